"""callbacks/loggers/wandb_rows.py: a run of Weights & Biases continues, each row once.

In one process, with a run that is made of a list. test_tracking.py has W&B's own.
"""

import json
import os
import random
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from pytorch_lightning.loggers import WandbLogger

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.callbacks.loggers import wandb_rows
from sagemaker_lightning.callbacks.loggers.wandb_rows import Rows


class Run:
    """A run of W&B; the server has some of its rows when it is resumed."""

    id = "mine"

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.partial: dict = {}

    @property
    def step(self) -> int:
        return len(self.rows)

    def log(self, data: dict, step: int, commit: bool) -> None:
        assert step == len(self.rows)
        self.partial |= data
        if commit:
            self.rows.append({name: self.partial[name] for name in self.partial if name[0] != "_"})
            self.partial = {}


@pytest.mark.parametrize("seed", range(20))
def test_a_run_has_each_row_once(tmp_path: Path, seed: int):
    """W&B sends rows in the background: any number of the last ones may be lost.

    The file, too, may be an older one.
    """
    draw = random.Random(seed)
    expected = [{"loss": draw.random(), "epoch": number // 9} for number in range(30)]
    saved = 0
    state = None
    server_rows = []
    rows_end = 0
    path = tmp_path / "wandb-mine.jsonl"
    while rows_end < len(expected):
        run = Run(server_rows)
        rows = Rows(run, path, waits=state is not None)
        if state is not None:
            run.log({"begun": 1.0})
            rows.continue_from(**state)
            assert path.stat().st_size == state["size"]
        rows_end = draw.randint(saved, len(expected)) if state else len(expected) // 2
        for number in range(saved, rows_end):
            row = expected[number]
            if draw.random() < 0.3:
                run.log({"loss": row["loss"]}, commit=False)
                run.log({"epoch": row["epoch"]})
            else:
                run.log(row)
            if draw.random() < 0.2 or state is None:
                saved = number + 1
                state = rows.state()
        rows.file.close()
        os.truncate(path, draw.randint(0, path.stat().st_size))
        server_rows = (
            run.rows if rows_end == len(expected) else run.rows[: draw.randint(0, len(run.rows))]
        )
        server_rows = server_rows if seed % 2 or rows_end == len(expected) else []
    assert run.rows == expected


def test_rows_that_are_lost_are_said_and_so_is_what_cannot_be_kept(
    tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.setattr(wandb_rows, "TAIL_BYTES", 100)
    path = tmp_path / "wandb-mine.jsonl"
    rows = Rows(Run([]), path, waits=False)
    rows.log({"loss": torch.tensor(1.0), "picture": object()})
    assert "W&B: picture is an object, which is sent once" in capsys.readouterr().out
    assert json.loads(path.read_text() or rows.state()["end"])[2]["loss"] == 1.0
    for number in range(9):
        rows.log({"loss": number} | ({} if number else {"picture": object()}))
    state = rows.state()
    assert not capsys.readouterr().out
    assert len(state["end"]) == 100 and state["rows"] == 10
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (0, 1):  # whole lines that are left of the file
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])
        run = Run([{}] * 9)
        Rows(run, path, waits=True).continue_from(**state)
        assert "lacks rows of the interrupted run" in capsys.readouterr().out
        assert run.rows[9:] == [{"loss": 8}]
        assert path.read_bytes().splitlines(keepends=True) == [*lines[:kept], lines[-1]]


class Steps:
    """A run of W&B that keeps the calls."""

    id = "mine"
    step = 0

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def log(self, data: dict, step: int, commit: bool | None) -> None:
        named = {name: data[name] for name in data if name[0] != "_"}
        self.calls.append((named, step, commit))


def test_a_step_of_ones_own_is_the_row(tmp_path: Path):
    """As W&B has it: a row is complete when a later one begins."""
    run = Steps()
    rows = Rows(run, tmp_path / "new/folder/wandb-mine.jsonl", waits=False)
    before = time.time()
    run.log({"a": 1}, step=0)
    run.log({"b": 2}, step=0)
    run.log({"a": 3}, step=4, commit=True)
    run.log({"late": 4}, step=4)
    run.log({"c": 5}, commit=False)
    run.log({"d": 6})
    assert run.calls == [
        ({"a": 1}, 0, False),
        ({"b": 2}, 0, False),
        ({"a": 3}, 4, True),
        ({"late": 4}, 4, None),  # W&B says that it ignores it
        ({"c": 5}, 5, False),
        ({"d": 6}, 5, True),
    ]
    state = rows.state()
    kept = [json.loads(line) for line in state["end"].splitlines()]
    assert [(row, complete) for row, complete, _ in kept] == [
        (0, False), (0, False), (4, True), (5, False), (5, True)
    ]  # fmt: skip
    assert state["rows"] == 6 and before <= kept[0][2]["_timestamp"] <= time.time()


def test_rows_are_on_the_disk_when_a_checkpoint_names_them(tmp_path: Path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append(os.fstat(number).st_size))
    rows = Rows(Run([]), tmp_path / "wandb-mine.jsonl", waits=False)
    rows.log({"loss": 1.0})
    assert sizes == [rows.state()["size"]] and sizes[0] > 0
    rows.log({"text": "x" * 70_000})
    assert len(rows.state()["end"]) == 64 * 1024  # a checkpoint stays small


def test_rows_that_nobody_continues_begin_a_new_file(tmp_path: Path):
    path = tmp_path / "wandb-mine.jsonl"
    path.write_text("[0, true, {}]\n")
    run = Run([])
    rows = Rows(run, path, waits=True)
    run.log({"loss": 1.0})
    assert not run.rows and path.stat().st_size > 0  # it waits
    for _ in range(2):
        rows.log_held()
        rows.continue_from(rows=0, size=0, end="")  # a second training of this process
        run.log({"loss": 2.0})
    assert run.rows == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 2.0}]
    assert rows.state()["rows"] == 3
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == [0, 1, 2]
    Rows(Run([]), path, waits=False)
    assert not path.read_text()


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """The module of W&B, which is not installed here."""
    module = types.SimpleNamespace(run=None, log=None)
    for name in ("wandb", "wandb.sdk.lib", "wandb.wandb_run"):
        monkeypatch.setitem(sys.modules, name, module)
    module.RunDisabled = module.Run = object
    return module


