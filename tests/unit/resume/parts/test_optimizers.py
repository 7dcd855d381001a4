"""The values of parameter groups, which hooks at the start may change."""

import copy
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from short_fits import (
    Noted,
    alone_and_resumed,
    as_in_a_new_process,
    interrupted,
    trainer,
    training,
    weights,
)
from torch import nn
from torch.optim.swa_utils import SWALR
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts.optimizers import (
    Optimizers,
    Schedulers,
    keeping_defaults,
    restore_group_values,
    sharing_groups,
    undo_conversions,
)

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def test_values_of_groups_are_given_back():
    optimizers = [
        SimpleNamespace(param_groups=[{"lr": 1.0, "params": "x"}, {"lr": 2.0}]),
        SimpleNamespace(param_groups=[{"lr": 3.0}]),
    ]
    saved = [[{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.3, "momentum": 0.5}, {"lr": 9.0}], [{"lr": 7.0}]]
    restore_group_values(SimpleNamespace(optimizers=optimizers), saved)
    assert [optimizer.param_groups for optimizer in optimizers] == [
        [{"lr": 0.1, "params": "x"}, {"lr": 0.2}],
        [{"lr": 0.3, "momentum": 0.5}],
    ]


def test_a_group_that_is_added_after_a_resume_has_the_entries_that_it_has_without_one():
    """torch adds to the defaults of a user's class as it loads a state."""

    def made():
        return torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {"lr": 0.1})

    optimizer, alone = made(), made()
    with keeping_defaults([optimizer]):
        optimizer.load_state_dict(alone.state_dict())
    for each in (optimizer, alone):
        each.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert optimizer.param_groups[1].keys() == alone.param_groups[1].keys()


def test_tensors_of_a_state_keep_their_dtype():
    """torch brings them to their parameters' as they are loaded."""

    def made():
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1)

    optimizer = made()
    exact = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["sum"] = exact
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = made()
    resumed.load_state_dict(saved)
    (state,) = resumed.state.values()
    assert state["sum"].dtype == torch.float32
    undo_conversions(resumed, saved)
    assert torch.equal(state["sum"], exact) and state["sum"] is not saved["state"][0]["sum"]


def test_each_value_of_a_state_is_compared():
    """In optimizers and in schedulers."""
    strategy = SimpleNamespace(optimizer_state=lambda optimizer: {"state": {0: {"step": 1}}})
    scheduler = SimpleNamespace(state_dict=lambda: {"last_epoch": 3})
    run = run_of(
        in_epoch_5(
            strategy=strategy,
            optimizers=["a", "b"],
            lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
        )
    )
    of_optimizers, of_schedulers = run.part(Optimizers), run.part(Schedulers)
    assert of_optimizers.digest(of_optimizers.present(), {}) == {
        "optimizer_states.0.state.0.step": 1,
        "optimizer_states.1.state.0.step": 1,
    }
    assert of_schedulers.digest(of_schedulers.present(), {}) == {"lr_schedulers.0.last_epoch": 3}


class Weighing(Noted):
    """Keeps a parameter group, and changes its values."""

    def training_step(self, batch, batch_idx):
        self.group["weight_decay"] = 0.01 * self.global_step
        self.group["lr"] *= 0.9
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)
        self.group = optimizer.param_groups[0]
        return optimizer


def test_a_group_that_the_model_keeps_is_the_optimizers_after_a_resume(tmp_path):
    alone, resumed = alone_and_resumed(training(Weighing), tmp_path, "batch 1:1")
    assert resumed.group is resumed.optimizers().optimizer.param_groups[0]
    assert weights(resumed) == weights(alone)


class Jittering(torch.optim.SGD):
    """Draws from a generator of its own."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, 0.1)
        self.random = np.random.RandomState(1)

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1 * self.random.rand()
        return super().step(closure)


class Jittered(Noted):
    """Trains with it."""

    def configure_optimizers(self):
        return Jittering(self.parameters())


def test_a_generator_of_an_optimizers_continues(tmp_path):
    alone, resumed = alone_and_resumed(training(Jittered), tmp_path, "batch 1:1")
    assert weights(resumed) == weights(alone)


class Rescheduled(Noted):
    """Trains on with another schedule from its second epoch on."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            (config,) = self.trainer.lr_scheduler_configs
            optimizer = config.scheduler.optimizer
            config.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


def replaced(capsys):
    """Return the lines that were printed of something that was replaced."""
    return [line for line in capsys.readouterr().out.splitlines() if "replaced" in line]


