"""What this process knows of the trainings that it has brought to their end."""

from pathlib import Path

import pytest
from pytorch_lightning import LightningModule, Trainer

from sagemaker_lightning.resume.same_run import earlier_fits

FOLDER, OTHER = Path("/a"), Path("/b")


@pytest.fixture(autouse=True)
def new_process(monkeypatch) -> None:
    """Know of no training."""
    monkeypatch.setattr(earlier_fits, "_finished", {})


def noted(folder: Path, fit: int, number: int, model: LightningModule) -> Trainer:
    """Note that a training of a new trainer has come to its end; return the trainer."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.connect(model)
    earlier_fits.note_finished(folder, trainer, fit, number)
    return trainer


def test_another_model_is_known_by_the_folder():
    model, other = LightningModule(), LightningModule()
    assert not earlier_fits.was_of_another_model(FOLDER, other)
    _kept = noted(FOLDER, 1, 7, model)
    assert earlier_fits.was_of_another_model(FOLDER, other)
    assert not earlier_fits.was_of_another_model(FOLDER, model)
    assert not earlier_fits.was_of_another_model(OTHER, other)


def test_a_training_that_saves_nothing_leaves_the_checkpoint_of_the_one_before():
    """It had nothing left to train."""
    assert not earlier_fits.has_saved(FOLDER, 1, 7)
    for fit, number, newest in ((1, 7, 7), (1, 0, 7), (1, 9, 9), (2, 0, 0)):
        noted(FOLDER, fit, number, LightningModule())
        assert earlier_fits.has_saved(FOLDER, fit, newest)
        assert not earlier_fits.has_saved(FOLDER, fit, newest + 1)
        assert not earlier_fits.has_saved(FOLDER, fit + 1, newest)
        assert not earlier_fits.has_saved(OTHER, fit, newest)


def test_the_next_training_of_a_trainer_is_another_one():
    model = LightningModule()
    trainer = noted(FOLDER, 2, 7, model)
    another = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert earlier_fits.next_fit(FOLDER, trainer) == 3
    assert earlier_fits.next_fit(FOLDER, another) == 2
    assert earlier_fits.next_fit(OTHER, trainer) == 1
