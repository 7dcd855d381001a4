"""Interrupted jobs of several ranks through `train`, by both launchers.

They run on one node and on two.
"""

import json
import re
import signal
import time
from pathlib import Path

import interruptible
import psutil
import pytest
import warm
from conftest import Job
from containers import ROOT

from sagemaker_lightning.contract.rendezvous import free_port

pytestmark = pytest.mark.slow

SOURCE = (ROOT / "tests/support/interruptible.py").read_text()
HYPERPARAMETERS = {
    "model": "interruptible.Model",
    "data": "interruptible.Data",
    "data.size": "92",
    "trainer.accelerator": "cpu",
    "trainer.devices": "2",
    "trainer.max_epochs": "3",
    "model.sleep": "0.1",
    "progress.every_n_seconds": "100",
}
HANG_SECONDS = 120  # what takes longer hangs


class Ranks(Job):
    """A job of two ranks on this machine, with a folder for checkpoints."""

    def begin(self, **changed: str) -> warm.Started:
        """Start the job."""
        self.write("code/interruptible.py", self.model_source)
        self.write("input/config/hyperparameters.json", json.dumps(HYPERPARAMETERS | changed))
        (self.base / "checkpoints").mkdir(exist_ok=True)
        with (self.base / "log").open("a") as log:
            return self.start_ranks(log.fileno())

    def start_ranks(self, log: int) -> warm.Started:
        """Start the job, whose ranks meet at a port that no other test is given meanwhile."""
        return self.start(log, **{"MASTER_PORT": str(free_port())} | self.own)

    own: dict[str, str] = {"OMP_NUM_THREADS": "1"}
    model_source = SOURCE

    def wait_for_steps(self, number: int, process: warm.Started) -> list[psutil.Process]:
        """Return the ranks when the first one has recorded so many steps in all."""
        deadline = time.monotonic() + HANG_SECONDS
        while self.steps() < number:
            assert time.monotonic() < deadline and process.poll() is None, (
                self.base / "log"
            ).read_text()[-3000:]
            time.sleep(0.02)
        children = [
            (warm.environ(child.pid), child)
            for child in psutil.Process(process.pid).children(recursive=True)
        ]
        ranks = [
            (variables["LOCAL_RANK"], child)
            for variables, child in children
            if "LOCAL_RANK" in variables
        ]
        return [child for _, child in sorted(ranks, key=lambda rank: rank[0])]

    def steps(self) -> int:
        """Return how many different steps the first rank has recorded."""
        file = self.base / "code/events-0.jsonl"
        return len(set(re.findall(r'"step", (\d+, \d+)', file.read_text()))) if file.exists() else 0

    @property
    def result(self) -> tuple[str, list]:
        """The weights, and the records of both ranks."""
        events = [interruptible.events(self.base / "code", rank) for rank in range(2)]
        return interruptible.weights(self.base / "model/model.pt"), events


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Ranks:
    """The job without an interruption."""
    job = Ranks(tmp_path_factory.mktemp("whole") / "ml")
    assert job.begin().wait(HANG_SECONDS) == 0, (job.base / "log").read_text()[-3000:]
    return job


@pytest.mark.parametrize(
    "program",
    [
        "app/train_multi_node.py",
        pytest.param("app/train_torchrun.py", marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_are_stopped_and_continue(uninterrupted: Ranks, tmp_path: Path, program):
    job = Ranks(tmp_path / "ml")
    # tests/unit/resume/test_container_restarts.py has a killed rank that comes back.
    job.own = job.own | {"SAGEMAKER_PROGRAM": program, "SAGEMAKER_LIGHTNING_MAX_RESTARTS": "0"}
    process = job.begin()
    job.wait_for_steps(5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 143
    steps = job.steps()
    assert job.failure.startswith(
        f"interrupted, resume from step {steps}: SIGTERM; {job.base}/checkpoints/step-"
    )
    assert not (job.base / "output/success").exists() and "Traceback" not in job.failure
    process = job.begin()
    ranks = job.wait_for_steps(steps + 4, process)
    # Only one rank gets the signal.
    (ranks[-1] if "torchrun" in program else ranks[0]).send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 143
    assert re.match(rf"interrupted, resume from step {job.steps()}: SIGTERM; ", job.failure)
    process = job.begin()
    job.wait_for_steps(job.steps() + 3, process)[-1].kill()
    assert process.wait(HANG_SECONDS) == 1 and job.failure.startswith("error: ")
    process = job.begin()
    assert process.wait(HANG_SECONDS) == 0 and (job.base / "output/success").exists()
    assert job.result == uninterrupted.result


def test_two_ranks_began_and_one_continues(tmp_path: Path):
    """Each epoch has every sample once, in the order of two ranks."""
    job = Ranks(tmp_path / "ml")
    process = job.begin()
    job.wait_for_steps(17, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 143
    events_of_two = [interruptible.events(job.base / "code", rank) for rank in range(2)]
    for rank in range(2):
        (job.base / f"code/events-{rank}.jsonl").unlink()
    assert job.begin(**{"trainer.devices": "1"}).wait(HANG_SECONDS) == 0, (
        job.base / "log"
    ).read_text()[-3000:]
    events_of_one = interruptible.events(job.base / "code")
    assert (
        "2 ranks saved it, now there are 1: no sample is left out or taken twice"
        in (job.base / "log").read_text()
    )
    for epoch in range(3):
        indices = [
            index
            for events in (*events_of_two, events_of_one)
            for key, values in events.items()
            if key.startswith(f"step {epoch} ")
            for index in values[-1]
        ]
        assert sorted(indices) == list(range(92))


def test_a_rank_that_is_frozen_does_not_hold_a_stop_up(tmp_path: Path):
    """The job ends without a new checkpoint, and says so; no process is left."""
    job = Ranks(tmp_path / "ml")
    # Not the 25 seconds of contract/deadlines.py: nothing but the time differs.
    job.model_source += "from sagemaker_lightning.contract import shutdown\n"
    job.model_source += "shutdown.BATCH_WAIT_SECONDS = 4.0\n"
    process = job.begin()
    ranks = job.wait_for_steps(15, process)
    ranks[-1].suspend()
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(HANG_SECONDS) == 143
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    assert job.failure.startswith(
        "interrupted, resume from step 12: SIGTERM; no batch ended within 4 s"
    )
