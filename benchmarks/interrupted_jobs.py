"""The jobs that `benchmarks.interruptions` interrupts.

They train the tests' model, and are started in each possible way.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))
HYPERPARAMETERS = {
    "model": "interruptible.Model",
    "data": "interruptible.Data",
    "data.size": "92",
    "trainer.max_epochs": "4",
    "trainer.accelerator": "cpu",
    "model.sleep": "0.03",
    "model.val_sleep": "0.05",
    "checkpoint.monitor": "val_loss",
    "progress.every_n_seconds": "100",
}


class Process:
    """A job as one process, in a folder."""

    ranks = 1

    def __init__(self, folder: Path, flags: Mapping[str, str] = HYPERPARAMETERS) -> None:
        self.folder = folder
        self.flags = flags
        folder.mkdir(parents=True)

    def start(self) -> None:
        """Start it."""
        import warm

        flags = [f"--{key}={value}" for key, value in self.flags.items()]
        with (self.folder / "log").open("a") as log:
            self.process = warm.start(
                ["python", ROOT / "tests/support/interruptible.py", *flags],
                self.folder,
                os.environ,
                log.fileno(),
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if it still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def processes(self) -> list[psutil.Process]:
        """Return the processes that can get a signal.

        The first one is the one to which SageMaker sends it.
        """
        with suppress(psutil.Error):
            first_process = psutil.Process(self.process.pid)
            return [first_process, *first_process.children(recursive=True)]
        return []

    def result(self) -> object:
        """Return the weights and the records of all ranks."""
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
        shutil.copy(ROOT / "tests/support/interruptible.py", folder / "code")
        hyperparameters = HYPERPARAMETERS | {"trainer.devices": str(self.ranks)}
        (folder / "input/config/hyperparameters.json").write_text(json.dumps(hyperparameters))

    def start(self) -> None:
        """Start it."""
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SAGEMAKER_BASE_DIR": str(self.folder),
            "SAGEMAKER_PROGRAM": self.program,
            "OMP_NUM_THREADS": "1",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_lightning.launch.toolkit_hook:main",
        }
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [ROOT / "entrypoint.sh", "train"], env=variables, stdout=log, stderr=log
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if it still runs after so many seconds."""
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
        from containers import IMAGE_TAG
        from nodes import Nodes

        source = {"interruptible.py": (ROOT / "tests/support/interruptible.py").read_text()}
        hyperparameters = HYPERPARAMETERS | {"trainer.devices": "1"}
        self.folder = folder
        self.nodes = Nodes(
            IMAGE_TAG, folder, list(self.hosts), hyperparameters, code=source, checkpoints=True
        )
        self.nodes.__enter__()

    def start(self) -> None:
        """Start both nodes."""
        self.nodes.remove()
        self.nodes.start()

    def wait(self, seconds: float) -> int | None:
        """Return the greater exit status, or None if one still runs after so many seconds."""
        deadline = time.monotonic() + seconds
        while any(self.nodes.runs(host) for host in self.hosts):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)
        return max(self.nodes.end().values())

    def processes(self) -> list[Callable[[int], object]]:
        """Return the nodes, each as something that can get a signal."""
        return [Node(self.nodes, host) for host in self.hosts]

    def result(self) -> object:
        """Return the weights and the records of both nodes."""
        import interruptible

        events = [
            interruptible.events(self.folder / host / "code", rank)
            for rank, host in enumerate(self.hosts)
        ]
        self.nodes.__exit__()
        return interruptible.weights(self.folder / "algo-1/model/model.pt"), events


class Node:
    """A container that can get a signal."""

    def __init__(self, nodes, host: str) -> None:
        self.nodes = nodes
        self.host = host

    def send_signal(self, number: int) -> None:
        """Send the signal to the container's first process."""
        from containers import docker

        docker("kill", f"--signal={number}", self.nodes.containers[self.host])


KINDS = {
    "process": Process,
    "train": Train,
    "ranks": Ranks,
    "torchrun": Torchrun,
    "nodes": Containers,
}
