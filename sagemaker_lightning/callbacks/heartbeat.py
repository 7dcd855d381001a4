"""A rank's line to its node's watch (nodes/watchdog.py): what it does, why it failed; broken, it says the rank died."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer


class Lifeline(Callback):
    """Tells the watch at `path`, if there is one, what the rank that is called `name` does."""

    def __init__(self, path: Path | None, name: str) -> None:
        self.socket = None
        self.told = 0.0
        if path and path.exists():
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(path))
            # A data worker is a copy of this process, and would hold the line when the rank is long dead.
            os.register_at_fork(after_in_child=self.socket.close)
            self._say(rank=name)

    def failed(self, line: str) -> None:
        """Say why this rank fails, for the ranks everywhere that will wait for it in vain."""
        self._say(failed=line)

    def stopped(self, line: str) -> None:
        """Say that this rank ends as it was told to."""
        self._say(stopped=line)

    def done(self) -> None:
        """Say that nothing is missing if this rank is gone."""
        self._say(done=True)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say, once a second, which step this is."""
        if time.monotonic() >= self.told + 1:
            self._say(status=f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}")
            self.told = time.monotonic()

    def _say(self, **message) -> None:
        if self.socket:
            with suppress(OSError):  # the watch is gone: so will this process be
                self.socket.sendall(json.dumps(message).encode() + b"\n")
