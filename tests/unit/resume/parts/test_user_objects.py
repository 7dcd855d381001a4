"""What of a user's objects is saved and restored: the parts that have them, together."""

import io
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import Precision, TorchCheckpointIO
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import SingleDeviceStrategy
from scipy.sparse import csr_matrix
from short_fits import Noted, alone_and_resumed, training, weights
from torch import nn
from torch.distributed import all_gather as gathered
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torchvision.transforms import InterpolationMode
from untrained import in_epoch_5, run_of
from user_state import (
    UNSAVED,
    Holding,
    Model,
    Points,
    Row,
    Sharing,
    UserState,
    in_training,
    own_hook,
    state_of,
    told,
    trainer_of,
)

from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.parts.roots import (
    names_in_code,
    objects_of_module,
    user_objects,
)
from sagemaker_lightning.resume.parts.stateful_objects import StatefulObjects
from sagemaker_lightning.resume.parts.trainer_settings import TrainerSettings
from sagemaker_lightning.resume.parts.user_objects import (
    UserObjects,
    _names_lost,
    run_creating_hooks,
)
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.state import nodes_of
from sagemaker_lightning.state.object_graph import Added


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


# Whose state it is --------------------------------------------------------------------------------


class Steps(SGD):
    """An optimizer of a user's own."""


