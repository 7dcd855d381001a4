"""Learning rates by step: the triangle, and which schedule is stepped when."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from sagemaker_lightning.cli import lr_schedules
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.cli.lr_schedules import Triangle
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError

from app.train import APPLICATION

SMALL = [
    "--data=ranks.Numbered",
    "--data.size=44",
    "--data.batch_size=8",
    "--model=ranks.Regression",
]
SMALL += ["--checkpoint.monitor=null"]


def triangle(steps: int, **options) -> list[float]:
    """Return the learning rate of each step; the peak is 2."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = Triangle(optimizer, **options)
    scheduler.steps = steps
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_triangle():
    assert triangle(10, warmup=0.2) == pytest.approx([0, 1, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25])
    assert triangle(4, warmup=0.0, end=0.5) == pytest.approx([2, 1.75, 1.5, 1.25])
    assert triangle(4, warmup=1.0, start=0.5) == pytest.approx([1, 1.25, 1.5, 1.75])


@pytest.mark.parametrize("warmup", [0.2, 1.0])
def test_after_the_last_step_the_rate_stays_at_its_end(warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = Triangle(optimizer, warmup=warmup, end=0.25)
    schedule.set_steps(10)
    assert [schedule.factor(step) for step in (10, 11, 30)] == [0.25] * 3


@pytest.mark.parametrize("warmup", [-0.1, 1.5, math.nan])
def test_a_wrong_share_of_warmup_is_refused(warmup):
    with pytest.raises(UserError, match=r"--lr_scheduler.warmup: found .* expected 0 to 1"):
        triangle(4, warmup=warmup)


class OwnTriangle(LightningModule):
    """Returns a Triangle from its own configure_optimizers."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self.weights = torch.nn.Linear(1, 1)
        self.steps = steps

    def training_step(self, batch, batch_idx):
        return self.weights(batch).sum()

    def train_dataloader(self):
        return DataLoader(torch.zeros(10, 1))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        schedule = Triangle(optimizer)
        if self.steps:
            schedule.set_steps(self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("steps", [None, 10])
def test_without_the_command_line_the_steps_must_be_given(tmp_path, steps):
    """It would train with a learning rate of 0, and no line would say so."""
    recorded_rates = Rates()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[recorded_rates]
    )
    if steps:
        trainer.fit(OwnTriangle(steps))
        assert recorded_rates.seen == pytest.approx(triangle(10))
        return
    with pytest.raises(UserError, match=r"^Triangle: found no number of steps, .* call set_steps"):
        trainer.fit(OwnTriangle(steps))


def test_a_checkpoint_keeps_no_number_of_steps():
    """A run that is resumed for more epochs has another number of steps."""
    schedulers = [
        Triangle(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)) for _ in range(2)
    ]
    schedulers[0].steps = 10
    schedulers[1].steps = 20
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    assert schedulers[1].steps == 20


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def rates(tmp_path, *flags: str) -> list[float]:
    """Return the learning rate of each step of two epochs of five steps."""
    environment = SageMakerEnvironment(
        model_dir=tmp_path / "m", output_data_dir=tmp_path, checkpoint_dir=tmp_path / "c"
    )
    all_flags = [
        "--trainer.max_epochs=2",
        "--trainer.accelerator=cpu",
        "--optimizer=SGD",
        "--optimizer.lr=2.0",
        *flags,
    ]
    cli = CommandLine(environment, [*SMALL, *all_flags], APPLICATION)
    cli.trainer.callbacks.append(recorded_rates := Rates())
    cli.trainer.fit(cli.model, cli.datamodule)
    return recorded_rates.seen


@pytest.mark.slow
def test_the_triangle_is_stepped_after_each_batch(tmp_path):
    rates_seen = rates(tmp_path, "--lr_scheduler=sagemaker_lightning.Triangle")
    assert rates_seen == pytest.approx([0, 1, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25])


def scheduled(name: str, **settings):
    """Return an optimizer, and a scheduler of torch for it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    return optimizer, getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)


def test_a_cycle_in_a_run_without_an_end_is_not_refused():
    optimizer, scheduler = scheduled("OneCycleLR", max_lr=2, total_steps=9)
    for steps in (math.inf, 9, 8):
        trainer = SimpleNamespace(estimated_stepping_batches=steps)
        assert lr_schedules.configured(trainer, optimizer, scheduler)["optimizer"] is optimizer


def test_a_cycle_with_fewer_steps_than_the_run_is_refused():
    optimizer, scheduler = scheduled("OneCycleLR", max_lr=2, total_steps=9)
    says = r"^--lr_scheduler: OneCycleLR has 9 steps, and the run 10; set .* more$"
    with pytest.raises(UserError, match=says):
        lr_schedules.configured(
            SimpleNamespace(estimated_stepping_batches=10), optimizer, scheduler
        )


def test_a_triangle_gets_the_steps_of_the_run():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Triangle(optimizer)
    trainer = SimpleNamespace(estimated_stepping_batches=10)
    assert lr_schedules.configured(trainer, optimizer, schedule)["optimizer"] is optimizer
    assert schedule.steps == 10


def test_a_schedule_of_epochs_is_lightnings_to_step():
    optimizer, scheduler = scheduled("StepLR", step_size=1)
    assert CommandLine.configure_optimizers(None, optimizer, scheduler) == (
        [optimizer],
        [scheduler],
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1}),
        ("OneCycleLR", {"max_lr": 2, "total_steps": 5}),
    ],
)
def test_torchs_cycles_are_stepped_after_each_batch(name, settings):
    optimizer, scheduler = scheduled(name, **settings)
    module = SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=5))
    assert CommandLine.configure_optimizers(module, optimizer, scheduler) == {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


@pytest.mark.parametrize(
    ("name", "settings"), [("ReduceLROnPlateau", {}), ("StepLR", {"step_size": 1})]
)
def test_a_scheduler_is_tried_without_a_warning(name, settings):
    _, scheduler = scheduled(name, **settings)
    with warnings.catch_warnings(action="error"):
        lr_schedules.step_once(scheduler)
    assert scheduler.last_epoch == 1


def test_a_run_without_an_end_has_no_triangle(tmp_path):
    flags = ["--lr_scheduler=sagemaker_lightning.Triangle", "--trainer.max_epochs=-1"]
    with pytest.raises(UserError, match=r"--lr_scheduler=Triangle: the run has no end"):
        rates(tmp_path, *flags)
