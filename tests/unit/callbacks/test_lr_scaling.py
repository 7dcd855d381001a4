"""callbacks/lr_scaling.py: the learning rate follows the number of ranks, for each scheduler."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from consistent_ranks import SHORT, fit_by_flags, rank_of

from sagemaker_lightning import LearningRateScaling, UserError
from sagemaker_lightning.callbacks.lr_scaling import scale_rates
from sagemaker_lightning.callbacks.rank_consistency import RankConsistency
from sagemaker_lightning.contract.environment import SageMakerEnvironment

# The learning rate --------------------------------------------------------------------------------

torch_schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "none": None,
    "StepLR": lambda optimizer: torch_schedulers.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "PolynomialLR": lambda optimizer: torch_schedulers.PolynomialLR(optimizer, 6),
    "CosineAnnealingLR": lambda optimizer: torch_schedulers.CosineAnnealingLR(
        optimizer, 6, eta_min=0.01
    ),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch_schedulers.CosineAnnealingWarmRestarts(
        optimizer, 3, eta_min=0.01
    ),
    "OneCycleLR": lambda optimizer: torch_schedulers.OneCycleLR(
        optimizer, max_lr=0.3, total_steps=8
    ),
    "CyclicLR": lambda optimizer: torch_schedulers.CyclicLR(
        optimizer, base_lr=0.02, max_lr=0.2, step_size_up=2
    ),
    "ReduceLROnPlateau": lambda optimizer: torch_schedulers.ReduceLROnPlateau(
        optimizer, "max", patience=0, min_lr=0.02
    ),
    "SequentialLR": lambda optimizer: torch_schedulers.SequentialLR(
        optimizer,
        [
            torch_schedulers.LinearLR(optimizer, 0.1, total_iters=3),
            torch_schedulers.CosineAnnealingLR(optimizer, 5, eta_min=0.01),
        ],
        milestones=[3],
    ),
    "ChainedScheduler": lambda optimizer: torch_schedulers.ChainedScheduler(
        [
            torch_schedulers.LinearLR(optimizer, 0.1, total_iters=3),
            torch_schedulers.ExponentialLR(optimizer, 0.9),
        ],
        optimizer=optimizer,
    ),
}


class Scheduled(ranks.Regression):
    """Notes the learning rate of each step, of two groups."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.rates = []

    def configure_optimizers(self):
        first_parameter, *other_parameters = self.parameters()
        groups = [{"params": [first_parameter], "lr": 0.1}, {"params": other_parameters}]
        optimizer = torch.optim.SGD(groups, self.lr, momentum=0.9)
        if not SCHEDULERS[self.name]:
            return optimizer
        scheduler = {
            "scheduler": SCHEDULERS[self.name](optimizer),
            "interval": "step",
            "monitor": "loss",
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", -self.global_step)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def curves(scaling: str, stops_at: int | None = None, goes_on: bool = False) -> dict[str, list]:
    """Return the learning rates of 8 steps with each scheduler.

    They are those up to a checkpoint, or those from a checkpoint on, if asked for.
    """
    rates = {}
    for name in SCHEDULERS:
        model = Scheduled(name)
        path = f"../{name}.ckpt"
        trainer = ranks.trainer(
            [RankConsistency(SageMakerEnvironment(), {}, scaling)],
            max_steps=stops_at or 8,
            max_epochs=-1,
        )
        trainer.fit(model, ranks.Numbered(44, batch_size=5), ckpt_path=path if goes_on else None)
        if stops_at:
            trainer.save_checkpoint(path)
        rates[name] = model.rates
    return rates


@pytest.mark.slow
def test_learning_rates_of_every_scheduler_are_scaled_and_once_only(tmp_path: Path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plain = curves("none")
    linear = ranks.run(curves, "linear", folder=tmp_path)[0]
    assert not linear.error, linear.output
    root = ranks.run(curves, "sqrt", nodes=[3], folder=tmp_path)[0].value
    # Two ranks stop after three steps. Then three runs continue: two ranks, one rank alone, and two
    # ranks that do not scale.
    until = ranks.run(curves, "linear", 3, folder=tmp_path)[0].value
    later_curves = ranks.run(curves, "linear", None, True, folder=tmp_path)[0].value
    unscaled = ranks.run(curves, "none", None, True, folder=tmp_path)[0].value
    alone = curves("linear", goes_on=True)
    for name, rates in plain.items():
        rates = torch.tensor(rates, dtype=torch.float64)
        expected = {
            "linear": 2 * rates,
            "root": 3**0.5 * rates,
            "until": 2 * rates[:3],
            "after": 2 * rates[3:],
        }
        all_curves = {"linear": linear.value, "root": root, "until": until, "after": later_curves}
        for case, curve in all_curves.items():
            scaled_rates = torch.tensor(curve[name], dtype=torch.float64)
            torch.testing.assert_close(
                scaled_rates,
                expected[case],
                rtol=1e-9,
                atol=0,
                msg=f"{name} {case} {scaled_rates} {rates}",
            )
        for curve in (alone, unscaled):
            torch.testing.assert_close(
                torch.tensor(curve[name], dtype=torch.float64), rates[3:], rtol=1e-9, atol=0
            )


def rates_scaled_alone(goes_on: bool) -> list[list[float]]:
    """Return the learning rates of three steps, or of those from a checkpoint on."""
    model = Scheduled("StepLR")
    trainer = ranks.trainer(
        [LearningRateScaling("linear")], max_steps=8 if goes_on else 3, max_epochs=-1
    )
    path = "../scaled.ckpt"
    trainer.fit(model, ranks.Numbered(44, batch_size=5), ckpt_path=path if goes_on else None)
    trainer.save_checkpoint(path)
    return model.rates


@pytest.mark.slow
def test_the_scaling_alone(tmp_path: Path):
    """A run that continues from Lightning's checkpoint does not scale again."""
    rates = [
        rate
        for goes_on in (False, True)
        for rate in ranks.run(rates_scaled_alone, goes_on, folder=tmp_path)[0].value
    ]
    expected = [[0.1 * 2 * 0.1 ** (step // 2)] for step in range(8)]
    assert len(rates) == 8
    torch.testing.assert_close(
        torch.tensor([[epoch_rates[0]] for epoch_rates in rates]), torch.tensor(expected)
    )


@pytest.mark.slow
def test_with_an_optimizer_by_flags(tmp_path: Path):
    flags = [
        "--optimizer=SGD",
        "--optimizer.lr=0.01",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=1",
    ]
    ended = ranks.run(
        fit_by_flags,
        {},
        *SHORT,
        *flags,
        "--lr_scaling=linear",
        "--trainer.devices=2",
        folder=tmp_path,
    )
    assert "lr_scaling=linear lr=0.01 -> 0.02 effective_batch_size=16" in ended[0].output, ended[
        0
    ].output


def test_a_rule_that_there_is_not_is_refused():
    with pytest.raises(UserError, match=r"\(rule=...\): found 'cubic', expected one of none, lin"):
        LearningRateScaling("cubic")


def test_each_training_scales_its_own_optimizers_once():
    """A restored factor is in the restored rates already."""
    scaling = LearningRateScaling()
    for stage, expected in (("fit", 3.0), ("fit", 3.0), ("validate", 1.0)):
        trainer = rank_of(3, [{"lr": 1.0, "initial_lr": 2.0, "swa_lr": 4.0, "momentum": 0.5}])
        scaling.setup(trainer, None, stage)
        scaling.on_train_start(trainer, None)
        group = trainer.optimizers[0].param_groups[0]
        assert group == {
            "lr": expected, "initial_lr": 2 * expected, "swa_lr": 4 * expected, "momentum": 0.5
        }  # fmt: skip
    assert scaling.state_dict() == {"factor": 3.0}
    resumed = LearningRateScaling("sqrt")
    resumed.load_state_dict({"factor": 3.0})
    trainer = rank_of(4, [{"lr": 0.3}])
    resumed.on_train_start(trainer, None)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_scheduler_of_a_scheduler_is_scaled():
    plain = SimpleNamespace(base_lrs=[1.0, 2.0], eta_min=0.5, default_min_lr=None, gamma=0.5)
    trainer = rank_of(2, [])
    outer = SimpleNamespace(_schedulers=[SimpleNamespace(_schedulers=[plain])], _last_lr=[3.0])
    trainer.lr_scheduler_configs = [SimpleNamespace(scheduler=outer)]
    scale_rates(trainer, 2.0)
    assert vars(plain) == {
        "base_lrs": [2.0, 4.0], "eta_min": 1.0, "default_min_lr": None, "gamma": 0.5
    }  # fmt: skip
    assert outer._last_lr == [6.0]
