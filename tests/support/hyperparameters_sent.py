"""Hyperparameters of every kind that every client sends, and what must arrive."""

from pathlib import Path

import yaml

# The smallest job that trains, tests and exports. It writes no checkpoint, as local mode takes ten
# seconds to pack one.
SHORT = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 2, "trainer.limit_val_batches": 1}
SHORT |= {"trainer.limit_test_batches": 1, "trainer.accelerator": "cpu", "data.batch_size": 64}
SHORT |= {"trainer.enable_checkpointing": False}


# One flag of ours for each kind, none of them at its default.
KNOWN = SHORT | {
    "checkpoint.filename": "a b=c 'q'",
    "checkpoint.monitor": None,
    "checkpoint.save_top_k": -1,
    "data": {"class_path": "DigitsDataModule", "init_args": {"seed": 7}},
    "data.normalize": True,
    "logger.name": "",
    "logger.version": "1.10",
    "optimizer": "Adam",
    "optimizer.betas": [0.8, 0.9],
}


def known_arrived(output: Path) -> None:
    """Check the values that the application has written for its flags."""
    (path,) = output.rglob("config.yaml")
    config = yaml.safe_load(path.read_text())
    checkpoint = config["checkpoint"]
    data = config["data"]
    logger = config["logger"]
    assert checkpoint["filename"] == "a b=c 'q'"
    assert checkpoint["monitor"] is None
    assert checkpoint["save_top_k"] == -1
    assert data["class_path"] == "app.data.DigitsDataModule"
    assert data["init_args"] | {"seed": 7, "normalize": True, "batch_size": 64} == data["init_args"]
    assert (logger["name"], logger["version"]) == ("", "1.10")
    assert config["optimizer"]["init_args"]["betas"] == [0.8, 0.9]
    assert config["trainer"]["enable_checkpointing"] is False
