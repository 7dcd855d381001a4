"""What of a user's objects is saved, restored and told: the parts that have them, together."""

import io
import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchmetrics import MeanMetric, MetricTracker
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.resume.parts.data_epoch import DataEpoch
from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.roots import objects_of_module, user_objects
from sagemaker_lightning.resume.parts.stateful_objects import StatefulObjects
from sagemaker_lightning.resume.parts.trainer_settings import TrainerSettings
from sagemaker_lightning.resume.parts.user_objects import (
    UserObjects,
    parts_of_modules,
    run_creating_hooks,
    without_pruning,
)
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.state import nodes_of
from sagemaker_lightning.state.object_graph import Added

HERE = "test_user_objects"


class Model(LightningModule):
    """Has a layer, and what it is given as attributes."""

    def __init__(self, **values) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
        for name, value in values.items():
            setattr(self, name, value)


class Sharing(Model):
    """Shares with all models of its class what is no state of one."""

    signs_of_all = itertools.count()
    scaler_of_all = torch.amp.GradScaler("cpu")


class Holding(Callback):
    """Holds something."""

    def __init__(self, **values) -> None:
        vars(self).update(values)


class Points(Dataset):
    """Points, and what a user has made of them."""

    def __init__(self, **values) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(index)


class Order(Sampler):
    """An order with a state."""

    def __init__(self, **values) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        return iter(range(8))


class SavedOrder(Order):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Loader:
    """A loader of a user's own."""

    def __iter__(self):
        return iter(range(8))


def trainer_of(model=None, *callbacks, train=None, val=None, optimizers=(), **options) -> Trainer:
    """Return a trainer as it is while it trains."""
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**settings | options, callbacks=list(callbacks))
    model = model or Model()
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.strategy.optimizers = list(optimizers)
    for loop, loader in ((trainer.fit_loop, train), (trainer.fit_loop.epoch_loop.val_loop, val)):
        loop._combined_loader = None if loader is None else CombinedLoader(loader, "sequential")
    return trainer


class UserState:
    """The parts of a checkpoint that have a user's objects, of a run that trains nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.run = run_of(trainer)
        self.objects = self.run.part(UserObjects)
        self.state = self.objects.graph

    def encode_changes(self, point: ResumePoint | None = None) -> dict:
        """Return what is saved."""
        saved = {
            part.key: self.run.part(part).save(point, None)
            for part in (UserObjects, Generators, StatefulObjects, TrainerSettings, Modes)
        }
        saved["structure"] = self.run.part(Structure).save(point, None)
        saved["data_identity"] = self.run.part(DataIdentity).save(point, None)
        if point:
            saved["loader_positions"] = self.run.part(LoaderPositions).save(point, None)
        return saved

    def restore(self, saved: dict, only_plain: bool = False, same_ranks: bool = True) -> None:
        """Restore it as after the hooks that begin training, or as before them."""
        resumed(self.run, world_size=1 if same_ranks else 2, **saved)
        parts = UserObjects, Generators, StatefulObjects, TrainerSettings, Modes
        moment = Moment.HOOKS if only_plain else Moment.TRAINING
        for part in map(self.run.part, parts):
            if moment in part.moments:
                part.restore(saved[part.key], moment)

    def restore_after_drawing(self, saved: dict) -> None:
        """Restore it once the loaders have begun the epoch."""
        resumed(self.run, ResumePoint.BATCH, **saved)
        for part in (UserObjects, Generators):
            self.run.part(part).restore(saved[part.key], Moment.EPOCH)


def state_of(*arguments, **values) -> UserState:
    """Return the state of the objects of a trainer, which has just begun."""
    state = UserState(trainer_of(*arguments, **values))
    state.run.mark_start()
    return state


def values_of(saved: dict) -> dict:
    """Return what a state has of attributes, containers and arrays, by path."""
    values = {}
    for _, path, note, references, content in nodes_of(saved.get("user_objects", saved)["graph"]):
        if isinstance(note, dict):
            names = (f"{path}.{name}" for name in note["names"])
            values |= dict(zip(names, references, strict=True))
        elif path is not None:
            values[path] = content or references
    return values


def in_training(state: UserState, **states) -> None:
    """Have the trainer's loaders say what their states are."""
    state.trainer.fit_loop._combined_loader = SimpleNamespace(
        states=lambda fetcher, within: states | {"within": within},
        iterables=None,
    )


# Whose state it is --------------------------------------------------------------------------------


class Steps(SGD):
    """An optimizer of a user's own."""


class Keeps(CSVLogger):
    """A logger of a user's own."""


def own_hook(module, inputs):
    """Change nothing."""


