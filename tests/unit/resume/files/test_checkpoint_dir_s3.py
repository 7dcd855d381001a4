"""resume/files/checkpoint_dir.py: which checkpoints wait for a copy in S3."""

import os
import threading
import time
from pathlib import Path

import pytest
from checkpoint_folders import (
    folder_of_three,  # noqa: F401  the fixture folder
    state,
)

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.checkpoint_file import write


def marked(folder: CheckpointDir, step: int, suffix: str) -> None:
    """Leave the mark of SageMaker's uploader beside a checkpoint."""
    path = folder.path_of(step)
    path.with_name(f"{path.name}.sagemaker-{suffix}").touch()


@pytest.fixture
def copied(tmp_path: Path) -> CheckpointDir:
    """The folder of a job's CheckpointConfig, without a checkpoint."""
    return CheckpointDir(CheckpointHome(tmp_path / "copied", is_copied=True), keep=2)


def test_none_is_removed_that_is_being_uploaded_or_is_the_newest_in_s3(copied: CheckpointDir):
    """To remove a file removes it in S3."""
    kept = lambda: [step for step, _ in copied.checkpoints()]  # noqa: E731
    copied.save(state(10), 10, 1)
    marked(copied, 10, "uploading")
    for step in (20, 30, 40):
        copied.save(state(step), step, 1)
    assert kept() == [40, 30, 10]
    marked(copied, 10, "uploaded")
    copied.save(state(50), 50, 1)
    assert kept() == [50, 40, 10]  # a job that is killed now resumes from step 10
    marked(copied, 40, "uploaded")
    copied.save(state(60), 60, 1)
    assert kept() == [60, 50, 40]
    # A mark that is older than its file is of another file of that name.
    os.utime(f"{copied.path_of(40)}.sagemaker-uploaded", (5000.0, 5000.0))
    copied.save(state(70), 70, 1)
    assert kept() == [70, 60]


def test_a_checkpoint_is_in_s3_when_its_best_model_is(copied: CheckpointDir):
    """A resumed run skips a checkpoint whose best model is missing."""
    best = copied.path / "best.ckpt"
    write(best, {"state_dict": {}}, 10)
    copied.save(state(10), 10, 1, [best])
    marked(copied, 10, "uploaded")
    assert copied.steps_in_s3() == []
    best.with_name("best.ckpt.sagemaker-uploaded").touch()
    assert copied.steps_in_s3() == [10]


def test_what_has_come_from_s3_is_in_s3(copied: CheckpointDir):
    """It has no marks, and is older than the container."""
    write(copied.path_of(10), state(10), 10, 1)
    copied.note_intact(10)
    assert copied.steps_in_s3() == []
    os.utime(copied.path_of(10), (5000.0, 5000.0))
    assert copied.steps_in_s3() == [10]
    here = CheckpointDir(CheckpointHome(copied.path), 2)
    here.note_intact(10)
    assert here.steps_in_s3() == []


def test_a_checkpoint_waits_for_the_copy_of_the_one_before(copied: CheckpointDir):
    def is_uploading() -> bool:
        copied.next_look = 0.0
        return copied.is_uploading()

    assert not is_uploading()
    copied.save(state(10), 10, 1)
    assert not is_uploading()  # without a mark, nothing is known
    marked(copied, 10, "uploading")
    assert is_uploading()
    marked(copied, 10, "uploaded")
    assert not is_uploading()
    copied.save(state(20), 20, 1)
    assert is_uploading()  # the uploader will get there
    os.utime(copied.path_of(20), (time.time() - 1000,) * 2)
    assert not is_uploading()  # or it never will


@pytest.mark.parametrize(
    ("marks", "step", "said"),
    [
        ([], 30, "{newest} is complete here; no mark tells whether it is in S3"),
        ([30], 30, "{newest} is in S3"),
        ([20], 20, "step-000000020.ckpt is in S3, step-000000030.ckpt is so far only here"),
    ],
)
def test_what_is_said_of_the_next_start(copied: CheckpointDir, marks, step, said):
    for each in (20, 30):
        copied.save(state(each), each, 1)
    for each in marks:
        marked(copied, each, "uploaded")
    outlook = copied.outlook()
    assert (outlook.step, outlook.said) == (step, said.format(newest=copied.path_of(30)))


def test_what_is_said_where_no_checkpoint_is_in_s3(copied: CheckpointDir):
    copied.save(state(30), 30, 1)
    marked(copied, 30, "uploading")
    outlook = copied.outlook()
    said = "no checkpoint is known to be in S3, step-000000030.ckpt is so far only here"
    assert (outlook.step, outlook.said) == (0, said)


def test_a_stop_waits_for_the_copy_in_s3(copied: CheckpointDir, capsys):
    """Nothing is copied once the container has ended."""
    copied.save(state(10), 10, 1)
    copied.wait_for_s3(time.monotonic() + 600)  # nothing shows that there is an uploader
    marked(copied, 10, "uploading")
    copied.wait_for_s3(time.monotonic())
    assert copied.steps_in_s3() == []
    uploader = threading.Timer(0.2, marked, (copied, 10, "uploaded"))
    uploader.start()
    copied.wait_for_s3(time.monotonic() + 600)
    assert copied.steps_in_s3() == [10]
    uploader.join()
    line = f"{copied.path_of(10)} is complete; it is on its way to S3"
    assert capsys.readouterr().out.splitlines() == [line, line]
    copied.wait_for_s3(time.monotonic() + 600)
