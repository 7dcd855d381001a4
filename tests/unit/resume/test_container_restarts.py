"""A rank dies, and the program is started again in its container: by each launcher.

The ranks are killed for real, and the end is compared with that of a run without a fault.
"""

import json
import re
import signal
import time
from pathlib import Path

import interruptible
import nightly
import psutil
import pytest
from nodes import Nodes
from test_interrupted_ranks import HANG_SECONDS, HYPERPARAMETERS, SOURCE, Ranks

pytestmark = pytest.mark.slow

# Ends rank 1 in a step, each time or the first time only.
FAULTY = """
import os, signal
from pathlib import Path
import interruptible

class Model(interruptible.Model):
    def __init__(self, fault: str = "", at: int = 5, once: bool = False, **others):
        super().__init__(**others)
        self.fault, self.at, self.once = fault, at, once

    def on_train_start(self):
        if Path("faulted").exists():
            with Path("parents").open("ab") as file:  # what has started the ranks again
                file.write(Path(f"/proc/{os.getppid()}/cmdline").read_bytes())

    def training_step(self, batch, batch_idx):
        is_due = self.global_step == self.at and self.global_rank == self.trainer.world_size - 1
        if is_due and not (self.once and Path("faulted").exists()):
            Path("faulted").touch()
            exec(self.fault)
        return super().training_step(batch, batch_idx)
"""
# Copies in memory are taken as often as they can be, from the first batch on.
COPYING = f"""{FAULTY}
from sagemaker_lightning.resume import memory_copies
memory_copies.FIRST_SECONDS = 0.0
memory_copies.MAX_SHARE = 1.0
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Kills this rank once the process is there that is to be forked.
KILL_WITH_STANDBY = """
import time
mine = ("SAGEMAKER_BASE_DIR=" + os.environ["SAGEMAKER_BASE_DIR"]).encode()
def is_standby(folder):
    try:
        is_one = b"warm_start.py" in (folder / "cmdline").read_bytes()
        return is_one and mine in (folder / "environ").read_bytes()
    except OSError:
        return False
while not any(map(is_standby, Path("/proc").glob("[0-9]*"))):
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""
# A program of the user's own: torch, Lightning and ExactResume, and nothing of the command line.
OWN = """
import argparse, os, sys
sys.path.insert(0, os.getcwd())
import interruptible, faulty, torch
import pytorch_lightning as pl
from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
arguments, _ = parser.parse_known_args()
with report_failures():
    resume = ExactResume(SageMakerEnvironment.read().checkpoint_dir, seed=3, every_n_steps=4)
    model = faulty.Model(fault=arguments.fault, once=True, at=9, sleep=0.05)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", callbacks=[resume],
        enable_progress_bar=False, logger=False, enable_checkpointing=False,
    )
    trainer.fit(model, interruptible.Data(size=92))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
"""


class Faulty(Ranks):
    """A job of two ranks, one of which has a fault."""

    source = FAULTY

    def begin(self, **changed: str):
        self.write("code/faulty.py", self.source)
        return super().begin(**{"model": "faulty.Model"} | changed)

    @property
    def log(self) -> str:
        return (self.base / "log").read_text()

    def prepare_own(self, hyperparameters: dict[str, str], program: str = OWN) -> None:
        """Write a program of a user's own, what it imports, and the job's hyperparameters."""
        sources = {"own.py": program, "faulty.py": FAULTY, "interruptible.py": SOURCE}
        for name, text in sources.items():
            self.write(f"code/{name}", text)
        self.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
        (self.base / "checkpoints").mkdir()

    def train_own(self, program: str = OWN, **hyperparameters: str) -> str:
        """Run a program of a user's own to its end; return the hash of its weights."""
        self.prepare_own({"sagemaker_program": "own.py"} | hyperparameters, program)
        with (self.base / "log").open("a") as file:
            process = self.start_ranks(file.fileno())
        assert process.wait(HANG_SECONDS) == 0, self.log[-3000:]
        return interruptible.weights(self.base / "model/model.pt")

    @property
    def restarts(self) -> list[dict]:
        """Those of model.json."""
        return json.loads((self.base / "model/model.json").read_text())["restarts"]

    def processes(self) -> list[psutil.Process]:
        """Return what this job has left running."""
        found = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
            except (psutil.Error, OSError):
                continue
            if variables.get("SAGEMAKER_BASE_DIR") == str(self.base):
                found.append(process)
        return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Ranks:
    """The job without a fault."""
    job = Ranks(tmp_path_factory.mktemp("whole") / "ml")
    assert job.begin().wait(HANG_SECONDS) == 0, (job.base / "log").read_text()[-3000:]
    return job


