"""A rank of `python -m benchmarks.scaling local`: it trains in turns and reports its speed.

The benchmark gives the turns out over a socket, as the ranks are not its children: launchers start
them.
"""

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Untimed steps at the start of a turn: the caches are full of another training's data.
WARMUP_STEPS = 3
# What a rank gets; silent: train without the other node.
EXCHANGE = "exchange"
SILENT = "silent"
END = "end"


@dataclass(frozen=True)
class Turn:
    """A rank's measurements of its turn; the seconds are a step's, on average."""

    rate: float
    """images/s."""
    seconds: float
    """Those of the whole step."""
    waited: float = 0.0
    """From the last gradient computed to the last one exchanged, with nothing else to do."""
    overlapped: float = 0.0
    """From the first gradients handed over to the last one computed; nobody waits for this part."""
    sent: float = 0.0
    """Bytes that a node sent in a step; the benchmark measures it."""


class Rank(Callback):
    """Trains in turns: WARMUP_STEPS untimed, then `steps` timed; it sleeps in between.

    Args:
        address: Path of the benchmark's socket.
        steps: Timed steps of a turn.
    """

    def __init__(self, address: str, steps: int) -> None:
        self.address = address
        self.steps = steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first turn."""
        self.start(trainer.model)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self.tick(len(batch[1]))

    def start(self, network: nn.Module) -> None:
        """Report to the benchmark and wait for the first turn of `network`.

        The network is in DDP if there are two nodes.
        """
        self.ddp = network if isinstance(network, DistributedDataParallel) else None
        if self.ddp:
            # Sample each step, not each hundredth.
            self.ddp._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001
        self.connection = Client(self.address)
        self._obey()

    def tick(self, images: int) -> None:
        """Count a step that trained on `images`; at the end of a turn, wait for the next one."""
        self.step += 1
        if self.step <= WARMUP_STEPS:
            self.images = 0
            self.waited = 0.0
            self.overlapped = 0.0
            self.started = time.perf_counter()
            return
        self.images += images
        if self.ddp:
            # DDP's own timers, in ns. A step's values are complete with the next step, so they are
            # one step behind.
            found = self.ddp._get_ddp_logging_data()  # noqa: SLF001  DDP has no public timers
            overlapped = found.get("backward_compute_comm_overlap_time", 0)
            self.overlapped += overlapped / 1e9
            self.waited += (found.get("backward_comm_time", 0) - overlapped) / 1e9
        if self.step == WARMUP_STEPS + self.steps:
            seconds = time.perf_counter() - self.started
            each = [total / self.steps for total in (seconds, self.waited, self.overlapped)]
            self.connection.send(Turn(self.images / seconds, *each))
            self._obey()

    def _obey(self) -> None:
        """Wait for an order, and prepare for it."""
        order = self.connection.recv()
        if order == END:
            os._exit(0)  # a model is of no use to anybody here
        if self.ddp:
            self.ddp.require_backward_grad_sync = order == EXCHANGE  # what no_sync() sets
        self.step = 0
