"""Forged states of optimizers and schedulers: a training ends with a line, or trains."""

import contextlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forged import (
    forge,
    little_memory,  # noqa: F401  the fixture bounded
)
from short_fits import Noted, as_in_a_new_process, interrupted, trainer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from sagemaker_lightning.contract.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Stepping(Noted):
    """Has an optimizer of one of torch's classes."""

    def __init__(self, class_: type, stop: str = "") -> None:
        super().__init__(stop)
        self.of = (class_,)  # no class of a layer

    def configure_optimizers(self):
        return self.of[0](self.parameters(), 0.1)


def step_on(folder: Path, class_: type, stop: str = "") -> None:
    as_in_a_new_process()
    trainer(folder, logger=False).fit(Stepping(class_, stop))


def copied(kept: Path, run: Path, train: Callable[[], object]) -> Path:
    """Return a folder with a copy of what an interrupted training leaves, which is made once."""
    if not kept.exists():
        with interrupted():
            train()
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(kept, run)
    return run


@pytest.fixture(scope="module")
def interrupted_steps(tmp_path_factory) -> Callable[[type], Path]:
    """Return a function that returns the folder of a training with an optimizer, interrupted."""
    folder = tmp_path_factory.mktemp("stepping")

    def again(class_: type) -> Path:
        kept, run = (folder / f"{name} {class_.__name__}" for name in ("kept", "run"))
        return copied(kept, run, lambda: step_on(kept, class_, "batch 1:1"))

    return again


def of_weight(name: str, value: object) -> Callable[[dict], object]:
    """Return what replaces a value that an optimizer keeps of its first parameter."""
    return lambda state: state["state"][0].update({name: value})


def of_group(**values: object) -> Callable[[dict], object]:
    """Return what replaces values of an optimizer's parameter group."""
    return lambda state: state["param_groups"][0].update(values)


OPTIMIZER_STATES = {
    "another shape": of_weight("exp_avg", torch.ones(7)),
    "a larger shape": of_weight("exp_avg", torch.ones(2, 1, 2)),
    "one number": of_weight("exp_avg", torch.ones(1)),
    "a text": of_weight("exp_avg", "text"),
    "several steps": of_weight("step", torch.ones(3)),
    "a step less": lambda state: state["state"][0].pop("step"),
    "a state less": lambda state: state["state"][0].pop("exp_avg"),
    "a number for a state": lambda state: state["state"].update({0: 5}),
    "a number for all states": lambda state: state.update(state=5),
    "nothing": lambda state: state.clear(),
    "a rate of text": of_group(lr="text"),
    "no rate": of_group(lr=None),
    "a number for two": of_group(betas=5),
    "a kernel that there is not": of_group(fused=True, differentiable=True),
    "another number of parameters": of_group(params=[0]),
    "a number for parameters": of_group(params=5),
    "a group more": lambda state: state["param_groups"].append(state["param_groups"][0]),
    "a number for groups": lambda state: state.update(param_groups=5),
    "a number for a group": lambda state: state.update(param_groups=[5]),
}


@pytest.mark.parametrize("name", OPTIMIZER_STATES)
def test_a_state_that_an_optimizer_cannot_continue_from_ends_the_run_with_a_line(
    interrupted_steps, name
):
    """Whether loading it or the first step with it would end with an error of torch's."""
    run = interrupted_steps(torch.optim.Adam)

    def change(content: dict) -> None:
        (state,) = content["optimizer_states"]
        OPTIMIZER_STATES[name](state)

    path = forge(run, change)
    with pytest.raises(UserError, match=f"{path.name}: found optimizer_states that") as raised:
        step_on(run, torch.optim.Adam)
    assert "\n" not in str(raised.value) and "move it away" in str(raised.value)


@pytest.mark.parametrize("class_", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.RMSprop])
def test_a_state_of_any_optimizer_that_has_another_shape_ends_the_run_with_a_line(
    interrupted_steps, class_
):
    run = interrupted_steps(class_)

    def change(content: dict) -> None:
        (state,) = content["optimizer_states"]
        of_first = state["state"][0]
        tensors = {name: value for name, value in of_first.items() if torch.is_tensor(value)}
        of_first |= {name: torch.ones(7, 3) for name, value in tensors.items() if value.dim()}

    forge(run, change)
    with pytest.raises(UserError, match="found optimizer_states that this program does not"):
        step_on(run, class_)


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), torch.ones(1, 1).expand(1, 2), torch.ones(3).as_strided((1, 2), (1, 0), 2)],
)
def test_a_fused_kernel_gets_no_state_that_is_smaller_than_its_parameter(interrupted_steps, value):
    """It would read and write what is beyond it, and end the process at best."""
    run = interrupted_steps(torch.optim.Adam)

    def change(content: dict) -> None:
        (state,) = content["optimizer_states"]
        state["state"][0]["exp_avg"] = value
        state["param_groups"][0]["fused"] = True

    forge(run, change)
    with pytest.raises(UserError, match=r"exp_avg is not a tensor of the shape \[1, 2\]"):
        step_on(run, torch.optim.Adam)