def test_a_scheduler_put_in_anothers_place_is_said_at_once(tmp_path, capsys):
    trainer(tmp_path, every_n_steps=1).fit(Rescheduled())
    assert replaced(capsys) == [
        "warning: the schedulers were replaced while training (torch.optim.lr_scheduler.StepLR by "
        "torch.optim.lr_scheduler.CosineAnnealingLR), and a resumed run creates the original ones: "
        "after an interruption this run has other rates; return them from configure_optimizers()"
    ]


def test_the_schedule_of_lightnings_averaging_is_not_the_users(tmp_path, capsys):
    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    fit = trainer(tmp_path, averaging, every_n_steps=1)
    fit.fit(Noted())
    assert type(fit.lr_scheduler_configs[0].scheduler) is SWALR
    assert replaced(capsys) == []


class UsedUp(Noted):
    """Has a schedule that ends before the training does."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("stop", ["batch 0:2", "batch 1:1"])
def test_a_schedule_that_is_used_up_is_the_programs_own_error(tmp_path, stop):
    """It is what the run alone ends with, some steps after the resume or at the first one."""

    def fit(folder, **moments):
        as_in_a_new_process()
        trainer(tmp_path / folder, logger=False).fit(UsedUp(**moments))

    with pytest.raises(ValueError, match="Tried to step 7 times") as alone:
        fit("alone")
    with interrupted():
        fit("run", stop=stop)
    for _ in range(2):
        with pytest.raises(ValueError, match="Tried to step 7 times") as resumed:
            fit("run")
        assert str(resumed.value) == str(alone.value)


def test_a_schedule_that_was_made_for_the_steps_of_other_ranks_is_named(monkeypatch):
    """With half as many ranks, each has twice as many steps in an epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 2)
    run = resumed(run_of(in_epoch_5(optimizers=[optimizer])), world_size=2)
    schedulers = run.part(Schedulers)
    monkeypatch.setattr(schedulers, "_says_by_itself", lambda reason: False)
    says = r"Tried to step 3 times\..*\): 2 ranks saved \S+, now there are 1, and an epoch"
    with pytest.raises(UserError, match=says), schedulers.steps():
        for _ in range(3):
            schedule.step()


def test_a_loaded_state_shares_memory_with_a_weight_as_the_one_before():
    """As after SAM's `weight.data = state["old"]`, where a user's object has the state, too."""
    weight, weight_now = nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.ones(2))
    optimizer, now = torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight_now], 0.1)
    optimizer.state[weight] = {"old": weight.detach(), "other": torch.zeros(3), "steps": 5}
    optimizer.state[weight]["scale"] = torch.ones(2)
    now.state[weight_now] = {"old": weight_now.detach(), "other": torch.zeros(2)}
    now.state[weight_now]["scale"] = torch.zeros(1).expand(2)
    state = now.state
    with sharing_groups([now]):
        now.load_state_dict(optimizer.state_dict())
    assert now.state is state
    assert state[weight_now]["old"].data_ptr() == weight_now.data_ptr()
    assert weight_now.tolist() == [3, 3]
    assert (len(state[weight_now]["other"]), state[weight_now]["steps"]) == (3, 5)
    assert state[weight_now]["scale"].tolist() == [1, 1]


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer, whose groups are its own, too, as published ones do."""

    def __init__(self, base) -> None:
        self.base = base
        self.defaults = base.defaults
        self.share()

    def share(self) -> None:
        self.param_groups = self.base.param_groups
        self.fast_state = self.base.state

    @property
    def state(self):
        return self.base.state

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)
        self.share()


def test_a_wrapper_shares_groups_and_states_with_its_optimizer_after_loading():
    weight = nn.Parameter(torch.ones(2))
    base = torch.optim.SGD([weight], 0.1, momentum=0.5)
    wrapper = Lookahead(base)
    groups, state, (group,) = base.param_groups, base.state, base.param_groups
    saved = copy.deepcopy(base.state_dict())
    saved["state"] = {0: {"momentum_buffer": torch.ones(2)}}
    saved["param_groups"][0]["lr"] = 0.3
    with sharing_groups([wrapper, base]):
        wrapper.load_state_dict(saved)
    assert wrapper.param_groups is base.param_groups is groups and groups[0] is group
    assert wrapper.fast_state is base.state is state
    assert group["lr"] == 0.3 and state[weight]["momentum_buffer"].tolist() == [1, 1]


class Windowed:
    """A schedule of no class of torch's, whose state_dict lacks what the rates follow."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.window = deque(maxlen=6)

    def step(self):
        self.window.append(len(self.window))
        self.optimizer.param_groups[0]["lr"] = 0.01 * sum(self.window)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_what_a_users_schedule_keeps_beside_its_state_dict_comes_back(tmp_path):
    class Scheduled(Noted):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [{"scheduler": Windowed(optimizer), "interval": "step"}]

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    models = alone_and_resumed(training(Scheduled, logger=False), tmp_path, "batch 1:1")
    alone, resumed = (each.lr_schedulers().window for each in models)
    assert resumed == alone


