"""Another optimizer, schedule or number of the code than the run began with is said."""

import contextlib
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from own_fits import PressCtrlC, Stops, Untested, short_trainer
from own_trainer import Classifier

from sagemaker_lightning import (
    ExactResume,
    UserError,
)


def test_a_seed_of_the_command_line_is_named_by_its_flag_alone(tmp_path: Path):
    for seed in (1, 2):
        resume = ExactResume(tmp_path, seed=seed, settings={"--seed_everything": seed})
        trainer = short_trainer(tmp_path, callbacks=[resume], limit_train_batches=1)
        if seed == 1:
            trainer.fit(model := Untested())
    says = r"is of another run: --seed_everything was 1, is 2; (?!ExactResume)"
    with pytest.raises(UserError, match=says):
        trainer.fit(model)


class Scheduled(Untested):
    """Its optimizer and schedule are made by functions that a test gives."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = (make,)  # no method

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self):
        return self.make[0](self, torch.optim, torch.optim.lr_scheduler)


def step_lr(step_size: int):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        return [optimizer], [schedules.StepLR(optimizer, step_size)]

    return make


def one_cycle(**arguments):
    def make(model, optim, schedules):
        optimizer = optim.AdamW(model.parameters())
        settings = {"max_lr": 0.1, "total_steps": model.trainer.estimated_stepping_batches}
        schedule = schedules.OneCycleLR(optimizer, **settings | arguments)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return make


def on_plateau(**arguments):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        schedule = schedules.ReduceLROnPlateau(optimizer, **arguments)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"},
        }

    return make


def two_optimizers(rate: float):
    def make(model, optim, schedules):
        parts = model.network[0], model.network[4]
        rates = 0.1, rate
        model.automatic_optimization = False
        return [optim.SGD(part.parameters(), lr) for part, lr in zip(parts, rates, strict=True)]

    return make


def scaled(factor: float):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        return [optimizer], [schedules.LambdaLR(optimizer, lambda step: factor)]

    return make


# unit/resume/same_run/test_optimizer_arguments.py has more of what is compared.
ARGUMENTS = [
    (step_lr(10), step_lr(5), "step_size of StepLR was 10, is 5"),
    (one_cycle(), one_cycle(max_lr=0.2), "lr of AdamW was 0.004, is 0.008"),
    (
        one_cycle(),
        one_cycle(pct_start=0.5),
        r"_schedule_phases of OneCycleLR was .*\.\.\. \(\w+\), is ",
    ),
    (one_cycle(), one_cycle(anneal_strategy="linear"), "_anneal_func_type of OneCycleLR was cos"),
    (step_lr(10), on_plateau(), "the scheduler was StepLR, is ReduceLROnPlateau"),
    (scaled(0.5), scaled(0.25), "factor of lr_lambdas of LambdaLR was 0.5, is 0.25;"),
    (two_optimizers(0.1), two_optimizers(0.2), r"lr of optimizer 1 \(SGD\) was 0.1, is 0.2"),
    (
        one_cycle(),
        step_lr(10),
        r"the optimizer was AdamW, is SGD; .*; ExactResume\(other_settings=True\) allows",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now", "says"), ARGUMENTS)
def test_another_argument_of_an_optimizer_or_schedule_is_one_line(
    tmp_path: Path, before, now, says
):
    """It would have no effect: the checkpoint has its own. The same ones are not refused."""
    few = {"limit_train_batches": 4}
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1, batch=0), **few).fit(Scheduled(before))
    with pytest.raises(UserError, match=f"is of another run: {says}"):
        short_trainer(tmp_path, **few).fit(Scheduled(now))
    short_trainer(tmp_path, **few).fit(Scheduled(before))


@pytest.mark.slow
def test_more_epochs_than_a_schedule_was_made_for_are_said(tmp_path: Path, capfd):
    """Once: the run continues with them."""

    def cosine(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        steps = model.trainer.estimated_stepping_batches
        return [optimizer], [schedules.CosineAnnealingLR(optimizer, steps)]

    outputs = []
    for epochs, step in ((1, 4), (2, 6), (2, 8), (2, 0)):
        with pytest.raises(SystemExit) if step else contextlib.nullcontext():
            short_trainer(tmp_path, Stops(step), max_epochs=epochs).fit(Scheduled(cosine))
        outputs.append(capfd.readouterr().out)
    says = (
        "warning: T_max of CosineAnnealingLR was 11, is 22: this run continues from its checkpoint"
    )
    assert [says in output for output in outputs] == [False, True, False, False]


class Warmup(pl.Callback):
    """Sets the learning rate by hand."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.rate * min(1, (trainer.global_step + 1) / 10)


class Fails(pl.Callback):
    """Ends the second epoch in the middle."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch == 1 and trainer.global_step % 4 == 3:
            raise RuntimeError("as it was asked to")


@pytest.mark.slow
def test_who_sets_another_learning_rate_is_named(tmp_path: Path, capfd):
    def train(*callbacks: pl.Callback) -> None:
        resume = ExactResume(tmp_path, seed=1)
        short_trainer(tmp_path, callbacks=[*callbacks, resume], max_epochs=2).fit(Classifier())

    with pytest.raises(RuntimeError):
        train(Fails(), Warmup(0.05))
    capfd.readouterr()
    train(Warmup(0.1))
    assert (
        "the learning rate differs; likely because of StepLR, whose arguments or state are others, "
        f"or what {__name__}.Warmup.on_train_batch_start sets, which is another value"
    ) in capfd.readouterr().out
