"""ExactResume and other callbacks in programs with a Trainer of their own.

The programs are stopped and killed, and compared bit by bit.
"""

import contextlib
import copy
import csv
import errno
import functools
import gc
import inspect
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
import pytorch_lightning as pl
import ranks
import torch
import warm
from containers import ROOT
from own_trainer import Classifier, Noisy
from pytorch_lightning.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torchmetrics import MeanMetric, MetricTracker

import sagemaker_lightning
from sagemaker_lightning import (
    ExactResume,
    GradientWeighting,
    LearningRateScaling,
    RankConsistency,
    SageMakerEnvironment,
    UserError,
    make_deterministic,
    report_failures,
)
from sagemaker_lightning.callbacks.loggers.tensorboard_events import read_events
from sagemaker_lightning.compat import versions
from sagemaker_lightning.contract import reporting, shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import first_draws, signals
from sagemaker_lightning.resume import run as run_module
from sagemaker_lightning.resume.files import checkpoint_dir, folder_lock
from sagemaker_lightning.resume.parts.roots import user_objects
from sagemaker_lightning.resume.same_run import earlier_fits
from sagemaker_lightning.state import object_graph

PROGRAM = ROOT / "tests/own_trainer.py"
TUTORIALS = ROOT / "tests/tutorials.py"
HANG_SECONDS = 90  # what takes longer hangs


def run(folder: Path, case: str, program: Path = PROGRAM, **variables: str) -> tuple[int, str]:
    """Run a case in a folder; return its exit status and its output."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | variables
    completed = warm.run(["python", program, case], folder, environment, HANG_SECONDS)
    return completed.returncode, completed.stdout


def results(output: str) -> list[str]:
    """Return the lines with the results."""
    lines = [line for line in output.splitlines() if re.match("(WEIGHTS|BEST|LR|SIZE) ", line)]
    assert lines, output[-3000:]
    return lines


def check(
    folder: Path, case: str, *interruptions: dict[str, str], program: Path = PROGRAM
) -> list[str]:
    """Compare a run left alone with an interrupted one.

    It returns the output of each run of the interrupted one.
    """
    status, expected = run(folder / "alone", case, program)
    assert status == 0, expected[-3000:]
    outputs = []
    for variables in interruptions:
        status, output = run(folder / "run", case, program, **variables)
        assert status == (143 if "STOP_AT" in variables else -9), output[-3000:]
        outputs.append(output)
    status, output = run(folder / "run", case, program)
    assert status == 0, output[-3000:]
    assert results(output) == results(expected)
    assert "warning: resumed" not in output
    return [*outputs, output]


@pytest.mark.slow
def test_five_lines_are_enough(tmp_path: Path):
    _, stopped, ended = check(tmp_path, "plain", {"KILL_AT": "0:3"}, {"STOP_AT": "1:4"})
    assert re.search(
        r"^interrupted, resume from step 16: SIGTERM; .* is complete \[host localhost",
        stopped,
        re.MULTILINE,
    )
    assert "Traceback" not in stopped and "\nresuming from step 16: " in ended
    assert "\nresumed at step 16: " in ended


CASES = {
    "adversarial": [{"STOP_AT": "1:4"}, {"KILL_AT": "2:3"}],
    "loaders": [{"KILL_AT": "1:4"}, {"STOP_AT": "2:1"}],
    "folds": [{"STOP_AT": "0/1:2"}, {"STOP_AT": "1/1:4"}, {"KILL_AT": "1/2:1"}],
    "around": [{"STOP_AT": "1:4"}],
    "longer": [{"STOP_AT": "1:4"}, {"STOP_AT": "2:4"}],
    "tuned": [{"STOP_AT": "2:1"}],
    "overfit": [{"STOP_AT": "1:2"}],
    "by_hand": [{"STOP_AT": "0:1"}, {"STOP_AT": "1:4"}, {"KILL_AT": "2:3"}],
    "averaged": [{"STOP_AT": "1:4"}, {"STOP_AT": "3:2"}, {"KILL_AT": "4:3"}],
    "streamed": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:2"}, {"KILL_AT": "2:1"}],
    "searched": [{"STOP_AT": "1:2"}, {"KILL_AT": "2:1"}],
    "two_ranks": [{"STOP_AT": "1:2"}, {"KILL_AT": "2:1"}],
    "three_ranks": [{"STOP_AT": "1:2"}],
}


SOAK_CASES = ("averaged", "streamed", "searched")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.soak if case in SOAK_CASES else ()) for case in CASES],
)
def test_a_program_of_ones_own(tmp_path: Path, case: str):
    *_, ended = check(tmp_path, case, *CASES[case])
    if case == "three_ranks":  # none is ended by the end of rank 0, which is done first
        assert len(results(ended)) == 3
    if case == "loaders":
        expected, resumed = (
            (tmp_path / name / "curves/lightning_logs") for name in ("alone", "run")
        )
        for file in ("version_0/metrics.csv", "version_0/hparams.yaml"):
            assert (expected / file).read_text() == (resumed / file).read_text()
        assert [path.name for path in resumed.iterdir()] == ["version_0"]


TUTORIAL_CASES = {
    "gan": [{"STOP_AT": "1:4"}, {"KILL_AT": "3:3"}],
    "finetuning": [{"STOP_AT": "0:4"}, {"STOP_AT": "2:1"}, {"KILL_AT": "3:2"}],
    "transformer": [{"STOP_AT": "0:4"}, {"STOP_AT": "2:7"}, {"KILL_AT": "3:1"}],
    "k_fold": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:2"}],
    "streamed": [{"STOP_AT": "1:2"}, {"STOP_AT": "2:9"}, {"KILL_AT": "3:2"}],
    "measured": [{"STOP_AT": "0:7"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "adapting": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "averaged": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "anchored": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "copied": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "stopped_early": [{"STOP_AT": "0:9"}, {"STOP_AT": "2:3"}],
    "combined": [{"STOP_AT": "0:8"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "curriculum": [{"STOP_AT": "0:8"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "growing": [{"STOP_AT": "0:1"}, {"STOP_AT": "1:4"}, {"KILL_AT": "3:2"}],
    "drawn": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "contrast": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "newton": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "cycled": [{"STOP_AT": "0:4"}, {"STOP_AT": "2:5"}, {"KILL_AT": "3:2"}],
    "seeded": [{"STOP_AT": "0:4"}, {"KILL_AT": "3:2"}],
    "mining": [{"STOP_AT": "0:3"}, {"STOP_AT": "2:4"}, {"KILL_AT": "3:2"}],
    "labels": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}, {"KILL_AT": "3:2"}],
    "thaws": [{"STOP_AT": "2:9"}, {"STOP_AT": "3:2"}, {"KILL_AT": "3:5"}],
    "clipped": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "in_turns": [{"STOP_AT": "1:0"}],
    "inner": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "stages": [{"KILL_AT": "0:7"}, {"STOP_AT": "1:3"}],
    "centered": [{"STOP_AT": "0:4"}, {"KILL_AT": "2:1"}],
    "tracked": [{"STOP_AT": "0:4"}, {"STOP_AT": "1:9"}],
    "skips": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:6"}, {"KILL_AT": "2:5"}],
    "resumable": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:9"}],
    "draws": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:9"}],
    "ranks": [{"STOP_AT": "1:2"}],
    "recipe": [{"STOP_AT": "0:3"}, {"STOP_AT": "1:6"}, {"KILL_AT": "2:5"}],
}
"""Where each of tests/tutorials.py is interrupted."""
IN_EACH_TEST = (
    "drawn",
    "mining",
    "thaws",
    "skips",
    "clipped",
    "in_turns",
    "inner",
    "anchored",
    "stages",
    "centered",
    "tracked",
    "recipe",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in IN_EACH_TEST else pytest.mark.soak)
        for case in TUTORIAL_CASES
    ],
)
def test_a_tutorial(tmp_path: Path, case: str):
    """As Lightning's documentation has it; no line says that something would not be exact."""
    *_, ended = check(tmp_path, case, *TUTORIAL_CASES[case], program=TUTORIALS)
    assert "warning:" not in ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("counts", "__main__.Counts.steps changes while training, and no checkpoint has it: a"),
        ("lists", "__main__.Lists.outputs changes while training, and no checkpoint has it: a"),
        ("unseeded", "the numbers in model.directions differ; likely because of data that were"),
        ("swaps", "the class or the hooks of model.backbone.2 differ"),
        ("slowed", "the class or the hooks of model.backbone.0 differ"),
        ("hooked", "the class or the hooks of model.backbone differ"),
        ("pending", "warning: model.pending was calculated before the interruption"),
    ],
)
def test_what_no_checkpoint_has_is_said(tmp_path: Path, case: str, says: str):
    """A stopped run would be silent about them."""
    status, stopped = run(tmp_path, case, TUTORIALS, STOP_AT="2:8" if case == "lists" else "2:9")
    assert status == 143
    status, ended = run(tmp_path, case, TUTORIALS)
    assert status == 0 and says in (stopped if says.startswith("__main__") else ended)


@pytest.mark.slow
def test_a_rank_does_not_outlive_the_process_that_started_it(tmp_path: Path):
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = warm.start(["python", PROGRAM, "two_ranks"], tmp_path, variables)
    while not list(tmp_path.rglob("step-*.ckpt")):
        assert process.poll() is None
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert any("LOCAL_RANK" in warm.environ(rank.pid) for rank in ranks)
    process.kill()
    assert psutil.wait_procs(ranks, timeout=HANG_SECONDS)[1] == []


# In somebody else's process -----------------------------------------------------------------------


