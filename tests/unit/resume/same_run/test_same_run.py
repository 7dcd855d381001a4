"""Whether a checkpoint is of this run: what is refused, and what is said."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from untrained import SAME_RUN, in_epoch_5, resumed, run_of

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.same_run import optimizer_arguments


def test_another_number_is_refused_if_it_is_not_that_of_the_workers(tmp_path):
    """Which is known as soon as there are loaders."""
    before = {"flags": '{"--data.count": 0}', "sizes": [4, None], "workers": [0], "ranks": 1}
    same = resumed(run_of(in_epoch_5(), tmp_path), same_run=before).same_run
    same.settings = {"--data.count": 0}
    same.compare_loaders()
    same.settings = {"--data.count": 2}
    with pytest.raises(UserError, match="is of another run: --data.count was 0, is 2; continue"):
        same.compare_loaders()


@pytest.mark.parametrize(
    ("options", "scaling", "expected"),
    [
        ({}, "none", True),
        ({}, "linear", False),
        ({"other_settings": True}, "none", False),
        ({"world_size": 2}, "none", False),
    ],
)
def test_learning_rates_are_the_same_unless_something_sets_others(options, scaling, expected):
    before = SAME_RUN | {"flags": '{"--lr_scaling": "none"}'}
    run = run_of(in_epoch_5(), other_settings=options.pop("other_settings", False))
    same = resumed(run, same_run=before, **options).same_run
    same.settings = {"--lr_scaling": scaling}
    assert same.has_same_rates is expected


def optimizing(rate: float = 0.1, steps: int = 10, **values) -> SimpleNamespace:
    """Return a trainer with an optimizer and a schedule."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    config = SimpleNamespace(scheduler=CosineAnnealingLR(optimizer, steps))
    vars(config).update(interval="step", frequency=1, monitor=None, reduce_on_plateau=False)
    return in_epoch_5(
        lightning_module=model, optimizers=[optimizer], lr_scheduler_configs=[config], **values
    )


def compared(tmp_path, trainer, other_settings=False, world_size=1, same_limits=True) -> None:
    """Compare the optimizers with those that a run had which began with 0.1 and 10 steps."""
    before = SAME_RUN | {"optimizers": optimizer_arguments.describe(optimizing())}
    run = run_of(trainer, tmp_path, other_settings=other_settings)
    same = resumed(run, same_run=before, world_size=world_size).same_run
    same.compare_optimizers(same_limits)
    assert same.optimizer_arguments == optimizer_arguments.describe(trainer)


LONGER = (
    "warning: T_max of CosineAnnealingLR was 10, is 20: this run continues from its checkpoint, "
    "and may end with other weights than a run that begins with these settings\n"
)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ({}, {"other_settings": True}),
        ({}, {"world_size": 2}),
        ({}, {"same_limits": False}),
        ({"callbacks": [BatchSizeFinder()]}, {}),
    ],
)
def test_a_schedule_may_be_made_for_another_length(tmp_path, capsys, trainer, options):
    compared(tmp_path, optimizing(steps=20, **trainer), **options)
    assert capsys.readouterr().out == LONGER
    compared(tmp_path, optimizing(steps=20, **trainer, is_global_zero=False), **options)
    compared(tmp_path, optimizing(**trainer), **options)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("callbacks", [[], [LearningRateFinder()]])
def test_another_schedule_is_refused(tmp_path, callbacks):
    with pytest.raises(UserError, match="is of another run: T_max of CosineAnnealingLR was 10, is"):
        compared(tmp_path, optimizing(steps=20, callbacks=callbacks))


def test_another_rate_is_refused_unless_something_sets_it(tmp_path, capsys):
    with pytest.raises(UserError, match="is of another run: lr of SGD was 0.1, is 0.2; continue"):
        compared(tmp_path, optimizing(0.2))
    with pytest.raises(UserError, match="lr of SGD was 0.1, is 0.2"):
        compared(tmp_path, optimizing(0.2), same_limits=False)
    for callback in (LearningRateFinder(), BatchSizeFinder()):
        compared(tmp_path, optimizing(0.2, callbacks=[callback]))
    compared(tmp_path, optimizing(0.2), other_settings=True)
    compared(tmp_path, optimizing(0.2), world_size=2)
    assert capsys.readouterr().out == ""


def test_a_new_run_is_compared_with_nothing(tmp_path):
    same = run_of(trainer := optimizing(0.2), tmp_path).same_run
    same.compare_optimizers(same_limits=True)
    same.compare_loaders()
    assert same.optimizer_arguments == optimizer_arguments.describe(trainer)


@pytest.mark.parametrize("number", [4, 5])
def test_four_of_many_differences_are_named(tmp_path, number):
    before = optimizer_arguments.describe(optimizing())
    for index in range(number):
        before["arguments"][f"x{index} of SGD"] = str(index)
    trainer = optimizing()
    run = resumed(run_of(trainer, tmp_path), same_run=SAME_RUN | {"optimizers": before})
    for index in range(number):
        trainer.optimizers[0].defaults[f"x{index}"] = 9
    rest = " (and 1 more)" if number > 4 else ""
    named = "; ".join(f"x{index} of SGD was {index}, is 9" for index in range(4))
    with pytest.raises(UserError) as raised:
        run.same_run.compare_optimizers(same_limits=True)
    assert str(raised.value) == (
        f"--resume.dirpath={tmp_path}: step-000000012.ckpt is of another run: {named}{rest}; "
        "continue with the same settings, or give another folder, or move the checkpoints away "
        "to start over; --resume.other_settings=true allows another learning rate, gradient "
        "clipping or precision"
    )


def test_other_classes_are_refused(tmp_path):
    before = optimizer_arguments.describe(optimizing())
    trainer = optimizing()
    trainer.lr_scheduler_configs = []
    setting = "ExactResume(dirpath=...)"
    run = run_of(trainer, tmp_path, setting=setting)
    run = resumed(run, same_run=SAME_RUN | {"optimizers": before})
    with pytest.raises(
        UserError,
        match=rf"^ExactResume\(dirpath={tmp_path}\): step.* the scheduler was CosineAnnealingLR, "
        r"is none; .*; ExactResume\(other_settings=True\) allows another",
    ):
        run.same_run.compare_optimizers(same_limits=True)
