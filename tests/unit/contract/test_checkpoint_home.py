"""contract/checkpoint_home.py: what outlives a container. Its marks: test_checkpoint_dir_s3.py."""

import os
import time
from pathlib import Path

import pytest

from sagemaker_lightning.contract import checkpoint_home
from sagemaker_lightning.contract.checkpoint_home import (
    CheckpointHome,
    Outlook,
    container_began,
    ends_with_container,
    folder_of,
    folders_after,
    outlook,
    outlook_by_names,
)

# Of `docker run -v FOLDER:/opt/ml/checkpoints -v OTHER:"/with blank" --tmpfs /tmp`.
MOUNTS = """overlay / overlay rw,relatime,lowerdir=/l,upperdir=/u,workdir=/w 0 0
proc /proc proc rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/vda /opt/ml/checkpoints ext4 rw 0 0
/dev/vda /with\\040blank ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "ends"),
    [
        ("/opt/ml/checkpoints", False),
        ("/opt/ml/checkpoints/mine", False),
        ("/with blank", False),
        ("/opt/ml/output/data/checkpoints", True),
        ("/opt/ml/checkpoints-2", True),
        ("/tmp/checkpoints", True),
    ],
)
def test_a_folder_that_is_not_mounted_ends_with_its_container(monkeypatch, folder, ends):
    monkeypatch.setattr(checkpoint_home, "_text", lambda path: MOUNTS)
    assert ends_with_container(Path(folder)) is ends
    on_a_desk = MOUNTS.replace("overlay / overlay", "/dev/vda / ext4")
    monkeypatch.setattr(checkpoint_home, "_text", lambda path: on_a_desk)
    assert not ends_with_container(Path(folder))


def test_when_the_first_process_began():
    """That is before this one, and after the machine was started."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert time.time() - since_boot - 1 < container_began() < time.time()


def test_a_stop_outside_of_a_training_goes_by_names(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    home = CheckpointHome(folder)
    assert outlook_by_names(home).said == "there is no checkpoint"
    folder.mkdir()
    for name in ("step-000000007.ckpt", "step-000000012.ckpt.sagemaker-ignore", "step-1.ckpt", "x"):
        (folder / name).touch()
    assert home.steps() == [7, 12] and outlook_by_names(home).step == 12
    assert outlook_by_names(CheckpointHome(folder, lost="it is gone")).step == 0
    (folder / "fit-3").mkdir()  # a later training that has no checkpoint yet
    assert outlook_by_names(home).step == 12
    later = folder / "fit-2" / "step-000000005.ckpt"
    later.parent.mkdir()
    later.touch()
    assert outlook_by_names(home).said == f"{later} is complete"


def test_later_trainings_are_found_by_their_folders(tmp_path: Path):
    assert folder_of(tmp_path, 1) == tmp_path
    for name in ("fit-2", "fit-10", "fit-3", "fit-x", "fit-", "fits", "fit-03"):
        (tmp_path / name).mkdir()
    (tmp_path / "fit-4").touch()
    found = folders_after(tmp_path, 2)
    assert found == [folder_of(tmp_path, fit) for fit in (10, 3)]
    assert folders_after(tmp_path / "none", 1) == []


def test_a_mark_of_an_earlier_job_is_ignored(tmp_path: Path):
    """It came from S3 with the rest."""
    file = tmp_path / "step-000000007.ckpt"
    mark = tmp_path / f"{file.name}.sagemaker-uploaded"
    for path in (file, mark):
        path.touch()
    home = CheckpointHome(tmp_path, is_copied=True)
    assert home.has_marks() and home.is_in_s3(file)
    os.utime(mark, (5000.0, 5000.0))
    assert not home.has_marks() and not home.is_in_s3(file)
    assert not CheckpointHome(tmp_path).is_in_s3(file)


def test_a_folder_that_is_lost_has_no_newest_checkpoint(tmp_path):
    found = outlook(CheckpointHome(tmp_path, lost="it is gone"), [3], [3])
    assert (found.step, found.is_newest) == (0, False)
    assert found.said == "it is gone, so the next run starts over"


def test_another_host_than_the_main_one_sees_no_copies(tmp_path):
    home = CheckpointHome(tmp_path, is_copied=True, is_main_host=False)
    (tmp_path / "step-000000003.ckpt.sagemaker-uploaded").touch()  # of the job before
    found = outlook(home, [3, 7], [3])
    says = "the main host copies step-000000007.ckpt to S3"
    assert (found.step, found.said, found.is_newest) == (7, says, False)


@pytest.mark.parametrize(
    ("steps", "in_s3", "mark", "found"),
    [
        ([], [], "", (0, "there is no checkpoint", True)),
        ([3, 7], [3, 7], "", (7, "PATH is in S3", True)),
        ([3, 7], [], "", (7, "PATH is complete here; no mark tells whether it is in S3", True)),
        ([3, 7], [3], "", (3, "step-000000003.ckpt is in S3, NAME is so far only here", False)),
        (
            [7],
            [],
            "step-000000007.ckpt.sagemaker-uploading",
            (0, "no checkpoint is known to be in S3, NAME is so far only here", False),
        ),
    ],
)
def test_from_where_the_next_run_resumes(tmp_path, steps, in_s3, mark, found):
    home = CheckpointHome(tmp_path, is_copied=True)
    if mark:
        (tmp_path / mark).touch()
    path = home.path_of(steps[-1] if steps else 0)
    step, said, is_newest = found
    expected = said.replace("PATH", str(path)).replace("NAME", path.name)
    assert outlook(home, steps, in_s3) == Outlook(step, expected, is_newest)


def test_a_folder_that_nothing_copies_has_the_newest_checkpoint(tmp_path):
    home = CheckpointHome(tmp_path)
    expected = Outlook(7, f"{home.path_of(7)} is complete", is_newest=True)
    assert outlook(home, [3, 7], []) == expected