def test_the_objects_of_a_training(tmp_path):
    model = Model()
    model.body[0].register_forward_pre_hook(own_hook)
    model.body.register_forward_pre_hook(print)  # of a library
    parts = [[*layer.parameters()] for layer in (model.body[0], nn.Linear(1, 1))]
    optimizers = [SGD(parts[0], 0.1), Steps(parts[1], 0.1)]
    optimizers[1].register_step_post_hook(own_hook)
    loaders = [
        DataLoader(Points(), sampler=Order()),
        DataLoader(Points(), sampler=SavedOrder()),
        Loader(),
        [1, 2],
        SavedOrder(),
    ]
    trainer = trainer_of(
        model,
        Holding(),
        train=loaders,
        val=[DataLoader(Points())],
        optimizers=optimizers,
        logger=[CSVLogger(tmp_path), Keeps(tmp_path)],
    )
    objects = user_objects(trainer)
    for name in ("trainer", "optimizers.0", "lightning_optimizers.1", "parameters.body.0.weight"):
        assert isinstance(objects[name], Added)
    assert objects["optimizers.1"] is optimizers[1] and objects["model"] is model
    assert objects["loggers.1 Keeps"] is trainer.loggers[1] and "loggers.0 CSVLogger" not in objects
    assert {name: hook for name, hook in objects.items() if name.startswith("hooks")} == {
        "hooks.model.body.0.0": own_hook,
        "hooks.optimizers.1.0": own_hook,
    }
    parts = {"dataset", "collate_fn", "sampler", "batch_sampler", "loader"}
    found = {}
    for name in objects:
        stage, _, rest = name.partition(".")
        if stage in ("train", "val"):
            number, _, part = rest.partition(".")
            found.setdefault(f"{stage}.{number}", set()).add(part)
    without_loader = parts - {"loader"}
    assert found == {
        "train.0": parts,
        "train.1": parts - {"sampler"},
        "train.2": parts,
        "train.3": without_loader,
        "val.0": parts,
    }
    assert objects["train.2.loader"] is loaders[2] and objects["train.3.dataset"] is None
    assert isinstance(objects["train.0.loader"], Added)


class Raised(Precision):
    """A precision of a user's own, with a number of its own."""

    def __init__(self, raised: float) -> None:
        super().__init__()
        self.raised = raised


class Counting(SingleDeviceStrategy):
    """A strategy of a user's own, with a number of its own."""

    def __init__(self, raised: float, count: int) -> None:
        super().__init__(device="cpu", precision_plugin=Raised(raised))
        self.count = count


def test_what_a_strategy_of_ones_own_counts_comes_back():
    def part_of(strategy):
        trainer = Trainer(strategy=strategy, logger=False, enable_checkpointing=False)
        trainer.strategy.connect(LightningModule())
        return run_of(trainer).part(UserObjects)

    trained, resumed = Counting(1.0, 0), Counting(1.0, 0)
    parts = [part_of(each) for each in (trained, resumed)]
    for part in parts:
        part.mark_start()
    trained.count, trained.precision_plugin.raised = 3, 2.0
    parts[1].graph.restore(parts[0].save(None, None)["graph"])
    assert resumed.count == 3 and resumed.precision_plugin.raised == 2


def test_an_object_is_known_by_its_name_in_the_module():
    inner = Loader()
    state = UserState(trainer_of(Model(mine=[inner])))
    assert objects_of_module(state.trainer)["model.mine.0"] is inner
    found = objects_of_module(UserState(trainer_of(Sharing())).trainer).values()
    assert not any(each is Sharing.scaler_of_all for each in found)


# What is saved ------------------------------------------------------------------------------------


def test_what_has_changed_is_saved():
    model, holding = Model(count=1, same=2), Holding(seen=[])
    state = state_of(model, holding)
    assert values_of(state.encode_changes()) == {}
    model.count += 1
    holding.seen.append(0.5)
    model.thing = object()
    model.body.eval()
    model.body[0].bias.requires_grad_(False)
    saved = state.encode_changes()
    assert values_of(saved) == {"model.count": 2, "callbacks.0 Holding.seen": [0.5]}
    assert saved["user_objects"]["unsaved"] == {"model.thing": "builtins.object"}
    assert saved["user_objects"]["made"] == [("model", "thing")]
    assert saved["modes"]["eval"] == ["body", "body.0", "body.1"] and saved["modes"]["frozen"] == [
        "body.0.bias"
    ]
    assert state.objects._missing_attributes(saved["user_objects"]) == []
    del model.thing
    assert state.objects._missing_attributes(saved["user_objects"]) == [("model", "thing")]


@pytest.mark.parametrize("point", ResumePoint)
def test_the_loaders_tell_their_states(point):
    state = state_of()
    in_training(state, mine=3)
    found = state.encode_changes(point)["loader_positions"]
    assert found == {"mine": 3, "within": point is not ResumePoint.EPOCH}


def test_settings_of_the_trainer_that_change_are_saved_from_then_on():
    state = state_of()
    trainer = state.trainer
    assert state.encode_changes()["trainer_settings"] == {}
    trainer.accumulate_grad_batches = 4
    trainer.should_stop = True
    trainer.mine = 3
    trainer._default_root_dir = "/elsewhere"
    saved = state.encode_changes()
    assert saved["trainer_settings"] == {"accumulate_grad_batches": 4}
    other = state_of()
    other.restore(saved)
    assert other.trainer.accumulate_grad_batches == 4
    assert other.encode_changes()["trainer_settings"] == {"accumulate_grad_batches": 4}
    other.trainer.accumulate_grad_batches = 1
    assert other.encode_changes()["trainer_settings"] == {"accumulate_grad_batches": 1}


