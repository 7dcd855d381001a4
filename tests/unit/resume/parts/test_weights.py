"""The model's weights, and what the model gets while it is trained: it comes back, or is said."""

import copy
import functools
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from short_fits import (
    Noted,
    alone_and_resumed,
    as_in_a_new_process,
    interrupted,
    trainer,
    training,
    weights,
)
from torch import distributed, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.nn.utils.parametrize import (
    ParametrizationList,
    register_parametrization,
    remove_parametrizations,
)
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanMetric
from untrained import in_epoch_5, run_of
from untrained import resumed as resuming

from sagemaker_lightning.compat.model_parallel import make_resumable
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts import pruned_weights
from sagemaker_lightning.resume.parts import weights as weights_part
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.weights import loads_itself, other_weights

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Taught(Noted):
    """Copies its layer as a teacher in its second epoch."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.teacher = None

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.teacher = copy.deepcopy(self.line).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.teacher is not None:
            loss = loss + (self.line(batch[0]) - self.teacher(batch[0])).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.line.parameters(), 0.1)


class Helped(Noted):
    """Has a second layer, which it loses or ties in its second epoch."""

    def __init__(self, change, **moments):
        super().__init__(**moments)
        self.change = change
        self.aid = nn.Linear(2, 1)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.change(self)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if getattr(self, "aid", None) is not None:
            loss = loss + (self.aid(batch[0]) - batch[0].sum()).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


def tie(model):
    """Have both layers have one weight."""
    model.aid.weight = model.line.weight


class Grown(Noted):
    """Gets a layer of a class that it has not got at its start."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.more = ParametrizationList([nn.Tanh()], nn.Parameter(torch.ones(1)))


class Parametrized(Noted):
    """Has its layer's weight computed from its second epoch on."""

    def on_train_start(self):
        """Change nothing."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            register_parametrization(self.line, "weight", nn.Tanh())


def fitted(folder, make, **moments):
    """Return a model that was made, and trained, as in a new process."""
    as_in_a_new_process()
    torch.manual_seed(1)
    model = make(**moments)
    trainer(folder).fit(model)
    return model


def test_a_teacher_copied_while_training_is_there_again(tmp_path, capsys):
    alone, resumed = alone_and_resumed(training(Taught), tmp_path, "batch 1:1")
    assert weights(resumed) == weights(alone) and "teacher.weight" in resumed.state_dict()
    assert not resumed.teacher.weight.requires_grad
    assert "cannot" not in capsys.readouterr().out


class Averaged(Noted):
    """Averages its layer from its second epoch on, and trains by the average."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch and batch_idx == 0:
            self.average = AveragedModel(self.line)
        elif self.current_epoch:
            self.average.update_parameters(self.line)
            loss = loss + self.average(batch[0]).detach().mean() * self.line.bias.sum()
        return loss


def test_an_average_that_is_made_while_training_continues(tmp_path, capsys):
    alone, resumed = alone_and_resumed(training(Averaged), tmp_path, "batch 1:1", "batch 1:2")
    assert weights(resumed) == weights(alone) and resumed.average.n_averaged == 3
    assert "cannot" not in capsys.readouterr().out


class Counting(nn.Linear):
    """Counts its calls, and has a metric."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.calls = 0
        self.mean = MeanMetric()

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


class Compilable(Noted):
    """May have a layer that torch.compile has wrapped, and logs that layer's metric."""

    def __init__(self, compiles=False, **moments):
        super().__init__(**moments)
        self.line = Counting()
        if compiles:
            self.line = torch.compile(self.line, backend="eager")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        metric = self.line.mean
        metric.update(loss.detach())
        self.log("mean", metric, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)], ids=str)
def test_torch_compile_may_be_switched_between_runs(tmp_path, capsys, before, after):
    alone = fitted(tmp_path / "alone", Compilable)
    with interrupted():
        fitted(tmp_path / "run", Compilable, stop="batch 1:1", compiles=before)
    resumed = fitted(tmp_path / "run", Compilable, compiles=after)
    assert "the state is as it was saved" in capsys.readouterr().out
    assert weights(resumed) == weights(alone)
    assert resumed.line.calls == alone.line.calls
    assert resumed.trainer.callback_metrics == alone.trainer.callback_metrics


