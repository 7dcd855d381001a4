"""The states of torchmetrics that are kept anywhere come back."""

import pytest
from pytorch_lightning import Callback, LightningModule, Trainer
from torchmetrics import MeanMetric, MetricTracker
from untrained import run_of, trainer_of

from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment


class Holding(Callback):
    """Holds something."""

    def __init__(self, **values) -> None:
        vars(self).update(values)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_tracker_has_as_many_steps_as_it_had(steps):
    """A hook at the start of training may have made one."""

    def tracked(values) -> tuple[Trainer, MetricTracker]:
        tracker = MetricTracker(MeanMetric(), maximize=True)
        for value in values:
            tracker.increment()
            tracker.update(value)
        return trainer_of(LightningModule(), Holding(tracker=tracker)), tracker

    saved = run_of(tracked(range(steps))[0]).part(Metrics).save(None, None)
    trainer, tracker = tracked([9.0])
    run_of(trainer).part(Metrics).restore(saved, Moment.TRAINING)
    assert tracker.n_steps == steps
    if steps:
        assert tracker.compute_all().tolist() == list(range(steps))


def test_each_value_of_a_state_is_compared():
    run = run_of(trainer_of(LightningModule()))
    saved = {"states": {"model.m": {"sum": 1, "seen": [2]}}, "tracked": {}}
    assert run.part(Metrics).digest(saved, {}) == {
        "metrics.model.m.sum": 1,
        "metrics.model.m.seen.0": 2,
    }