def installed_handlers() -> list:
    """Return the process's signal handlers and its threads."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    signal_handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return [*signal_handlers, fd, {thread.name for thread in threading.enumerate()}]


def short_trainer(folder: Path, *callbacks, **options) -> pl.Trainer:
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
    }
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    resume = ExactResume(folder, seed=1, every_n_minutes=0)
    return pl.Trainer(**settings | {"callbacks": [*callbacks, resume]} | options)


class PressCtrlC(pl.Callback):
    """Presses Ctrl-C at a batch, so many times."""

    def __init__(self, times: int, batch: int = 3) -> None:
        self.times = times
        self.batch = batch
        self.ran = -1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.ran = batch_idx
        if batch_idx == self.batch and trainer.current_epoch == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_training_leaves_the_process_as_it_was(tmp_path: Path):
    """This holds after a failure, and if a wakeup descriptor for signals is set."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    handlers_without_pipe = installed_handlers()
    signal.set_wakeup_fd(writing)
    try:
        handlers = installed_handlers()
        short_trainer(tmp_path / "a").fit(Classifier())
        assert installed_handlers() == handlers
        with pytest.raises(RuntimeError):
            os.environ["FAIL_AT"] = "0:2"
            short_trainer(tmp_path / "b").fit(Classifier())
        assert installed_handlers() == handlers
        del os.environ["FAIL_AT"]
        with pytest.raises(SystemExit):
            short_trainer(tmp_path / "c", PressCtrlC(1)).fit(Classifier())
        assert installed_handlers() == handlers and os.read(reading, 1) == bytes([signal.SIGINT])
    finally:
        os.environ.pop("FAIL_AT", None)
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)
    assert installed_handlers() == handlers_without_pipe


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
            raise RuntimeError("as it was told")


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


def test_a_mistake_is_none_of_a_signals_effects(tmp_path: Path):
    with pytest.raises(UserError, match="^--a: found 1$"):
        short_trainer(tmp_path, FailsAfterSignal(UserError("--a: found 1"))).fit(Untested())


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_the_next_fit_goes_on(tmp_path: Path, capfd):
    """The kernel of a notebook lives on; fit is called on the same trainer or a new one."""
    expected = Classifier()
    state = copy.deepcopy(expected.state_dict())
    short_trainer(tmp_path / "alone").fit(expected)
    presses = PressCtrlC(1)
    trainer = short_trainer(tmp_path / "run", presses)
    for next_trainer in (trainer, short_trainer(tmp_path / "run")):
        model = Classifier()
        model.load_state_dict(state)
        if next_trainer is trainer:
            with pytest.raises(SystemExit) as stopped:
                trainer.fit(model)
            assert stopped.value.code == 130 and presses.ran == 3
        else:
            next_trainer.fit(model)
    output = "".join(capfd.readouterr())
    assert (
        "interrupted, resume from step 4: SIGINT; " in output
        and "stopping at the end of this batch" in output
    )
    assert all(
        torch.equal(weight, expected.state_dict()[name])
        for name, weight in model.state_dict().items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("by_flag", [False, True])
def test_a_lightning_cli_resumes(tmp_path: Path, monkeypatch, capfd, by_flag: bool):
    """Its config.yaml is in the logger's folder, which a resumed run has again."""
    monkeypatch.chdir(tmp_path)

    def train(until: int) -> None:
        callbacks = [Stops(until)]
        args = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
        if by_flag:
            args += ["--trainer.callbacks+=sagemaker_lightning.ExactResume"]
            args += ["--trainer.callbacks.dirpath=checkpoints", "--trainer.callbacks.seed=7"]
        else:
            callbacks.append(ExactResume("checkpoints", seed=7))
        defaults = {"enable_progress_bar": False, "callbacks": [] if by_flag else callbacks}
        cli = LightningCLI(Classifier, trainer_defaults=defaults, args=args, run=False)
        cli.trainer.callbacks += callbacks[:1] if by_flag else []
        cli.trainer.fit(cli.model)

    with pytest.raises(SystemExit):
        train(until=14)
    with pytest.raises(SystemExit):
        train(until=17)
    train(until=0)
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["version_0"]
    output = capfd.readouterr().out
    assert "resumed at step 14: the state is as it was saved" in output
    assert "resumed at step 17: the state is as it was saved" in output
    assert "overwrite" not in output


def rows_of(folder: Path) -> str:
    return (folder / "lightning_logs/version_0/metrics.csv").read_text()


@pytest.mark.slow
def test_a_logger_that_was_used_before_fit_goes_on_in_its_file(tmp_path: Path):
    """A validation before the training opens the logger's file, in each run."""

    def train(folder: Path, stops: bool) -> None:
        logger = CSVLogger(folder / "logs")
        trainer = short_trainer(
            folder / "run", *([PressCtrlC(1)] if stops else []), logger=logger, log_every_n_steps=1
        )
        pl.seed_everything(3)
        model = Classifier()
        trainer.validate(model, verbose=False)
        trainer.fit(model)

    train(tmp_path / "alone", stops=False)
    with pytest.raises(SystemExit):
        train(tmp_path / "cut", stops=True)
    train(tmp_path / "cut", stops=False)
    assert [path.name for path in (tmp_path / "cut/logs/lightning_logs").iterdir()] == ["version_0"]
    assert rows_of(tmp_path / "cut/logs") == rows_of(tmp_path / "alone/logs")


class LogsEachValidationBatch(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), on_step=True)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [14, 22])
@pytest.mark.parametrize("every", [0, 2])
def test_the_batches_of_validations_are_counted_on(tmp_path: Path, stop: int, every: int):
    """Lightning logs them over their number, which begins anew with new loaders."""

    def train(folder: Path, until: int) -> None:
        trainer = short_trainer(
            folder,
            Stops(until),
            max_epochs=4,
            reload_dataloaders_every_n_epochs=every,
            val_check_interval=5,
            logger=CSVLogger(folder / "logs"),
        )
        trainer.fit(LogsEachValidationBatch())

    train(tmp_path / "alone", until=0)
    with pytest.raises(SystemExit):
        train(tmp_path / "cut", until=stop)
    train(tmp_path / "cut", until=0)
    rows = rows_of(tmp_path / "alone/logs")
    assert rows_of(tmp_path / "cut/logs") == rows
    assert max(int(row["step"]) for row in csv.DictReader(rows.splitlines())) >= (
        19 if every else 39
    )


@pytest.mark.slow
def test_what_is_logged_between_two_trainings_is_kept(tmp_path: Path, monkeypatch):
    """Even if the second one has to begin again, from the first one's checkpoint."""

    def train(folder: Path, until: int) -> None:
        monkeypatch.setattr(earlier_fits, "_finished", {})  # as in a new process
        used = [CSVLogger(folder / "logs"), TensorBoardLogger(folder / "events", version=0)]
        trainer = short_trainer(folder / "run", logger=used, log_every_n_steps=1)
        pl.seed_everything(3)
        model = Classifier()
        trainer.fit(model)
        trainer.test(model, verbose=False)
        used[0].log_metrics({"by hand": 1.0}, 7)
        trainer.fit_loop.max_epochs = 2
        trainer.callbacks.insert(0, Stops(until))
        trainer.fit(model)

    train(tmp_path / "alone", until=0)
    with pytest.raises(SystemExit):
        train(tmp_path / "run", until=14)
    (tmp_path / "run/run/step-000000014.ckpt").unlink()
    train(tmp_path / "run", until=0)
    content = rows_of(tmp_path / "run/logs")
    assert content == rows_of(tmp_path / "alone/logs")
    rows = list(csv.DictReader(content.splitlines()))
    assert [row["step"] for row in rows if row["by hand"]] == ["7"]
    assert [row["step"] for row in rows if row["val_loss"]] == ["10", "11", "21"]
    files = (tmp_path / "run/events").rglob("*tfevents*")
    points = sorted(point for file in files for point in read_events(file.read_bytes()))
    assert [step for tag, step, _ in points if tag == "train_loss_step"] == list(range(22))
    assert [step for tag, step, _ in points if tag == "val_loss"] == [10, 11, 21]


class History(Logger):
    """Keeps what is logged in memory."""

    name = "history"
    version = 0

    def __init__(self, as_arrays: bool = False) -> None:
        super().__init__()
        self.as_arrays = as_arrays
        self.values: dict[str, list] = {}

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.values.setdefault(name, []).append((step, self.kept(value)))

    def kept(self, value: float):
        return np.ma.masked_array([value]) if self.as_arrays else value


@pytest.mark.slow
def test_a_logger_in_memory_has_the_earlier_values(tmp_path: Path, capfd):
    """If a checkpoint can hold them; else a line names it."""

    def train(folder: Path, presses: int, as_arrays: bool = False) -> dict:
        logger = History(as_arrays)
        trainer = short_trainer(folder, PressCtrlC(presses), logger=logger, log_every_n_steps=1)
        pl.seed_everything(3)
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(Classifier())
        return logger.values

    expected = train(tmp_path / "alone", 0)
    train(tmp_path / "run", 1)
    assert train(tmp_path / "run", 0) == expected and len(expected["train_loss_step"]) == 11
    assert "History" not in capfd.readouterr().out
    train(tmp_path / "arrays", 1, as_arrays=True)
    says = "History.values holds a numpy.ma.MaskedArray, which no checkpoint can hold"
    assert capfd.readouterr().out.count(says) == 1


