"""resume/parts/epoch_state.py: what of a rank's own state a checkpoint has beside Lightning's."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim import SGD
from torchmetrics import MeanMetric, MetricTracker

from sagemaker_lightning.resume.parts import epoch_state
from sagemaker_lightning.resume.parts.epoch_state import (
    gradients,
    restore_gradients,
    restore_rank_state,
)
from sagemaker_lightning.resume.parts.user_state import UserState


class Model(LightningModule):
    """Has two layers, buffers of both kinds and what it is given as attributes."""

    def __init__(self, **values) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.register_buffer("saved", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        for name, value in values.items():
            setattr(self, name, value)


class Holding(Callback):
    """Holds something; what its class holds is of all objects, and no state of one."""

    of_all = nn.Linear(1, 1), MeanMetric()

    def __init__(self, **values) -> None:
        vars(self).update(values)


def trainer_of(model: LightningModule, *callbacks: Callback) -> Trainer:
    """Return a trainer as it is while it trains."""
    settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **settings)
    trainer.strategy.connect(model)
    model.trainer = trainer
    return trainer


def alike(value) -> list:
    """Return what two ranks say that have the same."""
    return [value, value]


def rank_state(trainer: Trainer, gather=alike) -> dict:
    return epoch_state.rank_state(trainer, gather, UserState(trainer))


# Buffers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ({}, {"model.hidden"}),
        ({"model.saved": "another"}, {"model.hidden", "model.saved"}),
        ({"model.saved": None, "model.hidden": None}, {"model.hidden", "model.saved"}),
    ],
)
def test_a_buffer_is_saved_if_lightning_does_not_save_it_for_all_ranks(others, names):
    """The state dict has those of rank 0."""
    state = rank_state(trainer_of(Model()), lambda own: [own, own | others])
    assert state["buffers"].keys() == names


def test_what_is_saved_is_no_part_of_the_model():
    model = Model()
    saved = rank_state(trainer_of(model))["buffers"]["model.hidden"]
    model.hidden += 1
    assert saved.item() == 0


def test_modules_beside_the_model_are_saved():
    """Of Lightning's own callbacks, only the buffers: they save the rest themselves."""
    averaging = StochasticWeightAveraging(0.1)
    averaging._average_model = nn.Sequential(nn.BatchNorm1d(1))
    model = Model()
    average = nn.Sequential(nn.BatchNorm1d(1))
    callback = Holding(
        average=average,
        of_average=[average[0]],
        of_model=model.first,
        metric=MeanMetric(),
        lazy=nn.LazyLinear(1),
    )
    state = rank_state(trainer_of(model, averaging, callback))
    assert set(state["metrics"]) == {"callbacks.1 Holding.metric"}
    names = set(state["buffers"])
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert names == (
        {"model.hidden"}
        | {f"StochasticWeightAveraging._average_model.0.{name}" for name in buffers}
        | {f"callbacks.1 Holding.average.0.{name}" for name in buffers | {"weight", "bias"}}
    )


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_a_buffer_is_restored_if_it_has_its_shape(shape):
    model = Model(side=nn.BatchNorm1d(1))
    trainer = trainer_of(model, Holding(average=nn.BatchNorm1d(1)))
    saved = rank_state(trainer)
    saved["buffers"]["model.hidden"] = torch.full(shape, 3.0)
    restore_rank_state(trainer, saved, mid_epoch=False)
    assert model.hidden.item() == (3 if shape == (1,) else 0)


def test_the_sums_of_an_epoch_are_restored_within_it(monkeypatch):
    restored = []
    monkeypatch.setattr(
        epoch_state.lightning_metrics,
        "restore_epoch_sums",
        lambda trainer, saved, device: restored.append((saved, device)),
    )
    trainer = trainer_of(Model())
    saved = rank_state(trainer) | {"results": "sums"}
    for mid_epoch in (False, True):
        restore_rank_state(trainer, saved, mid_epoch)
    assert restored == [("sums", torch.device("cpu"))]


# Metrics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_tracker_has_as_many_steps_as_it_had(steps):
    """A hook at the start of training may have made one."""

    def tracked(values) -> tuple[Trainer, MetricTracker]:
        tracker = MetricTracker(MeanMetric(), maximize=True)
        for value in values:
            tracker.increment()
            tracker.update(value)
        return trainer_of(Model(), Holding(tracker=tracker)), tracker

    saved = rank_state(tracked(range(steps))[0])
    trainer, tracker = tracked([9.0])
    restore_rank_state(trainer, saved, mid_epoch=False)
    assert tracker.n_steps == steps
    if steps:
        assert tracker.compute_all().tolist() == list(range(steps))


