"""What this process knows of the trainings that it has brought to their end."""

from pathlib import Path

import pytest
from pytorch_lightning import LightningModule

from sagemaker_lightning.resume.same_run import earlier_fits

FOLDER, OTHER = Path("/a"), Path("/b")


@pytest.fixture(autouse=True)
def new_process(monkeypatch) -> None:
    """Know of no training."""
    monkeypatch.setattr(earlier_fits, "_finished", {})


def test_another_model_is_known_by_the_folder():
    model, other = LightningModule(), LightningModule()
    assert not earlier_fits.was_of_another_model(FOLDER, other)
    earlier_fits.note_finished(FOLDER, model, 7)
    assert earlier_fits.was_of_another_model(FOLDER, other)
    assert not earlier_fits.was_of_another_model(FOLDER, model)
    assert not earlier_fits.was_of_another_model(OTHER, other)


def test_a_training_that_saves_nothing_leaves_the_checkpoint_of_the_one_before():
    """It had nothing left to train."""
    assert not earlier_fits.has_saved(FOLDER, 7)
    for number, newest in ((7, 7), (0, 7), (9, 9)):
        earlier_fits.note_finished(FOLDER, LightningModule(), number)
        assert earlier_fits.has_saved(FOLDER, newest)
        assert not earlier_fits.has_saved(FOLDER, newest + 1)
        assert not earlier_fits.has_saved(OTHER, newest)