class Rows(History):
    """Keeps what is logged in a table, and makes another one for each row."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.rows = pyarrow.table({"loss": pyarrow.array([], "float64")}) if empty else None

    def log_metrics(self, metrics, step=None):
        row = pyarrow.table({"loss": [float(metrics.get("train_loss_step", 0))]})
        self.rows = pyarrow.concat_tables([self.rows, row]) if self.rows is not None else row


@pytest.mark.parametrize("empty", [True, False])
def test_a_table_that_no_checkpoint_can_hold_is_named(tmp_path: Path, capfd, empty):
    short_trainer(tmp_path, logger=Rows(empty), log_every_n_steps=5).fit(Untested())
    says = "test_exact_resume.Rows.rows is a pyarrow.lib.Table, which no checkpoint can hold"
    assert capfd.readouterr().out.count(says) == 1


def test_what_is_logged_by_hand_before_fit_is_kept(tmp_path: Path, capfd):
    model = Classifier()
    for _ in range(2):
        logger = CSVLogger(tmp_path / "logs")
        logger.experiment.log_metrics({"mine": 1.0}, step=0)
        short_trainer(tmp_path / "run", logger=logger, log_every_n_steps=1).fit(model)
    assert "mine" in rows_of(tmp_path / "logs").splitlines()[0]
    assert (
        "CSVLogger: this run logs to version 1, the interrupted run logged to version 0"
        in capfd.readouterr().out
    )


@pytest.mark.slow
def test_a_program_that_trains_on_comes_by_its_first_training_again(tmp_path: Path, capfd):
    """Its checkpoint is of an epoch beyond the limit of the first training."""
    model = Classifier()
    trainer = short_trainer(tmp_path, max_epochs=4)
    trainer.fit(model)
    first_trainer = short_trainer(tmp_path, max_epochs=2)
    first_trainer.fit(model)
    assert "is beyond max_epochs=2, and the model has that step's weights" in capfd.readouterr().out
    assert first_trainer.max_epochs == 2 and first_trainer.global_step == trainer.global_step


class Untested(Classifier):
    """Without a validation: its sanity check would make the progress bar."""

    val_dataloader = validation_step = None


@pytest.mark.slow
def test_a_training_that_is_done_ends_with_the_hooks_of_its_start(tmp_path: Path):
    """A callback's on_train_end uses what its on_train_start has made, such as the progress bar."""
    model = Untested()
    for _ in range(2):
        short_trainer(tmp_path, TQDMProgressBar(), enable_progress_bar=True).fit(model)


class StopsEarly(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.slow
def test_a_training_that_was_ended_early_stays_so(tmp_path: Path, capfd):
    """Its last score is known. And a program may change its arrays between two trainings."""
    model = Untested()
    model.directions = np.ones(3)
    scores = []
    for callbacks in ([StopsEarly()], []):
        best = ModelCheckpoint(tmp_path / "best", monitor="train_loss_epoch")
        options = {"max_epochs": 3, "enable_checkpointing": True}
        trainer = short_trainer(tmp_path / "run", *callbacks, best, **options)
        trainer.fit(model)
        scores.append(best.current_score)
        model.directions = 2 * model.directions
    output = capfd.readouterr().out
    assert trainer.global_step == 11 and "step 11 was the last one" in output
    assert "warning: resumed" not in output
    assert scores[0] is not None and scores[0] == scores[1]


@pytest.mark.slow
def test_a_schedule_that_an_average_has_replaced_is_there_at_the_end(
    tmp_path: Path, capfd, monkeypatch
):
    model = Untested()
    for _ in range(2):
        monkeypatch.setattr(earlier_fits, "_finished", {})  # as in a new process
        averages = StochasticWeightAveraging(0.02, swa_epoch_start=1)
        short_trainer(tmp_path, averages, max_epochs=2).fit(model)
    output = capfd.readouterr().out
    assert "was the last one" in output and "warning: resumed" not in output


class StopsInValidation(pl.Callback):
    """Ends the training within an epoch, and may press Ctrl-C in the validation that follows."""

    def __init__(self, presses: bool) -> None:
        self.presses = presses

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 4

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.presses and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGINT)


class CountsEnds(Classifier):
    """Counts its batches and the ends of its validations and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = self.validations = self.ends = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.batches += 1

    def on_validation_end(self):
        self.validations += not self.trainer.sanity_checking

    def on_train_epoch_end(self):
        self.ends += 1


@pytest.mark.slow
def test_an_epoch_that_was_to_end_early_only_ends(tmp_path: Path):
    """After the validation that was interrupted."""
    options = {"max_epochs": 3, "val_check_interval": 5, "limit_val_batches": 1}
    for presses in (True, False):
        trainer = short_trainer(tmp_path, StopsInValidation(presses), **options)
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(model := CountsEnds())
    assert (model.batches, model.validations, model.ends, trainer.global_step) == (5, 1, 1, 5)


class Extending(Untested):
    """Sets its rate when a training starts, lowers it at each batch, and adds an epoch."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

    @property
    def group(self) -> dict:
        return self.trainer.optimizers[0].param_groups[0]

    def on_train_start(self):
        self.group["lr"] = 0.25

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.group["lr"] *= 0.875
        if self.global_step == 2:
            self.trainer.fit_loop.max_epochs += 1


@pytest.mark.slow
def test_rates_and_epochs_are_as_code_has_changed_them(tmp_path: Path):
    """Another limit of epochs replaces the epochs that were added."""
    model = Extending()
    for presses, epochs, steps in ((1, 1, 4), (0, 1, 22), (0, 3, 33)):
        trainer = short_trainer(tmp_path, PressCtrlC(presses), max_epochs=epochs)
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(model)
        assert trainer.global_step == steps
        assert model.group["lr"] == pytest.approx(0.25 * 0.875**steps)


class Validating(Classifier):
    """Counts what it validates, also in the check before training, and knows two folders."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.validated = 0

    def val_dataloader(self):
        self.data_folder = self.folder
        return super().val_dataloader()

    def validation_step(self, batch, batch_idx):
        self.validated += 1


@pytest.mark.slow
def test_the_check_before_training_counts_once(tmp_path: Path):
    """What is made with the data is no change: a resumed run may have another folder."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, StopsAt(0, 2), limit_val_batches=2).fit(Validating("a"))
    short_trainer(tmp_path, limit_val_batches=2).fit(model := Validating("b"))
    assert model.validated == 2 + 2
    assert model.folder == model.data_folder == "b"


class Growing(Untested):
    """Makes a part of it in a hook, if it is told to."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.grows = grows

    def on_fit_start(self):
        if self.grows:
            self.head = torch.nn.Linear(1, 1)


@pytest.mark.slow
def test_weights_that_no_hook_makes_again_are_one_line(tmp_path: Path):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Growing(True))
    says = r"step 4 is of another run: its model has head\.bias, this one does not; give another"
    with pytest.raises(UserError, match=says):
        short_trainer(tmp_path).fit(Growing(False))
    short_trainer(tmp_path).fit(Growing(True))


def test_ctrl_c_twice_stops_at_once(tmp_path: Path):
    presses = PressCtrlC(2)
    handlers = installed_handlers()
    with pytest.raises(SystemExit) as stopped:  # Lightning's answer to a KeyboardInterrupt
        short_trainer(tmp_path, presses).fit(Classifier())
    assert stopped.value.code == 1 and not (tmp_path / "step-000000004.ckpt").exists()
    assert installed_handlers() == handlers  # a notebook can be interrupted again


class Scaler:
    """An object that no checkpoint of ours holds; what it has seen is state."""

    def __init__(self) -> None:
        self.seen = 0


class WithScaler(Classifier):
    """Keeps an object in its checkpoints, as pytorch-forecasting and darts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def training_step(self, batch, batch_idx):
        self.scaler.seen += 1
        return super().training_step(batch, batch_idx) / self.scaler.seen

    def on_save_checkpoint(self, checkpoint):
        checkpoint["parameters"] = {"scaler": self.scaler, "size": 3}

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["parameters"]["size"] == 3
        self.scaler = checkpoint["parameters"]["scaler"]


@pytest.mark.slow
def test_objects_that_the_model_has_may_be_in_its_checkpoints(tmp_path: Path):
    """A resumed run has its own object there; the user's files have what Lightning writes."""
    expected = WithScaler()
    state = copy.deepcopy(expected.state_dict())
    short_trainer(tmp_path / "alone").fit(expected)
    for presses in (1, 0):
        model = WithScaler()
        model.load_state_dict(state)
        files = ModelCheckpoint(tmp_path / "own", "last", save_on_train_epoch_end=True)
        trainer = short_trainer(
            tmp_path / "run", PressCtrlC(presses), files, enable_checkpointing=True
        )
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(model)
    assert all(
        torch.equal(weight, expected.state_dict()[name])
        for name, weight in model.state_dict().items()
    )
    assert model.scaler.seen == expected.scaler.seen
    saved_parameters = torch.load(tmp_path / "own/last.ckpt", weights_only=False)["parameters"]
    assert (
        isinstance(saved_parameters["scaler"], Scaler)
        and saved_parameters["scaler"].seen == model.scaler.seen
    )


def wait_for_checkpoints() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.ckpt"))


def test_a_step_of_several_batches_is_saved_once(tmp_path: Path):
    resume = ExactResume(tmp_path, seed=1, every_n_minutes=0, every_n_steps=2, keep=50)
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 8}
    short_trainer(tmp_path, callbacks=[resume], **options).fit(Untested())
    assert saved_steps(tmp_path) == [2, 4]


@pytest.mark.slow
def test_a_checkpoint_has_the_state_of_its_step_whenever_it_is_written(tmp_path: Path, monkeypatch):
    """It is a copy: training goes on while it is written."""
    saved = {}
    monkeypatch.setattr(
        checkpoint_dir, "write", lambda path, state, step, number: saved.update({step: state})
    )
    resume = ExactResume(tmp_path, seed=1, every_n_minutes=0, every_n_steps=2)
    began = time.time()
    trainer = short_trainer(tmp_path, callbacks=[resume], limit_train_batches=3)
    trainer.fit(model := Untested())
    assert [*saved] == [2, 3]
    for step, state in saved.items():
        entries = state["sagemaker_lightning"]
        optimizer = state["optimizer_states"][0]["state"]
        assert {float(values["step"]) for values in optimizer.values()} == {float(step)}
        assert torch.equal(state["state_dict"]["network.0.weight"], model.network[0].weight) is (
            step == 3
        )
        assert began <= entries["number"] / 1e9 <= time.time()
        assert entries["ranks"][0]["rank_overrides"]["entries"] == {} and entries["step"] == step
        assert entries["parts"]["should_stop"] is False
        assert entries["parts"]["limits"]["added_limits"] == [0, 0]
        epochs = state["loops"]["fit_loop"]["epoch_progress"]["current"]
        assert (epochs["processed"], epochs["completed"]) == ((1, 0) if step == 3 else (0, 0))
        assert entries["resume_point"] == ("epoch" if step == 3 else "batch")


