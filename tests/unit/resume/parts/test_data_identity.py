"""What tells the data and the model's modules from others, and what modules get while training."""

from types import SimpleNamespace

import pytest
from short_fits import Noted, trainer
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from untrained import run_of
from user_state import Model, state_of, trainer_of

from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.resume_point import ResumePoint


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


def test_arrays_of_a_model_that_was_trained_before_are_not_compared():
    """The program may have changed them since, and trains on other data next."""
    state = state_of()
    part = state.run.part(DataIdentity)
    saved = {"numbers model.a": 1, "numbers callbacks.0 A.b": 2, "length x": 3}
    assert part.digest(saved, {}) == saved
    state.run.same_run.has_trained_before = True
    state.run.resumed = SimpleNamespace(saved_at=ResumePoint.BATCH)
    assert part.digest(saved, {}) == {"length x": 3}
    state.run.resumed.saved_at = ResumePoint.EPOCH
    assert part.digest(saved, {}) == {}


def test_messages_name_what_is_compared():
    run = run_of(trainer_of(Model()))
    for part, name, text in (
        (DataIdentity, "length train.0", "the length of train.0"),
        (DataIdentity, "numbers model.a", "the numbers in model.a"),
        (Structure, "class and hooks model.b", "the class or the hooks of model.b"),
        (Structure, "hooks optimizers.0", "the hooks of optimizers.0"),
        (Modes, "eval body", "eval body"),
    ):
        assert run.part(part).shown(name) == text


def test_data_that_two_loaders_share_may_have_the_name_of_either():
    part = run_of(trainer_of(Model())).part(DataIdentity)
    before = {"numbers val.0.dataset.tensors": 5, "length val.0": 5}
    now = {"numbers train.0.dataset.tensors": 5, "length val.0": 5}
    assert part.differing(before, now) == []
    assert part.differing(before, now | {"numbers train.0.dataset.tensors": 6}) == [
        "numbers val.0.dataset.tensors"
    ]
    assert part.differing(before, {"numbers train.0.dataset.tensors": 5}) == ["length val.0"]
