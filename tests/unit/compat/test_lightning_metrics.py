"""An epoch's sums continue as Lightning has made them."""

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from untrained import trainer_of

from sagemaker_lightning.compat import lightning_metrics


@pytest.mark.parametrize("reduce_fx", ["mean", torch.sum, sum, min, max, torch.max])
def test_a_resumed_epoch_logs_on_with_the_same_reduction(reduce_fx):
    trainers = [trainer_of(LightningModule()) for _ in range(2)]

    def log(trainer: Trainer, value: float) -> torch.Tensor:
        results = trainer.fit_loop.epoch_loop._results
        results.log(
            "training_step",
            "loss",
            torch.tensor(value),
            on_step=False,
            on_epoch=True,
            reduce_fx=reduce_fx,
            sync_dist_fn=trainer.strategy.reduce,
            batch_size=1,
        )
        return results["training_step.loss"].compute()

    log(trainers[0], 3.0)
    saved = [lightning_metrics.epoch_sums(trainers[0])]
    lightning_metrics.restore_epoch_sums(trainers[1], saved, saved, torch.device("cpu"))
    assert log(trainers[0], 1.0) == log(trainers[1], 1.0)


@pytest.mark.parametrize("reduce_fx", ["mean", sum, max, min])
@pytest.mark.parametrize("is_synced", [False, True])
def test_what_several_ranks_have_logged_is_logged_by_fewer_or_more(reduce_fx, is_synced):
    """All samples count, each once; what is a rank's own is rank 0's on a rank that is new."""

    def logged(trainer: Trainer, value: float | None, size: int = 1) -> float:
        results = trainer.fit_loop.epoch_loop._results
        if value is not None:
            options = {"on_step": False, "on_epoch": True, "sync_dist": is_synced}
            options |= {"reduce_fx": reduce_fx, "batch_size": size}
            options["sync_dist_fn"] = trainer.strategy.reduce
            results.log("training_step", "loss", torch.tensor(value), **options)
        return results["training_step.loss"].compute().item()

    def restored(own: list, everyone: list) -> Trainer:
        trainer = trainer_of(LightningModule())
        lightning_metrics.restore_epoch_sums(trainer, own, everyone, torch.device("cpu"))
        return trainer

    saved = []
    for value, size in ((1.0, 1), (2.0, 1), (4.0, 2)):
        logged(trainer := trainer_of(LightningModule()), value, size)
        saved.append(lightning_metrics.epoch_sums(trainer))
    assert logged(restored(saved, saved), 3.0 if reduce_fx == "mean" else None, 4) == (
        23 / 8 if reduce_fx == "mean" else {sum: 7, max: 4, min: 1}[reduce_fx]
    )
    new = restored([], saved[1:])
    value = {"mean": 3.0, sum: 3.0, max: 1.0, min: 3.0}[reduce_fx]
    expected = {"mean": 5 / 2, sum: 5, max: 2, min: 2}[reduce_fx]
    assert logged(new, value) == (value if is_synced else expected)


@pytest.mark.parametrize("before", [False, True])
def test_whether_ranks_share_a_value_the_first_log_says(before):
    """Lightning takes `sync_dist=True` for False where there is one process."""

    def log(trainer: Trainer, is_synced: bool, **options) -> None:
        options |= {"on_step": False, "on_epoch": True, "sync_dist": is_synced}
        options |= {"sync_dist_fn": trainer.strategy.reduce, "batch_size": 1}
        results = trainer.fit_loop.epoch_loop._results
        results.log("training_step", "loss", torch.tensor(3.0), **options)

    log(trainer := trainer_of(LightningModule()), before)
    saved = [lightning_metrics.epoch_sums(trainer)]
    resumed = trainer_of(LightningModule())
    lightning_metrics.restore_epoch_sums(resumed, saved, saved, torch.device("cpu"))
    for _ in range(2):
        log(resumed, not before)
    metric = resumed.fit_loop.epoch_loop._results["training_step.loss"]
    assert metric.meta.sync.should is not before
    with pytest.raises(MisconfigurationException, match="with different arguments"):
        log(resumed, not before, prog_bar=True)