class Unsaveable(Untested):
    """Holds an object that no checkpoint can hold, in its checkpoints or its hyperparameters."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        if place == "hparams":
            self.save_hyperparameters({"scaler": Scaler()})

    def on_save_checkpoint(self, checkpoint):
        if self.place == "hook":
            checkpoint["lock"] = threading.Lock()
        if self.place == "optimizer":
            checkpoint["optimizer_states"][0]["lock"] = threading.Lock()
        if self.place == "scheduler":
            checkpoint["lr_schedulers"][0]["lock"] = threading.Lock()

    def on_load_checkpoint(self, checkpoint):
        """Load what is there; without it, nobody would ask the other hook."""


class Unsaved(pl.Callback):
    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state_dict):
        """Load nothing."""


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("hook", r"lock is a _thread.lock \(on_save_checkpoint\(\) or state_dict\(\) of test_"),
        ("optimizer", r"optimizer_states.0.lock is a _thread.lock \(an optimizer of test_"),
        ("scheduler", r"lr_schedulers.0.lock is a _thread.lock \(a scheduler of test_"),
        ("callback", r"callbacks.Unsaved.lock is a _thread.lock \(a callback of test_"),
    ],
)
def test_an_object_that_no_checkpoint_can_hold_is_one_line(tmp_path: Path, place, says):
    callbacks = [Unsaved()] if place == "callback" else []
    line = rf"^a checkpoint of this run could not be read again: {says}exact_resume.Unsaveable\)"
    with pytest.raises(UserError, match=line):
        short_trainer(tmp_path, *callbacks).fit(Unsaveable(place))


def test_a_hyperparameter_that_no_checkpoint_can_hold_is_named_in_it(tmp_path: Path):
    short_trainer(tmp_path, limit_train_batches=1).fit(Unsaveable("hparams"))
    (last,) = tmp_path.glob("step-*.ckpt")
    saved = torch.load(last, weights_only=True)
    assert saved["hyper_parameters"]["scaler"] == "(test_exact_resume.Scaler)"


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
    assert saved_steps(tmp_path) == [1, 2]


def test_a_rank_may_outlive_its_launcher_except_while_it_trains(tmp_path: Path, monkeypatch):
    class Sees(pl.Callback):
        def on_train_batch_start(self, *_):
            set_signals.append("trains")

    set_signals = []
    monkeypatch.setattr(parent_process, "_set_death_signal", set_signals.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(parent_process.LAUNCHER_VARIABLE, raising=False)
    trainer = short_trainer(tmp_path, Sees(), limit_train_batches=1)
    assert set_signals == [signal.SIGKILL]
    model = Untested()
    for epochs in (1, 2):
        set_signals.clear()
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model)
        assert set_signals == [signal.SIGKILL, "trains", 0]


def test_a_training_that_fails_leaves_no_file_open_and_no_folder_locked(tmp_path: Path):
    open_files = []
    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match="as it was told"):
            short_trainer(tmp_path / name, Fails()).fit(Untested())
        open_files.append(len([*Path("/proc/self/fd").iterdir()]))
        assert folder_lock._held == {}
    assert open_files[0] == open_files[1]


def test_a_training_that_is_not_exact_leaves_the_signals_to_lightning(tmp_path: Path, capfd):
    class Sees(pl.Callback):
        def on_train_batch_start(self, *_):
            stops.append(resume.stop)

    stops = []
    resume = ExactResume(tmp_path, exact=False)
    trainer = short_trainer(tmp_path, callbacks=[Sees(), resume], limit_train_batches=1)
    trainer.fit(Untested())
    assert stops == [None] and saved_steps(tmp_path) == []
    assert "this run is trained and saved as Lightning does; " in capfd.readouterr().out


@pytest.mark.slow
def test_what_is_logged_by_hand_after_a_stop_is_kept(tmp_path: Path):
    model = Untested()
    logger = CSVLogger(tmp_path / "logs")
    options = {"logger": logger, "log_every_n_steps": 1, "limit_train_batches": 4}
    for presses in (1, 0):
        trainer = short_trainer(tmp_path / "run", PressCtrlC(presses, batch=1), **options)
        with pytest.raises(SystemExit) if presses else contextlib.nullcontext():
            trainer.fit(model)
        if presses:
            logger.log_metrics({"mine": 1.0}, step=1)
    rows = list(csv.DictReader(rows_of(tmp_path / "logs").splitlines()))
    assert [row["step"] for row in rows if row["mine"]] == ["1"]
    assert [row["step"] for row in rows if row["train_loss_step"]] == ["0", "1", "2", "3"]


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
    """Of any process; tests/test_foreign_image.py has what comes of it in a container."""
    code = f"import signal; signal.signal(signal.SIGTERM, {handler}); print(1, flush=True); input()"
    command = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        assert shutdown.loses_sigterm(process.pid) == (name if says else "")
        process.stdin.close()
    assert shutdown.loses_sigterm(process.pid) == ""


# One line each ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_find_each_other(tmp_path: Path, monkeypatch):
    """Without our launcher; what the user or torchrun has set stays."""
    for name in ("MASTER_ADDR", "NODE_RANK"):  # restored after the test
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("SM_CURRENT_HOST", "localhost")
    monkeypatch.setenv("SM_HOSTS", '["127.0.0.1", "localhost"]')
    sagemaker_lightning.join_hosts()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["MASTER_PORT"] == "12345"
    assert os.environ["NODE_RANK"] == "1"
    monkeypatch.setenv("SM_HOSTS", '["localhost", "no-such-host.invalid"]')
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT", "1")
    resume = ExactResume(tmp_path)  # waits for nobody
    options = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "logger": False}
    trainer = pl.Trainer(**options, callbacks=[resume])
    with pytest.raises(UserError, match="^host no-such-host.invalid: its name did not resolve"):
        trainer.fit(Untested())


def test_a_second_one_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"^Trainer\(callbacks=...\): found two ExactResume, for .*; allowed is one$",
    ):
        short_trainer(tmp_path / "a", ExactResume(tmp_path / "b")).fit(Classifier())


@pytest.mark.parametrize("part", [GradientWeighting(), LearningRateScaling()])
def test_what_it_does_itself_is_refused_beside_it(tmp_path: Path, part):
    with pytest.raises(UserError, match=f"found {type(part).__name__}, which RankConsistency and"):
        short_trainer(tmp_path, part).fit(Classifier())


def test_what_it_has_itself_is_refused_beside_it(tmp_path: Path):
    with pytest.raises(
        UserError, match="found RankConsistency beside ExactResume, which has one of its own"
    ):
        short_trainer(tmp_path, RankConsistency()).fit(Classifier())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keep": 0}, r"ExactResume\(keep=...\): found 0, allowed is 1 or more"),
        (
            {"keep": 0, "settings": {"--resume.keep": 0}},
            "--resume.keep: found 0, allowed is 1 or more",
        ),
        (
            {"every_n_minutes": float("nan")},
            r"ExactResume\(every_n_minutes=...\): found nan, allowed is 0 or more",
        ),
        ({"seed": "42"}, r"ExactResume\(seed=...\): found '42', allowed is an integer"),
        (
            {"every_n_steps": 1.5},
            r"ExactResume\(every_n_steps=...\): found 1.5, allowed is an integer",
        ),
        ({"dirpath": None}, r"ExactResume\(dirpath=...\): found None, allowed is a folder"),
        ({"settings": ["a"]}, r"ExactResume\(settings=...\): found \['a'\], allowed is a dict"),
        (
            {"dirpath": "s3://bucket/x"},
            r"ExactResume\(dirpath=...\): found s3://bucket/x, allowed is a folder",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path: Path, arguments, says):
    with pytest.raises(UserError, match=f"^{says}"):
        ExactResume(**{"dirpath": tmp_path} | arguments)


def test_the_pages_name_the_defaults():
    parameters = inspect.signature(ExactResume).parameters
    page = (ROOT / "docs/flags-and-recipes.md").read_text()
    for name in ("every_n_minutes", "keep"):
        assert f"`{name}` ({parameters[name].default:g})" in page
    assert "`exact` (true)" in page and parameters["exact"].default is True
    off = ("every_n_steps", "other_settings", "strict")
    assert not any(parameters[name].default for name in off)


def test_a_drill_sets_where_checkpoints_are(tmp_path: Path):
    environment = SageMakerEnvironment(drill={"steps": 2}, checkpoint_dir=tmp_path / "drill")
    resume = ExactResume(tmp_path / "own", environment=environment)
    assert resume.folder.path == tmp_path / "drill"


@pytest.mark.parametrize(("seed", "is_random"), [(2**32, False), (2**32 + 1, True)])
def test_a_seed_that_a_program_may_give_is_told_from_torchs_first_one(
    tmp_path: Path, seed, is_random
):
    model = Untested()
    torch.manual_seed(seed)
    ExactResume(tmp_path, seed=1)
    assert (model in first_draws._unseeded) is is_random


def test_a_seed_decides_what_is_drawn_after_it_unless_the_command_line_has_set_it(tmp_path: Path):
    drawn = {}
    for seed in (1, 1, 2):
        ExactResume(tmp_path, seed=seed)
        assert drawn.setdefault(seed, torch.get_rng_state().tolist()) == (
            torch.get_rng_state().tolist()
        )
    assert drawn[1] != drawn[2]
    ExactResume(tmp_path)
    ExactResume(tmp_path, seed=1, stop=shutdown.Stop(CheckpointHome(tmp_path), print))
    assert torch.get_rng_state().tolist() == drawn[2]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoints cannot be written there"):
        short_trainer(tmp_path / "file/checkpoints").fit(Classifier())


def test_checkpoints_of_another_program_are_one_line(tmp_path: Path):
    torch.save({"state_dict": {}}, tmp_path / "step-000000007.ckpt")
    with pytest.raises(
        UserError, match=rf"^ExactResume\(dirpath={tmp_path}\): found checkpoints, but none"
    ):
        short_trainer(tmp_path).fit(Classifier())


HOLDS = """
import os, sys, time
from pathlib import Path
from sagemaker_lightning.resume.files import folder_lock
assert folder_lock.lock(Path(sys.argv[1]), 0) == ""
if (worker := os.fork()) == 0:
    time.sleep(60)
