"""resume/parts/model_changes.py: what a model or a trainer has become is made again."""

import functools
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn
from torch.nn.utils import prune

from sagemaker_lightning.resume.parts import model_changes
from sagemaker_lightning.resume.resume_point import ResumePoint


def trainer_of(model=None, *callbacks: Callback, **values) -> SimpleNamespace:
    known = {
        "lightning_module": model or LightningModule(),
        "callbacks": list(callbacks),
        "datamodule": None,
        "loggers": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "train_dataloader": None,
        "val_dataloaders": None,
    }
    return SimpleNamespace(**known | values)


def test_buffers_get_the_shapes_that_were_saved():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("grown", torch.zeros(1))
    model.register_buffer("same", torch.zeros(2))
    model.register_buffer("empty", None)
    model.plain = 3
    kept = model.same
    weight = model[0].weight
    state = {
        "grown": torch.ones(3),
        "same": torch.ones(2),
        "empty": torch.ones(2),
        "added": torch.ones(2),
        "plain": torch.ones(2),
        "0.weight": torch.ones(4, 2),
        "0.mean": torch.ones(1),
        "absent.mean": torch.ones(1),
        "no tensor": 3,
    }
    model_changes.resize_buffers(model, state)
    for name in ("grown", "empty", "added"):
        assert torch.equal(getattr(model, name), state[name])
        assert getattr(model, name).data_ptr() != state[name].data_ptr()
    assert model.same is kept and torch.equal(kept, torch.zeros(2)) and model.plain == 3
    assert model[0].weight is weight and torch.equal(weight, torch.ones(4, 2))
    assert weight.data_ptr() != state["0.weight"].data_ptr()
    assert torch.equal(model[0].mean, torch.ones(1)) and "added" in model.state_dict()
    assert not hasattr(model, "no tensor")


def test_a_lazy_part_is_left_to_its_own_loading():
    model = nn.Sequential(nn.LazyLinear(2))
    model_changes.resize_buffers(model, {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)})
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)


def make_late(module):
    module.late = nn.Linear(1, 1)