@pytest.mark.parametrize(
    "change",
    [tie, lambda model: delattr(model, "aid"), lambda model: setattr(model, "aid", None)],
    ids=["tied", "deleted", "None"],
)
def test_a_layer_that_is_tied_or_removed_while_training_is_so_after_each_resume(tmp_path, change):
    train = training(functools.partial(Helped, change))
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:1", "batch 1:2")
    assert weights(resumed) == weights(alone)
    has_aid = getattr(resumed, "aid", None) is not None
    assert not has_aid or resumed.aid.weight is resumed.line.weight


@pytest.mark.parametrize(
    ("make", "what", "weight"),
    [
        (
            Grown,
            "model.more is a torch.nn.utils.parametrize.ParametrizationList",
            "more.original",
        ),
        (
            Parametrized,
            "model.line.parametrizations holds a torch.nn.utils.parametrize.ParametrizationList",
            "line.parametrizations.weight.original",
        ),
    ],
)
def test_a_layer_that_no_start_makes_is_said_at_once_and_refused_in_a_line(
    tmp_path, capsys, make, what, weight
):
    with interrupted():
        fitted(tmp_path, make, stop="batch 1:1")
    assert said_of_model(capsys) == [
        f"warning: {what} that was made while training, and a resumed run cannot make it to load "
        "its weights: after an interruption this run cannot continue; make it in __init__() or "
        "configure_model()"
    ]
    with pytest.raises(UserError, match=f"found weights {weight}, which the model lacks"):
        fitted(tmp_path, make)


class Rewritten(Noted):
    """Has its layer replaced by one of torch.fx from its second epoch on."""

    def on_train_start(self):
        """Change nothing."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.line = fx.symbolic_trace(self.line)


def test_a_layer_in_the_place_of_one_with_the_same_weights_refuses_no_resume(tmp_path, capsys):
    with interrupted():
        fitted(tmp_path, Rewritten, stop="batch 1:1")
    (line,) = said_of_model(capsys)
    assert line.startswith("warning: model.line is a torch.fx.graph_module.GraphModule")
    assert "unless a hook makes it again, this run is not exact after an interruption" in line
    fitted(tmp_path, Rewritten)


def said_of_model(capsys) -> list[str]:
    """Return the lines of the model; test_data_identity.py has that of a module's other class."""
    lines = capsys.readouterr().out.splitlines()
    others = [line for line in lines if "while training, which cannot be saved" not in line]
    return [line for line in others if line.startswith("warning: model.")]


class Unparametrized(Noted):
    """Has its layer's weight computed up to its second epoch."""

    def __init__(self, **moments):
        super().__init__(**moments)
        register_parametrization(self.line, "weight", nn.Tanh())

    def on_train_start(self):
        """Change nothing."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            remove_parametrizations(self.line, "weight")


class Unpruned(Unparametrized):
    """Prunes its layer's weight up to its second epoch."""

    def __init__(self, **moments):
        Noted.__init__(self, **moments)
        prune.random_unstructured(self.line, "weight", amount=1)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            prune.remove(self.line, "weight")


@pytest.mark.parametrize("make", [Unparametrized, Unpruned])
def test_a_weight_in_the_place_of_what_was_computed_is_said_at_once(tmp_path, capsys, make):
    with interrupted():
        fitted(tmp_path, make, stop="batch 1:1")
    (said,) = said_of_model(capsys)
    assert said == (
        "warning: model.line.weight was computed at the start and became a weight while training, "
        "and a resumed run will not make it a weight: after an interruption this run cannot "
        "continue; do this after training, or in __init__() or configure_model()"
    )
    with pytest.raises(UserError, match=r"found weights line\.weight, which the model lacks"):
        fitted(tmp_path, make)


def trainer_of(model: pl.LightningModule, *callbacks) -> pl.Trainer:
    """Return a trainer that has a model."""
    found = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    found.callbacks = list(callbacks)
    found.strategy.connect(model)
    model.trainer = found
    return found


class Renaming(Noted):
    """Loads states with other names itself."""

    def on_load_checkpoint(self, checkpoint):
        pass


def test_other_names_are_left_to_code_that_loads_states_itself():
    state = {"other.weight": torch.ones(1)}
    assert other_weights(Noted().state_dict(), state) == [
        "weights other.weight, which the model lacks",
        "no weights line.weight, which the model has",
        "no weights line.bias, which the model has",
    ]
    lenient = Noted()
    lenient.strict_loading = False
    assert not loads_itself(trainer_of(Noted()))
    assert all(loads_itself(trainer_of(model)) for model in (Renaming(), lenient))