print(worker, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_process_with_the_same_folder_is_one_line(tmp_path: Path, monkeypatch):
    """Until the first one is killed, even if a data worker of it lives on."""
    monkeypatch.setattr(run_module, "LOCK_SECONDS", 0.0)
    other_process = warm.start(["python", "-c", HOLDS, tmp_path], tmp_path)
    worker = int(other_process.stdout.readline())
    pid = other_process.pid
    says = rf"\(dirpath={tmp_path}\): process {pid} trains with these checkpoints now; end it"
    with pytest.raises(UserError, match=says):
        short_trainer(tmp_path).fit(Classifier())
    other_process.kill()
    other_process.wait(HANG_SECONDS)
    assert psutil.pid_exists(worker)
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    assert folder_lock._held == {}
    os.kill(worker, signal.SIGKILL)


def test_a_run_with_other_settings_is_one_line(tmp_path: Path):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(UserError, match="--trainer.accumulate_grad_batches was 1, is 2"):
        short_trainer(tmp_path, accumulate_grad_batches=2).fit(Classifier())


def test_a_seed_of_the_command_line_is_named_by_its_flag_alone(tmp_path: Path):
    for seed in (1, 2):
        resume = ExactResume(tmp_path, seed=seed, settings={"--seed_everything": seed})
        trainer = short_trainer(tmp_path, callbacks=[resume], limit_train_batches=1)
        if seed == 1:
            trainer.fit(model := Untested())
    says = r"is of another run: --seed_everything was 1, is 2; (?!ExactResume)"
    with pytest.raises(UserError, match=says):
        trainer.fit(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "seed", "says"),
    [
        (28, 1, "the length of train.0.dataset, the numbers in train.0.dataset.tensors differ"),
        (24, 2, "the numbers in train.0.dataset.tensors differ"),
        (24, 1, ""),
    ],
)
def test_other_data_are_said_at_an_epochs_end_too(tmp_path: Path, capfd, samples, seed, says):
    """No step is recorded there yet that could differ."""

    def loader(samples: int, seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.rand(samples, size, generator=generator) for size in (2, 1)]
        return DataLoader(TensorDataset(*columns), 4, shuffle=True)

    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1, batch=5), max_epochs=2).fit(Untested(), loader(24, 1))
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), max_epochs=2).fit(Untested(), loader(samples, seed))
    output = capfd.readouterr().out
    assert (
        f"on rank 0, {says}; likely because of data that were read or drawn anew" in output
    ) is (bool(says))
    assert ("warning: resumed" in output) is bool(says)


class Validated(Classifier):
    """Gets its training data, and its validation data from a test."""

    val_dataloader = None


def numbers(seed: int, samples: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        *(torch.rand(samples, size, generator=generator).round() for size in (2, 1))
    )


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            DataLoader(numbers(1, 9), 4),
            "the length of val.0.dataset, the numbers in val.0.dataset.tensors differ",
        ),
        (DataLoader(numbers(2), 4), "the numbers in val.0.dataset.tensors differ"),
        (DataLoader(numbers(1), 2), "the batch_size of val.0 differ"),
        (DataLoader(numbers(1), 4), ""),
    ],
)
def test_other_validation_data_are_said(tmp_path: Path, capfd, loader, says, every):
    """They decide the best model and when training ends. The next validation may come later."""
    options = {"max_epochs": 2, "check_val_every_n_epoch": every}
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1), **options).fit(
            Validated(), val_dataloaders=DataLoader(numbers(1), 4)
        )
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), **options).fit(Validated(), val_dataloaders=loader)
    output = capfd.readouterr().out
    assert f"on rank 0, {says}; likely because of data" in output or not says
    assert ("warning: resumed" in output) is bool(says)


class Drawn(Classifier):
    """Draws its validation data whenever Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first_numbers: dict[int, float] = {}

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(8, 2), torch.ones(8, 1)), 4)

    def validation_step(self, batch, batch_idx):
        self.first_numbers.setdefault(self.current_epoch, float(batch[0][0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epoch", "every", "reloads"),
    [(1, 1, 2), (2, 1, 2), (3, 1, 2), (1, 3, 2), (4, 3, 2), (1, 1, 0)],
)
def test_validation_data_that_are_drawn_anew_every_other_epoch(
    tmp_path: Path, epoch, every, reloads
):
    """Or only once."""
    options = {"reload_dataloaders_every_n_epochs": reloads, "check_val_every_n_epoch": every}
    options["max_epochs"] = 4 if every == 1 else 6
    if not reloads:
        options["max_epochs"] = 2
    uninterrupted = Drawn()
    short_trainer(tmp_path / "whole", **options).fit(uninterrupted)
    draws = len(set(uninterrupted.first_numbers.values()))
    assert draws == (1 if not reloads else 2 if every == 1 else 3)
    interrupted = Drawn()
    with pytest.raises(SystemExit):
        short_trainer(tmp_path / "run", Stops(epoch * 10 + 4), **options).fit(interrupted)
    resumed = Drawn()
    short_trainer(tmp_path / "run", **options).fit(resumed)
    assert interrupted.first_numbers | resumed.first_numbers == uninterrupted.first_numbers


@pytest.mark.slow
def test_other_batches_are_said_at_an_epochs_end_too(tmp_path: Path, capfd):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1, batch=10), max_epochs=2).fit(Untested())
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), max_epochs=2).fit(Untested(batch_size=8))
    output = capfd.readouterr().out
    assert "warning: model.batch_size" not in output
    assert "on rank 0, the batch_size of train.0 differ" in output


class Regularized(Untested):
    """Has numbers of its own, in a part of it and in a list."""

    def __init__(self, dropout: float = 0.3, weight: float = 1.0) -> None:
        super().__init__()
        self.network[3].p = dropout
        self.weights = {"loss": weight, "started": time.time()}
        self.started = time.time()

    def step(self, batch):
        return super().step(batch) * self.weights["loss"]


class Patient(pl.Callback):
    """Counts, and has a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    def on_train_batch_end(self, *args):
        self.count += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "limits", "says"),
    [
        ({}, (3, 99), ""),
        ({"dropout": 0.4}, (3, 99), "p of model.network.3 was 0.3, is 0.4"),
        ({}, (4, 99), "limit of Patient was 3, is 4"),
        ({}, (3, 7), "patience of EarlyStopping was 99, is 7"),
    ],
)
def test_other_numbers_of_the_code_are_said(tmp_path: Path, capfd, model, limits, says):
    """Some of them the checkpoint has, others not: no run from the beginning is like that."""

    def train(model: dict, limit: int, patience: int, presses: int) -> None:
        stops = EarlyStopping("train_loss", patience=patience)
        short_trainer(tmp_path, Patient(limit), stops, PressCtrlC(presses)).fit(
            Regularized(**model)
        )

    with pytest.raises(SystemExit):
        train({}, 3, 99, presses=1)
    capfd.readouterr()
    train(model, *limits, presses=0)
    output = capfd.readouterr().out
    assert output.count("warning: ") == bool(says)
    assert (
        f"warning: {says}: this run goes on from its checkpoint, and may end" in output or not says
    )


@pytest.mark.slow
def test_another_learning_rate_is_one_line(tmp_path: Path, capfd):
    """It would have no effect: the checkpoint has its own."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(
        UserError, match=r"is of another run: lr of AdamW was 0.05, is 0.1; continue"
    ):
        short_trainer(tmp_path).fit(Classifier(lr=0.1))
    resume = ExactResume(tmp_path, seed=1, other_settings=True)
    trainer = short_trainer(tmp_path, callbacks=[resume])
    capfd.readouterr()
    trainer.fit(model := Classifier(lr=0.1))
    assert model.optimizers().optimizer.param_groups[0]["initial_lr"] == 0.1
    assert "warning: " not in capfd.readouterr().out


class Scheduled(Untested):
    """Its optimizer and schedule are made by functions that a test gives."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = (make,)  # no method

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self):
        return self.make[0](self, torch.optim, torch.optim.lr_scheduler)


def step_lr(step_size: int):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        return [optimizer], [schedules.StepLR(optimizer, step_size)]

    return make


def one_cycle(**arguments):
    def make(model, optim, schedules):
        optimizer = optim.AdamW(model.parameters())
        settings = {"max_lr": 0.1, "total_steps": model.trainer.estimated_stepping_batches}
        schedule = schedules.OneCycleLR(optimizer, **settings | arguments)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return make


def in_groups(*groups: dict):
    def make(model, optim, schedules):
        parts = zip(groups, (model.network[0], model.network[1], model.network[4]), strict=False)
        return optim.AdamW([{"params": [*part.parameters()]} | group for group, part in parts], 0.1)

    return make


def warm_up(steps: int, form: str):
    class Object:
        def __init__(self) -> None:
            self.steps = steps

        def __call__(self, step: int) -> float:
            return min(1.0, (step + 1) / self.steps)

    functions = {
        "closure": lambda step: min(1.0, (step + 1) / steps),
        "partial": functools.partial(lambda step, steps: min(1.0, (step + 1) / steps), steps=steps),
        "object": Object(),
        "constant": {
            4: lambda step: min(1.0, (step + 1) / 4),
            8: lambda step: min(1.0, (step + 1) / 8),
        }[steps],
    }

    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        return [optimizer], [schedules.LambdaLR(optimizer, functions[form])]

    return make


def one_after_the_other(milestone: int, gamma: float, cycles: int):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        first = schedules.ChainedScheduler(
            [schedules.ExponentialLR(optimizer, gamma), schedules.StepLR(optimizer, 3)]
        )
        second = schedules.CosineAnnealingLR(optimizer, cycles)
        schedule = schedules.SequentialLR(optimizer, [first, second], [milestone])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return make


def on_plateau(**arguments):
    def make(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        schedule = schedules.ReduceLROnPlateau(optimizer, **arguments)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"},
        }

    return make


