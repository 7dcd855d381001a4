"""What a hook of the user's has replaced in a checkpoint is what training continues with."""

import pytest
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.compat import lightning_checkpoints
from sagemaker_lightning.resume.parts.before_hooks import BeforeHooks
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.weights import Weights
from sagemaker_lightning.resume.run import Run


@pytest.mark.parametrize("replaced", [{}, {"state_dict": "trained"}, {"optimizer_states": "own"}])
def test_what_was_trained_is_loaded(monkeypatch, replaced):
    """Their on_load_checkpoint gets the weights that they have saved."""
    loaded = []
    monkeypatch.setattr(
        lightning_checkpoints, "load_weights", lambda trainer, weights: loaded.append(weights)
    )
    accepted = []
    monkeypatch.setattr(Run, "accept", lambda run, checkpoint: accepted.append({**checkpoint}))
    file = {"state_dict": "an average", "optimizer_states": "none"}
    run = resumed(run_of(in_epoch_5()), checkpoint=file | {BeforeHooks.key: dict(replaced)})
    run.part(BeforeHooks).restore(run.resumed.checkpoint, Moment.LOADING)
    has_weights = "state_dict" in replaced
    assert loaded == ["trained"] * has_weights
    assert run.part(Weights).trained == ("trained" if has_weights else None)
    assert run.resumed.checkpoint == file | {**replaced, "state_dict": "an average"}
    assert accepted == [run.resumed.checkpoint]


def test_what_was_trained_is_compared():
    checkpoint = {"state_dict": "an average", BeforeHooks.key: {"state_dict": "trained"}}
    run = resumed(run_of(in_epoch_5()), checkpoint=checkpoint)
    assert run.resumed.saved(run.part(Weights))["state_dict"] == "trained"
    assert run.resumed.of(Weights)["state_dict"] == "an average"