def test_what_hooks_compute_at_the_start_is_saved():
    state = UserState(trainer_of(model := Model()))
    state.trainer.callbacks.append(Starts())
    state.run.mark_start()
    assert values_of(state.encode_changes()) == {} == values_of(state.encode_changes())
    state.objects.hooks_begin()
    model.anchor = torch.ones(1)
    state.objects.hooks_ended()
    model.data = torch.ones(1)
    state.run.mark_start()
    saved = state.encode_changes()
    assert set(values_of(saved)) == {"model.anchor"}
    assert saved["user_objects"]["computed"] == ["model.anchor"]
    model.anchor += 1
    assert state.encode_changes()["user_objects"]["computed"] == []
    other = UserState(trainer_of(Model(anchor=torch.zeros(1))))
    other.restore(saved, same_ranks=False)
    assert other.trainer.lightning_module.anchor == 0.0
    other.restore(saved)
    assert other.trainer.lightning_module.anchor == 1.0


class Starts(Callback):
    def on_train_start(self, trainer, pl_module):
        pass


def test_which_modules_and_hooks_there_are():
    model = Model(lazy=nn.LazyLinear(1))
    model.body.register_forward_pre_hook(own_hook)
    optimizer = SGD(model.body.parameters(), 0.1)
    optimizer.register_step_pre_hook(own_hook)
    modules = state_of(model, optimizers=[optimizer]).encode_changes()["structure"]
    begin = "the class or the hooks of model"
    assert modules == {
        begin: "Model 0",
        f"{begin}.body": "Sequential 1",
        f"{begin}.body.0": "Linear 0",
        f"{begin}.body.1": "Dropout 0",
        f"{begin}.lazy": "Linear 0",
        "the hooks of optimizers.0": "1",
    }


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        raise AssertionError("it may change the stream")


def test_what_tells_the_data_from_others():
    """Lengths, and numbers that the program has made and nothing has changed."""
    train = [DataLoader(Points(numbers=[1, 2], single=3, seen=[1]), 4, drop_last=True)]
    val = [DataLoader(TensorDataset(torch.ones(3)), batch_size=None)]
    model = Model(directions=np.ones(2), seen=np.ones(2), sizes=[1, 2])
    holding = Holding(directions=np.ones(2))
    state = state_of(model, holding, train=[*train, DataLoader(Stream()), Loader()], val=val)
    train[0].dataset.seen.append(2)
    model.seen[0] = 0.0
    data = state.encode_changes()["data_identity"]
    begin = "the numbers in "
    assert {name.removeprefix(begin) for name in data if name.startswith(begin)} == {
        "train.0.dataset.numbers",
        "val.0.dataset.tensors",
        "model.directions",
        "callbacks.0 Holding.directions",
    }
    others = {name: value for name, value in data.items() if not name.startswith(begin)}
    assert others == {
        "the length of train.0.dataset": 8,
        "the length of val.0.dataset": 3,
        "the batch_size of train.0": "4",
        "the drop_last of train.0": "True",
        "the sampler of train.0": "SequentialSampler",
        "the batch_size of train.1": "1",
        "the drop_last of train.1": "False",
        "the sampler of train.1": "_InfiniteConstantSampler",
        "the drop_last of val.0": "False",
        "the sampler of val.0": "SequentialSampler",
    }


def test_data_that_are_made_anew_while_training_are_told_for_training_alone():
    loader = DataLoader(TensorDataset(torch.ones(3)))
    state = state_of(train=[loader], val=[loader], reload_dataloaders_every_n_epochs=2)
    data = state.encode_changes()["data_identity"]
    assert "the length of train.0.dataset" in data and "the batch_size of train.0" in data
    assert not any("val." in name for name in data)


@pytest.mark.parametrize(
    ("point", "is_due", "is_saved"),
    [
        (ResumePoint.EPOCH, False, True),
        (ResumePoint.EPOCH, True, False),
        (ResumePoint.BATCH, True, True),
    ],
)
def test_data_that_the_next_epoch_makes_anew_are_not_saved(monkeypatch, point, is_due, is_saved):
    monkeypatch.setattr(lightning_loops, "loaders_are_due", lambda trainer: is_due)
    points = Points(level=1.0)
    state = state_of(train=[DataLoader(points)])
    points.level = 2.0
    saved = values_of(state.objects.save(point, None))
    assert any(name.endswith("dataset.level") for name in saved) is is_saved


# What is told -------------------------------------------------------------------------------------


COUNT = 0
SIGNS = itertools.repeat(1, 99)


class Counts(LightningModule):
    def training_step(self, batch, batch_idx):
        return COUNT * next(SIGNS)


def test_a_variable_that_no_checkpoint_can_hold_is_told_once_it_changes(monkeypatch, capsys):
    says = (
        f"{HERE}.SIGNS changes while training, and no checkpoint has it: a resumed run starts with "
        "its first value; keep it in an attribute of the model, or give it as a part: "
        "ExactResume(parts={...})\n"
    )
    for rank, expected in ((0, says), (1, "")):
        state = state_of(Counts())
        in_training(state)
        if rank:
            monkeypatch.setattr(type(state.trainer), "is_global_zero", False)
        state.encode_changes(ResumePoint.BATCH)
        next(SIGNS)
        state.encode_changes()
        assert capsys.readouterr().out == ""
        state.encode_changes(ResumePoint.BATCH)
        assert capsys.readouterr().out == expected
        state.encode_changes(ResumePoint.BATCH)
        assert capsys.readouterr().out == ""


