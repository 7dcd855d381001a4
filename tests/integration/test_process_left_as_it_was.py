"""Trainings with ExactResume in a process of somebody else's: signals, threads, what is left."""

import contextlib
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import warm
from containers import ROOT
from own_fits import (
    BLOCKS,
    HANG_SECONDS,
    PressCtrlC,
    Untested,
    saved_steps,
    short_trainer,
)
from own_trainer import Classifier, Noisy
from pytorch_lightning.callbacks import (
    ModelCheckpoint,
)
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from sagemaker_lightning import (
    UserError,
    report_failures,
)
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import signals
from sagemaker_lightning.resume.files import folder_lock

OTHERS: set[str] = set()
"""The names of threads that earlier tests have left, and that may end at any time."""


@pytest.fixture(autouse=True)
def others() -> None:
    """Note the threads that are there before each test."""
    OTHERS.update(thread.name for thread in threading.enumerate())


def installed_handlers() -> list:
    """Return the process's signal handlers and its threads, but for what other tests have left."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    signal_handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return [*signal_handlers, fd, {thread.name for thread in threading.enumerate()} - OTHERS]


def process_state() -> dict[str, object]:
    """Return what a training could leave changed in this process: flags, functions, classes."""
    modules = (
        random,
        np.random,
        np.random.bit_generator,
        signal,
        threading,
        warnings,
        os,
        sys,
        torch,
        torch.random,
        torch.utils.data,
        torch.utils.data._utils.fetch,
        torch.utils.data._utils.worker,
        torch.distributed,
        pl,
        pl.trainer.call,
    )
    classes = (
        random.Random,
        torch.utils.data.DataLoader,
        torch.utils.data.dataloader._DatasetKind,
        torch.utils.data.Dataset,
        torch.utils.data.RandomSampler,
        torch.utils.data.SequentialSampler,
        torch.utils.data.BatchSampler,
        torch.utils.data.DistributedSampler,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.nn.Module,
        torch._dynamo.pgo.FrameStateSizeEntry,
        pl.Trainer,
        pl.LightningModule,
        pl.Callback,
        pl.utilities.CombinedLoader,
        type(pl.Trainer(logger=False).fit_loop),
        ModelCheckpoint,
        CSVLogger,
        TensorBoardLogger,
    )
    changing_names = {
        "_",
        "_abc_impl",
        "__warningregistry__",
        "last_exc",
        "last_value",
        "last_traceback",
    }
    changing_names |= {"last_type", "_onceregistry", "_filters_version", "exc_info"}
    state = {
        f"{owner.__name__}.{name}": getattr(value, "__func__", value)
        for owner in (*modules, *classes)
        for name, value in vars(owner).items()
        if name not in changing_names
        and not isinstance(value, (dict, types.ModuleType, torch.Tensor))
    }
    state |= {f"environ {name}": value for name, value in os.environ.items()}
    for config in (torch._dynamo.config, torch._inductor.config):
        state |= {
            f"{config.__name__}.{name}": value for name, value in config.get_config_copy().items()
        }
    backends = torch.backends
    return state | {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "type": torch.get_default_dtype(),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "mkldnn": backends.mkldnn.enabled,
        "filters": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "switch interval": sys.getswitchinterval(),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "logging": [list(logging.root.handlers), logging.root.level],
        "finders": list(sys.meta_path),
    }


def without_lightnings(loader: DataLoader) -> dict[str, object]:
    """Return a loader's attributes without the one that Lightning sets after seed_everything."""
    return {name: value for name, value in vars(loader).items() if name != "worker_init_fn"}


