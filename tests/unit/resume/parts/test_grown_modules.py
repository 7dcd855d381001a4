"""Optimizers are made again of the modules as they are at the start."""

from pathlib import Path

import pytest
import torch
from short_fits import Noted, alone_and_resumed, training, weights
from torch import nn

from sagemaker_lightning.resume.parts.grown_modules import GrownModules


class Growing(nn.Module):
    """Has no head yet, and gets one and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.head = None

    def grow(self) -> None:
        del self.head
        self.head = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.add_module("last", nn.Identity())


def test_what_a_module_has_got_is_away_within_the_block():
    module = Growing()
    grown = GrownModules([module])
    names_at_start = [name for name, _ in module.named_parameters()]
    module.grow()
    head = module.head
    state = list(module.state_dict())
    children = [name for name, _ in module.named_children()]
    with grown.without_what_they_got():
        assert module.head is None and not hasattr(module, "scale") and not hasattr(module, "count")
        assert [name for name, _ in module.named_parameters()] == names_at_start
    assert module.head is head and list(module.state_dict()) == state
    assert [name for name, _ in module.named_children()] == children


def test_what_the_block_makes_stays():
    module = Growing()
    grown = GrownModules([module])
    module.grow()
    with grown.without_what_they_got():
        module.made = nn.Identity()
    assert isinstance(module.made, nn.Identity) and isinstance(module.head, nn.Linear)


def test_what_was_replaced_is_there_within_the_block_in_its_order():
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    first, weight = module[0], module[0].weight
    grown = GrownModules([module, first])
    module[0] = last = nn.Linear(1, 3)
    first.weight = other = nn.Parameter(torch.ones(2, 1))
    with grown.without_what_they_got():
        assert list(module) == [first, module[1]] and first.weight is weight
        assert [name for name, _ in first.named_parameters()] == ["weight", "bias"]
        module[1] = made = nn.Tanh()
    assert list(module) == [last, made] and first.weight is other


class Replacing(Noted):
    """Gets a larger head, and trains it besides."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.head = nn.Identity()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.head = nn.Sequential(nn.Linear(2, 2), nn.GELU())
            self.optimizers().add_param_group({"params": list(self.head.parameters())})

    def training_step(self, batch, batch_idx):
        return super().training_step([self.head(batch[0]), *batch[1:]], batch_idx)


def test_a_layer_in_the_place_of_another_one_is_trained_on(tmp_path):
    alone, resumed = map(weights, alone_and_resumed(training(Replacing), tmp_path, "batch 1:2"))
    assert resumed == alone and len(alone) == 3 + 6


class Aided(Noted):
    """Has its optimizer train all that it has at its start, and gets a head with its own."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.aid = nn.Linear(2, 1)
            self.of_aid = torch.optim.Adam(self.aid.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            self.of_aid.zero_grad()
            self.aid(batch[0]).square().mean().backward()
            self.of_aid.step()
        return super().training_step(batch, batch_idx)


def test_a_head_with_an_optimizer_of_its_own_that_is_made_while_training_comes_back(tmp_path):
    alone, resumed = map(weights, alone_and_resumed(training(Aided), tmp_path, "batch 1:2"))
    assert resumed == alone and len(alone) == 6


class Widening(Noted):
    """Gets another line while it is trained, which takes the first one's place in its optimizer."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.line = nn.Linear(2, 1)
            self.optimizers().optimizer.state.clear()
            self.optimizers().optimizer.param_groups[0]["params"] = [*self.line.parameters()]


@pytest.mark.parametrize("stop", ["batch 1:2", "end 1", "batch 2:1"])
def test_a_new_part_is_trained_on_when_data_are_made_anew(tmp_path: Path, stop):
    train = training(Widening, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    alone, resumed = alone_and_resumed(train, tmp_path, stop)
    assert weights(resumed) == weights(alone)


class Boosted(Noted):
    """Has no weights until its optimizer is made, and trains another learner in each epoch."""

    def __init__(self, **moments):
        super().__init__(**moments)
        del self.line
        self.learners = nn.ModuleList()

    def configure_optimizers(self):
        if not self.learners:
            self.learners.append(nn.Linear(2, 1))
        return torch.optim.SGD(self.learners[-1].parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        self.note(f"batch {self.current_epoch}:{batch_idx}")
        before = sum(learner(batch[0]).detach() for learner in self.learners[:-1])
        return (self.learners[-1](batch[0]) - 1 + before).square().mean()

    def on_train_start(self):
        """Do nothing."""

    def validation_step(self, batch, batch_idx):
        """Do nothing."""

    def on_train_epoch_end(self):
        self.learners.append(nn.Linear(2, 1))
        self.trainer.strategy.setup_optimizers(self.trainer)


def test_a_model_whose_first_weights_come_with_its_optimizer_grows_on(tmp_path):
    alone, resumed = map(weights, alone_and_resumed(training(Boosted), tmp_path, "batch 1:2"))
    assert resumed == alone and len(alone) == 9