class Keeps(CSVLogger):
    """A logger of a user's own."""


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
    assert saved["user_objects"]["unsaved"] == {"model.thing": ["builtins.object", ""]}
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
    within = point is not ResumePoint.EPOCH
    draws = {"validation draws": [], "validation iterations": []}
    assert found == {"mine": 3, "within": within, "generators": {}} | draws


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
    begin = "class and hooks model"
    assert modules == {
        begin: "Model 0",
        f"{begin}.body": "Sequential 1",
        f"{begin}.body.0": "Linear 0",
        f"{begin}.body.1": "Dropout 0",
        f"{begin}.lazy": "Linear 0",
        "hooks optimizers.0": "1",
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
    model.anchors = {"first": [torch.ones(1)], "seen": np.ones(1)}
    holding = Holding(directions=np.ones(2))
    state = state_of(model, holding, train=[*train, DataLoader(Stream()), Loader()], val=val)
    train[0].dataset.seen.append(2)
    model.seen[0] = 0.0
    data = state.encode_changes()["data_identity"]
    begin = "numbers "
    assert {name.removeprefix(begin) for name in data if name.startswith(begin)} == {
        "train.0.dataset.numbers",
        "val.0.dataset.tensors",
        "model.directions",
        "model.anchors",
        "callbacks.0 Holding.directions",
    }
    others = {name: value for name, value in data.items() if not name.startswith(begin)}
    assert others == {
        "length train.0.dataset": 8,
        "length val.0.dataset": 3,
        "batch_size train.0": "4",
        "drop_last train.0": "True",
        "sampler train.0": "SequentialSampler",
        "batch_size train.1": "1",
        "drop_last train.1": "False",
        "sampler train.1": "_InfiniteConstantSampler",
        "drop_last val.0": "False",
        "sampler val.0": "SequentialSampler",
    }


def test_data_that_are_made_again_while_training_are_reported_for_training_alone():
    loader = DataLoader(TensorDataset(torch.ones(3)))
    state = state_of(train=[loader], val=[loader], reload_dataloaders_every_n_epochs=2)
    data = state.encode_changes()["data_identity"]
    assert "length train.0.dataset" in data and "batch_size train.0" in data
    assert not any("val." in name for name in data)


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


class Tally(Callback):
    def __init__(self, count: int = 0) -> None:
        self.count = count


def test_callbacks_that_training_adds_and_removes():
    state = state_of(Model(), Tally(), Tally())
    gone, kept = state.trainer.callbacks[:2]
    gone.count, kept.count = 3, 4
    state.trainer.callbacks.remove(gone)
    state.trainer.callbacks.append(Tally(5))
    saved = state.encode_changes()
    other = state_of(Model(), Tally(), Tally())
    of_the_program = [*other.trainer.callbacks]
    other.restore(saved, only_plain=True)  # whose hooks at the start come next
    assert other.trainer.callbacks == of_the_program
    for _ in range(2):
        other.restore(saved)
        assert [each.count for each in other.trainer.callbacks] == [4, 5]
    assert [each.count for each in of_the_program] == [3, 4]
    other.trainer.callbacks[-1].count = 6
    again = state_of(Model(), Tally(), Tally())
    again.restore(other.encode_changes())
    assert [each.count for each in again.trainer.callbacks] == [4, 6]


def test_callbacks_that_write_checkpoints_stay():
    """Without the one that resumes, nothing would be as it was; a record may be forged."""

    def started() -> UserState:
        return state_of(Model(), Tally(), ModelCheckpoint(), enable_checkpointing=True)

    for replaces in (True, False):
        state, other = started(), started()
        state.trainer.callbacks.pop()
        if replaces:
            state.trainer.callbacks = []
        callbacks = [*other.trainer.callbacks]
        other.restore(state.encode_changes())
        assert other.trainer.callbacks == callbacks


def test_objects_of_libraries_that_training_makes_come_back(capsys):
    """The code has their classes by name; an enum is one wherever it is."""

    def started() -> tuple[UserState, Tally]:
        tally = Tally()
        tally.matrix = tally.space = None
        tally.mode = InterpolationMode.BILINEAR
        return state_of(Model(), tally), tally

    state, tally = started()
    tally.matrix, tally.mode = csr_matrix(np.eye(2)), InterpolationMode.NEAREST
    tally.space = SimpleNamespace(best=3)
    saved = state.encode_changes()
    assert capsys.readouterr().out == ""
    other, restored = started()
    other.restore(saved)
    assert restored.matrix.toarray().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert restored.mode is InterpolationMode.NEAREST and restored.space.best == 3


def test_plugins_of_ones_own_come_back():
    class CountingProfiler(PassThroughProfiler):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

    class CountingIO(TorchCheckpointIO):
        def __init__(self) -> None:
            self.names = []

    def started() -> tuple[UserState, CountingProfiler, CountingIO]:
        profiler, files = CountingProfiler(), CountingIO()
        options = {"profiler": profiler, "plugins": [files]}
        return state_of(Model(), **options), profiler, files

    state, profiler, files = started()
    profiler.count = 3
    files.names.append("a")
    saved = state.encode_changes()
    other, restored, restored_files = started()
    other.restore(saved)
    assert restored.count == 3 and restored_files.names == ["a"]


def test_a_librarys_callback_that_training_adds_is_named(capsys):
    state = state_of(Model())
    state.trainer.callbacks.append(EarlyStopping("loss"))
    state.encode_changes()
    (line,) = capsys.readouterr().out.splitlines()
    assert "Trainer.callbacks holds a pytorch_lightning" in line and "EarlyStopping" in line


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
    """The same holds for modules, callbacks, loaders, generators and classes."""
    model = Sharing(scaler=torch.amp.GradScaler("cpu"), made_of=SGD, layer=nn.Linear(1, 1))
    model.loader = DataLoader(Points())
    model.own = SavedOrder()
    trained = Steps(model.body.parameters(), 0.1)
    model.mine = Steps([nn.Parameter(torch.zeros(1))], 0.1)
    schedule = model.schedule = StepLR(trained, 1)
    state = state_of(model, Holding(of=trained), optimizers=[trained])
    state.trainer.strategy.lr_scheduler_configs = [SimpleNamespace(scheduler=schedule)]
    assert set(state.encode_changes()["stateful_objects"]) == {"model.scaler", "model.mine"}


def test_a_state_that_cannot_be_saved_is_reported(capsys):
    model = Model()
    model.inner = SGD([nn.Parameter(torch.zeros(1))], 0.1)
    model.inner.param_groups[0]["thing"] = Row()
    (line,) = told(capsys, state_of(model))
    assert line.startswith(f"user_state.Model.inner holds a user_state.Row{UNSAVED}")


def test_a_state_beyond_whose_memory_a_fused_kernel_would_write_is_refused():
    state = state_of(model := Model(inner=None))
    weight = model.body[0].weight
    model.inner = SGD([weight], 0.5, momentum=0.5, fused=True)
    model.inner.state[weight] = {"momentum_buffer": torch.zeros(0)}
    saved = state.encode_changes()
    with pytest.raises(ValueError, match="momentum_buffer is not a tensor of the shape"):
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


def test_a_state_that_cannot_be_had_is_reported(capsys):
    model = Model()
    model.inner = OfLibrary()
    (line,) = told(capsys, state := state_of(model))
    assert line.startswith("user_state.Model.inner has a state_dict() that raises RuntimeError")
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
    points.file = model.file = io.TextIOWrapper(io.BytesIO())
    points.is_open = model.is_open = True
    points.count = 3
    saved = state.encode_changes()
    other, restored, restored_model = made()
    other.restore(saved)
    assert restored.count == 3 and not restored.is_open and restored_model.is_open


# Data ---------------------------------------------------------------------------------------------


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
    model.file = io.TextIOWrapper(io.BytesIO())
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
        (Structure, {"class and hooks model": "Linear 0"}, {"class and hooks model"}),
        (DataIdentity, {"length val.0": 3}, {"length val.0"}),
        (Modes, {"eval": ["", "body"], "frozen": ["x"]}, {"eval model", "eval body", "frozen x"}),
    ):
        assert run.part(part).digest(saved, {}).keys() == names
    before, now = {"eval body": 6}, {"eval head": 6, "frozen x": 6}
    assert run.part(Modes).differing(before, now) == ["eval body", "eval head", "frozen x"]
    assert run.part(Modes).differing(before, before) == []


