"""Another number of ranks shares out the rest of an epoch."""

from types import SimpleNamespace

import pytest
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts import epoch_position
from sagemaker_lightning.resume.parts.epoch_position import EpochPosition
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.resume_point import ResumePoint


class Plan:
    """The plan of an epoch that other ranks began."""

    def continue_from(self, epoch, reached):
        self.began = epoch, reached

    def of_epoch(self, epoch):
        return "order", 10 * epoch


def loads(plan) -> SimpleNamespace:
    return SimpleNamespace(batch_plan=SimpleNamespace(epoch_plan=plan))


def test_the_rest_of_an_epoch_is_shared_out_anew():
    plan = Plan()
    trainer = in_epoch_5(train_dataloader=loads(plan))
    run = resumed(run_of(trainer), ResumePoint.BATCH, world_size=2)
    run.part(EpochPosition).restore(6, Moment.HOOKS)
    assert plan.began == (5, 6)
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.current).values()) == {50}


@pytest.mark.parametrize(
    ("loader", "reached"), [(None, 6), (loads(None), 6), (loads(Plan()), None)]
)
def test_an_epoch_that_cannot_be_shared_out_anew_is_refused(tmp_path, loader, reached):
    trainer = in_epoch_5(train_dataloader=loader)
    says = (
        f"^--resume.dirpath={tmp_path}: step 12 was saved within an epoch by 2 ranks, and its data "
        "cannot be shared out again among 1; give as many devices and nodes as before$"
    )
    run = resumed(run_of(trainer, tmp_path), ResumePoint.BATCH, world_size=2)
    with pytest.raises(UserError, match=says):
        run.part(EpochPosition).restore(reached, Moment.HOOKS)
    for point, ranks in ((ResumePoint.EPOCH, 2), (ResumePoint.BATCH, 1)):
        run = resumed(run_of(trainer, tmp_path), point, world_size=ranks)
        run.part(EpochPosition).restore(reached, Moment.HOOKS)
    assert set(vars(trainer.fit_loop.epoch_loop.batch_progress.current).values()) == {1}


def test_how_far_an_epoch_is_is_saved_within_it(monkeypatch):
    monkeypatch.setattr(epoch_position, "reached", lambda trainer: trainer.current_epoch)
    part = run_of(in_epoch_5()).part(EpochPosition)
    saved = [part.save(point, None) for point in ResumePoint]
    assert saved == [5 if point is not ResumePoint.EPOCH else None for point in ResumePoint]
