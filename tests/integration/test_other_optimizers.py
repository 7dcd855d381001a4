"""Another optimizer, schedule or number of the code than the run began with is said."""

import contextlib
import functools
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from own_fits import PressCtrlC, Stops, Untested, short_trainer
from own_trainer import Classifier
from pytorch_lightning.callbacks import (
    EarlyStopping,
)

from sagemaker_lightning import (
    ExactResume,
    UserError,
)


def test_a_run_with_other_settings_is_one_line(tmp_path: Path):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(UserError, match="--trainer.accumulate_grad_batches was 1, is 2"):
        short_trainer(tmp_path, accumulate_grad_batches=2).fit(Classifier())


def test_a_seed_of_the_command_line_is_named_by_its_flag_alone(tmp_path: Path):
    for seed in (1, 2):
        resume = ExactResume(tmp_path, seed=seed, settings={"--seed_everything": seed})
        trainer = short_trainer(tmp_path, callbacks=[resume], limit_train_batches=1)
        if seed == 1:
            trainer.fit(model := Untested())
    says = r"is of another run: --seed_everything was 1, is 2; (?!ExactResume)"
    with pytest.raises(UserError, match=says):
        trainer.fit(model)


class Regularized(Untested):
    """Has numbers of its own, in a part of it and in a list."""

    def __init__(self, dropout: float = 0.3, weight: float = 1.0) -> None:
        super().__init__()
        self.network[3].p = dropout
        self.weights = {"loss": weight, "started": time.time()}
        self.started = time.time()

    def step(self, batch):
        return super().step(batch) * self.weights["loss"]


class Patient(pl.Callback):
    """Counts, and has a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def on_train_batch_end(self, *args):
        self.count += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "limits", "says"),
    [
        ({}, (3, 99), ""),
        ({"dropout": 0.4}, (3, 99), "p of model.network.3 was 0.3, is 0.4"),
        ({}, (4, 99), "limit of Patient was 3, is 4"),
        ({}, (3, 7), "patience of EarlyStopping was 99, is 7"),
    ],
)
def test_other_numbers_of_the_code_are_said(tmp_path: Path, capfd, model, limits, says):
    """Some of them the checkpoint has, others not: no run from the beginning is like that."""

    def train(model: dict, limit: int, patience: int, presses: int) -> None:
        stops = EarlyStopping("train_loss", patience=patience)
        short_trainer(tmp_path, Patient(limit), stops, PressCtrlC(presses)).fit(
            Regularized(**model)
        )

    with pytest.raises(SystemExit):
        train({}, 3, 99, presses=1)
    capfd.readouterr()
    train(model, *limits, presses=0)
    output = capfd.readouterr().out
    assert output.count("warning: ") == bool(says)
    assert (
        f"warning: {says}: this run continues from its checkpoint, and may end" in output
        or not says
    )


@pytest.mark.slow
def test_another_learning_rate_is_one_line(tmp_path: Path, capfd):
    """It would have no effect: the checkpoint has its own."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(
        UserError, match=r"is of another run: lr of AdamW was 0.05, is 0.1; continue"
    ):
        short_trainer(tmp_path).fit(Classifier(lr=0.1))
    resume = ExactResume(tmp_path, seed=1, other_settings=True)
    trainer = short_trainer(tmp_path, callbacks=[resume])
    capfd.readouterr()
    trainer.fit(model := Classifier(lr=0.1))
    assert model.optimizers().optimizer.param_groups[0]["initial_lr"] == 0.1
    assert "warning: " not in capfd.readouterr().out


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


def in_groups(*groups: dict):
    def make(model, optim, schedules):
        parts = zip(groups, (model.network[0], model.network[1], model.network[4]), strict=False)
        return optim.AdamW([{"params": [*part.parameters()]} | group for group, part in parts], 0.1)

    return make


