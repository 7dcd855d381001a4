"""A run of Weights & Biases that is continued: its history is rows that cannot be removed.

W&B sends rows in the background, and an offline run that is resumed writes a new folder, which
replaces the old one when it is synced (wandb/wandb #3841). So all rows are kept in a file beside
the checkpoints. A resumed run asks W&B how many rows it has. It sends those that W&B lacks, all of
them to a new offline folder, and it does not send those again that W&B has.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import WandbLogger

from sagemaker_lightning.callbacks.loggers.base import (
    RunContinuation,
    is_count,
    put_before_its_class,
)
from sagemaker_lightning.compat import wandb_logger
from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.contract.log import log

TAIL_BYTES = 2**16
"""How many of the file's last bytes a checkpoint has: hundreds of rows."""


class WandbContinuation(RunContinuation):
    """The continuation of a WandbLogger."""

    serves = WandbLogger
    argument = "id"

    def take_version(self, version: int | str) -> None:
        """Have the logger continue in a run, unless it has another."""
        wandb_logger.set_run_if_none(self.logger, version)

    def prepare(self, folder: Path | None) -> None:
        """Have `Rows` send the rows, if there is a folder to keep them in.

        The points may come from TensorBoard's files: these are left alone.
        """
        is_lightnings = getattr(type(self.logger), "experiment", None) is WandbLogger.experiment
        if folder and is_lightnings and not wandb_logger.copies_tensorboard(self.logger):
            put_before_its_class(self.logger, ContinuedWandbLogger, folder=folder)

    @property
    def _rows(self) -> "Rows | None":
        return self.logger.rows if isinstance(self.logger, ContinuedWandbLogger) else None

    def keep_back(self, run_id: str, trains: bool) -> None:
        """Keep rows back until it is known if the interrupted run has logged them."""
        if isinstance(self.logger, ContinuedWandbLogger):
            self.logger.wait()

    def state(self) -> dict[str, Any]:
        """Return how many rows there are, and the end of their file."""
        return self._rows.state() if self._rows else {}

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state has numbers and the end of a file, if it has rows."""
        return "rows" not in state or (
            is_count(state["rows"])
            and is_count(state.get("size"))
            and isinstance(end := state.get("end"), str)
            and len(end) <= state["size"]
        )

    def cut_back(self, state: Mapping[str, Any], step: int, first: bool) -> None:
        """Send no row again that W&B has, and those that it lacks."""
        if isinstance(self.logger, ContinuedWandbLogger) and first and "rows" in state:
            rows = self.logger.make_rows()
            assert rows is not None  # `state` is of a process that sends rows
            rows.continue_from(state["rows"], state["size"], state["end"])

    def begin_anew(self) -> None:
        """Send the rows that were kept back."""
        if self._rows:
            self._rows.log_held()


class Rows:
    """Sends a run's rows, and keeps them in a file.

    Each line of the file is the number of a row, whether the row is complete with it, and values.

    Args:
        run: The run, as of `wandb.init`.
        path: The file.
        waits: Whether rows are kept back until `continue_from` or `log_held`.
    """

    def __init__(self, run: Any, path: Path, waits: bool) -> None:
        self.run = run
        self.path = path
        self.send = run.log
        self.sent = run.step  # rows that W&B has
        self.row = self.sent  # the row that comes next
        self.held: list[tuple[Any, ...]] | None = [] if waits else None
        self.reported_names: set[str] = set()  # names of values that the file cannot have
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a+b" if waits else "w+b")
        run.log = self.log
        wandb = sys.modules.get("wandb")
        if wandb and wandb.run is run:
            wandb.log = self.log  # type: ignore[attr-defined]  # the module's function

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Do what `Run.log` does, but send no row that W&B has."""
        if self.held is not None:
            self.held.append((data, step, commit))
            return
        if step is not None and step < self.row:
            self.send(data, step=step, commit=commit)  # W&B ignores it, and says so
            return
        self.row = self.row if step is None else step
        complete = step is None if commit is None else commit
        data = {"_timestamp": time.time()} | dict(data)  # as W&B would add it, when it is sent
        line = [self.row, complete, self._plain(data)]
        self.file.write(json.dumps(line).encode() + b"\n")
        self._send(data, self.row, complete)
        self.row += complete

    def log_held(self) -> None:
        """Log the rows that were kept back, if there are any, as a new run does."""
        held = self.held
        self.held = None
        if held is not None:
            self.file.truncate(0)
        for arguments in held or ():
            self.log(*arguments)

    def continue_from(self, rows: int, size: int, end: str) -> None:
        """Continue the run after as many rows, whose file had `size` bytes, the last being `end`.

        Rows that were kept back are among them. If bytes before `end` are missing, a warning says
        so. A run that this process has begun continues by itself.
        """
        if self.held is None:
            return
        self.held = None
        self.file.seek(0)
        before = self.file.read(size - len(end))
        if len(before) + len(end) < size:
            log.warning(
                f"{self.path} lacks rows of the interrupted run: the curves in W&B may have a gap"
            )
            before = before[: before.rfind(b"\n") + 1]  # whole lines
            end = end.partition("\n")[2]
        self.file.truncate(len(before))
        self.file.write(end.encode())
        self.file.flush()
        for line in (before + end.encode()).splitlines():
            row, complete, data = json.loads(line)
            self._send(data, row, complete)
        self.row = rows

    def state(self) -> dict[str, int | str]:
        """Return what `continue_from` takes; the file is on the disk.

        SageMaker copies a folder to S3 file by file: the copy of this file may be older than that
        of the checkpoint. So the checkpoint has its end.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        size = os.fstat(self.file.fileno()).st_size
        end = os.pread(self.file.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode()
        return {"rows": self.row, "size": size, "end": end}

    def _send(self, data: Mapping[str, Any], row: int, complete: bool) -> None:
        if row >= self.sent:
            self.send(data, step=row, commit=complete)

    def _plain(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that JSON has; a line names the others, once."""
        plain = {}
        for name, value in data.items():
            with suppress(Exception):  # a tensor or array of one number
                value = value.item()
            try:
                json.dumps(value)
                plain[name] = value
            except (TypeError, ValueError):
                if name not in self.reported_names:
                    self.reported_names.add(name)
                    log.warning(
                        f"W&B: {name} is {with_article(type(value).__name__)}, which is sent "
                        "once: a resumed run does not send it again to where it is missing"
                    )
        return plain


class ContinuedWandbLogger(wandb_logger.RunLogger):
    """The base that a WandbLogger gets before its own class, so that `Rows` sends its rows."""

    folder: Path
    waits = False
    rows: Rows | None = None

    def take_run(self, run: Any) -> None:
        """Send the rows of a run by `Rows`; not those of a run that is disabled."""
        if (self.rows is None or self.rows.run is not run) and not getattr(run, "disabled", False):
            self.rows = Rows(run, self.folder / f"wandb-{run.id}.jsonl", self.waits)

    def wait(self) -> None:
        """Keep rows back until it is known if the interrupted run has logged them."""
        self.waits = self.rows is None

    def make_rows(self) -> Rows | None:
        """Return what sends the run's rows; the run begins if it has not yet."""
        _ = self.experiment
        return self.rows


def files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder of checkpoints."""
    return sorted(folder.glob("wandb-*.jsonl"))
