"""Runs a function on every rank of a job of several nodes.

The ranks are processes on this machine, connected by gloo. They find each other by the variables
that torchrun sets, and start warm (warm.py).
"""

import gc
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import warm
from pytorch_lightning import Callback, LightningModule, Trainer

from sagemaker_lightning.contract.rendezvous import free_port

from app.in_memory import ResidentDataModule

HANG_SECONDS = 120  # a rank that takes longer hangs


@dataclass(frozen=True)
class Ended:
    value: object
    """What the function returned."""
    error: str
    """The exception that it raised instead, with its class."""
    output: str
    """What it wrote to stdout and stderr."""


def run(
    function: Callable,
    *args: object,
    nodes: Sequence[int] = (2,),
    folder: Path,
    variables: Callable[[int], Mapping[str, str]] = lambda node: {},
    **options: object,
) -> list[Ended]:
    """Call `function(*args, **options)` on every rank, and return how each ended, in order.

    Node k has `nodes[k]` ranks. It has a working directory of its own, `folder`/node-k, and
    `variables(k)` in its environment.
    """
    warm.ensure_server()
    port = free_port()
    processes = []
    for node, ranks in enumerate(nodes):
        (folder / f"node-{node}").mkdir(parents=True, exist_ok=True)
        for local_rank in range(ranks):
            rank = len(processes)
            environment = dict(os.environ) | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "tests",
                "WORLD_SIZE": str(sum(nodes)),
                "RANK": str(rank),
                "GROUP_RANK": str(node),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                **variables(node),
            }
            receiver, sender = warm.FORK_SERVER.Pipe()
            arguments = (
                partial(function, **options),
                args,
                environment,
                folder / f"node-{node}",
                folder / f"rank-{rank}.log",
                sender,
            )
            processes.append((warm.FORK_SERVER.Process(target=_rank, args=arguments), receiver))
            warm.start_alone(processes[-1][0])
            sender.close()
    logs = [folder / f"rank-{rank}.log" for rank in range(len(processes))]
    try:
        return [
            _ended(process, receiver, log)
            for (process, receiver), log in zip(processes, logs, strict=True)
        ]
    finally:
        for process, receiver in processes:
            process.kill()
            process.join()
            receiver.close()


def _ended(process, connection, log: Path) -> Ended:
    assert connection.poll(HANG_SECONDS), f"a rank hangs: {log.read_text()[-3000:]}"
    value, error = pickle.loads(connection.recv_bytes())
    process.join(HANG_SECONDS)
    return Ended(value, error, log.read_text())


def _rank(function, args, environment, folder: Path, log: Path, connection) -> None:
    """Call the function as a rank: environment, folder and log are this process's own."""
    gc.freeze()  # ExactResume looks at what the rank has made, not at what the server has imported
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        result = function(*args), ""
    except BaseException as error:
        traceback.print_exc()
        result = None, f"{type(error).__name__}: {error}"
    # Plain pickle: torch would share memory that ends with this process.
    connection.send_bytes(pickle.dumps(result))


# What the ranks train -----------------------------------------------------------------------------


class Numbered(ResidentDataModule):
    """Random images, each labelled with its number; 4 of them are for validation."""

    classes = tuple(map(str, range(100)))
    mean = (0.5,) * 3
    std = (0.25,) * 3

    def __init__(self, size: int, val_split: int | float = 4, **options) -> None:
        super().__init__(val_split=val_split, **options)
        self.size = size

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        images = np.random.RandomState(7).randint(0, 256, (self.size, 3, 8, 8)).astype(np.uint8)
        return images, np.arange(self.size, dtype=np.int64)


class Regression(LightningModule):
    """Predicts an image's number, without batch norm: its loss is a mean over samples.

    It records what it sees and does.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.lr = lr
        self.seen = []
        self.losses = []
        self.gradients = []
        self.validated = []

    def loss(self, batch) -> torch.Tensor:
        images, numbers = batch
        return (self.network(images)[:, 0] - numbers / 10).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen.append(batch[1].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch[1].tolist())

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(
            torch.cat([parameter.grad.flatten().clone() for parameter in self.parameters()])
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


def trainer(callbacks: Sequence[Callback] = (), **options) -> Trainer:
    """Return a trainer for this rank, or for one process if there are no ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    world = int(os.environ.get("WORLD_SIZE", 1))
    settings = {
        "accelerator": "cpu",
        "devices": ranks,
        "num_nodes": world // ranks,
        "callbacks": list(callbacks),
        "strategy": "ddp" if world > 1 else "auto",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**settings | options)
