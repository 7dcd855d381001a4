"""A ModelCheckpoint has its newest score again, and writes newer files again."""

from pytorch_lightning.callbacks import ModelCheckpoint
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.resume.files import user_checkpoints
from sagemaker_lightning.resume.parts.lightning_callbacks.model_checkpoint import ModelFiles
from sagemaker_lightning.resume.parts.part import Moment


def test_a_score_that_lightning_saves_is_there_again(monkeypatch):
    """One that has none in the checkpoint has none."""
    overwritten = []
    monkeypatch.setattr(
        user_checkpoints, "overwrite_later_files", lambda *given: overwritten.append(given)
    )
    known, new = ModelCheckpoint(monitor="a"), ModelCheckpoint(monitor="b")
    new.current_score = 5
    trainer = in_epoch_5(checkpoint_callbacks=[known, new, object()])
    states = {known.state_key: {"current_score": 0.5}}
    run = resumed(run_of(trainer), checkpoint={"callbacks": states})
    run.part(ModelFiles).restore({"a": ["b.ckpt"]}, Moment.LOADING)
    assert (known.current_score, new.current_score) == (0.5, None)
    assert overwritten == [(trainer, {"a": ["b.ckpt"]})]
