"""An epoch's sums go on as Lightning has made them."""

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
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
    lightning_metrics.restore_epoch_sums(
        trainers[1], lightning_metrics.epoch_sums(trainers[0]), torch.device("cpu")
    )
    assert log(trainers[0], 1.0) == log(trainers[1], 1.0)