class Exchanging(Noted):
    """What it has registered gets other values, modules and memory; others keep what it had."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.register_buffer("mean", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.first = {"mean": self.mean, "scale": self.scale}
        self.nets = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}
        self.champion = self.nets["a"]
        self.tied, self.twin = nn.Linear(2, 1), nn.Linear(2, 1)
        self.twin.weight = self.tied.weight
        self.within = vars(self)
        self.window = np.zeros(8)
        self.records = np.zeros(4, dtype=[("x", "f8")])
        self.seen = torch.zeros(4)
        self.views = [
            np.lib.stride_tricks.sliding_window_view(self.window, 3),
            np.broadcast_to(self.window, (2, 8)),
            self.records.view(np.recarray),
            self.seen[:1].expand(3),
        ]

    def training_step(self, batch, batch_idx):
        step = self.global_step
        for net in self.nets.values():
            net.weight.data += step
        self.champion = self.nets["b" if step % 2 else "a"]
        self.window[step % 8] += step
        self.records["x"] += step
        self.seen += step
        if step == 1:
            self.mean = self.mean + 1
            self.scale = nn.Parameter(self.scale * 2, requires_grad=False)
            self.twin.weight = nn.Parameter(self.tied.weight.detach() + 1)
        for kept in (*self.first.values(), self.twin.weight):
            kept.data += step
        self.note(str([*map(np.sum, self.views[:2]), self.views[2].x.sum(), self.views[3].sum()]))
        self.note(str([each.tolist() for each in (*self.first.values(), self.mean, self.scale)]))
        self.note(
            str([each.weight.tolist() for each in (*self.nets.values(), self.champion, self.tied)])
        )
        return super().training_step(batch, batch_idx)


def test_what_was_registered_and_what_shares_memory_stay_apart_and_together(tmp_path, capfd):
    stops = "batch 0:1", "batch 0:3", "batch 1:2"
    alone, resumed = alone_and_resumed(training(Exchanging), tmp_path, *stops)
    assert resumed.events == alone.events[-len(resumed.events) :] and len(resumed.events) > 9
    assert weights(resumed) == weights(alone) and "warning" not in capfd.readouterr().out
    assert resumed.champion in resumed.nets.values()
    assert all(
        np.shares_memory(*each)
        for each in zip([resumed.window] * 2 + [resumed.records], resumed.views[:3], strict=True)
    )


class Gathering(Model):
    """Calls a function of torch's by a name of this module's."""

    def forward(self, values):
        return gathered([torch.zeros(1)], values)


def test_a_function_of_torch_distributed_is_known_by_its_own_name():
    assert {"gathered", "all_gather"} <= set(names_in_code(trainer_of(Gathering())))


@pytest.mark.parametrize(
    ("saved", "names"),
    [({"lost": ["a.b", 1]}, ["a.b", "1"]), ({"lost": 3}, []), ({}, []), ([], [])],
)
def test_names_of_what_a_rank_lacks_may_have_any_form(saved, names):
    """A forged checkpoint may have it for other ranks, of which nothing else is read."""
    assert _names_lost(saved) == names


class CountingHook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module, inputs, output):
        self.calls += 1


def test_a_hook_of_all_modules_counts_on(tmp_path):
    def train(folder, stop=""):
        hook = CountingHook()
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            training(Noted)(folder, stop=stop)
        finally:
            handle.remove()
        return hook

    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2")
    assert resumed.calls == alone.calls > 0
