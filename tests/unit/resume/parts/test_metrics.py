"""The states of torchmetrics that are kept anywhere come back."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks.spike import SpikeDetection
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricTracker,
    PearsonCorrCoef,
    SumMetric,
)
from untrained import in_epoch_5, resumed, run_of, trainer_of

from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.run import Run


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
    resumed(run_of(trainer), metrics=saved).part(Metrics).restore(saved, Moment.TRAINING)
    assert tracker.n_steps == steps
    if steps:
        assert tracker.compute_all().tolist() == list(range(steps))


def test_a_metric_of_lightnings_own_callback_comes_back():
    """Its state_dict() has those states alone that are persistent."""

    def fitted(losses: list[float]) -> tuple[Run, SpikeDetection]:
        spikes = SpikeDetection(window=2)
        run = run_of(trainer_of(LightningModule(), spikes))
        run.mark_start()
        for loss in losses:
            spikes.running_mean.update(torch.tensor(loss))
        return run, spikes

    run, spikes = fitted([1.0, 2.0, 4.0])
    parts = Metrics, UserObjects
    saved = {part.key: run.part(part).save(None, None) for part in parts}
    other, restored = fitted([])
    resumed(other, **saved)
    for part in parts:
        other.part(part).restore(saved[part.key], Moment.TRAINING)
    for each in (spikes, restored):
        each.running_mean.update(torch.tensor(6.0))
    assert restored.running_mean.compute() == spikes.running_mean.compute() == 5.0


def test_each_value_of_a_state_is_compared():
    run = run_of(trainer_of(LightningModule()))
    saved = {"states": {"model.m": {"sum": 1, "seen": [2]}}, "tracked": {}}
    assert run.part(Metrics).digest(saved, {}) == {
        "metrics.model.m.sum": 1,
        "metrics.model.m.seen.0": 2,
    }


class Averaged(Metric):
    """Has a state of which the ranks' mean is taken, and a sum of its own rank alone."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.mean += value
        self.sum += value

    def compute(self) -> list[float]:
        return [self.mean.item(), self.sum.item()]


def measured(world_size: int, rank: int, make, values, saved=()) -> tuple[Metrics, Metric]:
    """Return the part of a rank, and its metric, which gets values after what was saved."""
    metric = make()
    trainer = in_epoch_5(
        world_size=world_size,
        global_rank=rank,
        is_global_zero=rank == 0,
        callbacks=[Holding(metric=metric)],
    )
    run = run_of(trainer)
    if saved:
        ranks = [{"metrics": each} for each in saved]
        resumed(run, world_size=len(saved), ranks=ranks, metrics=saved[0])
        run.part(Metrics).restore(saved[0], Moment.TRAINING)
    for value in values:
        metric.update(value)
    return run.part(Metrics), metric


@pytest.mark.parametrize(
    ("make", "one", "two", "four"),
    [
        (SumMetric, 10, [6, 4], [1, 4, 5, 0]),
        (MaxMetric, 5, [5, 4], [1, 4, 5, -torch.inf]),
        (MeanMetric, 10 / 3, [3, 4], [1, 4, 5, torch.nan]),
        (CatMetric, [1, 4, 5], [[1, 5], 4], [1, 4, 5, []]),
        (
            Averaged,
            [10 / 3, 10],
            [[10 / 3, 6], [10 / 3, 4]],
            [[10 / 3, each] for each in (1, 4, 5, 0)],
        ),
        (lambda: SumMetric(sync_on_compute=False), 10, [6, 4], [1, 4, 5, 1]),
    ],
)
def test_a_metric_continues_with_another_number_of_ranks(make, one, two, four, capsys):
    """All ranks' states are together what those before were together."""
    saved = [
        measured(3, rank, make, [value])[0].save(None, None)
        for rank, value in enumerate((1.0, 4.0, 5.0))
    ]
    for expected in ([one], two, four):
        for rank, value in enumerate(expected):
            _, metric = measured(len(expected), rank, make, [], saved)
            result = metric.compute()
            found = result if isinstance(result, list) else result.tolist()
            assert found == pytest.approx(value, nan_ok=True)
    assert "starts again" not in capsys.readouterr().out


def test_a_metric_that_only_its_class_can_add_up_starts_again_with_a_line(capsys):
    make = PearsonCorrCoef
    saved = []
    for rank in range(2):
        part, metric = measured(2, rank, make, [])
        metric.update(torch.rand(4), torch.rand(4))
        saved.append(part.save(None, None))
    _, metric = measured(3, 1, make, [], saved)
    assert torch.equal(
        metric.mean_x, saved[1]["states"]["callbacks.0 Holding.metric"]["states"]["mean_x"]
    )
    assert capsys.readouterr().out == ""
    _, metric = measured(1, 0, make, [], saved)
    assert metric.update_count == 0
    assert capsys.readouterr().out == (
        "warning: callbacks.0 Holding.metric: 2 ranks have saved states of this metric that cannot "
        "be added up for another number of them: it starts again\n"
    )


def test_a_metric_stays_on_its_device():
    class Watching(Callback):
        def __init__(self):
            self.mean = MeanMetric()

    trainer = Trainer(
        accelerator="cpu", callbacks=[Watching()], logger=False, enable_checkpointing=False
    )
    trainer.strategy.connect(LightningModule())
    trainer.strategy._root_device = torch.device("meta")
    run = run_of(trainer)
    ((_, metric),) = run.reached(MeanMetric)
    metric.update(3.0)
    part = run.part(Metrics)
    saved = part.save(None, None)
    run.resumed = SimpleNamespace(of_data_ranks=lambda part: ([saved], [saved]))
    metric.reset()
    part.restore(saved, Moment.TRAINING)
    assert metric.mean_value.device.type == "cpu" and metric.compute() == 3.0