class Registry:
    """Has one object, which is made when it is needed."""

    only = None

    @classmethod
    def count(cls) -> int:
        cls.only = cls.only or Registry()
        vars(cls.only)["steps"] = vars(cls.only).get("steps", 0) + 1
        return cls.only.steps


class Registered(LightningModule):
    def training_step(self, batch, batch_idx):
        return Registry.count() + COUNT


def test_variables_of_modules_and_classes_come_back(monkeypatch, capsys):
    state = state_of(Registered())
    in_training(state)
    monkeypatch.setitem(globals(), "COUNT", 5)
    Registry.count()
    saved = state.encode_changes(ResumePoint.BATCH)
    only = Registry.only
    monkeypatch.setitem(globals(), "COUNT", 0)
    Registry.only = None
    again = state_of(Registered())
    in_training(again)
    again.restore(saved)
    assert COUNT == 5 and type(Registry.only) is Registry and Registry.only is not only
    assert Registry.only.steps == 1
    Registry.only = None
    assert "no checkpoint has it" not in capsys.readouterr().out


class Row:
    """A thing that no checkpoint can hold."""

    def __init__(self) -> None:
        self.file = io.StringIO()


UNSAVED = ", which no checkpoint can hold: a resumed run starts without it; keep numbers, text, "


def told(capsys, state: UserState) -> list[str]:
    """Return what is told when the state is saved."""
    state.encode_changes()
    return capsys.readouterr().out.splitlines()


def test_what_a_function_keeps_and_no_checkpoint_can_hold_is_told(capsys):
    row = None

    def fill():
        nonlocal row
        row = Row()

    class Filling(Model):
        def training_step(self, batch, batch_idx):
            fill()
            return row

    state = state_of(model := Filling())
    assert told(capsys, state) == []
    model.training_step(None, 0)
    (line,) = told(capsys, state)
    name = f"{HERE}.test_what_a_function_keeps_and_no_checkpoint_can_hold_is_told.<locals>"
    assert line.startswith(f"{name}.Filling.training_step.row holds a {HERE}.Row{UNSAVED}")


INNER = None


class Adapts(Model):
    def training_step(self, batch, batch_idx):
        return INNER.step()


@pytest.mark.parametrize("at_start", [True, False])
def test_an_optimizer_in_a_variable_comes_back(monkeypatch, capsys, at_start):
    def make(model):
        return SGD(model.body.parameters(), 0.5, momentum=0.5)

    def begun():
        model = Adapts()
        monkeypatch.setitem(globals(), "INNER", make(model) if at_start else None)
        return state_of(model), model

    state, model = begun()
    monkeypatch.setitem(globals(), "INNER", INNER or make(model))
    model.body[0](torch.ones(1)).sum().backward()
    model.training_step(None, 0)
    saved = state.encode_changes(None)
    other, restored = begun()
    other.restore(saved)
    state_of_weight = INNER.state[restored.body[0].weight]
    assert torch.equal(state_of_weight["momentum_buffer"], torch.ones(1, 1))
    assert capsys.readouterr().out == ""


def test_a_metric_that_only_a_function_has_comes_back():
    def make():
        mean = MeanMetric()

        class Measuring(Model):
            def training_step(self, batch, batch_idx):
                mean.update(batch)
                return mean.compute().item()

        return Measuring()

    state = state_of(model := make())
    metrics = state.run.part(Metrics)
    model.training_step(1.0, 0), model.training_step(2.0, 1)
    saved = metrics.save(None, None)
    other = state_of(resumed_model := make())
    resumed(other.run, metrics=saved)
    other.run.part(Metrics).restore(saved, Moment.TRAINING)
    assert resumed_model.training_step(6.0, 2) == 3


def hooked() -> SGD:
    """Return an optimizer with a function that no checkpoint can name."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        lambda: {1: hooked()},
        lambda: {1: torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))},
    ],
)
def test_what_has_state_and_is_made_while_training_is_told_before_an_interruption(capsys, make):
    model = Model(own=None)
    state = state_of(model)
    assert told(capsys, state) == []
    model.own = make()
    (line,) = told(capsys, state)
    assert line.startswith(f"{HERE}.Model.own ") and "which no checkpoint can hold" in line
    assert told(capsys, state) == []


class Measuring(Model):
    """Gets metrics in hooks and on first use."""

    def on_train_epoch_start(self):
        self.mean = MeanMetric()

    def on_validation_epoch_start(self):
        self.error = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.loss = MeanMetric()


def test_a_metric_that_a_hook_makes_is_not_told_and_one_that_a_step_makes_is(capsys):
    state = state_of(model := Measuring())
    model.on_train_epoch_start()
    model.on_validation_epoch_start()
    assert told(capsys, state) == []
    model.training_step(None, 0)
    (line,) = told(capsys, state)
    name = "torchmetrics.aggregation.MeanMetric"
    assert line.startswith(f"{HERE}.Measuring.loss is a {name}{UNSAVED}")


def test_a_function_that_a_module_gets_in_place_of_another_is_told(monkeypatch, capsys):
    state = state_of(Chooses())
    in_training(state)
    monkeypatch.setitem(globals(), "criterion", lambda: 2)
    state.encode_changes(ResumePoint.BATCH)
    says = f"{HERE}.criterion changes while training, and no checkpoint has it"
    assert capsys.readouterr().out.startswith(says)


def criterion():
    return 1


class Chooses(LightningModule):
    def training_step(self, batch, batch_idx):
        return criterion()


def test_modules_beside_the_model_have_their_modes_again():
    def made():
        return Holding(teacher=nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))

    trained, resumed_one = made(), made()
    state = state_of(None, trained)
    trained.teacher[1].eval()
    trained.teacher[0].bias.requires_grad_(False)
    saved = state.encode_changes()
    state_of(None, resumed_one).restore(saved)
    modes = [module.training for module in resumed_one.teacher]
    assert modes == [True, False] and not resumed_one.teacher[0].bias.requires_grad
    assert resumed_one.teacher[0].weight.requires_grad


def test_a_container_of_what_cannot_be_saved_is_told_once(capsys):
    """If it has changed; what a library has put there is the library's."""
    model = Model(rows=[Row()], kept=[Row()], libraries=[random.Random(1)])
    callback = Holding(rows={})
    state = state_of(model, callback)
    assert told(capsys, state) == []
    model.rows.append(Row())
    model.libraries.append(SimpleNamespace())
    callback.rows["a"] = Row()
    lines = told(capsys, state)
    begins = [
        f"{HERE}.{name} holds a {HERE}.Row{UNSAVED}" for name in ("Model.rows", "Holding.rows")
    ]
    assert len(lines) == 2 and all(map(str.startswith, sorted(lines, reverse=True), begins))
    model.rows.append(Row())
    assert told(capsys, state) == []


