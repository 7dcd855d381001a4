"""A user's own loggers draw one curve, however often the run was interrupted.

No point is lost, and none is there twice.
"""

import csv
import json
from pathlib import Path

import pytest
from test_interruptions import points
from test_strangers import Run

LOGGERS = [
    {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
    {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs"}},
    {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": "logs", "name": "mine", "version": "all", "prefix": "x"},
    },
    {
        "class_path": "TensorBoardLogger",
        "init_args": {"save_dir": "boards", "sub_dir": "a", "log_graph": True},
    },
]


FLAGS = [
    "--model=strangers.Logging",
    "--data=strangers.Validated",
    f"--trainer.logger={json.dumps(LOGGERS)}",
    "--trainer.callbacks=LearningRateMonitor",
    "--trainer.log_every_n_steps=2",
]


def curves(folder: Path) -> dict:
    """Return what the loggers' files hold, by folder."""
    contents = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.glob("logs/**/metrics.csv"))
    }
    boards = {
        file.parent for name in ("logs", "boards") for file in folder.glob(f"{name}/**/events.*")
    }
    return contents | {
        str(board.relative_to(folder)): sorted(map(str, points(board))) for board in boards
    }


@pytest.mark.slow
def test_own_loggers_have_one_curve(tmp_path: Path):
    alone = Run(tmp_path / "alone", *FLAGS)
    run = Run(tmp_path / "run", *FLAGS)
    alone.finish()
    expected = curves(alone.folder)
    rows = list(
        csv.DictReader(expected["logs/lightning_logs/version_0/metrics.csv"].decode().splitlines())
    )
    assert all(
        any(row[name] for row in rows)
        for name in ("begun", "later", "lr-SGD", "val_loss", "loss_epoch")
    )
    assert (
        run.start(KILL_AT="1:2") == -9
        and run.start(STOP_AT="1:5") == 143
        and run.start(KILL_AT="2:3") == -9
    )
    run.finish()
    assert curves(run.folder) == expected
    run.finish()  # the run has already finished
    assert curves(run.folder) == expected