class Inheriting(Noted):
    """Its second optimizer continues the first one's state, which torch does not copy then."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        self.note(f"batch {self.current_epoch}:{batch_idx}")
        for layer, optimizer in zip((self.line, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward((layer(batch[0]) - 1).square().mean())
            optimizer.step()
            self.note(f"{layer.weight.sum().item()}")
        first, second = (each.optimizer for each in self.optimizers())
        if self.global_step == 4:
            second.load_state_dict(first.state_dict())

    def on_train_epoch_end(self):
        pass

    def configure_optimizers(self):
        layers = self.line, self.other
        return [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in layers]


def test_a_state_that_two_optimizers_share_is_one_again(tmp_path):
    alone, resumed = alone_and_resumed(training(Inheriting), tmp_path, "batch 1:0", "batch 1:2")
    assert resumed.events == alone.events
    buffers = [
        optimizer.state[weight]["momentum_buffer"].data_ptr()
        for optimizer in resumed.trainer.optimizers
        for weight in optimizer.param_groups[0]["params"]
    ]
    assert len(set(buffers)) == 2


class LoadingIntoTheWrapper(Inheriting):
    """Lightning does not pass on what it loads, and it sets rates that have no effect from then."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.global_step)
        optimizer.zero_grad()
        self.manual_backward(self.line(batch[0]).square().mean())
        optimizer.step()
        if self.global_step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.note(f"batch {self.current_epoch}:{batch_idx}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.line.parameters(), 0.1, momentum=0.9)


def test_what_a_program_loads_into_lightnings_wrapper_stays_there(tmp_path, capfd):
    train = training(LoadingIntoTheWrapper)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 0:1", "batch 1:0", "batch 1:1")
    assert weights(resumed) == weights(alone) and "warning" not in capfd.readouterr().out
    groups = [each.optimizers().param_groups[0] for each in (alone, resumed)]
    assert groups[0]["lr"] == groups[1]["lr"] != alone.trainer.optimizers[0].param_groups[0]["lr"]


class Named(torch.optim.SGD):
    """Keeps the name of what it does with a weight in the weight's state."""

    def step(self, closure=None):
        loss = super().step(closure)
        for weight in self.param_groups[0]["params"]:
            kind = self.state[weight].setdefault("kind", "first")
            weight.data *= 0.9 if kind == "first" else 0.8
            self.state[weight]["kind"] = "later"
        return loss


class WithNamed(Noted):
    def configure_optimizers(self):
        return Named(self.parameters(), 0.1)


def test_text_in_a_state_comes_back(tmp_path, capfd):
    """torch makes something else of it as it loads a state."""
    alone, resumed = alone_and_resumed(training(WithNamed), tmp_path, "batch 0:2", "batch 1:1")
    assert resumed.events == alone.events and weights(resumed) == weights(alone)
    assert "warning" not in capfd.readouterr().out


class Following(torch.optim.lr_scheduler.LRScheduler):
    """Follows what the model has seen; its state dict has the model, as torch makes it."""

    def __init__(self, optimizer, model) -> None:
        self.model = model
        super().__init__(optimizer)

    def get_lr(self):
        return [rate / (1 + self.model.validated) for rate in self.base_lrs]


class Followed(Noted):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [Following(optimizer, self)]


def test_a_schedule_that_keeps_the_model_has_the_one_of_its_program(tmp_path):
    alone, resumed = alone_and_resumed(training(Followed), tmp_path, "batch 0:2", "batch 1:1")
    assert resumed.events == alone.events and weights(resumed) == weights(alone)
    (config,) = resumed.trainer.lr_scheduler_configs
    assert config.scheduler.model is resumed


class Late(Noted):
    """Has a schedule once a hook at the start knows the number of steps."""

    steps = 0

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if not self.steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_fit_start(self):
        self.steps = self.trainer.estimated_stepping_batches
        self.trainer.strategy.setup_optimizers(self.trainer)


def test_a_schedule_that_a_hook_makes_before_the_training_continues(tmp_path):
    """Lightning loads its state once those hooks have run."""
    train = training(Late, max_epochs=3)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:1", "batch 2:0")
    assert weights(resumed) == weights(alone)
    epochs = [model.lr_schedulers().last_epoch for model in (resumed, alone)]
    assert epochs[0] == epochs[1] > 4
