"""All ranks learn of a signal to one rank at the next step, however long steps take."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import warm
from containers import ROOT
from torch import distributed

from sagemaker_lightning.resume.agreement import Agreement, Comparison


def calls_until_heard(counts: int) -> list[int]:
    """Return after how many calls each of two signals was heard.

    The second one is heard as a due checkpoint.
    """
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=rank == 0))
    for _ in range(counts):
        agreement.agree(0, False)
    # A numpy generator's state has this form.
    gathered = agreement.gather({"key": torch.tensor([rank, 2**32 - 1]).to(torch.uint32)})
    assert [answer["key"].tolist() for answer in gathered] == [[0, 2**32 - 1], [1, 2**32 - 1]]
    calls = []
    for signal, due in ((0, rank == 0), (15 if rank == 1 else 0, False)):
        calls.append(0)
        while not (agreement.signal_number or agreement.checkpoint_due):
            agreement.agree(signal, due)
            calls[-1] += 1
        agreement.checkpoint_saved()
    agreement.receive()
    distributed.destroy_process_group()
    return calls


@pytest.fixture
def group():
    """A group of this process alone, which tells itself what ranks tell each other."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def said(agreement: Agreement) -> tuple:
    return (
        agreement.signal_number,
        agreement.checkpoint_due,
        agreement.diverged,
        agreement.comparison,
    )


def test_what_is_said_counts_from_the_next_call_on(group):
    """A signal and a divergence stay; a checkpoint that is due is due once."""
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=True))
    agreement.receive()  # nothing is on its way
    agreement.agree(15, True, True, comparison=Comparison.DIFFERENT)
    assert said(agreement) == (0, False, False, Comparison.OPEN)
    agreement.agree(2, True)
    assert said(agreement) == (15, True, True, Comparison.DIFFERENT)
    agreement.agree(0, False)
    assert said(agreement) == (15, False, True, Comparison.IDENTICAL)
    assert type(agreement.comparison) is Comparison
    agreement.agree(0, True, now=True)
    assert said(agreement) == (15, True, True, Comparison.IDENTICAL)
    agreement.checkpoint_saved()
    assert not agreement.checkpoint_due


def test_the_first_rank_alone_says_when_a_checkpoint_is_due(group):
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=False))
    agreement.agree(0, True, now=True)
    assert said(agreement) == (0, False, False, Comparison.IDENTICAL)


def test_one_rank_needs_no_others():
    agreement = Agreement(SimpleNamespace(world_size=1, is_global_zero=True))
    agreement.agree(2, True, comparison=Comparison.OPEN)
    assert said(agreement) == (2, True, False, Comparison.OPEN)
    agreement.agree(0, False, True)
    assert said(agreement) == (0, False, True, Comparison.IDENTICAL)
    assert agreement.gather("a") == ["a"]


def test_of_two_comparisons_the_worse_one_is_greater():
    assert Comparison.IDENTICAL < Comparison.OPEN < Comparison.DIFFERENT


@pytest.mark.slow
def test_it_is_heard_at_the_next_call(tmp_path: Path):
    ended = ranks.run(calls_until_heard, 300, folder=tmp_path)
    assert [ended_rank.value for ended_rank in ended] == [[2, 2], [2, 2]], [
        ended_rank.error for ended_rank in ended
    ]


RANK_THAT_WAITS = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.contract import shutdown
shutdown.BATCH_WAIT_SECONDS = 0.2
with shutdown.Stop(Path("nowhere"), lambda line: print(line, flush=True)) as heard:
    heard.begin()
    heard.batch_seconds = float(sys.argv[1])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)
    print("the batch is done", flush=True)
"""


RANK_WHOSE_OUTPUT_IS_CLOSED = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.contract import shutdown
sys.stdout.close()
with shutdown.Stop(Path("nowhere"), lambda line: print(line, flush=True)):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(%s)
"""


def test_a_signal_ends_a_process_whose_output_is_closed():
    run = subprocess.run(
        [sys.executable, "-c", RANK_WHOSE_OUTPUT_IS_CLOSED % ranks.HANG_SECONDS],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 143


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "ended"), [("0.01", 143), ("30", 0)])
def test_a_batch_that_takes_long_is_no_rank_that_hangs(tmp_path: Path, seconds, ended):
    run = warm.run(
        ["python", "-c", RANK_THAT_WAITS, seconds], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == ended, run.stdout
    line = (
        "interrupted, resume from step 0: SIGTERM; no batch ended within 0 s, "
        "so there is no newer checkpoint"
    )
    assert ("the batch is done" in run.stdout) is (ended == 0) and (line in run.stdout) is (
        ended == 143
    )
