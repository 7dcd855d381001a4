"""compat/lightning_checkpoints.py: what is loaded without code, and what is not a checkpoint."""

import pickle
import types

import pytest
from pytorch_lightning.trainer.states import TrainerFn

from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.contract.errors import UserError


@pytest.mark.parametrize(
    ("given", "passed"),
    [({}, True), ({"weights_only": None}, True), ({"weights_only": False}, False)],
)
def test_a_checkpoint_is_loaded_without_its_code_unless_somebody_has_chosen_that(given, passed):
    """Lightning has the choice since 2.6."""
    called = []

    class Connector:
        _loaded_checkpoint = dict.fromkeys(("state_dict", "optimizer_states", "lr_schedulers"))

        def resume_start(self, checkpoint_path=None, weights_only=None):
            called.append((checkpoint_path, weights_only))

    class EarlierConnector(Connector):
        def resume_start(self, checkpoint_path=None):
            called.append((checkpoint_path,))

    for connector in (Connector(), EarlierConnector()):
        trainer = types.SimpleNamespace(
            _checkpoint_connector=connector, state=types.SimpleNamespace(fn=TrainerFn.FITTING)
        )
        lightning_checkpoints.replace_loading(trainer, lambda path: path == "ours", len)
        connector.resume_start("ours", **given)
        connector.resume_start("other", **given)
    assert called == [("other", passed), ("other",)]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(2, "No such file", "x"),
            r"read \(No such file\); expected one that a T",
        ),
        (OSError("odd"), r"read \(OSError: odd\); expected"),
        (KeyError(101), r"read \(KeyError: 101\); expected"),
        (ValueError("a. b\nc"), r"read \(ValueError: a\); expected"),
        (
            pickle.UnpicklingError("Weights only load failed. x\nWeightsUnpickler error: no"),
            r"read \(no\); expected .* saved, or weights_only=False if its objects are yours$",
        ),
        (
            pickle.UnpicklingError("Weights only load failed: y"),
            r"read \(UnpicklingError: Weights only load failed: y\); .*, or weights_only=False",
        ),
    ],
)
def test_a_file_that_is_not_a_checkpoint_says_so(error, says):
    with pytest.raises(UserError, match=says), lightning_checkpoints._refused("x.ckpt"):
        raise error
    with pytest.raises(MemoryError), lightning_checkpoints._refused("x.ckpt"):
        raise MemoryError
