"""The parts of scripts/launch.py: waiting times, and the last lines of a log.

Some waiting times contradict the run's limit.
"""

import argparse
from types import SimpleNamespace

import pytest

from launcher import contradictions, follower

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1"
FLAGS = {
    "image": IMAGE,
    "spot": True,
    "checkpoints": "s3://b/c",
    "max_run": 100,
    "keep_alive": None,
    "subnet": None,
}
FLAGS |= {
    "instance_group": None,
    "instance_type": None,
    "instance_count": None,
    "security_group": None,
    "drill": False,
}
FLAGS |= {"drill_data": []}


@pytest.mark.parametrize("max_wait", [None, 100, 101, 200])
def test_a_wait_as_long_as_the_run_is_allowed(max_wait):
    contradictions.check_flags(argparse.Namespace(**FLAGS, max_wait=max_wait))


def test_a_shorter_wait_is_not():
    with pytest.raises(
        ValueError, match=r"--max-wait: found 99, allowed is --max-run \(100\) or more"
    ):
        contradictions.check_flags(argparse.Namespace(**FLAGS, max_wait=99))


# what each look finds (the last look of a running job included), and how many looks there are
LOG_ANSWERS = {
    "nothing more": ([True, False], 2),
    "a late line": ([False, True, False, True], 3),
    "lines without an end": ([True] * 9, 4),
}


@pytest.mark.parametrize(("found", "looks"), LOG_ANSWERS.values(), ids=LOG_ANSWERS)
def test_the_last_lines_are_waited_for(monkeypatch, capsys, found, looks):
    """CloudWatch Logs gets the last lines some seconds after the job's end."""
    did = []
    job = {"TrainingJobStatus": "Completed", "TrainingJobName": "job-1"}
    log = SimpleNamespace(show=lambda: (did.append("look"), found.pop(0))[1])
    client = SimpleNamespace(describe_training_job=lambda TrainingJobName: job)  # noqa: N803
    monkeypatch.setattr(follower, "Log", lambda name, region: log)
    monkeypatch.setattr(
        follower,
        "aws",
        SimpleNamespace(client=lambda *_: client, ClientError=OSError, BotoCoreError=OSError),
    )
    monkeypatch.setattr(follower, "time", SimpleNamespace(sleep=did.append))
    assert follower.follow("job-1", "us-east-1", 5.0) == 0
    assert did == ["look"] + [5.0, "look"] * (looks - 1)
    assert capsys.readouterr().out.startswith("job-1: Completed\n")
