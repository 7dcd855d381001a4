"""Jobs with random mistakes of their users: each trains right, or names its mistake.

A job that does not train ends with one line that says what is wrong. One round of one seed runs by
default; with SOAK=1 in the environment, 400 of each of three seeds.
"""

import itertools
import os
from pathlib import Path

import mutated_jobs
import nightly
import pytest

pytestmark = pytest.mark.slow

N, SEEDS = (400, [1, 2, 3]) if os.environ.get("SOAK") else (40, [11])
ROUNDS = {seed: list(itertools.islice(mutated_jobs.cases(seed), N)) for seed in SEEDS}
CASES = [
    pytest.param(case, id=f"{seed}-{number}")
    for seed in SEEDS
    for number, case in enumerate(ROUNDS[seed])
]


@pytest.fixture(scope="module")
def server():
    """The process that forks the jobs."""
    return mutated_jobs.server()


@pytest.mark.parametrize("case", nightly.all_but(CASES[::4], CASES))
def test_a_mutated_job_ends_as_it_must(server, tmp_path: Path, case: mutated_jobs.Case):
    assert mutated_jobs.check(server, case, tmp_path / "ml") == [], case


# What the long rounds found; all of it is fixed now.
FAULTS_TO_FIND = [
    mutated_jobs.Case(
        "a long value", {"trainer.strategy": "x" * 2500}, names=("--trainer",), fails=True
    ),
    mutated_jobs.Case(
        "a dead link for logs",
        {"logger.save_dir": "here"},
        # root cannot make this folder either
        lambda folder: (folder / "code/here").symlink_to("/proc/nonexistent/there"),
        names=("code/here: logs cannot be written there",),
        fails=True,
    ),
    # Numbers that no code expects.
    mutated_jobs.Case("no test", {"trainer.limit_test_batches": "0"}, fails=False),
    mutated_jobs.Case("logs in years", {"logger.flush_secs": str(2**63 - 1)}, fails=False),
]


@pytest.mark.parametrize("case", FAULTS_TO_FIND, ids=lambda case: case.name)
def test_what_was_found(server, tmp_path: Path, case: mutated_jobs.Case):
    case.hyperparameters = mutated_jobs.BASE | case.hyperparameters
    assert mutated_jobs.check(server, case, tmp_path / "ml") == []


def test_a_seed_gives_the_same_jobs_again():
    first_cases, second_cases = (
        list(itertools.islice(mutated_jobs.cases(5), 60)) for _ in range(2)
    )
    assert [(case.name, case.hyperparameters) for case in first_cases] == [
        (case.name, case.hyperparameters) for case in second_cases
    ]


def test_what_is_wrong_is_seen(server, tmp_path: Path):
    """A check of the checks: three kinds of failures have to be found.

    A run that should have failed, a line that names something else, and a success without a model.
    """
    right = mutated_jobs.Case("right", dict(mutated_jobs.BASE), fails=True)
    assert mutated_jobs.check(server, right, tmp_path / "right") == ["it must fail"]
    other_case = mutated_jobs.Case(
        "other", mutated_jobs.BASE | {"zzz": "1"}, names=("--yyy",), fails=False
    )
    assert mutated_jobs.check(server, other_case, tmp_path / "other") == [
        "it must not fail",
        "none of ('--yyy',) is named",
    ]
    assert mutated_jobs.faults(right, tmp_path / "nothing", 0)[1].startswith(
        "a success without a model"
    )
    assert mutated_jobs.faults(right, tmp_path / "nothing", None) == ["it hangs"]