@pytest.mark.slow
def test_a_training_leaves_no_flag_function_or_class_changed(tmp_path: Path):
    """The user's loaders stay the same, too: a notebook may use them afterwards."""

    def check(folder: Path, *callbacks) -> None:
        loaders = [DataLoader(Noisy(), 4, shuffle=True), DataLoader(Noisy(), 4)]
        attributes = [(type(loader), without_lightnings(loader)) for loader in loaders]
        state_before = process_state()
        trainer = short_trainer(folder, *callbacks)
        with contextlib.suppress(SystemExit, RuntimeError):
            trainer.fit(model := Classifier(), *loaders)
        trainer.validate(model, loaders[1], verbose=False)
        trainer.test(model, loaders[1], verbose=False)
        state_after = process_state()
        assert [
            name for name in state_before if repr(state_before[name]) != repr(state_after.get(name))
        ] == []
        assert state_after.keys() == state_before.keys()
        assert [(type(loader), without_lightnings(loader)) for loader in loaders] == attributes
        assert [batch[0].tolist() for batch in loaders[0]] != [
            batch[0].tolist() for batch in loaders[0]
        ]

    pl.Trainer(fast_dev_run=True, logger=False).fit(Classifier())  # what Lightning itself sets
    check(tmp_path / "ends")
    check(tmp_path / "stops", PressCtrlC(1))
    check(tmp_path / "fails", Fails())


class Fails(pl.Callback):
    """Fails at the second batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("as it was asked to")


class FailsAfterSignal(Fails):
    """Fails as what a signal to the whole group has ended is missing: a program, for example."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise self.error


def test_an_error_that_comes_after_a_signal_is_a_stop(tmp_path: Path, capfd):
    trainer = short_trainer(tmp_path, FailsAfterSignal(BrokenPipeError(32, "Broken pipe")))
    trainer.callbacks[-1].save_every(steps=1, minutes=0)
    with pytest.raises(SystemExit) as left:
        trainer.fit(Untested())
    wait_for_checkpoints()
    errors = capfd.readouterr().err
    says = "interrupted, resume from step 2: SIGTERM; this step was not completed, most likely "
    assert left.value.code == 143 and saved_steps(tmp_path)[-1] == 2
    assert f"\n{says}" in errors and "another process, too: BrokenPipeError: " in errors
    assert "Traceback" in errors.partition(says)[0]  # it may have another cause


def test_a_mistake_is_not_taken_for_an_effect_of_a_signal(tmp_path: Path):
    with pytest.raises(UserError, match="^--a: found 1$"):
        short_trainer(tmp_path, FailsAfterSignal(UserError("--a: found 1"))).fit(Untested())


def test_ctrl_c_twice_stops_at_once(tmp_path: Path):
    presses = PressCtrlC(2)
    handlers = installed_handlers()
    with pytest.raises(SystemExit) as stopped:  # Lightning's answer to a KeyboardInterrupt
        short_trainer(tmp_path, presses).fit(Classifier())
    assert stopped.value.code == 1 and not (tmp_path / "step-000000004.ckpt").exists()
    assert installed_handlers() == handlers  # a notebook can be interrupted again


def wait_for_checkpoints() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


@pytest.mark.parametrize(
    ("contained", "first", "warns"), [(True, "bash", 1), (True, "", 0), (False, "bash", 0)]
)
def test_a_container_that_loses_sigterm_is_named_once(
    tmp_path: Path, monkeypatch, capfd, contained, first, warns
):
    monkeypatch.setattr(signals, "in_container", lambda: contained)
    monkeypatch.setattr(signals, "loses_sigterm", lambda: first)
    trainer = short_trainer(tmp_path, limit_train_batches=1)
    model = Untested()
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model)
    lines = [line for line in capfd.readouterr().out.splitlines() if "SIGTERM" in line]
    says = "warning: SIGTERM does not reach this training: bash, the container's first process, "
    assert len(lines) == warns and all(line.startswith(says) for line in lines)
    assert saved_steps(tmp_path) == [1] and saved_steps(tmp_path / "fit-2") == [2]


