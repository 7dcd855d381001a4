"""When the user's save hooks are called; a resume continues whatever they put into the file."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from short_fits import (
    Noted,
    alone_and_resumed,
    as_in_a_new_process,
    interrupted,
    saved,
    trainer,
    training,
    weights,
)
from torch import nn

from sagemaker_lightning import ExactResume
from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.contract.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Changing(pl.Callback):
    """Changes what a checkpoint has, when it is saved.

    Args:
        change: Gets the model and the checkpoint.
    """

    def __init__(self, change: Any) -> None:
        self.change = change
        self.loaded: list[set[str]] = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.change(pl_module, checkpoint)

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded.append(set(checkpoint["state_dict"]))


def put_an_average(model, checkpoint):
    checkpoint["state_dict"] = {
        name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()
    }


def rename_weights(model, checkpoint):
    state = checkpoint["state_dict"]
    for name in list(state):
        state[f"net.{name}"] = state.pop(name)


def drop(*keys):
    def change(model, checkpoint):
        for key in keys:
            del checkpoint[key]

    return change


def empty_optimizers(model, checkpoint):
    for state in checkpoint["optimizer_states"]:
        state["state"].clear()


CHANGES = {
    "an average in the weights' place": put_an_average,
    "other names": rename_weights,
    "no optimizers": drop("optimizer_states"),
    "optimizers without states": empty_optimizers,
    "no schedulers, loops or callbacks": drop("lr_schedulers", "loops", "callbacks"),
    "no step": drop("epoch", "global_step"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_changes_in_the_file_changes_no_training(tmp_path, change):
    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        model = Noted(**moments)
        changing = Changing(CHANGES[change])
        trainer(tmp_path / folder, changing).fit(model)
        return model, changing

    alone, _ = fitted("alone")
    with interrupted():
        fitted("run", stop="batch 1:1")
    resumed, changing = fitted("run")
    assert weights(resumed) == weights(alone)
    seen = {"net.line.weight", "net.line.bias"}
    if change != "other names":
        seen = {"line.weight", "line.bias"}
    assert changing.loaded == [seen]  # the hook sees what it has saved


class Averaged(torch.optim.SGD):
    """Keeps an average of the weights."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            average.lerp_(parameter.detach(), 0.3)
        return loss

    @torch.no_grad()
    def swap(self):
        for parameter in self.param_groups[0]["params"]:
            if "average" in self.state[parameter]:
                kept = parameter.clone()
                parameter.copy_(self.state[parameter]["average"])
                self.state[parameter]["average"].copy_(kept)


class Swapping(Noted):
    """Validates the average."""

    def configure_optimizers(self):
        return Averaged(self.parameters(), 0.1, momentum=0.9)

    def on_validation_start(self):
        self.optimizers().optimizer.swap()

    def on_validation_end(self):
        self.optimizers().optimizer.swap()


def test_an_average_that_is_swapped_in_for_a_validation_stays_one(tmp_path):
    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        model = Swapping(**moments)
        fit = trainer(tmp_path / folder)
        fit.fit(model)
        averages = [state["average"].tolist() for state in fit.optimizers[0].state.values()]
        return weights(model), averages

    alone = fitted("alone")
    with interrupted():
        fitted("run", stop="validation 1:0")
    assert fitted("run") == alone


