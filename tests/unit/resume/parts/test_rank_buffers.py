"""Which buffers a checkpoint has beside Lightning's, and how they come back."""

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchmetrics import MeanMetric
from untrained import alike, run_of, trainer_of

from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.rank_buffers import BESIDE, RankBuffers


class Model(LightningModule):
    """Has a layer, buffers of both kinds and what it is given as attributes."""

    def __init__(self, **values) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.register_buffer("saved", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        for name, value in values.items():
            setattr(self, name, value)


class Holding(Callback):
    """Holds something; what its class holds is of all objects, and no state of one."""

    of_all = nn.Linear(1, 1), MeanMetric()

    def __init__(self, **values) -> None:
        vars(self).update(values)


def buffers_of(trainer, gather=alike) -> dict:
    """Return what is saved of the buffers."""
    return run_of(trainer, gather=gather).part(RankBuffers).save(None, None)


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ({}, {"model.hidden"}),
        ({"model.saved": "another"}, {"model.hidden", "model.saved"}),
        ({"model.saved": None, "model.hidden": None}, {"model.hidden", "model.saved"}),
    ],
)
def test_a_buffer_is_saved_if_lightning_does_not_save_it_for_all_ranks(others, names):
    """The state dict has those of rank 0."""
    saved = buffers_of(trainer_of(Model()), lambda own: [own, own | others])
    assert saved.keys() == names


def test_a_buffer_that_the_checkpoint_lacks_is_saved():
    """A user's state_dict() may leave it out."""
    run = run_of(trainer_of(Model()), gather=alike)
    saved = run.part(RankBuffers).save(None, {"state_dict": {"first.weight": 1}})
    assert saved.keys() == {"model.hidden", "model.saved"}


def test_what_is_saved_is_no_part_of_the_model():
    model = Model()
    saved = buffers_of(trainer_of(model))["model.hidden"]
    model.hidden += 1
    assert saved.item() == 0


def test_modules_beside_the_model_are_saved():
    """Of Lightning's own callbacks, only the buffers: they save the rest themselves."""
    averaging = StochasticWeightAveraging(0.1)
    averaging._average_model = nn.Sequential(nn.BatchNorm1d(1))
    model = Model()
    average = nn.Sequential(nn.BatchNorm1d(1))
    callback = Holding(
        average=average,
        of_average=[average[0]],
        of_model=model.first,
        metric=MeanMetric(),
        lazy=nn.LazyLinear(1),
    )
    run = run_of(trainer_of(model, averaging, callback), gather=alike)
    metrics = run.part(Metrics).save(None, None)
    of_all = f"variables.{__name__}.Holding.of_all"
    assert set(metrics["states"]) == {"callbacks.1 Holding.metric", f"{of_all}[1]"}
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert set(run.part(RankBuffers).save(None, None)) == (
        {"model.hidden"}
        | {f"StochasticWeightAveraging._average_model.0.{name}" for name in buffers}
        | {f"{BESIDE}callbacks.1 Holding.average.0.{name}" for name in buffers | {"weight", "bias"}}
        | {f"{BESIDE}{of_all}[0].{name}" for name in ("weight", "bias")}
    )


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_a_buffer_is_restored_with_the_shape_that_it_had(shape):
    model = Model(side=nn.BatchNorm1d(1))
    run = run_of(trainer_of(model, Holding(average=nn.BatchNorm1d(1))), gather=alike)
    saved = run.part(RankBuffers).save(None, None)
    saved["model.hidden"] = torch.full(shape, 3.0)
    run.part(RankBuffers).restore(saved, Moment.TRAINING)
    assert torch.equal(model.hidden, torch.full(shape, 3.0))


def test_each_buffer_is_compared():
    run = run_of(trainer_of(Model()))
    assert run.part(RankBuffers).digest({"model.hidden": 1}, {}) == {"buffers.model.hidden": 1}


class Adapted(Model):
    """Leaves the weights of its first layer out of its state dict, as adapters do."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("first")}


def test_a_weight_that_the_state_dict_has_not_is_saved_once_training_changes_it():
    model = Adapted()
    part = run_of(trainer_of(model), gather=alike).part(RankBuffers)
    part.mark_start()
    assert "model.first.weight" not in part.save(None, None)
    model.first.weight.data += 1
    saved = part.save(None, None)
    assert torch.equal(saved["model.first.weight"], model.first.weight)
    resumed = Adapted()
    part = run_of(trainer_of(resumed), gather=alike).part(RankBuffers)
    part.mark_start()
    part.restore(saved, Moment.TRAINING)
    assert torch.equal(resumed.first.weight, model.first.weight)
    assert part.save(None, None).keys() == saved.keys()


def test_a_weight_that_a_checkpoint_had_is_in_the_next_if_lightning_loads_it_by_another_name():
    """Hooks of a user's may rename weights in the state dict, and name them back to load it."""
    model = Adapted()
    part = run_of(trainer_of(model), gather=alike).part(RankBuffers)
    part.mark_start()
    model.first.weight.data += 1
    saved = part.save(None, None)
    resumed = Adapted()
    resumed.first.weight.data.copy_(model.first.weight)
    part = run_of(trainer_of(resumed), gather=alike).part(RankBuffers)
    part.mark_start()
    part.restore(saved, Moment.TRAINING)
    assert part.save(None, None).keys() == saved.keys()


def test_a_metric_has_no_say_in_which_weights_are_saved():
    """So that no fingerprint of all weights is taken at each start of a model with one."""
    part = run_of(trainer_of(Model(mean=MeanMetric())), gather=alike).part(RankBuffers)
    part.mark_start()
    assert part.at_start == {}
    part = run_of(trainer_of(Adapted()), gather=alike).part(RankBuffers)
    part.mark_start()
    assert part.at_start.keys() == {"first.weight"}


def test_a_module_on_the_meta_device_that_is_kept_beside_the_model_has_no_values():
    """torch.func's tutorial on ensembles has one."""
    assert buffers_of(trainer_of(Model(base=[nn.Linear(1, 1).to("meta")]))).keys() == {
        "model.hidden"
    }


def test_a_weight_that_a_hook_renames_is_in_the_state_dict():
    """As that of activation checkpointing does; buffers, too."""
    model = Model(norm=checkpoint_wrapper(nn.BatchNorm1d(1)))
    part = run_of(trainer_of(model), gather=alike).part(RankBuffers)
    part.mark_start()
    for parameter in model.parameters():
        parameter.data += 1
    assert part.save(None, None).keys() == {"model.hidden"}


def test_a_weight_of_which_other_ranks_parts_have_changed_is_saved():
    """It is shared out: a checkpoint has the parts of all ranks, or none."""

    def gather(own):
        return [own, {"model.first.weight"} if isinstance(own, set) else own]

    part = run_of(trainer_of(Adapted()), gather=gather).part(RankBuffers)
    part.mark_start()
    assert part.save(None, None).keys() == {"model.hidden", "model.first.weight"}
