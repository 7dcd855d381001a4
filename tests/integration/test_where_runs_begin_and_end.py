"""Where a training begins, and with which hooks it ends, after a resume."""

import random
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from own_fits import Stops, StopsAt, Untested, short_trainer
from own_trainer import Classifier
from pytorch_lightning.callbacks import (
    ModelCheckpoint,
)
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import (
    ExactResume,
    UserError,
)


@pytest.mark.slow
@pytest.mark.parametrize("by_flag", [False, True])
def test_a_lightning_cli_resumes(tmp_path: Path, monkeypatch, capfd, by_flag: bool):
    """Its config.yaml is in the logger's folder, which a resumed run has again."""
    monkeypatch.chdir(tmp_path)

    def train(until: int) -> None:
        callbacks = [Stops(until)]
        args = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
        if by_flag:
            args += ["--trainer.callbacks+=sagemaker_lightning.ExactResume"]
            args += ["--trainer.callbacks.dirpath=checkpoints", "--trainer.callbacks.seed=7"]
        else:
            callbacks.append(ExactResume("checkpoints", seed=7))
        defaults = {"enable_progress_bar": False, "callbacks": [] if by_flag else callbacks}
        cli = LightningCLI(Classifier, trainer_defaults=defaults, args=args, run=False)
        cli.trainer.callbacks += callbacks[:1] if by_flag else []
        cli.trainer.fit(cli.model)

    with pytest.raises(SystemExit):
        train(until=14)
    with pytest.raises(SystemExit):
        train(until=17)
    train(until=0)
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["version_0"]
    output = capfd.readouterr().out
    assert "resumed at step 14: the state is as it was saved" in output
    assert "resumed at step 17: the state is as it was saved" in output
    assert "overwrite" not in output


class Downloaded(pl.LightningDataModule):
    """Data that `prepare_data` draws, once, into a file; `setup` draws which are trained on."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def prepare_data(self):
        if not self.file.exists():
            inputs = torch.rand(20, 2) + torch.tensor(np.random.rand(2) + random.random())
            np.save(self.file, inputs.numpy() + np.random.default_rng().random(2))

    def setup(self, stage):
        inputs = torch.tensor(np.load(self.file), dtype=torch.float32)
        self.chosen = torch.randperm(20).tolist() + random.sample(range(20), 4)
        self.chosen += np.random.default_rng().integers(20, size=3).tolist()
        self.data = TensorDataset(inputs[self.chosen], (inputs[self.chosen, :1] > 1).float())

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=3, shuffle=True)


def test_what_prepare_data_draws_once_changes_nothing_that_follows(tmp_path: Path, capfd):
    def train(folder: Path, *callbacks) -> list[int]:
        data = Downloaded(folder.with_suffix(".npy"))
        short_trainer(folder, *callbacks).fit(Classifier(), data)
        return data.chosen

    alone = train(tmp_path / "alone")
    with pytest.raises(SystemExit):
        train(tmp_path / "run", StopsAt(0, 4))
    assert train(tmp_path / "run") == alone
    output = capfd.readouterr().out
    assert "resumed at step 5: the state is as it was saved" in output
    assert "not that of" not in output


class StopsEarly(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.slow
def test_a_training_that_was_ended_early_stays_so(tmp_path: Path, capfd):
    """Its last score is known. And a program may change its arrays between two trainings."""
    model = Untested()
    model.directions = np.ones(3)
    scores = []
    for callbacks in ([StopsEarly()], []):
        best = ModelCheckpoint(tmp_path / "best", monitor="train_loss_epoch")
        options = {"max_epochs": 3, "enable_checkpointing": True}
        trainer = short_trainer(tmp_path / "run", *callbacks, best, **options)
        trainer.fit(model)
        scores.append(best.current_score)
        model.directions = 2 * model.directions
    output = capfd.readouterr().out
    assert trainer.global_step == 11 and "step 11 was the last one" in output
    assert "warning: resumed" not in output
    assert scores[0] is not None and scores[0] == scores[1]


class Validating(Classifier):
    """Counts what it validates, also in the check before training, and knows two folders."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.validated = 0

    def val_dataloader(self):
        self.data_folder = self.folder
        return super().val_dataloader()

    def validation_step(self, batch, batch_idx):
        self.validated += 1


@pytest.mark.slow
def test_the_check_before_training_counts_once(tmp_path: Path):
    """What is made with the data is not a change: a resumed run may have another folder."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, StopsAt(0, 2), limit_val_batches=2).fit(Validating("a"))
    short_trainer(tmp_path, limit_val_batches=2).fit(model := Validating("b"))
    assert model.validated == 2 + 2
    assert model.folder == model.data_folder == "b"


@pytest.mark.parametrize("content", [b"hello", b"", b"PK\x03\x04", None, [1], {"a": 1}])
def test_a_ckpt_path_that_is_not_a_checkpoint_is_one_line(tmp_path: Path, content):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    says = rf"^fit\(ckpt_path={path}\): found no checkpoint that could be read \(.*\); expected one"
    with pytest.raises(UserError, match=says) as caught:
        short_trainer(tmp_path / "run").fit(Classifier(), ckpt_path=path)
    assert "\n" not in str(caught.value)


def test_a_ckpt_path_with_weights_alone_is_one_line(tmp_path: Path):
    saves = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    short_trainer(tmp_path / "a", saves, enable_checkpointing=True).fit(Untested())
    path = tmp_path / "weights.ckpt"
    with pytest.raises(UserError, match="found no optimizer_states and no lr_schedulers in it"):
        short_trainer(tmp_path / "b").fit(Untested(), ckpt_path=path)