class Making(LightningModule):
    """Makes parts of it in hooks, and in what they call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)

    def on_fit_start(self):
        self.make()

    def make(self):
        self.head = nn.Linear(1, 1)
        make_late(self)

    def on_train_start(self):
        self.tail = nn.Linear(1, 1)

    def on_train_epoch_start(self):
        self.epochs = 1

    def unused(self):
        self.other = 1


class Adding(Callback):
    def on_train_start(self, trainer, pl_module):
        pl_module.extra = nn.Linear(1, 1)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


class Decorated(LightningModule):
    @decorated
    def on_fit_start(self):
        self.head = nn.Linear(1, 1)


def test_names_that_hooks_at_the_start_mention():
    names = model_changes.names_in_start_hooks(
        trainer_of(Making(), Adding(), StochasticWeightAveraging(0.1))
    )
    assert {"head", "late", "tail", "extra"} <= names
    assert not {"epochs", "other", "_average_model"} & names
    assert "head" in model_changes.names_in_start_hooks(trainer_of(Decorated()))
    assert model_changes.names_in_start_hooks(trainer_of()) == set()


def test_weights_of_parts_that_come_later_are_taken_out():
    model = Making()
    present = model.state_dict()
    later = {"head.weight": 1, "head.my_mask": 4, "head.weight_orig": 5}
    state = present | later | {"header.weight": 2, "other.weight": 3}
    taken = model_changes.take_later_weights(state, model, {"head", "body"})
    assert taken == later
    assert state == present | {"header.weight": 2, "other.weight": 3}


def test_weights_are_pruned_again():
    """The weights of the module itself, of a part, and what only has such a name."""
    trained = nn.Sequential(nn.Linear(3, 2))
    prune.random_unstructured(trained[0], "weight", 0.5)
    trained.register_buffer("my_mask", torch.ones(1))
    state = dict(trained.state_dict())
    mask, original = state["0.weight_mask"], state["0.weight_orig"]
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("my_mask", torch.ones(1))
    taken = model_changes.take_later_weights(state, model, set())
    assert state.keys() == model.state_dict().keys() and state["0.weight"] is original
    assert taken == {"0.weight_mask": mask, "0.weight_orig": original}
    model.load_state_dict(state)
    for _ in range(2):  # what is pruned already stays so
        model_changes.prune_again(model, taken)
    assert torch.equal(model[0].weight_mask, mask) and torch.equal(model[0].weight_orig, original)
    assert torch.equal(model[0].weight, trained[0].weight)
    assert model_changes.take_later_weights(dict(trained.state_dict()), trained, set()) == {}


def test_weights_that_a_pruning_shares_are_shared_again():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for layer in layers:
        prune.identity(layer, "weight")
    callback = ModelPruning(
        "l1_unstructured", parameters_to_prune=[(each, "weight") for each in layers]
    )
    callback._parameters_to_prune = [(each, "weight") for each in layers]
    copies = [nn.Linear(2, 2), nn.Linear(2, 2)]
    copies[1].weight = nn.Parameter(layers[1].weight_orig.data)
    callback._original_layers = {
        number: {"data": copied, "names": [(number, "weight")]}
        for number, copied in enumerate(copies)
    }
    trainer = trainer_of(None, Callback(), callback)
    assert model_changes.shared_original_weights(trainer) == [(1, 1)]
    copies[1].weight = nn.Parameter(torch.zeros(2, 2))
    model_changes.share_original_weights(trainer, [(1, 1)])
    assert model_changes.shared_original_weights(trainer) == [(1, 1)]


# Searches -----------------------------------------------------------------------------------------


def test_the_results_of_searches_are_kept():
    model = LightningModule()
    model.learning_rate = 0.5
    model.batch_size = 4
    model.mine = 0.25
    rates, sizes, own = (
        LearningRateFinder(),
        BatchSizeFinder(),
        LearningRateFinder(attr_name="mine"),
    )
    none = LearningRateFinder(attr_name="absent")
    results = model_changes.search_results(trainer_of(model, Callback(), rates, sizes, own, none))
    assert results == {"learning_rate": 0.5, "batch_size": 4, "mine": 0.25}
    model.lr = 0.125
    assert model_changes.search_results(trainer_of(model, rates)) == {"lr": 0.125}
    assert model_changes.search_results(trainer_of(model, Callback())) == {}


def test_a_search_that_is_done_is_not_done_again_in_this_training():
    model = LightningModule()
    model.lr = 0.5
    search, other = LearningRateFinder(), Callback()
    trainer = trainer_of(model, search, other)
    model_changes.apply_search_results(trainer, {"lr": 0.25})
    assert model.lr == 0.25 and search.on_fit_start(trainer, model) is None
    assert "on_fit_start" not in vars(other)
    other.on_fit_start = own = print
    model_changes.search_again(trainer)
    assert "on_fit_start" not in vars(search) and other.on_fit_start is own
    model_changes.search_again(trainer)


# Hooks and limits ---------------------------------------------------------------------------------


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
    trainer = trainer_of(model, callback)
    name = "callbacks.0 Starting"
    model_changes.run_creating_hooks(trainer, [])
    model_changes.run_creating_hooks(trainer, [(name, "other"), ("model.body", "thing")])
    assert (callback.calls, model.calls) == ([], 0)
    model_changes.run_creating_hooks(trainer, [(name, "thing")])
    assert (callback.calls, model.calls) == ([(trainer, model)], 0)
    model_changes.run_creating_hooks(trainer, [("model", "other"), ("model", "thing")])
    assert len(callback.calls) == 1 and model.calls == 1


@pytest.mark.parametrize(
    ("epochs", "steps", "known", "added", "expected"),
    [
        (None, -1, [-1, -1], [0, 0], [-1, -1]),
        (3, 40, [3, 40], [2, -5], [5, 35]),
        (3, 40, [3, 40], [0, 7], [3, 47]),
        (3, -1, [3, -1], [-1, 0], [2, -1]),
    ],
)
def test_limits_that_a_callback_has_changed(epochs, steps, known, added, expected):
    loop = SimpleNamespace(max_epochs=epochs, epoch_loop=SimpleNamespace(max_steps=steps))
    trainer = SimpleNamespace(fit_loop=loop)
    assert model_changes.limits(trainer) == known
    model_changes.add_to_limits(trainer, added)
    assert model_changes.limits(trainer) == expected


# Groups of parameters -----------------------------------------------------------------------------


def test_groups_that_hooks_have_made_are_made_again():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second = ([*part.parameters()] for part in model)
    trained = torch.optim.SGD(first, 0.1)
    trained.add_param_group({"params": [second[1], second[0], nn.Parameter(torch.zeros(1))]})
    trained.add_param_group({"params": []})
    others = torch.optim.SGD(second, 0.1)
    saved = model_changes.parameter_groups(trainer_of(model, optimizers=[trained, others]))
    assert saved == [
        [["0.weight", "0.bias"], ["1.bias", "1.weight", ""], []],
        [["1.weight", "1.bias"]],
    ]
    saved[0][1].pop()
    optimizer = torch.optim.SGD([*second[:1], *first], 0.1)
    members = optimizer.param_groups[0]["params"]
    trainer = trainer_of(model, optimizers=[optimizer])
    model_changes.restore_parameter_groups(trainer, saved)
    assert [[id(each) for each in group["params"]] for group in optimizer.param_groups] == [
        [*map(id, first)],
        [id(second[1]), id(second[0])],
        [],
    ]
    assert optimizer.param_groups[0]["params"] is members  # LBFGS keeps the list
    model_changes.restore_parameter_groups(trainer, [[["absent"]]])
    assert [*map(id, members)] == [*map(id, first)]
    model_changes.restore_parameter_groups(trainer, [[[*dict(model.named_parameters())]]])
    assert [*map(id, members)] == [*map(id, [*first, *second])]


def test_values_of_groups_are_given_back():
    optimizers = [
        SimpleNamespace(param_groups=[{"lr": 1.0, "params": "x"}, {"lr": 2.0}]),
        SimpleNamespace(param_groups=[{"lr": 3.0}]),
    ]
    saved = [[{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.3, "momentum": 0.5}, {"lr": 9.0}], [{"lr": 7.0}]]
    model_changes.restore_group_values(SimpleNamespace(optimizers=optimizers), saved)
    assert [optimizer.param_groups for optimizer in optimizers] == [
        [{"lr": 0.1, "params": "x"}, {"lr": 0.2}],
        [{"lr": 0.3, "momentum": 0.5}],
    ]


class Averaging(StochasticWeightAveraging):
    """Averages in the epochs 2 to 4; its hook changes what the real one changes."""

    swa_start, swa_end = 2, 4

    def __init__(self, resumes: bool = True) -> None:
        super().__init__(0.1)
        self._scheduler_state = {} if resumes else None
        self._latest_update_epoch = -1
        self.began = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.began.append((trainer.current_epoch, self._latest_update_epoch))
        if trainer.current_epoch <= self.swa_end:
            trainer.optimizers[0].param_groups[0]["lr"] = 9.0
        else:
            nn.init.zeros_(pl_module.weight)


class AtEpoch(SimpleNamespace):
    """A trainer that asks its loop for the epoch, as Lightning's does."""

    @property
    def current_epoch(self) -> int:
        return self.fit_loop.epoch_progress.current.completed