def test_a_program_may_log_by_the_module(wandb, tmp_path: Path):
    """`wandb.log` is the run's if there is one."""
    for current in (False, True):
        run = Run([])
        wandb.run, wandb.log = (run if current else Run([])), None
        rows = Rows(run, tmp_path / "wandb-mine.jsonl", waits=False)
        assert (wandb.log == rows.log) == current


def wandb_logger(run: Run | None, **options) -> WandbLogger:
    logger = WandbLogger.__new__(WandbLogger)
    logger._experiment, logger._id, logger._project = run, None, "mine"
    logger._wandb_init, logger._offline = options, False
    return logger


def test_a_logger_of_wandb_continues_in_the_run(wandb, tmp_path: Path, capsys):
    logger = wandb_logger(run := Run([]))
    loggers.prepare_files([logger], [])
    assert type(logger) is WandbLogger  # no checkpoints, nothing to continue
    loggers.prepare_files([logger], [], tmp_path)
    assert "rows" not in loggers.save_states([logger])[0]  # it has logged nothing
    for number in range(3):
        logger.experiment.log({"loss": number})
        if number == 0:
            states = loggers.save_states([logger])
    assert states[0]["rows"] == 1 and states[0]["version"] == "mine"
    assert [path.name for path in wandb_rows.files(tmp_path)] == ["wandb-mine.jsonl"]
    logger.rows.file.close()
    for first in (False, True):
        made = Run(run.rows[:1])
        wandb.init = lambda id, made=made: made
        logger = wandb_logger(None)
        loggers.prepare_files([logger], states, tmp_path)
        assert logger._wandb_init == {"id": "mine"}
        loggers.continue_files([logger], states, 0, first)
        logger.experiment.log({"loss": 7})
        assert made.rows[1:] == ([{"loss": 7}] if first else [])
    loggers.prepare_files([logger], states, tmp_path)  # a second training of this process
    logger.experiment.log({"loss": 8})
    assert made.rows[1:] == [{"loss": 7}, {"loss": 8}] and not capsys.readouterr().out
    loggers.prepare_files([logger := wandb_logger(None)], states, tmp_path)
    wandb.init = lambda id: made
    logger.experiment.log({"loss": 9})
    assert len(made.rows) == 3
    loggers.begin_files([logger])
    assert made.rows[3:] == [{"loss": 9}]


def test_a_run_that_is_disabled_or_copies_tensorboard_is_left_alone(wandb, tmp_path: Path):
    logger = wandb_logger(run := Run([]), sync_tensorboard=True)
    loggers.prepare_files([logger], [], tmp_path)
    assert type(logger) is WandbLogger
    logger = wandb_logger(run)
    run.disabled = True
    loggers.prepare_files([logger], [], tmp_path)
    assert logger.experiment is run and logger.rows is None and not list(tmp_path.iterdir())
    loggers.begin_files([logger])
    run.disabled = False
    first = logger.experiment and logger.rows
    assert logger.experiment and logger.rows is first


def test_another_run_of_wandb_is_said(wandb, tmp_path: Path, capsys):
    state = {"kind": "WandbLogger", "name": "mine", "version": "other"}
    loggers.prepare_files([wandb_logger(Run([]))], [state], tmp_path)
    says = "this run logs to id mine, the interrupted run logged to id other, so their"
    assert says in capsys.readouterr().out
