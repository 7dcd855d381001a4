"""A ThroughputMonitor counts on from what it has counted before the interruption."""

from pytorch_lightning.callbacks import ThroughputMonitor
from pytorch_lightning.trainer.states import RunningStage
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.lightning_callbacks.throughput import ThroughputCounts
from sagemaker_lightning.resume.parts.part import Moment


def part_of(*monitors: ThroughputMonitor) -> ThroughputCounts:
    for monitor in monitors:
        for counts in (monitor._batches, monitor._samples, monitor._lengths):
            counts[RunningStage.TRAINING] = 0
    return run_of(in_epoch_5(callbacks=[*monitors])).part(ThroughputCounts)


def test_the_counts_come_back():
    one, other = ThroughputMonitor(len), ThroughputMonitor(len)
    part = part_of(one, other)
    one._samples[RunningStage.TRAINING] = 24
    other._batches[RunningStage.TRAINING] = 3
    saved = part.save(None, None)
    one, other = ThroughputMonitor(len), ThroughputMonitor(len)
    part_of(one, other).restore(saved, Moment.TRAINING)
    assert one._samples == {RunningStage.TRAINING: 24} and one._batches == {
        RunningStage.TRAINING: 0
    }
    assert other._batches == {RunningStage.TRAINING: 3}


def test_only_counts_of_stages_that_run_are_taken():
    monitor = ThroughputMonitor(len)
    saved = [{"samples": {"train": -1, "validate": 5}, "batches": {"train": "5"}}, {}]
    part_of(monitor).restore(saved, Moment.TRAINING)
    assert monitor._samples == monitor._batches == {RunningStage.TRAINING: 0}
