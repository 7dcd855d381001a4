"""StochasticWeightAveraging continues in its epochs."""

from types import SimpleNamespace

import pytest
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import nn

from sagemaker_lightning.resume.parts.lightning_callbacks.weight_averaging import (
    continue_averaging,
)
from sagemaker_lightning.resume.resume_point import ResumePoint


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
def test_an_average_continues_in_its_epochs(epoch, point, begins):
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
    continue_averaging(trainer, [[{"lr": 0.25}]], point)
    assert callback.began == begins and not_averaging.began == []
    assert callback._latest_update_epoch == -1 and progress.completed == epoch
    assert callback._accumulate_grad_batches == not_averaging._accumulate_grad_batches == 3
    assert model.weight.item() == 1.0 and optimizer.param_groups[0]["lr"] == 0.25