# Schedulers ---------------------------------------------------------------------------------------

SCHEDULERS = {
    "steps": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 5], 0.5),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "several": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: 1.0), StepLR(optimizer, 1)], [3]
    ),
    "a cycle": lambda optimizer: OneCycleLR(optimizer, 0.2, 8),
    "cycles": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "a plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
}


class Scheduled(Noted):
    """Has a scheduler, which steps after each batch."""

    def __init__(self, kind: str, stop: str = "") -> None:
        super().__init__(stop)
        self.kind = kind

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = SCHEDULERS[self.kind](optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "loss"}]


def schedule_on(folder: Path, kind: str, stop: str = "") -> Scheduled:
    as_in_a_new_process()
    trainer(folder, logger=False).fit(model := Scheduled(kind, stop))
    return model


@pytest.fixture(scope="module")
def interrupted_schedule(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a training with a scheduler, interrupted."""
    folder = tmp_path_factory.mktemp("scheduled")

    def again(kind: str) -> Path:
        kept, run = folder / f"kept {kind}", folder / "run"
        return copied(kept, run, lambda: schedule_on(kept, kind, "batch 0:2"))

    return again


def forge_scheduler(folder: Path, values: object) -> Path:
    """Have a checkpoint have values of a scheduler, or what is not a dict as its state."""

    def change(content: dict) -> None:
        (state,) = content["lr_schedulers"]
        content["lr_schedulers"] = [state | values if isinstance(values, dict) else values]

    return forge(folder, change)


def within(value: object, times: int) -> object:
    for _ in range(times):
        value = {"a": value}
    return value


NOT_LOADED = [
    ("steps", None),
    ("steps", 5),
    ("steps", "text"),
    ("steps", [["optimizer", 5]]),
    ("several", {"_schedulers": [[["optimizer", 5]], {}]}),
    ("several", {"_schedulers": 5}),
    ("several", {"_schedulers": [5, 5]}),
    ("cycles", {"_scale_fn_custom": {"__code__": 5}}),
    ("a plateau", {"mode": "text"}),
    ("a plateau", {"factor": 10**600}),
]
NO_STEP = [
    ("steps", {"last_epoch": "3"}),
    ("steps", {"last_epoch": None}),
    ("steps", {"last_epoch": torch.ones(3)}),
    ("steps", {"last_epoch": [1] * 1_000}),
    ("steps", {"step_size": 0}),
    ("steps", {"gamma": torch.ones(3)}),
    ("steps", {"gamma": 10**70, "step_size": 1}),
    ("restarts", {"T_i": "2"}),
    ("restarts", {"T_mult": [1] * 1_000, "T_cur": 2}),
    ("several", {"_milestones": [0] * 1_000}),
    ("several", {"_milestones": 5}),
    ("several", {"_schedulers": [{}, {"step_size": 0}], "_milestones": [1]}),
    ("a cycle", {"total_steps": 0}),
    ("a cycle", {"_schedule_phases": []}),
    ("a cycle", {"_schedule_phases": [5]}),
    ("cycles", {"base_lrs": [1j], "max_lrs": [1]}),
    ("cycles", {"gamma": 3, "last_epoch": 10**18}),
    ("a plateau", {"best": "text"}),
    ("a plateau", {"best": torch.ones(3)}),
    ("a plateau", {"factor": "text", "patience": -1}),
]


@pytest.mark.parametrize(("kind", "values"), NOT_LOADED + NO_STEP)
def test_a_state_that_a_scheduler_cannot_continue_from_ends_the_run_with_a_line(
    interrupted_schedule, bounded, kind, values
):
    """Whether loading it or a step with it would end with an error of torch's, or never."""
    run = interrupted_schedule(kind)
    path = forge_scheduler(run, values)
    with pytest.raises(UserError, match=f"{path.name}: found lr_schedulers that") as raised:
        schedule_on(run, kind)
    assert "\n" not in str(raised.value) and "move it away" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("steps", {}),
        ("steps", {"last_epoch": 10**600}),
        ("steps", {"last_epoch": math.nan}),
        ("steps", {"base_lrs": [math.nan]}),
        ("steps", {"deep": within([], 240)}),
        ("steps", {5: 5, None: 5, ("a",): 5}),
        ("restarts", {"T_mult": 10**70, "T_i": 1, "T_cur": -(10**70)}),
        ("restarts", {"T_cur": math.inf}),
        ("several", {"_schedulers": [{}] * 1_000}),
        ("several", {"_schedulers": within([5], 100)}),
        ("a plateau", {"best": math.nan, "num_bad_epochs": 10**600}),
    ],
)
def test_with_another_state_that_a_scheduler_takes_the_training_ends(
    interrupted_schedule, bounded, kind, values
):
    run = interrupted_schedule(kind)
    forge_scheduler(run, values)
    with contextlib.suppress(UserError):
        assert schedule_on(run, kind).trainer.global_step == 8