def test_the_steps_of_a_metric_tracker_are_not_told(capsys):
    state = state_of(model := Model(tracker=MetricTracker(MeanMetric(), maximize=True)))
    for value in (1.0, 2.0):
        model.tracker.increment()
        model.tracker.update(value)
    assert told(capsys, state) == []


class Tracker:
    """Counts beside what no checkpoint can hold."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.count = 0


class Tracking(Model):
    """Makes trackers on first use, and another one for each epoch."""

    tracker = None

    def on_train_epoch_start(self):
        self.of_epoch = Tracker()

    def training_step(self, batch, batch_idx):
        self.tracker = self.tracker or Tracker()
        self.writers = {"file": io.StringIO(), "folder": "x"}
        self.state = {"file": io.StringIO(), "steps": 1}
        self.rules["name"] = re.compile("b")
        self.rules["steps"] = 2


def test_what_is_lost_with_what_cannot_be_saved_is_told_ahead(capsys):
    state = state_of(model := Tracking(rules={"name": re.compile("a")}))
    model.on_train_epoch_start()
    model.training_step(None, 0)
    first = UNSAVED.replace("without it", "with its first value")
    lines = sorted(told(capsys, state))
    begins = [
        f"{HERE}.Tracking.rules holds a re.Pattern{first}",
        f"{HERE}.Tracking.state holds a _io.StringIO{UNSAVED}",
        f"{HERE}.Tracking.tracker holds a {HERE}.Tracker{UNSAVED}",
    ]
    assert len(lines) == 3 and all(map(str.startswith, lines, begins))


def test_what_another_package_cannot_save_is_told_by_the_users_name(capsys):
    """Once for each attribute of the user's, and not by what the package calls its own."""
    package = {"__module__": "yaml"}  # any that is installed
    study = type("Study", (), package)()
    study.storage = type("Storage", (), package)()
    study.storage.trials = []
    study.trials = []
    state = state_of(None, Holding(study=study))
    study.storage.trials.append(Row())
    study.trials.append(Row())
    (line,) = told(capsys, state)
    assert line.startswith(f"{HERE}.Holding.study holds a {HERE}.Row{UNSAVED}")
    assert told(capsys, state) == []


def test_a_function_that_the_program_has_nowhere_at_its_start_is_told_once(capsys):
    model = Model(rules=[abs, own_hook], rule=abs)
    state = state_of(model)
    model.rule = own_hook
    assert told(capsys, state) == []
    model.rule = lambda value: value
    (line,) = told(capsys, state)
    assert line.startswith(f"{HERE}.Model.rule has got a function or a class while training that")
    assert told(capsys, state) == []


def test_a_table_that_changes_is_told_if_it_is_no_data_that_are_read(capsys):
    def table():
        return pyarrow.table({"x": [1.0]})

    class Data(LightningDataModule):
        rows = None

    model, points, data = Model(rows=table()), Points(rows=table()), Data()
    state = state_of(model, train=[DataLoader(points)], val=[DataLoader(other := Points())])
    state.trainer.datamodule = data
    state.run.mark_start()
    assert told(capsys, state) == []
    model.rows, points.rows, other.rows, data.rows = (table() for _ in range(4))
    lines = sorted(told(capsys, state))
    begins = [f"{HERE}.{name}.rows is a pyarrow.lib.Table{UNSAVED}" for name in ("Model", "Points")]
    assert len(lines) == 2 and all(map(str.startswith, lines, begins))


def test_other_ranks_tell_nothing(monkeypatch, capsys):
    model = Model(rows=[Row()], batches=iter([1]))
    state = state_of(model)
    monkeypatch.setattr(type(state.trainer), "is_global_zero", False)
    model.rows.append(Row())
    state.state.reordered.add("model.names")
    state.restore(state.encode_changes())
    assert capsys.readouterr().out == ""


