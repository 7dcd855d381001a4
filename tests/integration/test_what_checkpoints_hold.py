"""What a checkpoint holds of a training, and what it cannot hold."""

import contextlib
import copy
import threading
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from own_fits import PressCtrlC, Untested, short_trainer
from own_trainer import Classifier
from pytorch_lightning.callbacks import (
    ModelCheckpoint,
)

from sagemaker_lightning import (
    ExactResume,
    UserError,
)
from sagemaker_lightning.resume.files import checkpoint_dir


class Scaler:
    """An object that no checkpoint of ours holds; what it has seen is state."""

    def __init__(self) -> None:
        self.seen = 0


class WithScaler(Classifier):
    """Keeps an object in its checkpoints, as pytorch-forecasting and darts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def training_step(self, batch, batch_idx):
        self.scaler.seen += 1
        return super().training_step(batch, batch_idx) / self.scaler.seen

    def on_save_checkpoint(self, checkpoint):
        checkpoint["parameters"] = {"scaler": self.scaler, "size": 3}

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["parameters"]["size"] == 3
        self.scaler = checkpoint["parameters"]["scaler"]


@pytest.mark.slow
def test_objects_that_the_model_has_may_be_in_its_checkpoints(tmp_path: Path):
    """A resumed run has its own object there; the user's files have what Lightning writes."""
    expected = WithScaler()
    state = copy.deepcopy(expected.state_dict())
    short_trainer(tmp_path / "alone").fit(expected)
    for presses in (1, 0):
        model = WithScaler()
        model.load_state_dict(state)
        files = ModelCheckpoint(tmp_path / "own", "last", save_on_train_epoch_end=True)
        trainer = short_trainer(
            tmp_path / "run", PressCtrlC(presses), files, enable_checkpointing=True
        )
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(model)
    assert all(
        torch.equal(weight, expected.state_dict()[name])
        for name, weight in model.state_dict().items()
    )
    assert model.scaler.seen == expected.scaler.seen
    saved_parameters = torch.load(tmp_path / "own/last.ckpt", weights_only=False)["parameters"]
    assert (
        isinstance(saved_parameters["scaler"], Scaler)
        and saved_parameters["scaler"].seen == model.scaler.seen
    )


@pytest.mark.slow
def test_a_checkpoint_has_the_state_of_its_step_whenever_it_is_written(tmp_path: Path, monkeypatch):
    """It is a copy: training continues while it is written."""
    saved = {}
    monkeypatch.setattr(
        checkpoint_dir, "write", lambda path, state, step, number: saved.update({step: state})
    )
    resume = ExactResume(tmp_path, seed=1, every_n_minutes=0, every_n_steps=2)
    began = time.time()
    trainer = short_trainer(tmp_path, callbacks=[resume], limit_train_batches=3)
    trainer.fit(model := Untested())
    assert [*saved] == [2, 3]
    for step, state in saved.items():
        entries = state["sagemaker_lightning"]
        optimizer = state["optimizer_states"][0]["state"]
        assert {float(values["step"]) for values in optimizer.values()} == {float(step)}
        assert torch.equal(state["state_dict"]["network.0.weight"], model.network[0].weight) is (
            step == 3
        )
        assert began <= entries["number"] / 1e9 <= time.time()
        assert entries["ranks"][0]["rank_overrides"]["entries"] == {} and entries["step"] == step
        assert entries["parts"]["should_stop"] is False
        assert entries["parts"]["limits"]["added_limits"] == [0, 0]
        epochs = state["loops"]["fit_loop"]["epoch_progress"]["current"]
        assert (epochs["processed"], epochs["completed"]) == ((1, 0) if step == 3 else (0, 0))
        assert entries["resume_point"] == ("epoch" if step == 3 else "batch")


class Unsaveable(Untested):
    """Holds an object that cannot be saved, in its checkpoints or its hyperparameters."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        if place == "hparams":
            self.save_hyperparameters({"scaler": Scaler()})

    def on_save_checkpoint(self, checkpoint):
        if self.place == "hook":
            checkpoint["lock"] = threading.Lock()
        if self.place == "optimizer":
            checkpoint["optimizer_states"][0]["lock"] = threading.Lock()
        if self.place == "scheduler":
            checkpoint["lr_schedulers"][0]["lock"] = threading.Lock()

    def on_load_checkpoint(self, checkpoint):
        """Load what is there; without it, nobody would ask the other hook."""


class Unsaved(pl.Callback):
    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state_dict):
        """Load nothing."""


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("hook", r"lock is a _thread.lock \(on_save_checkpoint\(\) or state_dict\(\) of test_"),
        ("optimizer", r"optimizer_states.0.lock is a _thread.lock \(an optimizer of test_"),
        ("scheduler", r"lr_schedulers.0.lock is a _thread.lock \(a scheduler of test_"),
        ("callback", r"callbacks.Unsaved.lock is a _thread.lock \(a callback of test_"),
    ],
)
def test_an_object_that_no_checkpoint_can_hold_is_one_line(tmp_path: Path, place, says):
    callbacks = [Unsaved()] if place == "callback" else []
    of = f"{says}what_checkpoints_hold.Unsaveable"
    line = rf"^a checkpoint of this run could not be read again: {of}\)"
    with pytest.raises(UserError, match=line):
        short_trainer(tmp_path, *callbacks).fit(Unsaveable(place))


def test_a_hyperparameter_that_no_checkpoint_can_hold_is_named_in_it(tmp_path: Path):
    short_trainer(tmp_path, limit_train_batches=1).fit(Unsaveable("hparams"))
    (last,) = tmp_path.glob("step-*.ckpt")
    saved = torch.load(last, weights_only=True)
    assert saved["hyper_parameters"]["scaler"] == f"({__name__}.Scaler)"
