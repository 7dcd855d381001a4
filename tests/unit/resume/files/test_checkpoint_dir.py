"""A folder of checkpoints: full, removed, another program's, used twice."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest
import pytorch_lightning as pl
import torch
import warm
from own_fits import HANG_SECONDS, PressCtrlC, short_trainer
from own_trainer import Classifier

from sagemaker_lightning import (
    UserError,
)
from sagemaker_lightning.resume import run as run_module
from sagemaker_lightning.resume.files import checkpoint_dir, folder_lock
from sagemaker_lightning.resume.same_run import earlier_fits


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoints cannot be written there"):
        short_trainer(tmp_path / "file/checkpoints").fit(Classifier())


def test_checkpoints_of_another_program_are_one_line(tmp_path: Path):
    torch.save({"state_dict": {}}, tmp_path / "step-000000007.ckpt")
    with pytest.raises(
        UserError, match=rf"^ExactResume\(dirpath={tmp_path}\): found checkpoints, but none"
    ):
        short_trainer(tmp_path).fit(Classifier())


HOLDS = """
import os, sys, time
from pathlib import Path
from sagemaker_lightning.resume.files import folder_lock
assert folder_lock.lock(Path(sys.argv[1]), 0) == ""
if (worker := os.fork()) == 0:
    time.sleep(60)
print(worker, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_process_with_the_same_folder_is_one_line(tmp_path: Path, monkeypatch):
    """Until the first one is killed, even if a data worker of it lives on."""
    monkeypatch.setattr(run_module, "LOCK_SECONDS", 0.0)
    other_process = warm.start(["python", "-c", HOLDS, tmp_path], tmp_path)
    worker = int(other_process.stdout.readline())
    pid = other_process.pid
    says = rf"\(dirpath={tmp_path}\): process {pid} trains with these checkpoints now; end it"
    with pytest.raises(UserError, match=says):
        short_trainer(tmp_path).fit(Classifier())
    other_process.kill()
    other_process.wait(HANG_SECONDS)
    assert psutil.pid_exists(worker)
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    assert folder_lock._held == {}
    os.kill(worker, signal.SIGKILL)


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path: Path, monkeypatch):
    def write(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_dir, "write", write)
    says = rf"\(dirpath={tmp_path}\): no checkpoint could be written there \(No space left on"
    with pytest.raises(UserError, match=says):
        short_trainer(tmp_path).fit(Classifier())


@pytest.mark.slow
def test_a_folder_that_is_removed_while_training_is_made_again(tmp_path: Path):
    class Removes(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
                shutil.rmtree(tmp_path / "run")

    model = Classifier()
    short_trainer(tmp_path / "run", Removes(), max_epochs=2).fit(model)
    resumed = Classifier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier_fits, "_finished", {})
        short_trainer(tmp_path / "run", Removes(), max_epochs=2).fit(resumed)
    assert torch.equal(model.network[0].weight, resumed.network[0].weight)
