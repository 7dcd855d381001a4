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