def test_an_iterator_is_told_of_once(capsys):
    class Saves:
        def __iter__(self):
            return self

        def __next__(self):
            return 1

    batches = iter(DataLoader(range(4)))
    state = state_of(
        Sharing(batches=batches, signs=itertools.cycle({1}), file=io.StringIO(), own=Saves())
    )
    lines = told(capsys, state)
    assert lines[0] == (
        "warning: model.batches is a _SingleProcessDataLoaderIter, and no checkpoint can hold its "
        "position: after an interruption this run is not exact; keep a loader with state_dict(), "
        "or an index"
    )
    assert [line.split()[1] for line in lines] == ["model.batches", "model.signs"]
    assert told(capsys, state) == []


def test_a_set_in_another_order_is_told_once(capsys):
    state = state_of()
    saved = state.encode_changes()
    state.state.reordered.add("model.names")
    state.restore(saved)
    assert capsys.readouterr().out == (
        "model.names is a set, and after an interruption its elements may come in another order: "
        "if training depends on it, sort them first, or keep a list or a dict\n"
    )
    state.restore(saved)
    assert capsys.readouterr().out == ""


# What is restored ---------------------------------------------------------------------------------


def whole() -> tuple[UserState, Model, Holding]:
    """Return the state of a run with something of each kind."""
    model = Model(count=0, rng=np.random.default_rng(1))
    holding = Holding(rng=random.Random(1), inner=None)
    trained = SGD(model.body.parameters(), 0.1)
    model.inner = SGD([nn.Parameter(torch.zeros(1))], 0.5, momentum=0.9)
    model.schedule = StepLR(trained, 1)
    return state_of(model, holding, optimizers=[trained]), model, holding


def test_what_was_saved_is_there_again():
    state, model, holding = whole()
    model.count = 3
    model.rng.random(), holding.rng.random()
    model.inner.param_groups[0]["lr"] = 0.25
    model.schedule.last_epoch = 7
    model.body.eval()
    model.body[0].bias.requires_grad_(False)
    saved = state.encode_changes()
    assert set(saved["generators"]) == {"model.rng", "callbacks.0 Holding.rng"}
    assert set(saved["stateful_objects"]) == {"model.inner", "model.schedule"}
    other, restored, held = whole()
    other.restore(saved, only_plain=True)
    assert restored.count == 3 and restored.inner.param_groups[0]["lr"] == 0.5
    assert restored.body.training and restored.body[0].bias.requires_grad
    other.restore(saved)
    assert restored.rng.random() == model.rng.random() and held.rng.random() == holding.rng.random()
    assert restored.inner.param_groups[0]["lr"] == 0.25 and restored.schedule.last_epoch == 7
    assert restored.training and not restored.body.training and not restored.body[0].training
    frozen = [name for name, each in restored.named_parameters() if not each.requires_grad]
    assert frozen == ["body.0.bias"]


def test_what_the_run_does_not_have_is_left_out():
    state, model, _ = whole()
    saved = state.encode_changes()
    for kind in ("generators", "stateful_objects"):
        saved[kind].clear()
    model.rng.random()
    position = model.rng.bit_generator.state
    state.restore(saved)
    assert model.rng.bit_generator.state == position


def test_what_lightning_saves_is_not_saved_twice():
    """Nor what are modules, callbacks, loaders, generators and classes."""
    model = Sharing(scaler=torch.amp.GradScaler("cpu"), made_of=SGD, layer=nn.Linear(1, 1))
    model.loader = DataLoader(Points())
    model.own = SavedOrder()
    trained = Steps(model.body.parameters(), 0.1)
    model.mine = Steps([nn.Parameter(torch.zeros(1))], 0.1)
    schedule = model.schedule = StepLR(trained, 1)
    state = state_of(model, Holding(of=trained), optimizers=[trained])
    state.trainer.strategy.lr_scheduler_configs = [SimpleNamespace(scheduler=schedule)]
    assert set(state.encode_changes()["stateful_objects"]) == {"model.scaler", "model.mine"}


def test_a_state_that_cannot_be_saved_is_told(capsys):
    model = Model()
    model.inner = SGD([nn.Parameter(torch.zeros(1))], 0.1)
    model.inner.param_groups[0]["thing"] = Row()
    (line,) = told(capsys, state_of(model))
    assert line.startswith(f"{HERE}.Model.inner holds a {HERE}.Row{UNSAVED}")


def test_an_optimizer_made_while_training_comes_back_with_its_object(capsys):
    state = state_of(model := Model(inner=None))
    model.inner = SGD(model.body.parameters(), 0.5)
    assert not told(capsys, state)
    saved = state.encode_changes()
    assert saved["stateful_objects"] == {}
    state_of(other := Model(inner=None)).restore(saved)
    assert other.inner.param_groups[0]["params"][0] is other.body[0].weight


def test_a_state_beyond_whose_memory_a_fused_kernel_would_write_is_refused():
    state = state_of(model := Model(inner=None))
    weight = model.body[0].weight
    model.inner = SGD([weight], 0.5, momentum=0.5, fused=True)
    model.inner.state[weight] = {"momentum_buffer": torch.zeros(0)}
    saved = state.encode_changes()
    with pytest.raises(ValueError, match="momentum_buffer is no tensor of the shape"):
        state_of(Model(inner=None)).restore(saved)