class Replaced(Noted):
    """Trains on with another optimizer from its second epoch on."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), 0.01)]


def test_an_optimizer_put_in_anothers_place_is_said_at_once_and_refused_in_a_line(tmp_path, capsys):
    with interrupted():
        trainer(tmp_path).fit(Replaced(stop="batch 1:2"))
    said = [line for line in capsys.readouterr().out.splitlines() if "replaced" in line]
    assert said == [
        "warning: the optimizers were replaced while training (torch.optim.sgd.SGD by "
        "torch.optim.adam.Adam), and a resumed run creates the original ones: after an "
        "interruption this run cannot continue; return them from configure_optimizers()"
    ]
    with pytest.raises(UserError, match="found states of the optimizers torch.optim.adam.Adam"):
        trainer(tmp_path).fit(Replaced())


class CountingModel(Noted):
    """Counts the calls of its hook.

    Args:
        calls: The calls of all save hooks, by name.
        moments: As in Noted.
    """

    def __init__(self, calls: Counter[str], **moments: str) -> None:
        super().__init__(**moments)
        self.count = calls.update

    def on_save_checkpoint(self, checkpoint):
        self.count(["on_save_checkpoint of the model"])
        checkpoint["own"] = self.global_step


class CountingCallback(pl.Callback):
    def __init__(self, calls: Counter[str]) -> None:
        self.count = calls.update

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.count(["on_save_checkpoint of the callback"])

    def state_dict(self):
        self.count(["state_dict of the callback"])
        return {"a": 1}


class CountingData(pl.LightningDataModule):
    """Counts the calls of its hook."""

    train_dataloader = Noted.train_dataloader
    val_dataloader = Noted.val_dataloader

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.count = calls.update

    def state_dict(self):
        self.count(["state_dict of the data module"])
        return {"a": 1}


TRAINERS = {
    "a model after each epoch": {},
    "no validation": {"limit_val_batches": 0},
    "two validations an epoch": {"val_check_interval": 2},
    "a validation every second epoch": {"check_val_every_n_epoch": 2},
    "validations by batches of all epochs": {
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    },
    "accumulated gradients": {"accumulate_grad_batches": 2},
    "no models": {"enable_checkpointing": False},
}
MODELS = (
    {"every_n_train_steps": 1},
    {"monitor": "error"},
    {"save_on_train_epoch_end": True},
    {"save_weights_only": True},
)


@pytest.mark.parametrize(
    ("options", "models"),
    [*((options, None) for options in TRAINERS.values()), *(({}, each) for each in MODELS)],
    ids=[*TRAINERS, *(next(iter(each)) for each in MODELS)],
)
def test_users_save_hooks_are_called_as_often_as_by_lightning_alone(tmp_path, options, models):
    """Whatever validations there are, and however often this package saves a checkpoint."""

    def calls(folder: Path, is_ours: bool) -> Counter[str]:
        found: Counter[str] = Counter()
        callbacks = [CountingCallback(found)]
        if models:
            callbacks.append(ModelCheckpoint(save_top_k=-1, **models))
        used = trainer(
            folder,
            *callbacks,
            **{"enable_checkpointing": True, "max_epochs": 3, "every_n_steps": 1} | options,
        )
        if not is_ours:
            used.callbacks = [each for each in used.callbacks if not isinstance(each, ExactResume)]
        used.fit(CountingModel(found), datamodule=CountingData(found))
        assert bool(list(folder.glob("step-*.ckpt"))) is is_ours
        return found

    expected = calls(tmp_path / "lightning", is_ours=False)
    assert calls(tmp_path / "ours", is_ours=True) == expected
    assert bool(expected) is options.get("enable_checkpointing", True)


class Keeping(CountingModel):
    """Draws numbers from an iterator that only its hooks can save."""

    def __init__(self, calls: Counter[str], **moments: str) -> None:
        super().__init__(calls, **moments)
        self.drawn = 0
        self.numbers = map(float, range(99))

    def draw(self):
        self.drawn += 1
        self.note(f"drawn {next(self.numbers)}")

    def training_step(self, batch, batch_idx):
        self.draw()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.draw()
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["drawn"] = self.drawn

    def on_load_checkpoint(self, checkpoint):
        self.numbers = map(float, range(checkpoint["drawn"], 99))


@pytest.mark.parametrize(
    ("stop", "when"),
    [
        ("batch 0:0", {1: "batch"}),
        ("batch 0:1", {2: "validation"}),
        ("validation 0:0", {2: "batch"}),
        ("batch 0:3", {4: "validation"}),
        ("validated 3", {4: "epoch"}),
    ],
)
def test_a_stop_waits_for_a_validation_if_hooks_have_to_say_what_was_before(tmp_path, stop, when):
    """They are asked when a checkpoint is written, and by no validation."""

    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        calls: Counter[str] = Counter()
        model = Keeping(calls, **moments)
        trainer(tmp_path / folder, val_check_interval=2).fit(model)
        return model.events, weights(model), sum(calls.values())

    *alone, calls = fitted("alone")
    assert calls == 2  # at the ends of two epochs
    with interrupted():
        fitted("run", stop=stop)
    assert saved(tmp_path / "run") == when
    *resumed, _ = fitted("run")
    assert resumed[1] == alone[1] and resumed[0] == alone[0]


class Loading(pl.Callback):
    """Loads what another one saves."""

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        assert checkpoint["own"]


class Paired(CountingCallback):
    """Loads its own state."""

    def load_state_dict(self, state_dict):
        assert state_dict == {"a": 1}


class Average(EMAWeightAveraging):
    """Counts the calls of its hook; Lightning's loads the average."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        super().on_save_checkpoint(trainer, pl_module, checkpoint)