def test_a_rank_may_outlive_its_launcher_except_while_it_trains(tmp_path: Path, monkeypatch):
    class Sees(pl.Callback):
        def on_train_batch_start(self, *_):  # what it had closed over would come back
            parent_process._set_death_signal("trains")

    set_signals = []
    monkeypatch.setattr(parent_process, "_set_death_signal", set_signals.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(parent_process.LAUNCHER_VARIABLE, raising=False)
    trainer = short_trainer(tmp_path, Sees(), limit_train_batches=1)
    assert set_signals == [parent_process.LAUNCHER_ENDED]
    model = Untested()
    for epochs in (1, 2):
        set_signals.clear()
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model)
        assert set_signals == [parent_process.LAUNCHER_ENDED, "trains", 0]


def test_a_training_that_fails_leaves_no_file_open_and_no_folder_locked(tmp_path: Path):
    open_files = []
    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match="as it was asked to"):
            short_trainer(tmp_path / name, Fails()).fit(Untested())
        gc.collect()  # another test's files
        open_files.append(len([*Path("/proc/self/fd").iterdir()]))
        assert folder_lock._held == {}
    assert open_files[1] <= open_files[0]  # those of another test may be closed meanwhile


def test_in_another_thread_no_handler_is_installed(tmp_path: Path, capfd):
    handlers = installed_handlers()
    thread = threading.Thread(target=lambda: short_trainer(tmp_path).fit(Classifier()))
    thread.start()
    thread.join()
    assert installed_handlers() == handlers and (tmp_path / "step-000000011.ckpt").exists()
    assert "".join(capfd.readouterr()).count("warning: fit is not called in the main thread") == 1


@pytest.mark.parametrize(
    ("handler", "says"), [("signal.SIG_DFL", True), ("signal.SIG_IGN", True), ("print", False)]
)
def test_who_loses_sigterm_is_known(handler: str, says: bool):
    """For any process; test_foreign_image.py shows the effect in a container."""
    code = f"import signal; signal.signal(signal.SIGTERM, {handler}); print(1, flush=True); input()"
    command = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        assert shutdown.loses_sigterm(process.pid) == (name if says else "")
        process.stdin.close()
    assert shutdown.loses_sigterm(process.pid) == ""


@pytest.mark.parametrize(
    ("error", "trace"),
    [(UserError("--a: found 1"), False), (ValueError("unpack"), True)],
    ids=["user's", "other"],
)
def test_a_job_gets_a_line_and_the_failure_file(tmp_path: Path, monkeypatch, capfd, error, trace):
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    with pytest.raises(SystemExit) as raised, report_failures():
        raise error
    output = capfd.readouterr().err
    assert raised.value.code == 1 and ("Traceback" in output) is trace
    assert (
        (tmp_path / "failure")
        .read_text()
        .startswith(f"error: {'ValueError: ' if trace else ''}{error} [host algo-2")
    )


EARLY = {
    "a variable": ("", {"SM_NUM_GPUS": "many"}, "error: SM_NUM_GPUS: found 'many', expected a"),
    "a version": (
        "from sagemaker_lightning.compat import versions\nversions.version = lambda name: '1.9.5'",
        {},
        "error: pytorch-lightning: found 1.9.5, expected 2.5.2 or later",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", EARLY)
def test_a_mistake_before_report_failures_is_entered_is_a_line_too(tmp_path: Path, mistake):
    """The five lines read the environment, and import, before that."""
    first_line, variables, says = EARLY[mistake]
    lines = BLOCKS[0].splitlines()
    (tmp_path / "train.py").write_text(
        "\n".join([first_line, *lines[1:4], "raise ValueError('x')"])
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SM_OUTPUT_DIR": str(tmp_path)} | variables
    environment.pop("PYTEST_CURRENT_TEST")
    completed = warm.run(["python", "train.py"], tmp_path, environment, HANG_SECONDS)
    output_lines = completed.stdout.splitlines()
    assert (
        completed.returncode == 1 and output_lines[0].startswith(says) and len(output_lines) == 1
    ), completed.stdout
    assert (tmp_path / "failure").read_text() == output_lines[0]
