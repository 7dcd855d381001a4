"""What tells the data and the model's modules from others: how it is compared and named."""

from types import SimpleNamespace

from untrained import run_of
from user_state import Model, state_of, trainer_of

from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.resume_point import ResumePoint


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
