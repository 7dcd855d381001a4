"""Hosts as containers: what the engine answers. No engine runs here."""

import os
import subprocess

import pytest
from containers import ROOT
from environments import python_of

SIGNAL_PROGRAM = """
import sys
from types import SimpleNamespace
from docker.errors import APIError
from sagemaker_rehearsal.engines.containers import Container


def kill(signal):
    answer = SimpleNamespace(status_code=int(sys.argv[1]), reason="", url="")
    raise APIError("no", response=answer, explanation=sys.argv[2])


Container(SimpleNamespace(kill=kill)).signal("SIGKILL")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "explanation", "is_gone"),
    [
        (409, "container 1f is not running", True),
        (404, "No such container: 1f", True),
        (500, "container 1f PID 36 is zombie and can not be killed. Use the --init option", True),
        (500, "permission denied", False),
    ],
)
def test_a_container_that_has_ended_takes_any_signal(status, explanation, is_gone):
    completed = subprocess.run(
        [python_of("rehearsal"), "-c", SIGNAL_PROGRAM, str(status), explanation],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (completed.returncode == 0) is is_gone, completed.stderr
    assert is_gone or "APIError" in completed.stderr
