"""A LearningRateMonitor has the rates of all steps, whenever it was interrupted."""

from pytorch_lightning.callbacks import LearningRateMonitor
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.lightning_callbacks.learning_rates import NotedRates
from sagemaker_lightning.resume.parts.part import Moment


def part_of(monitor: LearningRateMonitor) -> NotedRates:
    monitor.lrs = {"lr-SGD": [], "lr-Adam": []}
    return run_of(in_epoch_5(callbacks=[monitor])).part(NotedRates)


def test_the_rates_come_back():
    """Also under a name that was added, or is no more, since the hooks at the start set the names.

    StochasticWeightAveraging, say, takes another scheduler.
    """
    monitor, resumed = LearningRateMonitor(), LearningRateMonitor()
    part = part_of(monitor)
    monitor.lrs["lr-SGD"] += [0.1, 0.05]
    saved = part.save(None, None)
    saved[0]["cosine"] = saved[0]["lr-SGD"]
    part_of(resumed).restore(saved, Moment.TRAINING)
    assert resumed.lrs == {"lr-SGD": [0.1, 0.05], "lr-Adam": [], "cosine": [0.1, 0.05]}


def test_names_of_a_training_before_do_not_come_back():
    monitor, resumed = LearningRateMonitor(), LearningRateMonitor()
    saved = part_of(monitor).save(None, None)
    part = part_of(resumed)
    resumed.lrs = {"lr-SGD": [], "lr-AdamW": []}
    part.restore(saved, Moment.TRAINING)
    assert resumed.lrs == {"lr-SGD": [], "lr-AdamW": []}


def test_a_start_with_nothing_left_has_them_too():
    """Lightning calls no hook there that sets the names."""
    monitor, resumed = LearningRateMonitor(), LearningRateMonitor()
    part = part_of(monitor)
    monitor.lrs["lr-SGD"] += [0.1, 0.05]
    saved = part.save(None, None)
    other = part_of(resumed)
    resumed.lrs = {}
    other.restore(saved, Moment.HOOKS)
    assert resumed.lrs == {"lr-SGD": [0.1, 0.05], "lr-Adam": []}