class OfLibrary:
    """A library's object whose state cannot be had before it is used."""

    __module__ = "datasets.iterable_dataset"

    def state_dict(self):
        raise RuntimeError("not begun")

    def load_state_dict(self, state):
        pass


class OfStream(IterableDataset):
    """A library's stream around an object that saves where it is."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self) -> None:
        self.inner = OfLibrary()

    def __iter__(self):
        return iter([1.0])


def test_a_state_that_cannot_be_had_is_told(capsys):
    model = Model()
    model.inner = OfLibrary()
    (line,) = told(capsys, state := state_of(model))
    assert line.startswith(f"{HERE}.Model.inner has a state_dict() that raises RuntimeError")
    assert state.encode_changes()["stateful_objects"] == {}


def test_what_is_in_a_stream_is_left_to_its_loader(capsys):
    """Its batches are drawn again, from the stream as it began."""
    model = Model()
    model.stream = OfStream()
    assert not told(capsys, state := state_of(model))
    assert state.encode_changes()["stateful_objects"] == {}


class Outer(SGD):
    """An optimizer around another one, of which it has the groups and the state."""

    def __init__(self, inner: SGD) -> None:
        super().__init__(inner.param_groups, 0.1)
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state


def test_optimizers_that_share_groups_still_do_when_their_states_are_loaded():
    def made() -> Model:
        model = Model()
        weight = nn.Parameter(torch.zeros(1))
        model.outer = Outer(SGD([weight], 0.5, momentum=0.9))
        weight.grad = torch.ones(1)
        model.outer.inner.step()
        return model

    model = made()
    state = state_of(model)
    model.outer.param_groups[0]["lr"] = 0.25
    model.outer.inner.step()
    saved = state.encode_changes()
    restored = made()
    outer, inner = restored.outer, restored.outer.inner
    groups, member, optimizer_state = inner.param_groups, inner.param_groups[0], inner.state
    state_of(restored).restore(saved)
    assert outer.param_groups is inner.param_groups is groups and groups[0] is member
    assert outer.state is inner.state is optimizer_state and member["lr"] == 0.25
    (weight,) = member["params"]
    momentum, expected = (
        each.state[each.param_groups[0]["params"][0]]["momentum_buffer"]
        for each in (inner, model.outer)
    )
    assert list(optimizer_state) == [weight] and torch.equal(momentum, expected)


def test_an_optimizer_that_had_no_state_has_none():
    def made() -> Model:
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        return Model(inner=SGD([weight], 0.5, momentum=0.9))

    saved = state_of(made()).encode_changes()
    restored = made()
    restored.inner.step()
    state_of(restored).restore(saved)
    assert not restored.inner.state


class Around(torch.optim.Optimizer):
    """An optimizer that has nothing of its own, not even groups."""

    def __init__(self, inner: SGD) -> None:
        self.around = (inner,)

    @property
    def param_groups(self):
        return self.around[0].param_groups

    def state_dict(self):
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state):
        self.param_groups[0]["lr"] = state["lr"]


def test_an_optimizer_may_have_no_groups_of_its_own():
    models = [Model(around=Around(SGD([nn.Parameter(torch.zeros(1))], 0.5))) for _ in range(2)]
    states = [state_of(model) for model in models]
    models[0].around.param_groups[0]["lr"] = 0.25
    states[1].restore(states[0].encode_changes())
    assert models[1].around.param_groups[0]["lr"] == 0.25


def test_a_flag_of_a_dataset_is_left_if_what_it_tells_of_is_missing():
    """The dataset makes it then; the flags of others say what hooks have done."""

    def made(point=None) -> tuple[UserState, Points, Model]:
        points, model = Points(is_open=False, count=0), Model(is_open=False)
        return state_of(model, train=[DataLoader(points)]), points, model

    state, points, model = made()
    points.file = model.file = io.StringIO()
    points.is_open = model.is_open = True
    points.count = 3
    saved = state.encode_changes()
    other, restored, restored_model = made()
    other.restore(saved)
    assert restored.count == 3 and not restored.is_open and restored_model.is_open


# Data ---------------------------------------------------------------------------------------------


def test_the_state_that_data_depend_on():
    """Of the model and the callbacks; a dataset's own generators are seeded."""
    model = Model(count=0, rng=np.random.default_rng(1))
    points = Points(rng=np.random.default_rng(1))
    state = state_of(model, train=[DataLoader(points)])
    model.count = 3
    saved = state.run.part(DataEpoch).state_of_objects()
    assert values_of(saved) == {"model.count": 3} and set(saved["generators"]) == {"model.rng"}
    drawn = model.rng.random()
    model.count = 4
    state.run.part(DataEpoch).restore_objects(saved)
    assert model.count == 3 and model.rng.random() == drawn
    state.run.part(DataEpoch).restore_objects(saved | {"generators": {}})


