"""Interrupts real jobs at random moments, many times, and compares what comes out; measures what it costs.

    python -m benchmarks.interruptions soak KIND --rounds=20 --seed=1      KIND: process, train, ranks, torchrun, nodes
    python -m benchmarks.interruptions cost

A round interrupts a job until it has come to its end, which takes up to six tries: SIGKILL or SIGTERM to all of it or
to one process of it, at a moment drawn evenly from its whole time, start-up included. Right is a round whose weights
are those of an uninterrupted job to the last bit, and in which no step was done in two ways. `process` is one process
forked from a server that has imported everything; `train`, `ranks` (two, by Lightning) and `torchrun` (two) go through
the toolkit; `nodes` are two containers of the tests' image.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
LIMIT = 120  # seconds from an interruption to the end of all; what takes longer hangs
GIVEN = {
    "model": "interruptible.Model", "data": "interruptible.Data", "data.size": "92", "trainer.max_epochs": "4",
    "trainer.accelerator": "cpu", "model.sleep": "0.03", "model.val_sleep": "0.05", "checkpoint.monitor": "val_loss",
    "progress.every_n_seconds": "100",
}  # fmt: skip


class Process:
    """A job as one process, in a folder."""

    server = None
    ranks = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        if not Process.server:
            Process.server = multiprocessing.get_context("forkserver")
            Process.server.set_forkserver_preload(["app.train", "interruptible"])

    def start(self) -> None:
        """Start it."""
        import interruptible

        flags = [f"--{key}={value}" for key, value in GIVEN.items()]
        self.process = self.server.Process(target=interruptible.main, args=(self.folder, flags, {}))
        self.process.start()

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, None if it runs on after so many seconds."""
        self.process.join(seconds)
        return self.process.exitcode

    def processes(self) -> list[psutil.Process]:
        """Return what can be sent a signal, the one that SageMaker would send it to first."""
        with suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def result(self) -> object:
        """Return the weights and what all ranks did."""
        import interruptible

        return interruptible.weights(self.model), [
            interruptible.events(folder, rank) for rank, folder in enumerate(self.events)
        ]

    @property
    def model(self) -> Path:
        return self.folder / "output/model/model.pt"

    @property
    def events(self) -> list[Path]:
        return [self.folder]


class Train(Process):
    """A job through the toolkit's `train`, on one node."""

    program = "app/train_multi_node.py"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("code", "checkpoints", "input/config"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "tests/interruptible.py", folder / "code")
        given = GIVEN | {"trainer.devices": str(self.ranks)}
        (folder / "input/config/hyperparameters.json").write_text(json.dumps(given))

    def start(self) -> None:
        """Start it."""
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "SAGEMAKER_BASE_DIR": str(self.folder), "SAGEMAKER_PROGRAM": self.program, "OMP_NUM_THREADS": "1",
            "SAGEMAKER_TRAINING_MODULE": "app.toolkit:main",
        }  # fmt: skip
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen([ROOT / "entrypoint.sh", "train"], env=variables, stdout=log, stderr=log)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, None if it runs on after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode

    @property
    def model(self) -> Path:
        return self.folder / "model/model.pt"

    @property
    def events(self) -> list[Path]:
        return [self.folder / "code"] * self.ranks


class Ranks(Train):
    """Two ranks, started by Lightning."""

    ranks = 2


class Torchrun(Ranks):
    """Two ranks, started by torchrun."""

    program = "app/train_torchrun.py"


class Containers:
    """Two nodes, each a container of the tests' image."""

    hosts = ("algo-1", "algo-2")

    def __init__(self, folder: Path) -> None:
        from containers import TAG
        from nodes import Nodes

        source = {"interruptible.py": (ROOT / "tests/interruptible.py").read_text()}
        given = GIVEN | {"trainer.devices": "1"}
        self.folder, self.nodes = folder, Nodes(TAG, folder, list(self.hosts), given, code=source, checkpoints=True)
        self.nodes.__enter__()

    def start(self) -> None:
        """Start both."""
        self.nodes.remove()
        self.nodes.start()

    def wait(self, seconds: float) -> int | None:
        """Return the greater exit status, None if one of them runs on after so many seconds."""
        end = time.monotonic() + seconds
        while any(self.nodes._runs(host) for host in self.hosts):
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)
        return max(self.nodes.end().values())

    def processes(self) -> list[Callable[[int], object]]:
        """Return each node, as something to send a signal to."""
        return [Node(self.nodes, host) for host in self.hosts]

    def result(self) -> object:
        """Return the weights and what both did."""
        import interruptible

        events = [interruptible.events(self.folder / host / "code", rank) for rank, host in enumerate(self.hosts)]
        self.nodes.__exit__()
        return interruptible.weights(self.folder / "algo-1/model/model.pt"), events


