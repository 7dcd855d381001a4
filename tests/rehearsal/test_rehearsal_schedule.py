"""Rules for interruptions: what a text stands for, when they come, and what is drawn."""

import pytest

from sagemaker_rehearsal.faults import schedule
from sagemaker_rehearsal.faults.schedule import Rule, Schedule, parse

RULES = {
    "at 40s": {"at": 40.0},
    "  at   1.5m  ": {"at": 90.0},
    "at 0s": {"at": 0.0},
    "at step 120": {"step": 120},
    "every 5m": {"every": 300.0, "times": None},
    "every ~2h": {"every": 7200.0, "about": True, "times": None},
    "every ~20s 100 times": {"every": 20.0, "about": True, "times": 100},
    "at 1s of algo-2": {"at": 1.0, "hosts": "algo-2"},
    "at 1s of algo-2,algo-10": {"at": 1.0, "hosts": "algo-2,algo-10"},
    "at step 3 of any": {"step": 3, "hosts": "any"},
    "every 1s of all unwarned": {"every": 1.0, "times": None, "warned": "unwarned"},
    "every 1s either": {"every": 1.0, "times": None, "warned": "either"},
    "every 1s 2 times of any warned gap 0.5h": {
        "every": 1.0,
        "times": 2,
        "hosts": "any",
        "gap": 1800.0,
    },
}


@pytest.mark.parametrize("rule_text", RULES)
def test_the_rule_that_a_text_is(rule_text):
    plain = {
        "at": None,
        "step": None,
        "every": None,
        "about": False,
        "times": 1,
        "hosts": "all",
        "warned": "warned",
    }
    assert parse(rule_text) == Rule(
        text=" ".join(rule_text.split()), **plain | {"gap": 0.0} | RULES[rule_text]
    )


@pytest.mark.parametrize(
    "rule_text",
    [
        "",
        "at",
        "at 40",
        "at -4s",
        "at 4d",
        "at step",
        "at step 1.5",
        "at ~5m",
        "at 5m 2 times",
        "every",
        "every 0s",
        "every ~0.0m",
        "every 5m 0 times",
        "every 5m -1 times",
        "every 5m times",
        "at 1s of algo",
        "at 1s of algo-1, algo-2",
        "at 1s of algo-1,",
        "at 1s warned of any",
        "at 1s gap 3s of any",
        "at 1s gap",
        "at 1s maybe",
        "AT 1s",
        "at 1s at 2s",
    ],
)
def test_a_wrong_rule_is_refused(rule_text):
    with pytest.raises(ValueError, match=r"--interrupt: found '.*', expected "):
        parse(rule_text)


HOSTS = [f"algo-{number}" for number in range(1, 5)]


def make_schedule(*rules: str, seed: str = "0", hosts: list[str] = HOSTS) -> Schedule:
    """Return a job's schedule."""
    return Schedule([schedule.parse(rule) for rule in rules], hosts, seed)


def test_a_time_after_the_first_start_comes_once():
    """If it comes between two attempts, it is due as soon as the second one trains."""
    job_schedule = make_schedule("at 40s of algo-3,algo-1 unwarned gap 5s")
    assert job_schedule.next() is None and job_schedule.due(1000.0, None) is None
    job_schedule.begin(100.0, first=True)
    assert job_schedule.next() == 140.0 and job_schedule.due(139.9, None) is None
    job_schedule.begin(200.0, first=False)
    due = job_schedule.due(200.0, None)
    assert (due.hosts, due.warned, due.gap) == (["algo-3", "algo-1"], False, 5.0)
    assert due.why == "at 40s of algo-3,algo-1 unwarned gap 5s"
    job_schedule.begin(300.0, first=False)
    assert job_schedule.next() is None and job_schedule.due(1e9, 10**9) is None


def test_every_counts_from_each_start():
    job_schedule = make_schedule("every 10s 2 times")
    for start in (100.0, 115.0):
        job_schedule.begin(start, first=start == 100.0)
        assert job_schedule.next() == start + 10 and job_schedule.due(start + 9, None) is None
        assert job_schedule.due(start + 10, None).hosts == HOSTS
        assert job_schedule.due(start + 50, None) is None  # not before the next attempt
    job_schedule.begin(200.0, first=False)
    assert job_schedule.next() is None and job_schedule.due(1000.0, None) is None


def test_a_step_that_the_log_has_passed():
    job_schedule = make_schedule("at step 5", "at step 7")
    job_schedule.begin(0.0, first=True)
    assert job_schedule.next() is None
    assert job_schedule.due(1e9, None) is None
    assert job_schedule.due(1e9, 4) is None
    assert job_schedule.due(0.0, 5).why == "at step 5"
    assert job_schedule.due(0.0, 6) is None  # not again, although the job comes past it again
    assert job_schedule.due(0.0, 9).why == "at step 7"


def test_several_rules_are_one_schedule():
    job_schedule = make_schedule("at 30s", "every 20s", "at step 2")
    job_schedule.begin(0.0, first=True)
    assert job_schedule.next() == 20.0
    assert [job_schedule.due(30.0, 2).why for _ in range(3)] == ["at 30s", "every 20s", "at step 2"]
    assert job_schedule.due(30.0, 2) is None


def drawn_interruptions(seed: str, *rules: str) -> list:
    """Return the moment, the hosts and the warning of the interruption of ten attempts."""
    job_schedule = make_schedule(*rules, seed=seed)
    interruptions = []
    for _ in range(10):
        job_schedule.begin(0.0, first=False)
        moment = job_schedule.next()
        due = job_schedule.due(moment, None)
        interruptions.append((moment, tuple(due.hosts), due.warned))
    return interruptions


def test_what_is_drawn_comes_from_the_seed():
    rule = "every ~10s of any either"
    assert (
        drawn_interruptions("1", rule)
        == drawn_interruptions("1", rule)
        != drawn_interruptions("2", rule)
    )
    interruptions = [
        interruption for seed in range(40) for interruption in drawn_interruptions(str(seed), rule)
    ]
    moments, hosts, warned = zip(*interruptions, strict=True)
    assert len(set(moments)) == len(interruptions) and 7 < sum(moments) / len(interruptions) < 13
    assert {len(names) for names in hosts} == {1} and {names[0] for names in hosts} == set(HOSTS)
    assert 100 < sum(warned) < 300


def test_a_host_that_the_job_has_not():
    says = r"'at 1s of algo-9,algo-1' is of algo-9; the job has algo-1, algo-2"
    with pytest.raises(ValueError, match=says):
        make_schedule("at 1s of algo-9,algo-1", hosts=["algo-1", "algo-2"])