@pytest.fixture(scope="module")
def own_weights(tmp_path_factory) -> str:
    """The hash of the weights of a program of a user's own, without a fault."""
    job = Faulty(tmp_path_factory.mktemp("own") / "ml")
    weights = job.train_own()
    assert "restart 1" not in job.log
    return weights


@pytest.mark.parametrize(
    "program",
    nightly.all_but(
        ["app/train_multi_node.py"], ["app/train_multi_node.py", "app/train_torchrun.py"]
    ),
)
def test_killed_ranks_are_back_with_the_same_bits(uninterrupted, tmp_path: Path, program):
    job = Faulty(tmp_path / "ml")
    job.own = job.own | {"SAGEMAKER_PROGRAM": program}
    process = job.begin()
    job.wait_for_steps(5, process)[-1].kill()
    job.wait_for_steps(job.steps() + 14, process)[0].send_signal(signal.SIGSEGV)
    assert process.wait(HANG_SECONDS) == 0, job.log[-3000:]
    assert job.result == uninterrupted.result and not job.processes()
    first, second = job.restarts
    assert first["step"] >= 4 and first["lost_steps"] == first["step"] - first["resumed_step"]
    assert second["step"] >= second["resumed_step"] >= 12  # an epoch has 12
    # Another rank may hear of the death before torchrun does, and does not know the signal.
    assert re.search("SIGKILL|it was killed", first["reason"])
    assert all(each["seconds"] > 0 for each in job.restarts)
    assert (
        f"restart 2 in this container (at most 3 an hour), after step {second['step']}: " in job.log
    )
    line = rf"restart 2: continued from step {second['resumed_step']} after (\S+) s, "
    # Each is rounded by itself.
    assert float(re.search(line, job.log)[1]) == pytest.approx(second["seconds"], abs=0.06)
    assert not (job.base / "output/failure").exists()


@pytest.mark.parametrize(
    ("program", "at", "on_disk"),
    [
        ("app/train_multi_node.py", 7, 0),  # before the first checkpoint
        pytest.param("app/train_torchrun.py", 17, 12, marks=pytest.mark.thorough),
    ],
)
def test_killed_ranks_continue_from_a_copy_in_memory(
    uninterrupted, tmp_path: Path, program, at, on_disk
):
    job = Faulty(tmp_path / "ml")
    job.source = COPYING
    job.own = job.own | {"SAGEMAKER_PROGRAM": program}
    process = job.begin(**{"model.fault": KILL, "model.once": "true", "model.at": str(at)})
    assert process.wait(HANG_SECONDS) == 0, job.log[-3000:]
    (restart,) = job.restarts
    assert on_disk < restart["resumed_step"] <= restart["step"] == at
    resumed = re.search(r"^resuming from step (\d+): (/dev/shm/.*)/step-\d+.ckpt$", job.log, re.M)
    assert int(resumed[1]) == restart["resumed_step"] and not Path(resumed[2]).parent.exists()
    assert "not that of the interrupted run" not in job.log
    assert job.result == uninterrupted.result and not job.processes()


FAULTS = {
    "a signal": (KILL, "was killed by SIGKILL"),
    "an error of a GPU": (
        "raise RuntimeError('CUDA error, an illegal memory access was encountered')",
        "RuntimeError: CUDA error",
    ),
}


@pytest.mark.parametrize("kind", nightly.all_but(["a signal"], FAULTS))
def test_a_fault_that_comes_back_ends_the_job(tmp_path: Path, kind):
    fault, why = FAULTS[kind]
    job = Faulty(tmp_path / "ml")
    process = job.begin(**{"model.fault": fault})
    assert process.wait(HANG_SECONDS) == 1, job.log[-3000:]
    assert why in job.failure.splitlines()[0]
    line = "(after 1 restart in the container: it came back at the same step)"
    assert line in job.failure.splitlines()[0] and job.failure.startswith("error: ")
    assert job.log.count("restart 1 in this container") == 1 and not job.processes()


