"""A resume goes on with what was trained, whatever the user's hooks put into the file."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from short_fits import Noted, as_in_a_new_process, interrupted, trainer, weights

from sagemaker_lightning.contract.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Changing(pl.Callback):
    """Changes what a checkpoint has, when it is saved.

    Args:
        change: Gets the model and the checkpoint.
    """

    def __init__(self, change: Any) -> None:
        self.change = change
        self.loaded: list[set[str]] = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.change(pl_module, checkpoint)

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded.append(set(checkpoint["state_dict"]))


def put_an_average(model, checkpoint):
    checkpoint["state_dict"] = {
        name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()
    }


def rename_weights(model, checkpoint):
    state = checkpoint["state_dict"]
    for name in list(state):
        state[f"net.{name}"] = state.pop(name)


def drop(*keys):
    def change(model, checkpoint):
        for key in keys:
            del checkpoint[key]

    return change


def empty_optimizers(model, checkpoint):
    for state in checkpoint["optimizer_states"]:
        state["state"].clear()


CHANGES = {
    "an average in the weights' place": put_an_average,
    "other names": rename_weights,
    "no optimizers": drop("optimizer_states"),
    "optimizers without states": empty_optimizers,
    "no schedulers, loops or callbacks": drop("lr_schedulers", "loops", "callbacks"),
    "no step": drop("epoch", "global_step"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_changes_in_the_file_changes_no_training(tmp_path, change):
    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        model = Noted(**moments)
        changing = Changing(CHANGES[change])
        trainer(tmp_path / folder, changing).fit(model)
        return model, changing

    alone, _ = fitted("alone")
    with interrupted():
        fitted("run", stop="batch 1:1")
    resumed, changing = fitted("run")
    assert weights(resumed) == weights(alone)
    seen = {"net.line.weight", "net.line.bias"}
    if change != "other names":
        seen = {"line.weight", "line.bias"}
    assert changing.loaded == [seen]  # the hook sees what it has saved


class Averaged(torch.optim.SGD):
    """Keeps an average of the weights."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            average.lerp_(parameter.detach(), 0.3)
        return loss

    @torch.no_grad()
    def swap(self):
        for parameter in self.param_groups[0]["params"]:
            if "average" in self.state[parameter]:
                kept = parameter.clone()
                parameter.copy_(self.state[parameter]["average"])
                self.state[parameter]["average"].copy_(kept)


class Swapping(Noted):
    """Validates the average."""

    def configure_optimizers(self):
        return Averaged(self.parameters(), 0.1, momentum=0.9)

    def on_validation_start(self):
        self.optimizers().optimizer.swap()

    def on_validation_end(self):
        self.optimizers().optimizer.swap()


def test_an_average_that_is_swapped_in_for_a_validation_stays_one(tmp_path):
    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        model = Swapping(**moments)
        fit = trainer(tmp_path / folder)
        fit.fit(model)
        averages = [state["average"].tolist() for state in fit.optimizers[0].state.values()]
        return weights(model), averages

    alone = fitted("alone")
    with interrupted():
        fitted("run", stop="validation 1:0")
    assert fitted("run") == alone


class Replaced(Noted):
    """Trains on with another optimizer from its second epoch on."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), 0.01)]


def test_an_optimizer_put_in_anothers_place_is_said_at_once_and_refused_in_a_line(tmp_path, capsys):
    with interrupted():
        trainer(tmp_path).fit(Replaced(stop="batch 1:2"))
    said = [line for line in capsys.readouterr().out.splitlines() if "replaced" in line]
    assert said == [
        "the optimizers were replaced while training (torch.optim.sgd.SGD by "
        "torch.optim.adam.Adam), and a resumed run makes the first ones: after an interruption "
        "this run cannot go on; return them from configure_optimizers()"
    ]
    with pytest.raises(UserError, match="found states of the optimizers torch.optim.adam.Adam"):
        trainer(tmp_path).fit(Replaced())