@pytest.mark.parametrize(
    ("epoch", "point", "begins"),
    [
        (1, ResumePoint.BATCH, [(1, 1)]),
        (2, ResumePoint.BATCH, [(2, 2)]),
        (4, ResumePoint.EPOCH, [(4, 4)]),
        (5, ResumePoint.BATCH, [(4, 4), (5, -1)]),
        (5, ResumePoint.VALIDATION, [(4, 4), (5, -1)]),
        (5, ResumePoint.EPOCH, [(4, 4)]),
        (6, ResumePoint.BATCH, [(4, 4)]),
    ],
)
def test_an_average_goes_on_in_its_epochs(epoch, point, begins):
    """The hook that makes its schedule runs; weights and rates stay as they were.

    It makes it in an epoch in which it averages, even if all of them are done.
    """
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    callback, not_averaging = Averaging(), Averaging(resumes=False)
    progress = SimpleNamespace(completed=epoch)
    trainer = AtEpoch(
        lightning_module=model,
        callbacks=[Callback(), not_averaging, callback],
        optimizers=[optimizer],
        fit_loop=SimpleNamespace(epoch_progress=SimpleNamespace(current=progress)),
        accumulate_grad_batches=3,
    )
    model_changes.continue_averaging(trainer, [[{"lr": 0.25}]], point)
    assert callback.began == begins and not_averaging.began == []
    assert callback._latest_update_epoch == -1 and progress.completed == epoch
    assert callback._accumulate_grad_batches == not_averaging._accumulate_grad_batches == 3
    assert model.weight.item() == 1.0 and optimizer.param_groups[0]["lr"] == 0.25
