"""compat/lightning_metrics.py: what an epoch has logged, in another trainer."""

import copy

import pytorch_lightning
import torch
from boring_fits import fit
from pytorch_lightning.demos.boring_classes import BoringModel
from torchmetrics import MaxMetric

from sagemaker_lightning.compat import lightning_metrics


class Logs(BoringModel):
    """A model that logs the values that it is given, in each way that Lightning has."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values
        self.largest = MaxMetric()

    def training_step(self, batch, batch_idx):
        value = torch.tensor(self.values[batch_idx])
        self.largest(value)
        self.log("loss", value, on_step=True, on_epoch=True)
        self.log("sum", value, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log("of a group", value, on_step=False, on_epoch=True, sync_dist_group="a group")
        return super().training_step(batch, batch_idx)


def test_an_epochs_logged_values_continue_in_another_trainer():
    """But not those of a group of processes, which cannot be saved."""
    saved = {}

    class Save(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                saved["sums"] = copy.deepcopy(lightning_metrics.epoch_sums(trainer))
                saved["newest"] = lightning_metrics.newest_values(trainer)

    class Restore(pytorch_lightning.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.largest.update(2.0)
            assert trainer.callback_metrics == {}
            lightning_metrics.set_newest_values(trainer, saved["newest"])
            assert trainer.callback_metrics == saved["newest"]["_callback_metrics"]
            device = torch.device("cpu")
            sums = [saved["sums"]]
            lightning_metrics.restore_epoch_sums(trainer, sums, sums, device)
            results = trainer.fit_loop.epoch_loop._results
            assert results["training_step.loss"]._forward_cache == 2
            assert results["training_step.sum"]._forward_cache is None

    alone = fit(Logs(1.0, 2.0, 4.0, 8.0), Save()).callback_metrics
    assert saved["newest"]["_callback_metrics"]["loss_step"] == 1  # Lightning has not shown the 2
    assert alone["loss_epoch"] == 15 / 4 and alone["sum"] == 15 and alone["largest"] == 8
    resumed = fit(Logs(4.0, 8.0), Restore(), limit_train_batches=2).callback_metrics
    assert alone.pop("of a group") != resumed.pop("of a group") == 6
    assert resumed == alone
