"""The newest value of each metric comes back."""

import torch
from pytorch_lightning import LightningModule
from untrained import run_of, trainer_of

from sagemaker_lightning.resume.parts.newest_metrics import NewestMetrics
from sagemaker_lightning.resume.parts.part import Moment


def test_metrics_are_shown_as_they_were():
    trainer = trainer_of(LightningModule())
    trainer._logger_connector._callback_metrics["loss"] = torch.tensor(2.0)
    saved = run_of(trainer).part(NewestMetrics).save(None, None)
    other = trainer_of(LightningModule())
    run_of(other).part(NewestMetrics).restore(saved, Moment.HOOKS)
    assert other.callback_metrics == {"loss": torch.tensor(2.0)}
