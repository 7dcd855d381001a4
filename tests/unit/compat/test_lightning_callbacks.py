"""Lightning calls no hook of a batch that does nothing, and all others as ever."""

import ast
import functools
import inspect
import sys
import textwrap
import types

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_callbacks import EMPTY_HOOKS, calling_hooks_directly


@pytest.mark.parametrize("hook", EMPTY_HOOKS)
def test_the_hooks_that_are_not_called_have_no_code(hook):
    for function in EMPTY_HOOKS[hook]:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert all(
            isinstance(each, ast.Pass)
            or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            for each in definition.body
        )


class Noting:
    """Notes which hooks are called, and by which name `log` would log there."""

    def note(self, hook: str, module: pl.LightningModule) -> None:
        module.notes.append((type(self).__name__, hook, module._current_fx_name))


class Hooks(Noting, pl.Callback):
    """A callback with some hooks; one is set on the object."""

    def __init__(self) -> None:
        self.on_after_backward = lambda _, module: self.note("on_after_backward", module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.note("on_train_batch_start", pl_module)

    def on_validation_batch_end(self, trainer, pl_module, *_) -> None:
        self.note("on_validation_batch_end", pl_module)


class Model(Noting, pl.LightningModule):
    """A model with some hooks, which may end an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.notes = []

    def on_train_batch_start(self, batch, batch_idx) -> int | None:
        """Note it, and end an epoch after two batches."""
        self.note("on_train_batch_start", self)
        return -1 if batch_idx == 2 else None

    def on_before_zero_grad(self, optimizer) -> None:
        self.note("on_before_zero_grad", self)

    def training_step(self, batch, batch_idx) -> torch.Tensor:
        loss = self.line(batch[0]).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx) -> None:
        self.log("validated", self.line(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Strategy(SingleDeviceStrategy):
    """A strategy with a hook of its own."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        self.lightning_module.notes.append((type(self).__name__, "on_train_batch_start", ""))


def fit(tmp_path, *more_callbacks, **options) -> tuple[list, dict]:
    """Train two epochs of four batches, and return what was noted and logged."""
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(8, 2)), 2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "default_root_dir": tmp_path, "max_epochs": 2}
    model = Model()
    callbacks = [pl.Callback(), Hooks(), pl.Callback(), *more_callbacks]
    strategy = Strategy(torch.device("cpu"))
    trainer = pl.Trainer(**quiet, callbacks=callbacks, strategy=strategy, **options)
    trainer.fit(model, data, data)
    assert model._current_fx_name is None
    return model.notes, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
def test_hooks_that_do_something_are_called_as_lightning_calls_them(tmp_path):
    expected = fit(tmp_path)
    names = {name for name, *_ in expected[0]}
    assert names == {"Hooks", "Model", "Strategy"} and len(expected[0]) > 20
    with calling_hooks_directly():
        assert fit(tmp_path) == expected


@pytest.mark.slow
def test_empty_hooks_are_not_called_without_a_profiler(tmp_path):
    names = {function.__code__: name for name, of in EMPTY_HOOKS.items() for function in of}
    called = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code in names:
            called.add(names[frame.f_code])

    with calling_hooks_directly():
        sys.setprofile(note)
        fit(tmp_path)
        sys.setprofile(None)
        assert not called
        profiler = SimpleProfiler(tmp_path, "profile")
        sys.setprofile(note)
        fit(tmp_path, profiler=profiler)
        sys.setprofile(None)
    assert called == EMPTY_HOOKS.keys()
    profile = next(tmp_path.glob("*profile*")).read_text()
    assert "[Callback]Callback.on_train_batch_end" in profile


def test_a_function_that_somebody_put_in_place_of_lightnings_gets_all_hooks(tmp_path, monkeypatch):
    called = []
    function = call._call_lightning_module_hook

    def noting(trainer, hook_name, *args, **options):
        called.append(hook_name)
        return function(trainer, hook_name, *args, **options)

    monkeypatch.setattr(call, "_call_lightning_module_hook", noting)
    with calling_hooks_directly():
        fit(tmp_path)
    assert EMPTY_HOOKS.keys() <= {*called}


def test_a_class_that_answers_names_itself_is_asked(tmp_path):
    batches = []

    class Answers(pl.Callback):
        def __getattribute__(self, name: str):
            if name == "on_train_batch_end":
                return lambda *_: batches.append(name)
            return super().__getattribute__(name)

    with calling_hooks_directly():
        fit(tmp_path, Answers())
    assert batches


def test_lightnings_own_functions_are_back_afterwards():
    before = [call._call_callback_hooks, call._call_lightning_module_hook, call._call_strategy_hook]
    with pytest.raises(ZeroDivisionError), calling_hooks_directly():
        assert call._call_callback_hooks is not before[0]
        raise ZeroDivisionError
    assert before == [
        call._call_callback_hooks,
        call._call_lightning_module_hook,
        call._call_strategy_hook,
    ]
    assert training_epoch_loop.is_param_in_hook_signature is is_param_in_hook_signature


def test_a_signature_is_read_once_for_each_method():
    calls = []

    def has_parameter(hook, name, min_args=None):
        calls.append(hook)
        return is_param_in_hook_signature(hook, name, min_args=min_args)

    class Unhashable:
        __hash__ = None

        def __call__(self, batch):
            """Do nothing."""

    known = lightning_callbacks._once_for_each_method(has_parameter)
    model = Model()
    unhashable = Unhashable()
    for hook in (model.training_step, unhashable, model.training_step, unhashable):
        has = known(hook, "batch_idx", min_args=2)
        assert has == (hook is not unhashable)
    model.training_step = types.MethodType(lambda self, batch: None, model)
    assert not known(model.training_step, "batch_idx", min_args=2)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("name", "hook"),
    [("_call_lightning_module_hook", "optimizer_step"), ("_call_strategy_hook", "training_step")],
)
def test_a_function_in_the_place_of_lightnings_is_called(name, hook, tmp_path, monkeypatch):
    called = []
    function = getattr(call, name)

    @functools.wraps(function)
    def noting(trainer, hook_name, *args, **options):
        called.append(hook_name)
        return function(trainer, hook_name, *args, **options)

    monkeypatch.setattr(call, name, noting)
    with calling_hooks_directly():
        fit(tmp_path)
    assert hook in called


def test_what_lightning_puts_into_a_callback_is_no_state_of_it():
    """A state may be all of the attributes, as `vars(self).copy()`."""
    model = pl.LightningModule()
    own = {"n": 1, "log": torch.ones(2), "call": [].append}
    states = {"a": {"log": model.log, "log_dict": model.log_dict, "n": 2}, "b": own, "c": [3]}
    found = lightning_callbacks.without_lightnings(states, model)
    assert found == {"a": {"n": 2}, "b": found["b"], "c": [3]}
    assert found["b"].keys() == own.keys() and found["b"]["log"] is own["log"]