def two_optimizers(rate: float):
    def make(model, optim, schedules):
        parts = model.network[0], model.network[4]
        rates = 0.1, rate
        model.automatic_optimization = False
        return [optim.SGD(part.parameters(), lr) for part, lr in zip(parts, rates, strict=True)]

    return make


ARGUMENTS = [
    (step_lr(10), step_lr(5), "step_size of StepLR was 10, is 5"),
    (one_cycle(), one_cycle(max_lr=0.2), "lr of AdamW was 0.004, is 0.008"),
    (
        one_cycle(),
        one_cycle(pct_start=0.5),
        r"_schedule_phases of OneCycleLR was .*\.\.\. \(\w+\), is ",
    ),
    (one_cycle(), one_cycle(anneal_strategy="linear"), "_anneal_func_type of OneCycleLR was cos"),
    (
        in_groups({"lr": 0.1}, {"lr": 0.01}),
        in_groups({"lr": 0.1}, {"lr": 0.02}),
        "lr of parameter group 1 of AdamW was 0.01, is 0.02",
    ),
    (
        in_groups({}, {"weight_decay": 0.0}),
        in_groups({}, {"weight_decay": 0.3}),
        "weight_decay of parameter group 1 of AdamW was 0.0, is 0.3",
    ),
    (in_groups({}, {}, {}), in_groups({}, {}), "number of parameter groups of AdamW was 3, is 2"),
    (step_lr(10), on_plateau(), "the scheduler was StepLR, is ReduceLROnPlateau"),
    (on_plateau(patience=1), on_plateau(patience=3), "patience of ReduceLROnPlateau was 1, is 3"),
    (on_plateau(), on_plateau(mode="max"), ".*mode of ReduceLROnPlateau was min, is max"),
    (
        one_after_the_other(4, 0.9, 5),
        one_after_the_other(4, 0.8, 6),
        "gamma of ExponentialLR in ChainedScheduler in SequentialLR was 0.9, is 0.8; "
        "T_max of CosineAnnealingLR in SequentialLR was 5, is 6",
    ),
    (
        one_after_the_other(4, 0.9, 5),
        one_after_the_other(3, 0.9, 5),
        "_milestones of SequentialLR was 4, is 3",
    ),
    *(
        (warm_up(4, how), warm_up(8, how), "steps of lr_lambdas of LambdaLR was 4, is 8;")
        for how in ("closure", "partial", "object")
    ),
    (
        warm_up(4, "constant"),
        warm_up(8, "constant"),
        "the code of lr_lambdas of LambdaLR has changed;",
    ),
    (two_optimizers(0.1), two_optimizers(0.2), r"lr of optimizer 1 \(SGD\) was 0.1, is 0.2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now", "says"), ARGUMENTS)
def test_another_argument_of_an_optimizer_or_schedule_is_one_line(
    tmp_path: Path, before, now, says
):
    """It would have no effect: the checkpoint has its own. The same ones are not refused."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path / "run", PressCtrlC(1)).fit(Scheduled(before))
    with pytest.raises(UserError, match=f"is of another run: {says}"):
        short_trainer(tmp_path / "run").fit(Scheduled(now))
    short_trainer(tmp_path / "run").fit(Scheduled(before))


@pytest.mark.slow
def test_more_epochs_than_a_schedule_was_made_for_are_said(tmp_path: Path, capfd):
    """Once: the run goes on with them."""

    def cosine(model, optim, schedules):
        optimizer = optim.SGD(model.parameters(), 0.1)
        steps = model.trainer.estimated_stepping_batches
        return [optimizer], [schedules.CosineAnnealingLR(optimizer, steps)]

    outputs = []
    for epochs, step in ((1, 4), (2, 6), (2, 8), (2, 0)):
        with pytest.raises(SystemExit) if step else contextlib.nullcontext():
            short_trainer(tmp_path, Stops(step), max_epochs=epochs).fit(Scheduled(cosine))
        outputs.append(capfd.readouterr().out)
    says = "warning: T_max of CosineAnnealingLR was 11, is 22: this run goes on from its checkpoint"
    assert [says in output for output in outputs] == [False, True, False, False]


class Warmup(pl.Callback):
    """Sets the learning rate by hand."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.rate * min(1, (trainer.global_step + 1) / 10)


@pytest.mark.slow
def test_who_sets_another_learning_rate_is_named(tmp_path: Path, capfd):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1), Warmup(0.05)).fit(Classifier())
    capfd.readouterr()
    short_trainer(tmp_path, PressCtrlC(0), Warmup(0.1)).fit(Classifier())
    assert (
        "the learning rate differs; likely because of StepLR, whose arguments or state are others, "
        "or what test_exact_resume.Warmup.on_train_batch_start sets, which is another value"
    ) in capfd.readouterr().out


@pytest.mark.parametrize("content", [b"hello", b"", b"PK\x03\x04", None, [1], {"a": 1}])
def test_a_ckpt_path_that_is_no_checkpoint_is_one_line(tmp_path: Path, content):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    says = rf"^fit\(ckpt_path={path}\): found no checkpoint that could be read \(.*\); expected one"
    with pytest.raises(UserError, match=says) as caught:
        short_trainer(tmp_path / "run").fit(Classifier(), ckpt_path=path)
    assert "\n" not in str(caught.value)


def test_a_ckpt_path_with_weights_alone_is_one_line(tmp_path: Path):
    saves = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    short_trainer(tmp_path / "a", saves, enable_checkpointing=True).fit(Untested())
    path = tmp_path / "weights.ckpt"
    with pytest.raises(UserError, match="found no optimizer_states and no lr_schedulers in it"):
        short_trainer(tmp_path / "b").fit(Untested(), ckpt_path=path)


class OwnShare(torch.utils.data.Sampler):
    """Draws every second batch, as rank 0 or rank 1 has to."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([range(4 * batch, 4 * batch + 4) for batch in range(rank, 10, 2)])


class Stream(IterableDataset):
    """Yields the same samples on all ranks."""

    def __iter__(self):
        yield from map(Noisy().__getitem__, range(20))


def fit_two_ranks(loader_name: str) -> str:
    """Train with a loader whose samples Lightning does not distribute over the ranks."""
    loaders = {
        "own": lambda: DataLoader(Noisy(), batch_sampler=OwnShare()),
        "stream": lambda: DataLoader(Stream(), 4),
    }
    options = {"use_distributed_sampler": False} if loader_name == "own, as it is" else {}
    trainer = short_trainer(Path("run"), devices=2, strategy="ddp", **options)
    trainer.fit(Untested(), loaders[loader_name.partition(",")[0]]())
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader_name", "says"),
    [
        (
            "own",
            "Trainer(use_distributed_sampler=...): found True, and OwnShare, which draws other "
            "samples on each rank; give use_distributed_sampler=False",
        ),
        ("own, as it is", ""),
        ("stream", "warning: all 2 ranks train on the same batch: they share"),
    ],
)
def test_who_shares_the_samples_out_is_said(tmp_path: Path, loader_name, says):
    """Each sample once, or a line on it."""
    ended = ranks.run(fit_two_ranks, loader_name, folder=tmp_path)
    if loader_name == "own":
        assert all(says in rank.error for rank in ended), ended[0].output
    else:
        assert not ended[0].error and not ended[1].error, ended[0].output
        assert ended[0].output.count("warning: ") == bool(says) and says in ended[0].output


def fit_a_sharded_channel(own_sampler: bool) -> str:
    """Train two hosts of one rank each, whose channel is divided over the hosts."""
    environment = SageMakerEnvironment(
        hosts=("algo-1", "algo-2"),
        current_host=f"algo-{1 + int(os.environ['RANK'])}",
        sharded_channels=frozenset({"training"}),
    )
    trainer = pl.Trainer(
        num_nodes=2,
        accelerator="cpu",
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=not own_sampler,
        callbacks=[ExactResume("../run", seed=1, environment=environment)],
    )
    trainer.fit(Untested(), DataLoader(Noisy(), 4))
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("own_sampler", [False, True])
def test_a_sharded_channel_that_all_ranks_share_is_said(tmp_path: Path, own_sampler):
    """A host would train on a part of its own samples, and no line would say so."""
    ended = ranks.run(fit_a_sharded_channel, own_sampler, nodes=[1, 1], folder=tmp_path)
    assert not ended[0].error and not ended[1].error, ended[0].output
    says = "files of the channel training (ShardedByS3Key), and all 2 ranks share"
    assert ended[0].output.count(says) == (not own_sampler), ended[0].output
    assert says not in ended[1].output


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path: Path, monkeypatch):
    def write(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_dir, "write", write)
    says = rf"\(dirpath={tmp_path}\): no checkpoint could be written there \(No space left on"
    with pytest.raises(UserError, match=says):
        short_trainer(tmp_path).fit(Classifier())


@pytest.mark.slow
def test_a_folder_that_is_removed_while_training_is_made_again(tmp_path: Path):
    class Removes(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
                shutil.rmtree(tmp_path / "run")

    model = Classifier()
    short_trainer(tmp_path / "run", Removes(), max_epochs=2).fit(model)
    resumed = Classifier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier_fits, "_finished", {})
        short_trainer(tmp_path / "run", Removes(), max_epochs=2).fit(resumed)
    assert torch.equal(model.network[0].weight, resumed.network[0].weight)


class OtherOptimizer(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_another_optimizer_is_one_line(tmp_path: Path):
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, PressCtrlC(1)).fit(Classifier())
    with pytest.raises(
        UserError,
        match=r"the optimizer was AdamW, is SGD; .*; ExactResume\(other_settings=True\) allows",
    ):
        short_trainer(tmp_path).fit(OtherOptimizer())


@pytest.mark.slow
def test_a_strategy_that_copies_the_process_is_one_line(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(reporting, "_shows_exceptions", lambda: False)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("MASTER_PORT")  # Lightning sets it; it is unset again at the end
    with pytest.raises(SystemExit) as ended, report_failures():
        short_trainer(tmp_path, devices=2, strategy="ddp_fork").fit(Classifier())
    output = capfd.readouterr().err.splitlines()
    assert ended.value.code == 1 and "Traceback (most recent call last):" not in output
    assert output[-1].startswith(
        "error: Trainer(strategy=...): found DDPStrategy, which copies this process"
    )


def test_processes_that_are_copies_of_this_one_are_refused(tmp_path: Path):
    resume = ExactResume(tmp_path)
    trainer = short_trainer(tmp_path / "a", devices=2, strategy="ddp_spawn")
    error = resume._unsupported(trainer.strategy)
    assert (
        "DDPStrategy, which copies this process, whose runs cannot be resumed; "
        "allowed are one device"
    ) in str(error)


def test_a_version_of_lightning_that_is_not_supported_is_one_line(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: "3.0.0")
    monkeypatch.delitem(vars(sagemaker_lightning), "ExactResume")
    with pytest.raises(UserError, match="found pytorch-lightning 3.0.0, expected 2.5.2 or later"):
        sagemaker_lightning.ExactResume  # noqa: B018


def test_fast_dev_run_saves_nothing(tmp_path: Path):
    short_trainer(tmp_path / "a", fast_dev_run=True).fit(Classifier())
    assert not (tmp_path / "a").exists()


def test_a_copy_is_one_of_its_own(tmp_path: Path):
    """Some users make callbacks once, and copy them for each trainer."""
    resume = ExactResume(tmp_path, seed=3, keep=5)
    trainer = short_trainer(tmp_path / "a")
    trainer.fit(Classifier())
    used = [entry for entry in trainer.callbacks if isinstance(entry, ExactResume)]
    for original in (resume, *used):
        copied = copy.deepcopy(original)
        assert copied.seeding is not original.seeding and copied.folder.path == original.folder.path
        assert copied.arguments == original.arguments
    resume = ExactResume(tmp_path, stop=shutdown.Stop(CheckpointHome(tmp_path), print))
    assert copy.deepcopy(resume).stop is resume.stop and resume.resumes == []


def test_a_callback_is_pickled_with_its_arguments(tmp_path: Path):
    """A library may save the callbacks beside a model, and read them again (darts does)."""
    resume = ExactResume(tmp_path, seed=3, keep=5)
    trainer = short_trainer(tmp_path / "a")
    trainer.fit(Classifier())
    used = [entry for entry in trainer.callbacks if isinstance(entry, ExactResume)]
    for original in (resume, *used):
        pickled = pickle.dumps(original)
        state = torch.get_rng_state()
        read = pickle.loads(pickled)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(read) is ExactResume and read.arguments == original.arguments


class Fading(Noisy):
    """Points whose noise training changes; data workers have copies of it."""

    def __init__(self) -> None:
        self.noise = 1.0

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return self.noise * inputs, labels


class Batches:
    """An iterable of batches, in place of a DataLoader; it counts them."""

    def __init__(self) -> None:
        self.noise = 1.0

    def __len__(self) -> int:
        return 11

    def __iter__(self):
        for _ in range(11):
            self.noise *= 0.99
            yield self.noise * torch.randn(4, 2), torch.randint(2, (4, 1)).float()


class FadingLoader(DataLoader):
    """A DataLoader with an attribute of its own, which the iteration changes."""

    noise = 1.0

    def __iter__(self):
        for inputs, labels in super().__iter__():
            self.noise *= 0.99
            yield self.noise * inputs, labels


class Around:
    """A loader around another one."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.noise = 1.0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for inputs, labels in self.loader:
            yield self.noise * inputs, labels


