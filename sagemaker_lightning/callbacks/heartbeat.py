"""A rank's connection to its node's watchdog (nodes/watchdog.py).

Over it, the rank says what it does and why it failed. If the connection breaks, the watchdog knows
that the rank died.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from sagemaker_lightning.contract import deadlines
from sagemaker_lightning.nodes.messages import HEARD, RankMessage


class Heartbeat(Callback):
    """Tells the watchdog what this rank does.

    The command line has one. In a script with a Trainer of its own, under our hook, the line on a
    lost host has an epoch and a step only if the Trainer has this callback.

    Args:
        path: The watchdog's socket, `SageMakerEnvironment.read().watch`; nothing is sent if it is
            None or does not exist.
        name: Name of this rank in messages, such as "host algo-1, rank 0".
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self.socket = None
        self.last_status_at = 0.0
        if path and path.exists():
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(path))
            # A data worker is a copy of this process: it would keep the connection open after the
            # rank has died.
            os.register_at_fork(after_in_child=self.socket.close)
            self._send(RankMessage(rank=name))

    def failed(self, line: str) -> None:
        """Say why this rank fails; ranks everywhere would wait for it in vain.

        Return once that is heard: a busy watch could no longer tell what was before this rank's
        end, and what followed from it.
        """
        self._send(RankMessage(failed=line))
        if self.socket:
            with suppress(OSError):  # no answer in time, or none that will come
                self.socket.settimeout(deadlines.ENDS_BY_ITSELF)
                self.socket.recv(len(HEARD))

    def stopped(self, line: str) -> None:
        """Say that this rank ends because it was asked to."""
        self._send(RankMessage(stopped=line))

    def done(self) -> None:
        """Say that this rank is complete, and that its end is not a failure."""
        self._send(RankMessage(done=True))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Send the epoch and the step, once a second."""
        if time.monotonic() >= self.last_status_at + 1:
            status = f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
            self._send(RankMessage(status=status))
            self.last_status_at = time.monotonic()

    def _send(self, message: RankMessage) -> None:
        if self.socket:
            with suppress(OSError):  # the watchdog is gone, and this process will be ended, too
                self.socket.sendall(message.line())
