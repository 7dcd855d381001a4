"""Who receives the signals of a training."""

import signal

import pytest
import pytorch_lightning as pl
from short_fits import Noted, saved, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Stopping(pl.Callback):
    """Is stopped when Lightning has installed its handlers, and nothing else has."""

    def on_sanity_check_start(self, trainer, pl_module):
        signal.raise_signal(signal.SIGTERM)


def test_a_sigterm_that_lightning_receives_before_training_stops_it(tmp_path):
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    model = Noted()
    try:
        with pytest.raises(SystemExit) as ended:
            trainer(tmp_path, Stopping(), num_sanity_val_steps=2).fit(model)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert set(saved(tmp_path)) <= {0, 1}
    assert not any("end 0" in event for event in model.events)


class Probing(pl.Callback):
    """Trains a model of its own in a hook, in which SIGTERM comes."""

    def __init__(self, folder):
        self.folder = folder
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        probe = pl.Trainer(
            max_steps=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Stopped()],
        )
        probe.fit(Noted())
        self.steps.append(probe.global_step)


class Stopped(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        signal.raise_signal(signal.SIGTERM)


def test_a_sigterm_within_a_hooks_own_training_stops_the_training_of_the_hook(tmp_path):
    """At the end of its batch, with a checkpoint; Lightning would end with exit status 0."""
    probing = Probing(tmp_path)
    with pytest.raises(SystemExit) as ended:
        trainer(tmp_path, probing).fit(Noted())
    assert ended.value.code == 143
    assert probing.steps == [3] and 1 in saved(tmp_path)