def test_a_frozen_rank_is_ended_and_all_start_again(uninterrupted, tmp_path: Path):
    job = Faulty(tmp_path / "ml")
    job.own = job.own | {"SAGEMAKER_LIGHTNING_HANG_TIMEOUT": "4"}
    process = job.begin()
    job.wait_for_steps(15, process)[-1].suspend()
    assert process.wait(HANG_SECONDS) == 0, job.log[-3000:]
    (restart,) = job.restarts
    assert "its process " in restart["reason"] and "been stopped (SIGSTOP)" in restart["reason"]
    assert job.result == uninterrupted.result and not job.processes()


@pytest.mark.thorough
def test_a_rank_that_loops_for_ever_ends_with_the_collective_of_the_others(own_weights, tmp_path):
    """It uses a processor, as a long step does: the limit of a collective tells them apart."""
    job = Faulty(tmp_path / "ml")
    strategy = "pl.strategies.DDPStrategy(timeout=__import__('datetime').timedelta(seconds=8))"
    weights = job.train_own(OWN.replace('"ddp"', strategy), fault="while True: pass")
    assert "restart 1 in this container" in job.log and not job.processes()
    assert weights == own_weights


def test_a_mistake_is_not_tried_again(tmp_path: Path):
    """Not even in the middle of a training. Other kinds of mistakes are test_attempts.py's."""
    job = Faulty(tmp_path / "ml")
    mistake = "from sagemaker_lightning import UserError; raise UserError('--a: found 1')"
    process = job.begin(**{"model.fault": mistake, "model.once": "true"})
    assert process.wait(HANG_SECONDS) == 1, job.log[-3000:]
    assert "restart" not in job.log


@pytest.mark.parametrize("how", nightly.all_but(["by itself"], ["by itself", "torchrun"]))
def test_a_program_of_ones_own_is_started_again(own_weights, tmp_path: Path, how):
    job = Faulty(tmp_path / "ml")
    hyperparameters = {"fault": KILL, "max_restarts": "2"}
    if how == "torchrun":
        hyperparameters |= {"sagemaker_torch_distributed_enabled": "true"}
        hyperparameters |= {"trainer.devices": "2"}  # how many ranks torchrun starts
    assert job.train_own(**hyperparameters) == own_weights
    line = r"restart 1 in this container \(at most 2 an hour\), .*was killed by SIGKILL"
    assert re.search(line, job.log)
    assert re.search(r"restart 1: continued from step [89] after ", job.log)


ENDS = {
    "os._exit(1)": ("ended without giving a reason: its exit status was 1", 1),
    "os.abort()": ("ended without giving a reason: it was killed by SIGABRT", 1),
    "os._exit(0)": ("ended with exit status 0 within its training, after step 9: ", 0),
}


@pytest.mark.parametrize("fault", nightly.all_but(["os._exit(1)"], ENDS))
def test_a_rank_of_ones_own_program_that_ends_is_named(tmp_path: Path, fault):
    """All that the other one says is that it was lost."""
    why, restarts = ENDS[fault]
    job = Faulty(tmp_path / "ml")
    job.prepare_own(
        {"sagemaker_program": "own.py", "fault": fault}, OWN.replace("once=True", "once=False")
    )
    with (job.base / "log").open("a") as file:
        process = job.start_ranks(file.fileno())
    assert process.wait(HANG_SECONDS) == 1, job.log[-3000:]
    line = job.failure.splitlines()[0]
    assert re.search(rf"the rank with PID \d+ {re.escape(why)}", line), line
    assert ("it came back at the same step" in line) == bool(restarts)
    assert job.log.count("restart 1 in this container") == restarts