class Curriculum(Classifier):
    """A model that changes the data on which it is trained."""

    def __init__(self, make_loader: Callable) -> None:
        super().__init__()
        self.make_loader = make_loader

    def train_dataloader(self):
        return self.make_loader()

    def changing(self):
        loader = self.trainer.train_dataloader
        return loader if hasattr(loader, "noise") else loader.dataset

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.changing().noise *= 1 - 0.1 * outputs["loss"].item()


class KeptCurriculum(Curriculum):
    """It keeps the data, too."""

    def train_dataloader(self):
        self.data = self.make_loader()
        return self.data


class Darkening(Classifier):
    """Its validations change the weights, and what they validate changes, too."""

    def val_dataloader(self):
        return FadingLoader(Noisy(), self.batch_size)

    def validation_step(self, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.001 * batch[0].mean())


class StopsAt(pl.Callback):
    """Presses Ctrl-C at a batch of an epoch."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at = epoch, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def resumed_and_alone(
    folder: Path, model: Classifier, at: tuple[int, int], **options
) -> list[Classifier]:
    """Train a model with an interruption and without one; return both models."""
    options = {"max_epochs": 3} | options
    short_trainer(folder / "alone", **options).fit(alone := copy.deepcopy(model))
    with pytest.raises(SystemExit):
        trainer = short_trainer(folder / "interrupted", StopsAt(*at), **options)
        trainer.fit(copy.deepcopy(model))
    short_trainer(folder / "interrupted", **options).fit(resumed := copy.deepcopy(model))
    return [resumed, alone]


CHANGING = {
    "a dataset": lambda: Curriculum(lambda: DataLoader(Fading(), 4, shuffle=True)),
    "a dataset of a data worker": lambda: Curriculum(
        lambda: DataLoader(Fading(), 4, shuffle=True, num_workers=1)
    ),
    "an iterable": lambda: Curriculum(Batches),
    "an iterable that the model keeps": lambda: KeptCurriculum(Batches),
    "a DataLoader of a class of one's own": lambda: Curriculum(
        lambda: FadingLoader(Noisy(), 4, shuffle=True)
    ),
    "a loader around one with a data worker": lambda: Curriculum(
        lambda: Around(DataLoader(Noisy(), 4, shuffle=True, num_workers=1))
    ),
    "a loader of validations": Darkening,
}


@pytest.mark.slow
@pytest.mark.parametrize("at", [(0, 5), (1, 0), (1, 5)])
@pytest.mark.parametrize("case", CHANGING)
def test_what_changes_in_the_data_is_as_it_was(tmp_path: Path, case: str, at: tuple[int, int]):
    resumed, alone = resumed_and_alone(tmp_path, CHANGING[case](), at)
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    if isinstance(resumed, Curriculum):
        assert resumed.changing().noise == alone.changing().noise < 1


class Stored(torch.utils.data.Dataset):
    """Samples in a table, which no checkpoint holds."""

    def __init__(self, values: torch.Tensor) -> None:
        self.rows = pyarrow.table({"x": values.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return torch.tensor([self.rows["x"][index].as_py(), 1.0]), torch.tensor([index % 2.0])


class Redrawn(Untested):
    """Draws its data when Lightning asks for it; they depend on what training has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def train_dataloader(self):
        return DataLoader(Stored(self.level * torch.rand(16)), 4, shuffle=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.level *= 0.99


@pytest.mark.slow
def test_data_that_are_made_anew_while_training_are_as_they_were(tmp_path: Path, capfd):
    """Within an epoch those of the epoch in which they were made, at its end new ones."""
    model = Redrawn()
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}
    short_trainer(tmp_path / "alone", **options).fit(alone := copy.deepcopy(model))
    for at in ((3, 1), (1, 3)):
        folder = tmp_path / str(at[0])
        with pytest.raises(SystemExit):
            short_trainer(folder, StopsAt(*at), **options).fit(copy.deepcopy(model))
        short_trainer(folder, **options).fit(resumed := copy.deepcopy(model))
        assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
        assert resumed.level == alone.level
    assert "warning: resumed" not in capfd.readouterr().out


class Adding(Classifier):
    """It keeps the mean of its losses at an object of Lightning's or torch's, and trains by it."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        owner = {
            "trainer": self.trainer,
            "optimizer": self.trainer.optimizers[0],
            "Lightning's optimizer": self.optimizers(),
            "loader": self.trainer.train_dataloader,
        }[self.owner]
        if not hasattr(owner, "losses"):
            owner.losses = []
        owner.losses.append(outputs["loss"].item())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.0003 * sum(owner.losses))


class AddingToParameters(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.count = getattr(parameter, "count", 0) + 1
                average = getattr(parameter, "average", parameter)
                parameter.average = average * 0.9 + parameter * 0.1
                parameter.add_(parameter.average, alpha=-0.001 * parameter.count)


def doubled(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = default_collate(samples)
    return 2 * inputs, labels


class Collating(Classifier):
    """It has its batches put together in another way from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.collating = {"later": doubled}  # a checkpoint names no function

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.train_dataloader.collate_fn = self.collating["later"]


ADDING = {
    **{
        f"to the {owner}": functools.partial(Adding, owner)
        for owner in ("trainer", "optimizer", "Lightning's optimizer", "loader")
    },
    "to parameters": AddingToParameters,
    "a function to the loader": Collating,
}


@pytest.mark.slow
@pytest.mark.parametrize("at", [(0, 5), (1, 5)])
@pytest.mark.parametrize("case", ADDING)
def test_what_is_added_to_a_librarys_object_is_there_again(
    tmp_path: Path, case: str, at: tuple[int, int]
):
    resumed, alone = resumed_and_alone(tmp_path, ADDING[case](), at)
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))


