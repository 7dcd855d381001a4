"""Callback.on_batch_committed and Callback.on_epoch_committed are called when nothing is half done.

To be added to Lightning as tests/tests_pytorch/callbacks/test_committed_hooks.py, with
`lightning.pytorch` in place of `pytorch_lightning`.
"""

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

BATCHES = 4  # of an epoch


class Model(BoringModel):
    """It has a schedule by the step that follows a metric of the validation."""

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {
            "scheduler": scheduler,
            "monitor": "val_loss",
            "interval": "step",
            "frequency": 2,
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Calls(Callback):
    """Writes down the hooks in the order in which they are called, and the counters they see."""

    def __init__(self):
        self.names = []
        self.batches = []
        self.epochs = []
        self.scheduler_steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.names.append("batch_end")

    def on_validation_end(self, trainer, pl_module):
        self.names.append("validation_end")

    def on_train_epoch_end(self, trainer, pl_module):
        self.names.append("epoch_end")

    def on_batch_committed(self, trainer, pl_module):
        self.names.append("batch_committed")
        self.batches.append(counters(trainer.fit_loop.epoch_loop.batch_progress.current))
        self.scheduler_steps.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)

    def on_epoch_committed(self, trainer, pl_module):
        self.names.append("epoch_committed")
        self.epochs.append(counters(trainer.fit_loop.epoch_progress.current))


def counters(progress):
    """Return each of the four counters once, so one number if they agree."""
    return {progress.ready, progress.started, progress.processed, progress.completed}


def trainer_with(tmp_path, *callbacks, **settings):
    settings = {"max_epochs": 1, "val_check_interval": 2, **settings}
    return Trainer(
        default_root_dir=tmp_path,
        limit_train_batches=BATCHES,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )


def test_committed_hooks_come_last(tmp_path):
    """A batch is committed after the validation that follows it, an epoch after its end's hooks."""
    calls = Calls()
    trainer_with(tmp_path, calls).fit(Model())
    batch = ["batch_end", "batch_committed"]
    batch_and_validation = ["batch_end", "validation_end", "batch_committed"]
    assert calls.names == [
        *(batch + batch_and_validation) * (BATCHES // 2),
        "epoch_end",
        "epoch_committed",
    ]


def test_counters_have_moved(tmp_path):
    """In ``on_train_batch_end`` and ``on_train_epoch_end``, `completed` is one behind."""
    calls = Calls()
    trainer_with(tmp_path, calls, max_epochs=2).fit(Model())
    assert calls.batches == [{1}, {2}, {3}, {4}] * 2
    assert calls.epochs == [{1}, {2}]


def test_schedulers_have_stepped(tmp_path):
    """Also those that follow a metric: they step after the validation."""
    calls = Calls()
    trainer_with(tmp_path, calls).fit(Model())
    assert calls.scheduler_steps == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("batch", "last"), [(1, "batch_committed"), (BATCHES - 1, "epoch_committed")]
)
def test_a_stop_by_sigterm_waits_for_the_hook(tmp_path, batch, last):
    """After a batch within an epoch, it waits for on_batch_committed; else for the epoch's."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch_, batch_idx):
            trainer._signal_connector.received_sigterm = batch_idx == batch

    calls = Calls()
    with pytest.raises(SIGTERMException):
        trainer_with(tmp_path, Stop(), calls, max_epochs=5).fit(Model())
    assert calls.names[-1] == last
    assert len(calls.batches) == batch + 1


def test_a_skipped_epoch_commits_no_batch(tmp_path):
    """A batch for which on_train_batch_start returns -1 is not trained; the epoch ends."""

    class Skipping(Model):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    calls = Calls()
    trainer_with(tmp_path, calls).fit(Skipping())
    assert calls.names == ["batch_end", "batch_committed", "epoch_end", "epoch_committed"]


def test_a_metric_cannot_be_logged_there(tmp_path):
    """What belongs to the batch has been logged."""

    class Logging(Callback):
        def on_batch_committed(self, trainer, pl_module):
            pl_module.log("late", 1.0)

    with pytest.raises(MisconfigurationException, match="You can't .* inside `on_batch_committed`"):
        trainer_with(tmp_path, Logging()).fit(Model())


def test_lambda_callback_has_the_hooks(tmp_path):
    calls = []
    callback = LambdaCallback(
        on_batch_committed=lambda *_: calls.append("batch"),
        on_epoch_committed=lambda *_: calls.append("epoch"),
    )
    trainer_with(tmp_path, callback).fit(Model())
    assert calls == ["batch"] * BATCHES + ["epoch"]