def warm_up(steps: int, form: str):
    class Object:
        def __init__(self) -> None:
            self.steps = steps

        def __call__(self, step: int) -> float:
            return min(1.0, (step + 1) / self.steps)

    functions = {
        "closure": lambda step: min(1.0, (step + 1) / steps),
        "partial": functools.partial(lambda step, steps: min(1.0, (step + 1) / steps), steps=steps),
        "object": Object(),
        "constant": {
            4: lambda step: min(1.0, (step + 1) / 4),
            8: lambda step: min(1.0, (step + 1) / 8),
        }[steps],
    }

    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        return [optimizer], [schedules.LambdaLR(optimizer, functions[form])]

    return make


def one_after_the_other(milestone: int, gamma: float, cycles: int):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        first = schedules.ChainedScheduler(
            [schedules.ExponentialLR(optimizer, gamma), schedules.StepLR(optimizer, 3)]
        )
        second = schedules.CosineAnnealingLR(optimizer, cycles)
        schedule = schedules.SequentialLR(optimizer, [first, second], [milestone])
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


ARGUMENTS = [
    (step_lr(10), step_lr(5), "step_size of StepLR was 10, is 5"),
    (one_cycle(), one_cycle(max_lr=0.2), "lr of AdamW was 0.004, is 0.008"),
    (
        one_cycle(),
        one_cycle(pct_start=0.5),
        r"_schedule_phases of OneCycleLR was .*\.\.\. \(\w+\), is ",
    ),
    (one_cycle(), one_cycle(anneal_strategy="linear"), "_anneal_func_type of OneCycleLR was cos"),
    (
        in_groups({"lr": 0.1}, {"lr": 0.01}),
        in_groups({"lr": 0.1}, {"lr": 0.02}),
        "lr of parameter group 1 of AdamW was 0.01, is 0.02",
    ),
    (
        in_groups({}, {"weight_decay": 0.0}),
        in_groups({}, {"weight_decay": 0.3}),
        "weight_decay of parameter group 1 of AdamW was 0.0, is 0.3",
    ),
    (in_groups({}, {}, {}), in_groups({}, {}), "number of parameter groups of AdamW was 3, is 2"),
    (step_lr(10), on_plateau(), "the scheduler was StepLR, is ReduceLROnPlateau"),
    (on_plateau(patience=1), on_plateau(patience=3), "patience of ReduceLROnPlateau was 1, is 3"),
    (on_plateau(), on_plateau(mode="max"), ".*mode of ReduceLROnPlateau was min, is max"),
    (
        one_after_the_other(4, 0.9, 5),
        one_after_the_other(4, 0.8, 6),
        "gamma of ExponentialLR in ChainedScheduler in SequentialLR was 0.9, is 0.8; "
        "T_max of CosineAnnealingLR in SequentialLR was 5, is 6",
    ),
    (
        one_after_the_other(4, 0.9, 5),
        one_after_the_other(3, 0.9, 5),
        "_milestones of SequentialLR was 4, is 3",
    ),
    *(
        (warm_up(4, how), warm_up(8, how), "steps of lr_lambdas of LambdaLR was 4, is 8;")
        for how in ("closure", "partial", "object")
    ),
    (
        warm_up(4, "constant"),
        warm_up(8, "constant"),
        "the code of lr_lambdas of LambdaLR has changed;",
    ),
    (two_optimizers(0.1), two_optimizers(0.2), r"lr of optimizer 1 \(SGD\) was 0.1, is 0.2"),
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


@pytest.mark.slow
def test_who_sets_another_learning_rate_is_named(tmp_path: Path, capfd):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1), Warmup(0.05)).fit(Classifier())
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), Warmup(0.1)).fit(Classifier())
    assert (
        "the learning rate differs; likely because of StepLR, whose arguments or state are others, "
        f"or what {__name__}.Warmup.on_train_batch_start sets, which is another value"
    ) in capfd.readouterr().out


class OtherOptimizer(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_another_optimizer_is_one_line(tmp_path: Path):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(
        UserError,
        match=r"the optimizer was AdamW, is SGD; .*; ExactResume\(other_settings=True\) allows",
    ):
        short_trainer(tmp_path).fit(OtherOptimizer())