def test_samplers_get_what_has_changed_since_they_have_drawn():
    """And so does what they share with others; of generators, those of samplers alone."""

    def made() -> SimpleNamespace:
        rng = np.random.default_rng(1)
        shared = Holding(count=0)
        order = Order(count=0, rng=rng, shared=shared)
        points = Points(count=0)
        loader = DataLoader(points, sampler=order)
        model = Model(count=0, rng=rng, other=np.random.default_rng(2))
        state = state_of(model, shared, train=[loader])
        return SimpleNamespace(**locals())

    run = made()
    for owner in (run.shared, run.order, run.points, run.model, run.loader):
        owner.count = 3
    expected, _ = run.rng.random(2), run.model.other.random()
    expected = run.rng.bit_generator.state
    saved = run.state.encode_changes()
    restored = made()
    restored.state.restore_after_drawing(saved)
    assert restored.order.count == restored.shared.count == restored.loader.count == 3
    assert restored.points.count == restored.model.count == 3
    assert restored.rng.bit_generator.state == expected
    fresh = np.random.default_rng(2).bit_generator.state
    assert restored.model.other.bit_generator.state == fresh
    del saved["generators"]["model.rng"]
    restored.state.restore_after_drawing(saved)


class Starting(Callback):
    """Makes something when an epoch starts."""

    def __init__(self) -> None:
        self.calls = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.calls.append((trainer, pl_module))
        self.thing = object()


class StartingModel(LightningModule):
    calls = 0

    def on_train_epoch_start(self):
        self.calls += 1
        self.thing = object()


def test_hooks_that_make_what_is_missing_run_again():
    model, callback = StartingModel(), Starting()
    trainer = in_epoch_5(lightning_module=model, callbacks=[callback])
    name = "callbacks.0 Starting"
    run_creating_hooks(trainer, [])
    run_creating_hooks(trainer, [(name, "other"), ("model.body", "thing")])
    assert (callback.calls, model.calls) == ([], 0)
    run_creating_hooks(trainer, [(name, "thing")])
    assert (callback.calls, model.calls) == ([(trainer, model)], 0)
    run_creating_hooks(trainer, [("model", "other"), ("model", "thing")])
    assert len(callback.calls) == 1 and model.calls == 1


def test_what_a_users_objects_hold_is_compared():
    """By its path, and a mode that only one of two runs has."""
    state = state_of(model := Model())
    model.count = 3
    model.file = io.StringIO()
    record = state.encode_changes()["user_objects"]
    run = state.run
    none, one = ({"metrics": {"tracked": each}} for each in ({}, {"model.steps": 2}))
    assert run.part(UserObjects).digest(record, none).keys() == {"model.count", "model.file"}
    record["unsaved"] = {"model.steps.1": "made", "model.stepsize": "x"}
    names = {"model.count", "model.stepsize"}  # what a tracker holds is compared with the metrics
    assert run.part(UserObjects).digest(record, one).keys() == names
    for part, saved, names in (
        (Generators, {"model.rng": 3}, {"generators model.rng"}),
        (StatefulObjects, {"model.inner": values.encode(3)}, {"stateful model.inner"}),
        (TrainerSettings, {"limit": 3}, {"settings limit"}),
        (Structure, {"the class of model": "Linear 0"}, {"the class of model"}),
        (DataIdentity, {"the length of val.0": 3}, {"the length of val.0"}),
        (Modes, {"eval": ["", "body"], "frozen": ["x"]}, {"eval model", "eval body", "frozen x"}),
    ):
        assert run.part(part).digest(saved, {}).keys() == names
    before, now = {"eval body": 6}, {"eval head": 6, "frozen x": 6}
    assert run.part(Modes).differing(before, now) == ["eval body", "eval head", "frozen x"]
    assert run.part(Modes).differing(before, before) == []


def test_arrays_of_a_model_that_was_trained_before_are_not_compared():
    """The program may have changed them since."""
    state = state_of()
    part = state.run.part(DataIdentity)
    saved = {"the numbers in model.a": 1, "the numbers in callbacks.0 A.b": 2, "the length of x": 3}
    assert part.digest(saved, {}) == saved
    state.run.same_run.has_trained_before = True
    assert part.digest(saved, {}) == {"the length of x": 3}


@pytest.mark.parametrize("function", [without_pruning, parts_of_modules])
def test_pruned_weights_are_left_to_the_weights(function):
    """They are pruned again once the optimizers have their parameters."""
    names = ["buffer w_mask", "parameter w_orig", "w", "buffer own_mask", "module more"]
    note = {"names": names, "gone": ["parameter w", "parameter gone"]}
    node = ["object", "model.line", note, [[1], [2], [3], [4], [5]], None]
    kind, path, note, references, content = function(node)
    assert (kind, path, content) == ("object", "model.line", None)
    assert note["names"] == ["buffer own_mask", "module more"] and references == [[4], [5]]
    assert "parameter w" not in note["gone"]


def test_other_objects_are_left_as_they_are():
    node = ["list", "model.seen", None, [1, 2], None]
    assert without_pruning(node) is node and parts_of_modules(node) is None
    node = ["object", "model", {"names": ["count"]}, [1], None]
    assert without_pruning(node) is node and parts_of_modules(node) is None


def test_data_that_two_loaders_share_may_have_the_name_of_either():
    part = run_of(trainer_of(Model())).part(DataIdentity)
    before = {"the numbers in val.0.dataset.tensors": 5, "the length of val.0": 5}
    now = {"the numbers in train.0.dataset.tensors": 5, "the length of val.0": 5}
    assert part.differing(before, now) == []
    assert part.differing(before, now | {"the numbers in train.0.dataset.tensors": 6}) == [
        "the numbers in val.0.dataset.tensors"
    ]
    assert part.differing(before, {"the numbers in train.0.dataset.tensors": 5}) == [
        "the length of val.0"
    ]