class Annotated(Noted):
    """Has hooks that add a number to its state dict, and leave the bias out."""

    def __init__(self, **moments) -> None:
        super().__init__(**moments)
        self.register_state_dict_post_hook(self.annotate)

    @staticmethod
    def annotate(module, state, prefix, metadata):
        state["validated"] = torch.tensor(module.validated)
        del state["line.bias"]


def test_what_hooks_add_to_a_state_dict_and_leave_out_is_as_it_was(tmp_path):
    """Lightning alone could load neither."""
    train = training(Annotated)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 0:2", "batch 1:1")
    assert weights(resumed) == weights(alone) and torch.equal(resumed.line.bias, alone.line.bias)
    assert resumed.validated == alone.validated


def test_buffers_get_the_shapes_that_were_saved():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("grown", torch.zeros(1))
    model.register_buffer("same", torch.zeros(2))
    model.register_buffer("empty", None)
    model.plain = 3
    kept = model.same
    weight = model[0].weight
    state = {
        "grown": torch.ones(3),
        "same": torch.ones(2),
        "empty": torch.ones(2),
        "added": torch.ones(2),
        "plain": torch.ones(2),
        "0.weight": torch.ones(4, 2),
        "0.mean": torch.ones(1),
        "absent.mean": torch.ones(1),
        "no tensor": 3,
    }
    weights_part.resize_buffers(model, state)
    for name in ("grown", "empty", "added"):
        assert torch.equal(getattr(model, name), state[name])
        assert getattr(model, name).data_ptr() != state[name].data_ptr()
    assert model.same is kept and torch.equal(kept, torch.zeros(2)) and model.plain == 3
    assert model[0].weight is weight and torch.equal(weight, torch.ones(4, 2))
    assert weight.data_ptr() != state["0.weight"].data_ptr()
    assert torch.equal(model[0].mean, torch.ones(1)) and "added" in model.state_dict()
    assert not hasattr(model, "no tensor")


@pytest.mark.parametrize(("exactly", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_weights_that_training_has_cast_have_their_dtype_again(exactly, expected):
    model = nn.Linear(2, 2)
    weight = model.weight
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    weights_part.resize_buffers(model, state, exactly)
    assert model.weight is weight and weight.dtype is model.bias.dtype is expected


def test_weights_lie_in_memory_as_training_has_put_them():
    """Sums follow that order, and so does their rounding."""
    model = nn.Conv2d(2, 2, 2)
    weight = model.weight
    trained = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last).state_dict()
    weights_part.resize_buffers(model, trained, exactly=False)
    assert weight.is_contiguous()
    bias = model.bias.data_ptr()
    weights_part.resize_buffers(model, trained)
    assert model.weight is weight and weight.stride() == trained["weight"].stride()
    assert torch.equal(weight, trained["weight"]) and model.bias.data_ptr() == bias


def test_a_part_that_is_cast_while_training_is_so_after_a_resume(tmp_path):
    alone, resumed = alone_and_resumed(training(Casting), tmp_path, "batch 1:1")
    assert weights(resumed) == weights(alone) and resumed.frozen.weight.dtype is torch.bfloat16


class Casting(Noted):
    """Casts a frozen part while it is trained."""

    def __init__(self, **moments):
        super().__init__(**moments)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.frozen.bfloat16()


def test_a_lazy_part_is_left_to_its_own_loading():
    model = nn.Sequential(nn.LazyLinear(2))
    weights_part.resize_buffers(model, {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)})
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)


class Making(pl.LightningModule):
    """Has one part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)


class Extra(pl.LightningModule):
    """Has a state beside its weights, which it replaces when it is loaded."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.counts = {"steps": 0}
        self.again = [self.counts]

    def get_extra_state(self):
        return dict(self.counts)

    def set_extra_state(self, state):
        self.counts = dict(state)


def test_a_state_beside_the_weights_stays_the_object_that_it_is():
    model = Extra()
    run = run_of(trainer_of(model))
    run.mark_start()
    resuming(run)
    run.part(weights_part.Weights).restore({"state_dict": Extra().state_dict()}, Moment.TRAINING)
    assert model.counts is model.again[0]


