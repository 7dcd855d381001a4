"""Parameter groups that hooks had made are made again, before their states are loaded."""

from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from short_fits import Noted, alone_and_resumed, trainer
from torch import nn
from torch.nn.utils import prune
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.parameter_groups import ParameterGroups
from sagemaker_lightning.resume.parts.part import Moment


def part_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> ParameterGroups:
    """Return the part of a run that has a model and optimizers."""
    trainer = in_epoch_5(lightning_module=model, optimizers=list(optimizers))
    return run_of(trainer).part(ParameterGroups)


def test_groups_that_hooks_have_made_are_made_again():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second = ([*part.parameters()] for part in model)
    trained = torch.optim.SGD(first, 0.1)
    trained.add_param_group({"params": [second[1], second[0], nn.Parameter(torch.zeros(1))]})
    trained.add_param_group({"params": []})
    others = torch.optim.SGD(second, 0.1)
    saved = part_of(model, trained, others).save(None, None)
    assert saved == [
        [["0.weight", "0.bias"], ["1.bias", "1.weight", ""], []],
        [["1.weight", "1.bias"]],
    ]
    saved[0][1].pop()
    optimizer = torch.optim.SGD([*second[:1], *first], 0.1)
    members = optimizer.param_groups[0]["params"]
    part = part_of(model, optimizer)
    part.restore(saved, Moment.OPTIMIZERS)
    assert [[id(each) for each in group["params"]] for group in optimizer.param_groups] == [
        [*map(id, first)],
        [id(second[1]), id(second[0])],
        [],
    ]
    assert optimizer.param_groups[0]["params"] is members  # LBFGS keeps the list
    part.restore([[["absent"]]], Moment.OPTIMIZERS)
    assert [*map(id, members)] == [*map(id, first)]
    part.restore([[[*dict(model.named_parameters())]]], Moment.OPTIMIZERS)
    assert [*map(id, members)] == [*map(id, [*first, *second])]


def test_a_group_that_was_made_of_pruned_weights_has_their_order_before_they_are_pruned():
    trained, model = nn.Linear(3, 2), nn.Linear(3, 2)
    prune.l1_unstructured(trained, "weight", 0.5)
    saved = part_of(trained, torch.optim.SGD(trained.parameters(), 0.1)).save(None, None)
    assert saved == [[["bias", "weight_orig"]]]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    part_of(model, optimizer).restore(saved, Moment.OPTIMIZERS)
    members = optimizer.param_groups[0]["params"]
    assert [*map(id, members)] == [id(model.bias), id(model.weight)]


@pytest.mark.parametrize(
    ("grows", "is_models", "lines"), [(0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1)]
)
def test_a_group_that_no_run_can_be_resumed_with_is_named_once(capsys, grows, is_models, lines):
    """A group of the program's own is there again whatever it holds."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.bias, nn.Parameter(torch.zeros(1))], 0.1)
    part = part_of(model, optimizer)
    part.hooks_begin()
    part.save(None, None)
    added = model.weight if is_models else nn.Parameter(model.weight)
    if grows:
        optimizer.param_groups[0]["params"].append(added)
    else:
        optimizer.add_param_group({"params": added})
    for _ in range(2):
        part.save(None, None)
    said = "warning: a parameter group of optimizer 0 has got weights that the model does not have"
    assert capsys.readouterr().out.count(said) == lines


def test_a_weight_in_place_of_another_is_in_its_own_group_alone(monkeypatch):
    """The group of the one that is gone keeps a weight that no model has."""
    trained = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    trained.weight = nn.Parameter(torch.zeros(2, 1))
    optimizer.add_param_group({"params": [trained.weight]})
    saved = part_of(trained, optimizer).save(None, None)
    assert saved == [[["", "bias"], ["weight"]]]
    model = nn.Linear(1, 2)
    resumed = torch.optim.SGD(model.parameters(), 0.1)
    copied = []
    monkeypatch.setattr(nn.Parameter, "detach", lambda self: copied.append(self) or self.data)
    part_of(model, resumed).restore([[["weight", "bias"]]], Moment.OPTIMIZERS)
    monkeypatch.undo()
    assert copied == []  # no weight is copied where none has another's place
    part_of(model, resumed).restore(saved, Moment.OPTIMIZERS)
    (gone, bias), (weight,) = (group["params"] for group in resumed.param_groups)
    assert weight is model.weight and bias is model.bias
    assert gone is not weight and gone.shape == weight.shape
    # A model that has none in its place keeps the group as it is.
    other = nn.Linear(1, 2)
    unchanged = torch.optim.SGD([gone, other.bias], 0.1)
    part_of(other, unchanged).restore([[["", "bias"]]], Moment.OPTIMIZERS)
    assert unchanged.param_groups[0]["params"][0] is gone


class Layered(Noted):
    """Has two layers that callbacks unfreeze."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        (values,) = batch
        return super().training_step([self.second(self.first(values))], batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.line.parameters(), 0.1)


class Unfreezing(BaseFinetuning):
    """Unfreezes a layer when an epoch begins; Lightning saves by class."""

    name, epoch = "first", 1

    def freeze_before_training(self, pl_module):
        self.freeze(getattr(pl_module, self.name))

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(getattr(pl_module, self.name), optimizer)


class UnfreezingLater(Unfreezing):
    name, epoch = "second", 2


def test_two_callbacks_add_groups_to_an_optimizer(tmp_path):
    """Lightning gives it the groups of the last one alone, and cannot load its state."""

    def train(folder: Path, stop: str = "") -> dict:
        torch.manual_seed(1)
        model = Layered(stop=stop)
        fitted = trainer(folder, Unfreezing(), UnfreezingLater(), max_epochs=4)
        fitted.callbacks.reverse()  # ours comes first
        fitted.fit(model)
        return {name: value.tolist() for name, value in model.state_dict().items()}

    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2", "batch 2:2")
    assert resumed == alone