@pytest.mark.parametrize(
    ("callbacks", "read"),
    [
        ([CountingCallback], []),
        ([Paired], ["state_dict of 0"]),
        (
            [CountingCallback, Loading],
            ["on_save_checkpoint of 0", "on_save_checkpoint of the model", "state_dict of 0"],
        ),
        ([Average], ["on_save_checkpoint of 0"]),
        ([EMAWeightAveraging, ModelCheckpoint], []),
    ],
)
def test_a_hook_is_read_if_something_loads_what_it_saves(callbacks, read):
    calls: Counter[str] = Counter()
    made = [each(calls) if each in (CountingCallback, Paired) else each() for each in callbacks]
    used = pl.Trainer(callbacks=made, logger=False, accelerator="cpu")
    used.strategy.connect(model := CountingModel(calls))
    names = {id(owner): f" of {number}" for number, owner in enumerate(made)}
    names[id(model)] = " of the model"
    found = lightning_checkpoints.save_hooks(used)
    assert sorted(f"{name}{names[id(owner)]}" for owner, name in found.read) == sorted(read)


class Reading(CountingModel):
    """Loads what its hook saves; none of its hooks runs at an epoch's end."""

    on_train_epoch_end = pl.LightningModule.on_train_epoch_end

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if "current_model_state" not in checkpoint:  # Lightning's average would miss its weights
            checkpoint["state_dict"] = {"average": torch.ones(1)}
        checkpoint.pop("lr_schedulers", None)

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint


class ReadingData(CountingData):
    """Loads its state; what that changes in it comes back as the interrupted run had it."""

    loaded: dict[str, dict] = {}

    def load_state_dict(self, state_dict):
        self.loaded["newest"] = state_dict


class OfWeights(ModelCheckpoint):
    """Writes weights alone, for which no callback is asked, after the other one has written."""

    def __init__(self) -> None:
        super().__init__(filename="weights", save_weights_only=True)


class Ending(pl.Callback):
    """Has a hook at an epoch's end, which may change what others save."""

    def on_train_epoch_end(self, *_):
        pass


@pytest.mark.parametrize(
    ("options", "more", "is_as_often"),
    [
        ({}, [], True),
        ({"val_check_interval": 2}, [], True),
        ({"limit_val_batches": 0}, [], True),
        ({"check_val_every_n_epoch": 2}, [], False),  # no file at each second epoch's end
        ({}, [Ending], False),
        ({}, [OfWeights], False),
        ({}, [EMAWeightAveraging], False),
        ({"enable_checkpointing": False}, [], False),
    ],
)
def test_a_file_of_the_same_moment_has_what_hooks_save(tmp_path, options, more, is_as_often):
    """They are called once for both, if no code of the user's runs in between."""

    def fitted(folder: Path, is_ours: bool = True, **moments: str):
        ReadingData.loaded.clear()
        as_in_a_new_process()
        calls: Counter[str] = Counter()
        used = trainer(
            tmp_path / folder,
            Paired(calls),
            *(each() for each in more),
            **{"enable_checkpointing": True, "max_epochs": 3} | options,
        )
        if not is_ours:
            used.callbacks = [each for each in used.callbacks if not isinstance(each, ExactResume)]
        torch.manual_seed(1)
        model, data = Reading(calls, **moments), ReadingData(calls)
        used.fit(model, datamodule=data)
        return calls, weights(model), model, data

    expected, *_ = fitted("lightning", is_ours=False)
    calls, alone, *_ = fitted("ours")
    assert (calls == expected) is is_as_often
    assert all(calls[name] >= expected[name] for name in calls)
    with interrupted():
        fitted("run", stop="epoch 1", fails="batch 1:0")
    _, resumed, model, data = fitted("run")
    assert resumed == alone
    assert EMAWeightAveraging in more or list(model.loaded["state_dict"]) == ["average"]
    assert model.loaded["own"] == 4 and data.loaded["newest"] == {"a": 1}


class Counted(nn.Module, pl.Callback):
    """A part of a model that is a callback, too, as of anomalib's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def on_train_batch_end(self, *_):
        self.batches += 1


class WithCallback(Noted):
    """Lightning's file of an epoch's end is of the same moment as ours: no hook is in between."""

    on_train_epoch_end = pl.LightningModule.on_train_epoch_end

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.part = Counted()

    def configure_callbacks(self):
        return [self.part]


@pytest.mark.parametrize("enable_checkpointing", [True, False])
def test_a_callback_that_is_a_module_is_saved_with_the_model(tmp_path, enable_checkpointing):
    train = training(WithCallback, max_epochs=3, enable_checkpointing=enable_checkpointing)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:1", "batch 2:1")
    assert weights(resumed) == weights(alone)
    assert resumed.part.batches == alone.part.batches > 4
