"""Data workers, however they are started: a signal to the whole group loses no batch.

And no worker is left behind.
"""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import warm
from containers import ROOT

SOURCE = """
import time
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.1)
        return index
"""
PROGRAM = """
import signal
import sys
from torch.utils.data import DataLoader
from sagemaker_lightning.data.deterministic import make_resumable
from numbers_of_mine import Numbers

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
    loader, _ = make_resumable(
        DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context=sys.argv[1]), 7, "train"
    )
    loader.batch_plan.begin(0, 0, 0)
    print("begins", flush=True)
    print([batch.tolist() for batch in loader if not print("a batch", flush=True)], flush=True)
"""
OF_THE_USERS_OWN = """
import multiprocessing

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from sagemaker_lightning import ExactResume


def loader():
    return DataLoader(TensorDataset(torch.ones(4000, 1)), 2, num_workers=1)


class Loader:
    # One of the user's own, with another one in it.
    def __iter__(self):
        return iter(loader())

    def __len__(self):
        return 2000


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        vars(self)["batches"] = iter(loader())
        vars(self)["shared"] = multiprocessing.Manager().dict()

    def training_step(self, batch, batch_idx):
        self.shared["steps"] = self.shared.get("steps", 0) + len(next(self.batches)[0])
        if batch_idx == 3:
            print("trains", flush=True)
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
trainer = pl.Trainer(max_epochs=1, callbacks=[ExactResume("checkpoints", seed=1)], **settings)
trainer.fit(Model(), Loader())
"""
CASES = [
    pytest.param(method, text, marks=() if always_run else pytest.mark.soak)
    for method, text, always_run in [
        ("fork", "begins", False),
        ("fork", "a batch", False),
        ("spawn", "begins", False),
        ("spawn", "a batch", False),
        ("forkserver", "begins", False),
        ("forkserver", "a batch", True),
    ]
]
HANG_SECONDS = 120


class Loading:
    """A process that goes through a loader with workers."""

    def __init__(self, folder: Path, method: str = "fork", program: str = PROGRAM) -> None:
        (folder / "numbers_of_mine.py").write_text(SOURCE)
        (folder / "program.py").write_text(program)
        self.log = folder / "log"
        self.method = method
        with self.log.open("w") as log:
            environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
            self.process = warm.start(
                ["python", folder / "program.py", method], folder, environment, log.fileno()
            )

    @property
    def output(self) -> str:
        """The output of the process so far."""
        return self.log.read_text()

    def below(self) -> list[psutil.Process]:
        """Return the processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, text: str) -> None:
        """Wait until the output has `text`, and there is a worker."""
        deadline = time.monotonic() + HANG_SECONDS
        while text not in self.output or not any(
            "resource_tracker" not in process.cmdline()[-1] for process in self.below()
        ):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "text"), CASES)
def test_a_signal_to_the_group_costs_no_batch(tmp_path: Path, method, text):
    loading = Loading(tmp_path, method)
    loading.until(text)
    for process in [*loading.below(), loading.process]:
        process.send_signal(signal.SIGTERM)
    assert loading.process.wait(HANG_SECONDS) == 0, loading.output
    assert (
        "heard" in loading.output
        and "[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]" in loading.output
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "text"), CASES)
def test_no_worker_outlives_its_loader(tmp_path: Path, method, text):
    loading = Loading(tmp_path, method)
    loading.until(text)
    below = loading.below()
    loading.process.kill()
    _, alive = psutil.wait_procs(below, HANG_SECONDS)
    for process in alive:
        process.kill()
    assert below and not alive


@pytest.mark.slow
def test_a_signal_to_all_stops_a_training_whose_code_starts_processes_with_a_checkpoint(tmp_path):
    """A loader in a loader of the user's own, an iterator made in __init__, and a Manager."""
    loading = Loading(tmp_path, program=OF_THE_USERS_OWN)
    loading.until("trains")
    below = loading.below()
    assert len(below) >= 3
    for process in [*below, loading.process]:
        process.send_signal(signal.SIGTERM)
    assert loading.process.wait(HANG_SECONDS) == 143, loading.output
    said = re.search(
        r"^interrupted, resume from step (\d+): .*-0*(\d+).ckpt is", loading.output, re.M
    )
    assert said and said[1] == said[2] and int(said[1]) > 3, loading.output
    assert "Error" not in loading.output
    assert psutil.wait_procs(below, HANG_SECONDS)[1] == []