def test_weights_of_parts_that_come_later_are_taken_out():
    model = Making()
    present = model.state_dict()
    later = {"head.weight": 1, "head.my_mask": 4, "head.weight_orig": 5}
    state = present | later | {"header.weight": 2, "other.weight": 3}
    taken = weights_part.take_later_weights(state, model, {"head", "body"})
    assert taken == later
    assert state == present | {"header.weight": 2, "other.weight": 3}


def test_weights_are_pruned_again():
    """The weights of the module itself, of a part, and what only has such a name."""
    trained = nn.Sequential(nn.Linear(3, 2))
    prune.random_unstructured(trained[0], "weight", 0.5)
    trained.register_buffer("my_mask", torch.ones(1))
    state = dict(trained.state_dict())
    mask, original = state["0.weight_mask"], state["0.weight_orig"]
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("my_mask", torch.ones(1))
    taken = weights_part.take_later_weights(state, model, set())
    assert state.keys() == model.state_dict().keys() and state["0.weight"] is original
    assert taken == {"0.weight_mask": mask, "0.weight_orig": original}
    model.load_state_dict(state)
    for _ in range(2):  # what is pruned already stays so
        pruned_weights.prune_again(model, taken)
    assert torch.equal(model[0].weight_mask, mask) and torch.equal(model[0].weight_orig, original)
    assert torch.equal(model[0].weight, trained[0].weight)
    assert weights_part.take_later_weights(dict(trained.state_dict()), trained, set()) == {}


class Counts(pl.Callback):
    """Counts how often it saves."""

    saved = 0

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved += 1


class OfLightning(pl.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["saved"] = trainer, pl_module


OfLightning.on_save_checkpoint.__module__ = "pytorch_lightning.callbacks.mine"


def test_a_users_code_is_not_asked_to_save_for_the_comparison():
    counts = Counts()
    strategy = SimpleNamespace(lightning_module_state_dict=lambda: {"w": 1})
    trainer = in_epoch_5(strategy=strategy, callbacks=[counts, OfLightning()])
    part = run_of(trainer).part(weights_part.Weights)
    saved = (trainer, trainer.lightning_module)
    assert part.present() == {"state_dict": {"w": 1}, "saved": saved}
    assert counts.saved == 0


def test_each_weight_is_compared_but_for_a_buffer_that_is_the_ranks_own():
    part = run_of(in_epoch_5()).part(weights_part.Weights)
    saved = {
        "state_dict": {"body.weight": 1, "norm.mean": 2},
        "current_model_state": {"weight": 3},
        "averaging_state": {"n": 4},
    }
    assert part.digest(saved, {"rank_buffers": {"model.norm.mean": 5}}) == {
        "state_dict.body.weight": 1,
        "current_model_state.weight": 3,
        "averaging_state.n": 4,
    }


def test_a_model_may_have_more_or_fewer_weights():
    part = run_of(in_epoch_5()).part(weights_part.Weights)
    assert part.differing({"state_dict.w": 4, "averaging_state.n": 5}, {"state_dict.v": 6}) == []
    assert part.differing({"state_dict.w": 4}, {"state_dict.w": 5}) == ["state_dict.w"]


def test_first_weights_are_put_into_the_parts_of_a_sharded_model():
    """A validation before training has gathered them."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = pl.LightningModule()
        model.layer = nn.Linear(2, 1)
        fully_shard(model.layer, mesh=init_device_mesh("cpu", (1,)))
        strategy = ModelParallelStrategy(1, 1)
        make_resumable(strategy)
        strategy._lightning_module = model
        strategy.note_places()
        trainer = in_epoch_5(lightning_module=model, strategy=strategy)
        part = run_of(trainer).part(weights_part.Weights)
        part.at_start = weights_part.values_of(model)
        with torch.no_grad():
            model.layer.weight.fill_(3)
            model.layer(torch.ones(1, 2))
        assert not isinstance(model.layer.weight, DTensor)
        with part.first_weights():
            assert isinstance(model.layer.weight, DTensor)
            assert model.layer.weight.full_tensor().equal(part.at_start["layer.weight"])
        assert model.layer.weight.full_tensor().tolist() == [[3, 3]]
    finally:
        distributed.destroy_process_group()
