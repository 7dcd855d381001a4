"""What was logged within an epoch comes back within it."""

import pytest
import torch
from pytorch_lightning import LightningModule
from untrained import resumed, run_of, trainer_of

from sagemaker_lightning.resume.parts import epoch_sums
from sagemaker_lightning.resume.parts.epoch_sums import EpochSums
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.resume_point import ResumePoint


@pytest.mark.parametrize("point", list(ResumePoint))
def test_the_sums_of_an_epoch_are_restored_within_it(monkeypatch, point):
    restored = []
    monkeypatch.setattr(
        epoch_sums.lightning_metrics,
        "restore_epoch_sums",
        lambda trainer, *saved: restored.append(saved),
    )
    run = resumed(run_of(trainer_of(LightningModule())), point, epoch_sums="sums")
    run.part(EpochSums).restore("sums", Moment.TRAINING)
    within = point is not ResumePoint.EPOCH
    assert restored == [(["sums"], ["sums"], torch.device("cpu"))] * within
