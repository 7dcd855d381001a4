"""Hooks and classes that modules get while training: the next checkpoint cannot hold them."""

import pytest
from short_fits import Noted, trainer
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune


def halve(module, inputs, output):
    return output / 2


class Hooking(Noted):
    """Registers a hook at a moment; each epoch has one of its own while it lasts."""

    def __init__(self, moment: str = "", pruned: bool = False) -> None:
        super().__init__()
        self.moment = moment
        self.pruned = pruned

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.of_epoch = self.line.register_forward_hook(halve)

    def on_train_epoch_end(self):
        self.of_epoch.remove()

    def training_step(self, batch, batch_idx):
        if self.moment == f"batch {self.current_epoch}:{batch_idx}":
            self.line.register_forward_hook(halve)
            self.trainer.optimizers[0].register_step_pre_hook(lambda *_: None)
        if self.pruned and batch_idx == 2:
            prune.l1_unstructured(self.line, "bias", 0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("moment", "count"), [("batch 0:0", 1), ("batch 0:2", 1), ("batch 1:0", 1), ("", 0)]
)
def test_a_hook_that_training_registers_is_said_once(tmp_path, capfd, moment, count):
    trainer(tmp_path, every_n_steps=1).fit(Hooking(moment))
    said = capfd.readouterr().out
    for name in ("model.line", "optimizers.0"):
        says = f"warning: {name} got a hook while training, and hooks cannot be saved"
        assert said.count(says) == count


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Parametrizing(Noted):
    """One layer is parametrized at the start, and another one while training."""

    def __init__(self) -> None:
        super().__init__()
        self.other = parametrizations.weight_norm(nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (1, 1):
            parametrize.register_parametrization(self.line, "weight", Halved())
        return super().training_step(batch, batch_idx)


def test_a_module_that_gets_another_class_is_said_once(tmp_path, capfd):
    trainer(tmp_path, every_n_steps=1).fit(Parametrizing())
    assert capfd.readouterr().out.count(" has become ") == 1
    trainer(tmp_path / "other", every_n_steps=1).fit(Noted())
    assert " has become " not in capfd.readouterr().out


def test_a_hook_of_a_library_is_the_librarys_matter(tmp_path, capfd):
    trainer(tmp_path, every_n_steps=1).fit(Hooking(pruned=True))
    assert "has got a hook" not in capfd.readouterr().out