class Sees(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        objects = user_objects(trainer)
        self.added = {
            name: object_graph.attributes(object_)
            for name, object_ in objects.items()
            if isinstance(object_, object_graph.Added)
        }


@pytest.mark.slow
def test_what_libraries_set_themselves_is_not_added(tmp_path: Path):
    sees = Sees()
    short_trainer(tmp_path, sees).fit(model := Classifier())
    parameters = {f"parameters.{name}": {} for name, _ in model.named_parameters()}
    collating = {"collate_fn": default_collate}
    assert sees.added == parameters | {
        "trainer": {},
        "optimizers.0": {},
        "lightning_optimizers.0": {},
        "train.0.loader": collating,
        "val.0.loader": collating,
    }


class Iterating(Classifier):
    """It has an iterator of its own, with data workers."""

    def on_fit_start(self) -> None:
        self.batches = iter(DataLoader(torch.arange(400.0), 4, num_workers=2))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return super().training_step((inputs + next(self.batches).mean(), labels), batch_idx)


@pytest.mark.slow
def test_an_iterator_of_ones_own_is_told_of_and_left_alone(tmp_path: Path, capfd):
    """Some of its attributes belong to its workers: others from before would break it."""
    with pytest.raises(SystemExit):
        short_trainer(tmp_path, StopsAt(0, 5)).fit(Iterating())
    short_trainer(tmp_path).fit(Iterating())
    warnings = re.findall(
        r"^warning: (.*) and no checkpoint can hold", capfd.readouterr().out, re.M
    )
    assert warnings == ["model.batches is a _MultiProcessingDataLoaderIter,"] * 2


class Beside(Untested):
    """Trains by what it keeps beside its weights and its optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("saved", torch.zeros(()))
        self.teacher = [torch.nn.Linear(2, 1), torch.nn.LazyLinear(1)]
        self.mean = MeanMetric()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.scale = torch.nn.Parameter(torch.ones(()))  # no optimizer has it

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.scale
        with torch.no_grad():
            self.seen += 1
            self.saved += 2
            self.teacher[0].weight.mul_(0.9).add_(self.network[0].weight.mean(0))
            self.mean(loss)
            self.tracker(loss)
            kept = self.seen + self.saved + self.teacher[0].weight.sum() + self.mean.compute()
            kept += self.tracker.compute_all().sum()
            kept += 0 if self.scale.grad is None else self.scale.grad
        return loss * (1 + 0.01 * kept)

    def configure_optimizers(self):
        return torch.optim.SGD(self.network.parameters(), 0.05)


@pytest.mark.slow
def test_what_a_model_keeps_beside_its_weights_is_as_it_was(tmp_path: Path):
    options = {"max_epochs": 2, "limit_train_batches": 4}
    resumed, alone = resumed_and_alone(tmp_path, Beside(), (1, 1), **options)
    weights = zip(resumed.network.parameters(), alone.network.parameters(), strict=True)
    assert all(torch.equal(*each) for each in weights)
    assert resumed.seen == alone.seen == 8 and resumed.saved == 16
    assert torch.equal(resumed.teacher[0].weight, alone.teacher[0].weight)
    assert resumed.tracker.n_steps == 2 and resumed.mean.compute() == alone.mean.compute()
    assert torch.equal(resumed.tracker.compute_all(), alone.tracker.compute_all())
    assert torch.equal(resumed.scale.grad, alone.scale.grad)


@pytest.mark.slow
def test_the_mean_of_an_epoch_is_of_all_its_batches(tmp_path: Path):
    model = Classifier()
    alone = short_trainer(tmp_path / "alone")
    alone.fit(copy.deepcopy(model))
    with pytest.raises(SystemExit):
        short_trainer(tmp_path / "run", PressCtrlC(1, batch=7)).fit(copy.deepcopy(model))
    resumed = short_trainer(tmp_path / "run")
    resumed.fit(model)
    assert resumed.callback_metrics == alone.callback_metrics
    assert "train_loss_epoch" in resumed.callback_metrics


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", ["validate", "test", "predict"])
def test_an_evaluation_takes_the_checkpoint_that_it_is_given(tmp_path: Path, evaluates: str):
    trained = Classifier()
    trainer = short_trainer(tmp_path / "run")
    trainer.fit(trained)
    trainer.save_checkpoint(tmp_path / "given.ckpt")
    for folder in ("run", "another"):
        model = Classifier()
        evaluate = getattr(short_trainer(tmp_path / folder), evaluates)
        evaluate(model, ckpt_path=tmp_path / "given.ckpt")
        weights = zip(model.state_dict().values(), trained.state_dict().values(), strict=True)
        assert all(torch.equal(*each) for each in weights)


class Harder(torch.utils.data.Sampler):
    """Draws an epoch at its start, by weights that training changes meanwhile.

    It shares the model's generator.
    """

    def __init__(self, model: pl.LightningModule) -> None:
        self.weights = np.ones(43)
        self.model = model

    def __len__(self) -> int:
        return 43

    def __iter__(self):
        probabilities = self.weights / self.weights.sum()
        return iter(self.model.draws.choice(43, 43, p=probabilities).tolist())


class Mining(Classifier):
    """A model that draws more of what has a large loss."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(3)
        self.seen = 0
        self.sampler = Harder(self)

    def train_dataloader(self):
        return DataLoader(Noisy(), self.batch_size, sampler=self.sampler)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.seen += 1
        loss = outputs["loss"].item()
        self.sampler.weights[4 * batch_idx] += self.seen * loss * self.draws.random()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 7, 10])
def test_what_training_changes_in_a_sampler_counts_for_the_next_epoch(tmp_path: Path, batch: int):
    model = Mining()
    short_trainer(tmp_path / "alone", max_epochs=3).fit(alone := copy.deepcopy(model))
    with pytest.raises(SystemExit):
        trainer = short_trainer(tmp_path / "interrupted", PressCtrlC(1, batch), max_epochs=3)
        trainer.fit(copy.deepcopy(model))
    resumed = copy.deepcopy(model)
    short_trainer(tmp_path / "interrupted", max_epochs=3).fit(resumed)
    assert all(map(torch.equal, resumed.state_dict().values(), alone.state_dict().values()))
    assert (resumed.sampler.weights == alone.sampler.weights).all()
    assert resumed.seen == alone.seen == 33 and resumed.draws.random() == alone.draws.random()


@pytest.mark.slow
def test_lightnings_profiler_sees_the_loader(tmp_path: Path):
    profiler = pl.profilers.SimpleProfiler()
    trainer = short_trainer(tmp_path, profiler=profiler)
    trainer.fit(Classifier())
    waits = profiler.recorded_durations["[EpochLoop].train_dataloader_next"]
    assert len(waits) >= trainer.num_training_batches


# Where a run begins -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("steps", [11, 15])
def test_ckpt_path_is_where_a_run_begins(tmp_path: Path, capfd, steps):
    """A run begins with Lightning's checkpoint; a resumed run begins with its own."""
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=steps, save_top_k=-1)
    pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, devices=1, callbacks=[saves]).fit(
        Classifier()
    )
    path = tmp_path / f"step={steps}.ckpt"
    weights = []
    for name in ("alone", "run"):
        model = Classifier()
        if name == "run":
            with pytest.raises(SystemExit):
                short_trainer(tmp_path / name, Stops(steps + 3), max_epochs=3).fit(
                    Classifier(), ckpt_path=path
                )
            capfd.readouterr()
        trainer = short_trainer(tmp_path / name, max_epochs=3)
        trainer.fit(model, ckpt_path=path)
        assert trainer.global_step == 33
        output = "".join(capfd.readouterr())
        assert (f"ckpt_path={path} is not loaded: this run began before" in output) is (
            name == "run"
        )
        weights.append(model.state_dict())
    assert all(torch.equal(weight, weights[1][key]) for key, weight in weights[0].items())


class Stops(pl.Callback):
    """Presses Ctrl-C at an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


# The others, alone --------------------------------------------------------------------------------


def test_a_loader_is_deterministic_without_a_trainer():
    def drawn(seed: int, epoch: int, batch: int = 0, workers: int = 0) -> list:
        data = TensorDataset(torch.arange(20))
        loader = make_deterministic(DataLoader(data, 4, shuffle=True, num_workers=workers), seed)
        loader.begin_epoch(epoch, batch)
        return [batch[0].tolist() for batch in loader]

    assert drawn(7, 1) == drawn(7, 1, workers=1) != drawn(7, 2) and drawn(7, 1) != drawn(8, 1)
    assert drawn(7, 1, 2) == drawn(7, 1)[2:]
    loader = make_deterministic(DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True), 7)
    first_batches = [batch[0].tolist() for batch in loader]
    assert [
        batch[0].tolist() for batch in make_deterministic(loader, 8)
    ] != first_batches  # another seed counts
    with pytest.raises(
        UserError, match="^make_deterministic: an IterableDataset has no positions; allowed is"
    ):
        make_deterministic(DataLoader(iter_only()), 7)


def iter_only():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    return Stream()


def test_a_notebook_and_a_test_get_the_exception_itself(monkeypatch):
    with pytest.raises(ValueError, match="^x$"), report_failures():
        raise ValueError("x")


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
    "a variable": ("", {"SM_NUM_GPUS": "many"}, "error: SM_NUM_GPUS: found 'many', allowed is a"),
    "a version": (
        "from sagemaker_lightning.compat import versions\nversions.version = lambda name: '3.0.0'",
        {},
        "error: requirements.txt: found pytorch-lightning 3.0.0, expected 2.5.2 or later",
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


# The documentation --------------------------------------------------------------------------------

BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/your-own-trainer.md").read_text(), re.DOTALL
)
THEIRS = """
import sys
import types
import torch

sys.modules.setdefault("pyro", types.ModuleType("pyro"))  # test_given_parts.py uses it
from own_trainer import Classifier as Model, Noisy
from torch.utils.data import DataLoader
from pytorch_lightning import LightningDataModule

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Noisy(), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Noisy(), 8)

loader = DataLoader(Noisy(), 8, shuffle=True)
"""
MORE = dict.fromkeys((1, 3, 4), "trainer.fit(Model(), Data())\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_what_the_page_shows_runs(tmp_path: Path, number: int):
    (tmp_path / "train.py").write_text(THEIRS + BLOCKS[number] + MORE.get(number, ""))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    flags = (
        ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
        if "SageMakerCLI" in BLOCKS[number]
        else []
    )
    completed = warm.run(["python", "train.py", *flags], tmp_path, environment, HANG_SECONDS)
    assert completed.returncode == 0, completed.stdout[-3000:]
    made_files = {
        0: "output/data/checkpoints/step-000000030.ckpt",
        1: "checkpoints/step-000000030.ckpt",
        3: "lightning_logs",
        6: "output/model/model.pt",
    }
    assert number not in made_files or (tmp_path / made_files[number]).exists(), completed.stdout[
        -3000:
    ]
