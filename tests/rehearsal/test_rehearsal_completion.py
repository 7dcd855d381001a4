"""What bash completes of the rehearsal's flags and commands."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from containers import ROOT
from environments import python_of
from shell_completion import completed_by_bash

pytestmark = pytest.mark.slow

PROGRAM = "sagemaker-lightning-rehearsal"


def completion(path: str) -> subprocess.CompletedProcess:
    """Run the command in the rehearsal's environment, with `path` as PYTHONPATH."""
    return subprocess.run(
        [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "completion", "bash"],
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> str:
    """The script for bash. The rehearsal's environment has no shtab, and ours has one."""
    folder = tmp_path_factory.mktemp("shtab")
    (folder / "shtab").symlink_to(Path(find_spec("shtab").origin).parent)
    completed = completion(f"{ROOT}:{folder}")
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["--no-c"], ["--no-capacity"]),
        (["serve", "--see"], ["--seed"]),
        (["re"], ["report", "rerun", "resume"]),
        (["report", "job", "--fo"], ["--format", "--folder"]),
        (["--engine", "p"], ["processes"]),
    ],
)
def test_bash_completes(script, words, completed):
    assert completed_by_bash(script, PROGRAM, words) == completed