class Node:
    """A container, to send a signal to."""

    def __init__(self, nodes, host: str) -> None:
        self.nodes, self.host = nodes, host

    def send_signal(self, number: int) -> None:
        """Send it to the container's first process."""
        from containers import docker

        docker("kill", f"--signal={number}", self.nodes.containers[self.host])


KINDS = {"process": Process, "train": Train, "ranks": Ranks, "torchrun": Torchrun, "nodes": Containers}


def soak(kind: str, rounds: int, seed: int) -> None:
    """Interrupt `rounds` jobs, and print what came of it."""
    draw, counts = random.Random(seed), dict.fromkeys(("kills", "stops", "wrong", "hung"), 0)
    leaving = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "whole"):  # the first one finds nothing in any cache
            whole = KINDS[kind](Path(folder, name))
            began = time.monotonic()
            whole.start()
            assert whole.wait(300) == 0, "the job fails without an interruption, too"
            seconds, expected = time.monotonic() - began, whole.result()
        for number in range(rounds):
            job = KINDS[kind](Path(folder, str(number)))
            for _ in range(6):
                job.start()
                if job.wait(draw.uniform(0, seconds)) is None:
                    leaving.append(interrupt(job, draw, counts))
            job.start()
            ended = job.wait(300)
            try:
                right = ended == 0 and job.result() == expected
            except AssertionError as error:  # a step that was done in two ways
                right = print(f"round {number}: {error}")
            if not right:
                counts["wrong"] += 1
                shutil.copytree(job.folder, Path(tempfile.mkdtemp(prefix=f"wrong-{kind}-{number}-"), "job"))
            shutil.rmtree(job.folder)
            print(f"{kind} seed={seed} round={number} {'right' if right else 'WRONG'} {counts}", flush=True)
    print(
        f"{kind}: {rounds} jobs of {seconds:.0f} s, seed {seed}: {counts}; from a stop to the end of all "
        f"{median(leaving or [0]):.1f} s, {max(leaving or [0]):.1f} s at most",
        flush=True,
    )


def interrupt(job, draw: random.Random, counts: dict[str, int]) -> float:
    """Interrupt a job that runs; return the seconds until all of it has ended, 0 for one that was killed whole."""
    processes = job.processes()
    chosen = processes if draw.random() < 0.4 else [draw.choice(processes)] if processes else []
    chosen = processes[:1] if draw.random() < 0.3 else chosen
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    if number == signal.SIGKILL and processes[:1] == chosen[:1]:
        chosen = processes  # outside of a container, nothing ends with the process that SageMaker knows
    counts["kills" if number == signal.SIGKILL else "stops"] += 1
    began = time.monotonic()
    for process in chosen:
        with suppress(psutil.Error):
            process.send_signal(number)
    if job.wait(LIMIT) is None:
        counts["hung"] += 1
        for process in job.processes():
            process.send_signal(signal.SIGKILL)
        job.wait(LIMIT)
    took = time.monotonic() - began
    for process in processes:  # what a kill has left
        with suppress(psutil.Error, AttributeError):
            process.wait(10) if number == signal.SIGTERM else process.kill()
    return 0.0 if number == signal.SIGKILL else took


def cost() -> None:
    """Print what checkpoints, agreement and a restart cost, with our example on its default data."""
    from benchmarks.interruption_cost import main

    main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruptions")
    parser.add_argument("what", choices=["soak", "cost"])
    parser.add_argument("kind", choices=KINDS, nargs="?", default="process")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    soak(given.kind, given.rounds, given.seed) if given.what == "soak" else cost()