def test_a_stop_during_a_restart_is_a_stop(tmp_path: Path):
    job = Faulty(tmp_path / "ml")
    process = job.begin(**{"model.fault": KILL, "model.once": "true"})
    deadline = time.monotonic() + HANG_SECONDS
    while "IN sanity check" not in job.log.partition("restart 1 in this container")[2]:
        assert time.monotonic() < deadline and process.poll() is None, job.log[-3000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 143, job.log[-3000:]
    assert job.failure.startswith("interrupted, resume from step ") and not job.processes()


@pytest.mark.parametrize(
    "how",
    [
        "by Lightning",
        pytest.param("by torchrun", marks=pytest.mark.soak),
        pytest.param("by itself", marks=pytest.mark.thorough),
    ],
)
def test_a_restarted_rank_imports_nothing_anew(uninterrupted, own_weights, tmp_path: Path, how):
    """It is forked, once a process has made the imports meanwhile; and it has the same bits.

    This job starts as a container does, not warm as those above.
    """
    job = Faulty(tmp_path / "ml")
    program = "app/train_torchrun.py" if how == "by torchrun" else "app/train_multi_node.py"
    hyperparameters = HYPERPARAMETERS | {"model": "faulty.Model", "model.fault": KILL_WITH_STANDBY}
    hyperparameters |= {"model.once": "true", "model.at": "17"}
    if how == "by itself":
        hyperparameters = {"fault": KILL_WITH_STANDBY}
        program = "own.py"
    job.prepare_own(hyperparameters | {"sagemaker_program": program})
    run = job.run(cold=True, **job.own)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "restart 1: continued from step " in run.stdout
    assert "starting it with all imports" not in run.stdout
    assert (job.base / "code/parents").read_text().count("warm_start.py") == 2
    weights = interruptible.weights(job.base / "model/model.pt")
    assert weights == (own_weights if how == "by itself" else uninterrupted.result[0])
    assert not job.processes()


# Rank 0 is in a long step as the other one dies.
SLOW = """class Slow(faulty.Model):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and self.global_step == 9 and not os.path.exists("slept"):
            open("slept", "x").close()
            __import__("time").sleep(600)
        return super().training_step(batch, batch_idx)

parser ="""


def test_a_death_does_not_wait_for_the_step_of_another_rank(own_weights, tmp_path: Path):
    """torchrun asks the others to stop, and gives them minutes for that.

    This job starts as a container does: its ranks are known by their variables in /proc.
    """
    job = Faulty(tmp_path / "ml")
    program = OWN.replace("faulty.Model(", "Slow(").replace("parser =", SLOW, 1)
    hyperparameters = {"sagemaker_program": "own.py", "fault": KILL, "trainer.devices": "2"}
    hyperparameters |= {"sagemaker_torch_distributed_enabled": "true"}
    job.prepare_own(hyperparameters, program)
    run = job.run(cold=True, **job.own)
    assert run.returncode == 0, run.stdout[-3000:]
    # Who hears of the death after torchrun has read the status does not know the signal.
    says = "ended without giving a reason: it was killed"
    assert re.search(f"restart 1 in this container .*{says}", run.stdout) and not job.processes()
    assert interruptible.weights(job.base / "model/model.pt") == own_weights


# All hosts decide alike: tests/unit/launch/test_attempts.py. By which checkpoint:
# test_sharded.py.
@pytest.mark.thorough
@pytest.mark.docker
def test_two_hosts_start_again_from_the_checkpoint_that_both_have(
    image: str, uninterrupted: Ranks, tmp_path: Path
):
    hyperparameters = HYPERPARAMETERS | {"trainer.devices": "1", "model": "faulty.Model"}
    fault = {"model.fault": KILL, "model.once": "true", "model.at": "17"}
    with Nodes(
        image,
        tmp_path,
        ["algo-1", "algo-2"],
        hyperparameters | fault,
        code={"interruptible.py": SOURCE, "faulty.py": FAULTY},
        checkpoints=True,
    ) as job:
        job.start()
        assert job.end() == {"algo-1": 0, "algo-2": 0}, job.output("algo-1")[-3000:]
        for host in job.hosts:
            line = "restart 1 in this container (at most 3 an hour), after step 17: "
            assert line in job.output(host)
        assert re.search(r"restart 1: continued from step 1[2-7] after ", job.output("algo-1"))
    assert interruptible.weights(tmp_path / "algo-1/model/model.pt") == uninterrupted.result[0]
