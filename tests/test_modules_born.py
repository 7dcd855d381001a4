"""What the model gets while it is trained: it comes back, or is said before and refused after."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from short_fits import Noted, as_in_a_new_process, interrupted, trainer, weights
from torch import nn

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts.model_changes import other_weights

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Taught(Noted):
    """Copies its layer as a teacher in its second epoch."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.teacher = None

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.teacher = copy.deepcopy(self.line).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.teacher is not None:
            loss = loss + (self.line(batch[0]) - self.teacher(batch[0])).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.line.parameters(), 0.1)


class Grown(Noted):
    """Gets a layer of a class that it has not got at its start."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.more = nn.Bilinear(1, 1, 1)


def fitted(folder, make, **moments):
    """Return a model that was made, and trained, as in a new process."""
    as_in_a_new_process()
    torch.manual_seed(1)
    model = make(**moments)
    trainer(folder).fit(model)
    return model


def test_a_teacher_copied_while_training_is_there_again(tmp_path, capsys):
    alone = fitted(tmp_path / "alone", Taught)
    with interrupted():
        fitted(tmp_path / "run", Taught, stop="batch 1:1")
    resumed = fitted(tmp_path / "run", Taught)
    assert weights(resumed) == weights(alone) and "teacher.weight" in resumed.state_dict()
    assert not resumed.teacher.weight.requires_grad
    assert "cannot" not in capsys.readouterr().out


def test_a_layer_that_no_start_makes_is_said_at_once_and_refused_in_a_line(tmp_path, capsys):
    with interrupted():
        fitted(tmp_path, Grown, stop="batch 1:1")
    said = [line for line in capsys.readouterr().out.splitlines() if "model.more" in line]
    assert said == [
        "model.more is a torch.nn.modules.linear.Bilinear that was made while training, and a "
        "resumed run cannot make it to load its weights: after an interruption this run cannot go "
        "on; make it in __init__() or configure_model()"
    ]
    with pytest.raises(UserError, match=r"found weights more\.weight, which the model has not got"):
        fitted(tmp_path, Grown)


def trainer_of(model: pl.LightningModule, *callbacks) -> pl.Trainer:
    """Return a trainer that has a model."""
    found = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    found.callbacks = list(callbacks)
    found.strategy.connect(model)
    model.trainer = found
    return found


class Renaming(Noted):
    """Loads states with other names itself."""

    def on_load_checkpoint(self, checkpoint):
        pass


def test_other_names_are_left_to_code_that_loads_states_itself():
    state = {"other.weight": torch.ones(1)}
    assert other_weights(trainer_of(Noted()), state) == [
        "weights other.weight, which the model has not got",
        "no weights line.weight, which the model has",
        "no weights line.bias, which the model has",
    ]
    lenient = Noted()
    lenient.strict_loading = False
    for model in (Renaming(), lenient):
        assert other_weights(trainer_of(model), state) == []
