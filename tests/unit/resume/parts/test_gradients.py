"""Which gradients the next optimizer step still uses, and how they come back."""

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from short_fits import Noted, alone_and_resumed, saved, training, weights
from torch import nn
from torch.optim import SGD
from untrained import alike, in_epoch_5, resumed, run_of, trainer_of

from sagemaker_lightning.resume.parts import gradients as gradients_part
from sagemaker_lightning.resume.parts.gradients import Gradients
from sagemaker_lightning.resume.parts.part import Moment


class Model(LightningModule):
    """Has two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)


def gradients(trainer: Trainer, gather) -> dict | None:
    """Return what is saved."""
    return run_of(trainer, gather=gather).part(Gradients).save(None, None)


def restore_gradients(trainer: Trainer, ranks: list) -> None:
    """Restore what each rank has saved."""
    run = resumed(run_of(trainer), world_size=len(ranks), ranks=ranks)
    run.part(Gradients).restore(None, Moment.TRAINING)


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


class ReadsThoseOfTheStepBefore(Callback):
    def on_train_batch_start(self, trainer, model, *_):
        self.norm = model.first.weight.grad


class ReadsNewOnes(Callback):
    def on_before_optimizer_step(self, trainer, model, *_):
        self.norm = model.first.weight.grad


class StepsByItself(SGD):
    def step(self, closure=None):
        closure()
        return [group["params"][0].grad for group in self.param_groups]


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
        (lambda: after_backward(Model(), ReadsThoseOfTheStepBefore()), False, ALL),
        (lambda: after_backward(Model(), ReadsNewOnes()), False, {"second.weight": 2}),
        (lambda: after_backward(Model(), optimizer=StepsByItself), False, {"second.weight": 2}),
    ],
)
def test_gradients_that_the_next_step_uses_are_saved(monkeypatch, trainer, accumulates, saved):
    """Lightning removes the others before it."""
    trainer = trainer()
    loops = gradients_part.lightning_loops
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
    monkeypatch.setattr(gradients_part.lightning_loops, "gradients_accumulate", lambda _: False)
    found = gradients(trainer, lambda _: by_rank)
    assert (found if found is None else found.keys()) == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, {}), (1, None)])
def test_if_no_gradient_can_last_the_ranks_do_not_ask_each_other(monkeypatch, rank, expected):
    model = Model()
    model.second.requires_grad_(False)
    trainer = trainer_of(model)
    trainer.strategy.optimizers = [SGD(model.first.parameters(), 0.1)]
    monkeypatch.setattr(Trainer, "global_rank", rank)
    monkeypatch.setattr(gradients_part.lightning_loops, "gradients_accumulate", lambda _: False)
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
    trainer = in_epoch_5(world_size=ranks, global_rank=rank, lightning_module=model)
    model.second.weight.grad = torch.ones(1, 1)
    restore_gradients(
        trainer, [{"gradients": {"first.weight": torch.ones(1, 1)}}, {"gradients": None}]
    )
    assert model.first.weight.grad.item() == expected["first"]
    assert model.second.weight.grad is expected["second"]


def test_a_weight_that_gets_another_shape_later_has_no_gradient_before():
    trainer = after_backward(model := Model())
    restore_gradients(trainer, [{"gradients": {"first.weight": torch.ones(4, 4)}}])
    assert model.first.weight.grad is None or model.first.weight.grad.shape == (1, 1)


def test_another_number_of_ranks_gets_the_mean_of_the_gradients():
    model = Model()
    trainer = in_epoch_5(world_size=1, global_rank=0, lightning_module=model)
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


class Switching(Noted):
    """Has automatic optimization in every second epoch."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.automatic_optimization = self.current_epoch % 2 == 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


@pytest.mark.parametrize("stop", ["batch 1:2", "end 0", "batch 2:2"])
def test_a_module_that_switches_its_optimization_continues(tmp_path, stop):
    """Its own steps use the gradients that Lightning's have left."""

    # A validation removes gradients.
    train = training(Switching, max_epochs=3, strict=True, limit_val_batches=0)
    alone, resumed = alone_and_resumed(train, tmp_path, stop)
    assert weights(resumed) == weights(alone) and resumed.global_step == alone.global_step
    assert max(saved(tmp_path / "run")) == 12


class OwnTensors(Noted):
    """Sums up the gradients of a tensor, and of a module in a list, over three batches."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.scale = torch.ones(1, requires_grad=True)
        self.layers = [nn.Linear(1, 1)]
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        own = [self.scale, *self.layers[0].parameters()]
        if self.batches % 3 == 0:
            with torch.no_grad():
                for tensor in own:
                    tensor -= 0.1 * tensor.grad
                    tensor.grad = None
        loss = super().training_step(batch, batch_idx)
        return (self.layers[0](self.line(batch[0]) * self.scale) - 1).square().mean() + loss


@pytest.mark.parametrize("stop", ["batch 0:1", "batch 0:3", "batch 1:2"])
def test_gradients_that_add_up_in_tensors_of_the_users_come_back(tmp_path, stop):
    train = training(OwnTensors, max_epochs=3)
    alone, resumed = alone_and_resumed(train, tmp_path, stop)
    assert weights(resumed) == weights(alone)
    assert torch.equal(resumed.scale, alone.scale)
    assert torch.equal(resumed.scale.grad, alone.scale.grad)
