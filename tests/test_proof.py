"""app/proof.py: a run that goes on says whether it does what was done before, and what differs first if it does not."""

import json
from pathlib import Path

import pytest
from test_strangers import Run, same

pytestmark = pytest.mark.slow


def killed(folder: Path, *flags: str, at: str = "1:6") -> Run:
    """Return a run that was killed where the model says so."""
    run = Run(folder, *flags)
    assert run.start(KILL_AT=at) == -9, run.said[-3000:]
    return run


def verdicts(run: Run) -> list[str]:
    """Return what the run says of itself."""
    return [line for line in run.said.splitlines() if line.removeprefix("warning: ").startswith("resumed at step")]


def described(run: Run) -> list[dict]:
    """Return what model.json says."""
    return json.loads((run.folder / "output/model/model.json").read_text())["resumes"]


def test_what_is_done_again_is_what_was_done(tmp_path: Path):
    run = killed(tmp_path)
    run.finish()
    assert verdicts(run) == ["resumed at step 10: the next 6 steps are those of the interrupted run, bit for bit"]


def test_after_a_stop_the_next_batch_was_announced(tmp_path: Path):
    run = Run(tmp_path)
    assert run.start(STOP_AT="1:6") == 143
    run.finish()
    assert verdicts(run) == ["resumed at step 17: the state is as it was saved, and the next batch the one that was to come, bit for bit"]