def test_metrics_are_shown_as_they_were():
    trainer = trainer_of(Model())
    trainer._logger_connector._callback_metrics["loss"] = torch.tensor(2.0)
    shown = epoch_state.newest_metrics(trainer)
    other = trainer_of(Model())
    epoch_state.restore_newest_metrics(other, shown)
    assert other.callback_metrics == {"loss": torch.tensor(2.0)}


# Gradients ----------------------------------------------------------------------------------------


def after_backward(model: LightningModule, *callbacks: Callback, optimizer=SGD) -> Trainer:
    """Return a trainer of the first layer, when all gradients but the buffers' are there."""
    trainer = trainer_of(model, *callbacks)
    trainer.strategy.optimizers = [optimizer(model.first.parameters(), 0.1)]
    (model.first.weight + 2 * model.second.weight).sum().backward()
    return trainer


class KeepsGradients(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class OwnSteps(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnZero(Model):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class ReadsGradients(Callback):
    def on_before_zero_grad(self, *_):
        pass


ALL = {"first.weight": 1, "second.weight": 2}


@pytest.mark.parametrize(
    ("trainer", "accumulates", "saved"),
    [
        (lambda: after_backward(Model()), False, {"second.weight": 2}),
        (lambda: after_backward(Model()), True, ALL),
        (lambda: after_backward(OwnSteps()), False, ALL),
        (lambda: after_backward(OwnZero()), False, ALL),
        (lambda: after_backward(Model(), optimizer=KeepsGradients), False, ALL),
        (lambda: after_backward(Model(), ReadsGradients()), False, ALL),
    ],
)
def test_gradients_that_the_next_step_uses_are_saved(monkeypatch, trainer, accumulates, saved):
    """Lightning removes the others before it."""
    trainer = trainer()
    loops = epoch_state.lightning_loops
    monkeypatch.setattr(loops, "gradients_accumulate", lambda _: accumulates)
    found = gradients(trainer, alike)
    assert {name: value.item() for name, value in found.items()} == saved
    trainer.lightning_module.zero_grad()
    restore_gradients(trainer, [{"gradients": found}])
    again = gradients(trainer, alike)
    assert {name: value.item() for name, value in again.items()} == saved


@pytest.mark.parametrize(
    ("rank", "by_rank", "expected"),
    [
        (0, ["a", "b"], {"second.weight"}),
        (1, ["a", "b"], {"second.weight"}),
        (1, ["a", "a"], None),
        (2, ["a", "b", "a"], None),
        (2, ["a", "a", "b"], {"second.weight"}),
    ],
)
def test_equal_gradients_are_saved_by_rank_0(monkeypatch, rank, by_rank, expected):
    trainer = after_backward(Model())
    monkeypatch.setattr(trainer.strategy, "_world_size", len(by_rank), raising=False)
    monkeypatch.setattr(Trainer, "global_rank", rank)
    monkeypatch.setattr(epoch_state.lightning_loops, "gradients_accumulate", lambda _: False)
    found = gradients(trainer, lambda _: by_rank)
    assert (found if found is None else found.keys()) == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, {}), (1, None)])
def test_if_no_gradient_can_last_the_ranks_do_not_ask_each_other(monkeypatch, rank, expected):
    model = Model()
    model.second.requires_grad_(False)
    trainer = trainer_of(model)
    trainer.strategy.optimizers = [SGD(model.first.parameters(), 0.1)]
    monkeypatch.setattr(Trainer, "global_rank", rank)
    monkeypatch.setattr(epoch_state.lightning_loops, "gradients_accumulate", lambda _: False)
    assert gradients(trainer, None) == expected


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [
        (0, 2, {"first": 1, "second": None}),
        (1, 2, {"first": 1, "second": None}),
        (0, 1, {"first": 1, "second": None}),
    ],
)
def test_ranks_that_had_the_gradients_of_rank_0_get_these(rank, ranks, expected):
    model = Model()
    trainer = SimpleNamespace(world_size=ranks, global_rank=rank, lightning_module=model)
    model.second.weight.grad = torch.ones(1, 1)
    restore_gradients(
        trainer, [{"gradients": {"first.weight": torch.ones(1, 1)}}, {"gradients": None}]
    )
    assert model.first.weight.grad.item() == expected["first"]
    assert model.second.weight.grad is expected["second"]


def test_another_number_of_ranks_gets_the_mean_of_the_gradients():
    model = Model()
    trainer = SimpleNamespace(world_size=1, global_rank=0, lightning_module=model)
    values = ({"first.weight": 1.0, "second.weight": 8.0}, {"first.weight": 2.0}, {}, None)
    ranks = [
        {
            "gradients": None
            if each is None
            else {name: torch.full((1, 1), value) for name, value in each.items()}
        }
        for each in values
    ]
    restore_gradients(trainer, ranks)
    assert model.first.weight.grad.item() == (1 + 2 + 1) / 4
    assert model.second.weight.grad.item() == (8 + 8) / 4
