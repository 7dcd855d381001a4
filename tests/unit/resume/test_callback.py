"""ExactResume in trainings of a few batches: when it saves and stops, what it says and leaves.

They run in this process and take some hundredths of a second each.
"""

import csv
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch._dynamo import config as dynamo
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sagemaker_lightning import ExactResume, SageMakerEnvironment, UserError
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.contract import deadlines, reporting, shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.data.loaders.resumable import digest_of
from sagemaker_lightning.drill import drilled_run
from sagemaker_lightning.process import parent_process
from sagemaker_lightning.resume import agreement, callback, run, stopping
from sagemaker_lightning.resume.check import journal
from sagemaker_lightning.resume.files import checkpoint_dir, checkpoint_file, folder_lock
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.resume.same_run import earlier_fits

OF_RESUME = ("seed", "every_n_minutes", "every_n_steps", "keep", "exact", "other_settings")
OF_RESUME += ("strict", "settings", "saves", "environment", "stop")


class Line(pl.LightningModule):
    """A line with noise, trained on six batches an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        nn.init.constant_(self.line.weight, 0.5)
        nn.init.constant_(self.line.bias, 0.0)
        self.lr = 0.1

    def training_step(self, batch, batch_idx):
        loss = (self.line(batch[0] + torch.rand(2, 1)) - 1).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(12.0)[:, None] / 12), 2, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Validated(Line):
    """With three batches of a validation."""

    def validation_step(self, batch, batch_idx):
        self.log("error", self.line(batch[0]).abs().mean())

    test_step = validation_step

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(3, 1)))

    test_dataloader = val_dataloader


class ByHand(Line):
    """Optimizes by hand, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class At(pl.Callback):
    """Calls a function at a moment.

    Args:
        moment: Such as "batch 1", "end of batch 1", "check 0" (a batch of the check before
            training), "validation 0", "test 0" or "end of epoch 0"; an expression for several.
        function: Called with the trainer.
    """

    def __init__(self, moment: str, function: Callable) -> None:
        self.moment = moment
        self.function = function

    def reached(self, trainer: pl.Trainer, moment: str) -> None:
        if re.fullmatch(self.moment, moment):
            self.function(trainer)

    def on_train_batch_start(self, trainer, *_):
        self.reached(trainer, f"batch {trainer.global_step + 1}")

    def on_train_batch_end(self, trainer, *_):
        self.reached(trainer, f"end of batch {trainer.global_step}")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, *_):
        what = "check" if trainer.sanity_checking else "validation"
        self.reached(trainer, f"{what} {batch_idx}")

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, *_):
        self.reached(trainer, f"test {batch_idx}")

    def on_train_epoch_end(self, trainer, *_):
        self.reached(trainer, f"end of epoch {trainer.current_epoch}")


def press_ctrl_c(trainer: pl.Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail(trainer: pl.Trainer) -> None:
    raise RuntimeError("as it was told")


def end(trainer: pl.Trainer) -> None:
    trainer.should_stop = True


class Announces(pl.Callback):
    """Prints that a batch begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        print(f"batch {trainer.global_step + 1}")


def trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    """Return a trainer of one epoch, with an ExactResume."""
    if options.pop("reseeds", True):
        torch.manual_seed(1)
    of_resume = {name: options.pop(name) for name in OF_RESUME if name in options}
    resume = ExactResume(folder, **{"seed": 1, "every_n_minutes": 0} | of_resume)
    settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings |= {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}
    return pl.Trainer(**settings | options, callbacks=[*callbacks, resume])


def resume_of(trainer: pl.Trainer) -> ExactResume:
    return next(each for each in trainer.callbacks if isinstance(each, ExactResume))


def fit(folder: Path, *callbacks: pl.Callback, model=None, **options) -> pl.LightningModule:
    """Train, as in a new process; return the model."""
    earlier_fits._finished.clear()
    model = model or Line()
    trainer(folder, *callbacks, **options).fit(model)
    return model


@contextmanager
def interrupted(status: int = 130) -> Iterator[None]:
    """Expect that a training is stopped by Ctrl-C."""
    with pytest.raises(SystemExit) as stopped:
        yield
    assert stopped.value.code == status


@contextmanager
def failed() -> Iterator[None]:
    """Expect that a training fails as it was told to."""
    with pytest.raises(RuntimeError, match="as it was told"):
        yield


def saved(folder: Path) -> dict[int, str]:
    """Return when each checkpoint in a folder was saved, by step."""
    entries = [
        checkpoint_file.read(path)[checkpoint_file.ENTRIES_KEY]
        for path in sorted(folder.glob("step-*.ckpt"))
    ]
    return {each["step"]: each["resume_point"] for each in entries}


def equal(one: pl.LightningModule, other: pl.LightningModule) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# Saved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, {6: "epoch"}),
        ({"max_epochs": 3, "keep": 2}, {12: "epoch", 18: "epoch"}),
        ({"every_n_steps": 2}, {2: "batch", 4: "batch", 6: "epoch"}),
        ({"every_n_steps": 2, "keep": 1}, {6: "epoch"}),
        ({"every_n_steps": 4, "max_epochs": 2}, {6: "epoch", 8: "batch", 12: "epoch"}),
        ({"every_n_steps": 1, "accumulate_grad_batches": 3}, {1: "batch", 2: "epoch"}),
        ({"every_n_steps": 4, "model": ByHand}, {4: "batch", 6: "epoch"}),
        ({"max_steps": 4}, {4: "batch"}),
        ({"ends": "end of batch 3"}, {3: "batch"}),
        ({"saves": False}, {}),
        ({"exact": False}, {}),
        ({"fast_dev_run": True}, {}),
    ],
)
def test_when_checkpoints_are_saved(tmp_path, options, when):
    """At the end of an epoch, by steps, and where a limit ends the training."""
    ends = options.pop("ends", "never")
    model = options.pop("model", Line)()
    fit(tmp_path / "run", At(ends, end), model=model, **options)
    assert saved(tmp_path / "run") == when
    assert (tmp_path / "run").exists() is bool(when)


def test_the_journal_has_what_follows_the_oldest_checkpoint(tmp_path):
    """It begins with the first batch of an epoch."""
    fit(tmp_path, max_epochs=5, keep=2)
    oldest, _ = sorted(tmp_path.glob("step-*.ckpt"))
    run = checkpoint_file.read(oldest)[checkpoint_file.ENTRIES_KEY]["journal"]
    steps = [step.position for step in journal.read(tmp_path, run, 0, 1)[0]]
    assert steps == [(epoch, batch) for epoch in (3, 4) for batch in range(6)]


class Clock(pl.Callback):
    """A clock that moves a minute with each batch; to save one checkpoint takes some seconds."""

    def __init__(self, monkeypatch, slow: str, seconds: float) -> None:
        now = [1000.0]
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(stopping, "time", clock)
        monkeypatch.setattr(run, "time", clock)
        self.tick = lambda seconds: now.__setitem__(0, now[0] + seconds)
        self.slow, self.seconds = slow, f"{seconds}"

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if f"{trainer.global_step}" == self.slow:
            self.tick(float(self.seconds))

    def on_load_checkpoint(self, *_):
        """Only what may be loaded is asked for."""

    def on_train_batch_start(self, *_):
        self.tick(60)


@pytest.mark.parametrize(
    ("minutes", "slow", "seconds", "steps"),
    [
        (1, "", 0.0, [1, 2, 3, 4, 5, 6]),
        (1.5, "", 0.0, [2, 4, 6]),
        (2, "", 0.0, [2, 4, 6]),
        (0, "", 0.0, [6]),
        (1, "2", 1.205, [1, 2, 5, 6]),
    ],
)
def test_checkpoints_by_the_clock(tmp_path, monkeypatch, minutes, slow, seconds, steps):
    """After so many minutes; after more if they cost more than a hundredth of the time."""
    clock = Clock(monkeypatch, slow, seconds)
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", False)
    fit(tmp_path, clock, every_n_minutes=minutes, keep=9)
    assert [*saved(tmp_path)] == steps


def test_the_clock_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    def looks(writer) -> bool:
        looked.append(writer)
        return len(looked) < 4

    looked = []
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", property(looks))
    fit(tmp_path, Clock(monkeypatch, "", 0.0), every_n_minutes=1, keep=9)
    assert [*saved(tmp_path)] == [4, 5, 6]


# Stopped and resumed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Line:
    """A model that was trained without an interruption."""
    return fit(tmp_path_factory.mktemp("alone"))


AS_IT_WAS = "the state is as it was saved, and the next batch the one that was to come, bit for bit"


def test_a_run_that_is_stopped_twice_ends_with_the_same_weights(tmp_path, capfd, alone):
    """The last time with the same trainer. Each result is said as soon as it is known."""
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c))
    again = trainer(tmp_path, At("batch 3", press_ctrl_c), Announces())
    capfd.readouterr()
    with interrupted():
        again.fit(Line())
    output = capfd.readouterr()
    assert output.out.splitlines() == [
        f"resuming from step 1: {tmp_path / 'step-000000001.ckpt'}",
        "batch 2",
        f"resumed at step 1: {AS_IT_WAS}",
        "batch 3",
    ]
    assert output.err.splitlines()[-2:] == [
        "stopping at the end of this batch; Ctrl-C again stops at once",
        f"interrupted, resume from step 3: SIGINT; {tmp_path / 'step-000000003.ckpt'} is complete "
        f"[{reporting.place()}]",
    ]
    again.fit(model := Line())
    assert equal(model, alone)
    assert saved(tmp_path) == {1: "batch", 3: "batch", 6: "epoch"}
    result = {"identical": True, "steps": 0, "said": AS_IT_WAS}
    assert resume_of(again).resumes == [{"step": 1} | result, {"step": 3} | result]


def kill(folder: Path, model: type[Line] = Line) -> None:
    """Leave a run as if it was killed in step 6: its newest checkpoint is of step 3."""
    with failed():
        fit(folder, At("batch 6", fail), model=model(), every_n_steps=3)
    assert saved(folder) == {3: "batch"}


@pytest.mark.parametrize(
    ("last", "options", "says"),
    [
        (
            "batch 6",
            {},
            ["4", "5", "the next 2 steps are those of the interrupted run, bit for bit", "6"],
        ),
        ("batch 4", {}, ["4", "the next step is that of the interrupted run, bit for bit"]),
        ("batch 6", {"other_settings": True}, ["4", "5", "6"]),
    ],
)
def test_steps_that_are_done_again_are_compared(tmp_path, capfd, last, options, says):
    """As many as there are until the training ends; none if the run may be another one."""
    kill(tmp_path)
    capfd.readouterr()
    fit(tmp_path, At(f"end of {last}", end), Announces(), **options)
    assert capfd.readouterr().out.splitlines()[1:] == [
        f"batch {line}" if line.isdigit() else f"resumed at step 3: {line}" for line in says
    ]


class Scaled(Line):
    """Multiplies the loss by what a variable of the environment says."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float(os.environ["FACTOR"])


class ScaledByHand(ByHand, Scaled):
    """Does so, and optimizes by hand."""


@pytest.mark.parametrize("model", [Scaled, ScaledByHand])
def test_other_steps_than_before_are_said_at_once(tmp_path, capfd, monkeypatch, model):
    """`strict` ends the job by them."""
    monkeypatch.setenv("FACTOR", "1")
    kill(tmp_path, model)
    monkeypatch.setenv("FACTOR", "2")
    says = (
        "resumed at step 3: step 4 is not that of the interrupted run: on rank 0, the loss differs"
    )
    with pytest.raises(UserError, match=f"^--resume.strict: {says}"):
        fit(tmp_path, model=model(), strict=True)
    capfd.readouterr()
    fit(tmp_path, Announces(), model=model())
    lines = capfd.readouterr().out.splitlines()
    assert lines[2].startswith(f"warning: {says}") and lines[3] == "batch 5"


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> Line:
    """A model that was trained for two epochs, with validations, without an interruption."""
    return fit(tmp_path_factory.mktemp("validated"), model=Validated(), max_epochs=2)


@pytest.mark.parametrize(
    ("moment", "step", "kind", "validations"),
    [
        ("check 0", 1, "batch", 0),
        ("end of batch 6", 6, "validation", 0),
        ("validation 0", 6, "validation", 1),
        ("validation 2", 6, "validation", 3),
        ("end of epoch 0", 6, "epoch", 3),
        ("end of batch 12", 12, "validation", 3),
    ],
)
def test_a_stop_comes_at_the_next_moment_at_which_nothing_is_half_done(
    tmp_path, moment, step, kind, validations, validated
):
    seen = []
    model = Validated()
    notes = At("validation .", seen.append)
    with interrupted():
        fit(tmp_path, At(moment, press_ctrl_c), notes, model=model, max_epochs=2)
    assert [*saved(tmp_path)][-1] == step and saved(tmp_path)[step] == kind
    assert model.training and len(seen) == validations
    assert equal(fit(tmp_path, model=Validated(), max_epochs=2), validated)


class Swaps(pl.Callback):
    """Validates with other weights, as an average would."""

    def on_validation_start(self, trainer, pl_module):
        pl_module.line.weight.data += 1

    def on_validation_end(self, trainer, pl_module):
        pl_module.line.weight.data -= 1


def test_weights_that_are_others_in_a_validation_are_saved_as_before_it(tmp_path):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    expected = fit(tmp_path / "alone", Swaps(), model=Validated(), **options)
    with interrupted():
        stop = At("validation 1", press_ctrl_c)
        fit(tmp_path / "run", Swaps(), stop, model=Validated(), **options)
    assert saved(tmp_path / "run") == {6: "validation"}
    assert equal(fit(tmp_path / "run", Swaps(), model=Validated(), **options), expected)


class Unoptimized(Line):
    """Steps by itself, without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        super().training_step(batch, batch_idx).backward()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.1 * parameter.grad

    def configure_optimizers(self):
        return None


def test_a_run_without_an_optimizer_resumes(tmp_path):
    expected = fit(tmp_path / "alone", model=Unoptimized(), max_epochs=2)
    with interrupted():
        ctrl_c = At("end of epoch 0", press_ctrl_c)
        fit(tmp_path / "run", ctrl_c, model=Unoptimized(), max_epochs=2)
    assert equal(fit(tmp_path / "run", model=Unoptimized(), max_epochs=2), expected)


@pytest.mark.parametrize(
    ("moment", "options", "when"),
    [
        ("end of epoch 0", {}, {6: "epoch"}),
        ("end of batch 4", {"max_steps": 4}, {4: "batch"}),
        ("end of batch 6", {"max_steps": 6}, {6: "epoch"}),
    ],
)
def test_a_stop_that_comes_at_the_end_is_none(tmp_path, moment, options, when):
    fit(tmp_path, At(moment, press_ctrl_c), **options)
    assert saved(tmp_path) == when


@pytest.mark.parametrize(
    ("every", "full_from", "says"),
    [
        (0, 0, "0: SIGINT; there is no checkpoint, as that of step 3 could not be written (No "),
        (
            1,
            3,
            "2: SIGINT; {}/step-000000002.ckpt is complete, as that of step 3 could not be "
            "written (No space left on device) [",
        ),
    ],
)
def test_a_stop_says_what_could_not_be_saved(tmp_path, monkeypatch, capfd, every, full_from, says):
    def write(path: Path, checkpoint: dict, step: int, number: int) -> None:
        if step >= full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        checkpoint_file.write(path, checkpoint, step, number)

    monkeypatch.setattr(checkpoint_dir, "write", write)
    with interrupted():
        fit(tmp_path, At("batch 3", press_ctrl_c), every_n_steps=every)
    assert f"\ninterrupted, resume from step {says.format(tmp_path)}" in capfd.readouterr().err


@contextmanager
def uploader(folder: Path, stalls_after: int | None = None) -> Iterator[SageMakerEnvironment]:
    """Leave the marks of SageMaker's uploader beside checkpoints, up to a step.

    It yields the environment of a job whose checkpoint folder this is.
    """

    def upload() -> None:
        while not ended.wait(0.01):
            for path in folder.glob("step-*.ckpt"):
                path.with_name(f"{path.name}.sagemaker-uploading").touch()
                if stalls_after is None or int(path.stem[5:]) <= stalls_after:
                    path.with_name(f"{path.name}.sagemaker-uploaded").touch()

    ended = threading.Event()
    thread = threading.Thread(target=upload)
    thread.start()
    try:
        yield SageMakerEnvironment(copied_dir=folder)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("stalls_after", "says"),
    [
        (None, "3: SIGINT; {}/step-000000003.ckpt is in S3 ["),
        (1, "1: SIGINT; step-000000001.ckpt is in S3, step-000000003.ckpt is so far only here ["),
        (0, "0: SIGINT; no checkpoint is known to be in S3, step-000000003.ckpt is so far only "),
    ],
)
def test_a_stop_says_what_is_in_s3(tmp_path, monkeypatch, capfd, stalls_after, says):
    """It waits for the copy, for a while: nothing is copied once the container has ended."""

    def wait_for_mark(trainer: pl.Trainer) -> None:
        while not list(tmp_path.glob("*-000000001.ckpt.sagemaker-uploading")):
            time.sleep(0.01)

    monkeypatch.setattr(deadlines, "CHECKPOINT_IS_COPIED", 600.0 if stalls_after is None else 0.5)
    callbacks = [At("batch 2", wait_for_mark), At("batch 3", press_ctrl_c)]
    with uploader(tmp_path, stalls_after) as environment, interrupted():
        fit(tmp_path, *callbacks, every_n_steps=1, environment=environment)
    assert f"\ninterrupted, resume from step {says.format(tmp_path)}" in capfd.readouterr().err


def test_a_stop_that_saves_nothing_waits_for_the_copy_too(tmp_path, monkeypatch):
    """No signal cuts that short."""
    phases = []
    wait = lambda folder, until: phases.append(resume_of(used).stop.phase.name)  # noqa: E731
    monkeypatch.setattr(checkpoint_dir.CheckpointDir, "wait_for_s3", wait)
    used = trainer(tmp_path, At("batch 8", press_ctrl_c), max_epochs=3)
    with interrupted():
        used.fit(Streamed())
    assert phases == ["SAVING"] and saved(tmp_path) == {6: "epoch"}


def test_a_checkpoint_waits_until_the_one_before_is_in_s3(tmp_path, monkeypatch):
    """It would come to S3 late, behind one that is outdated; the last one does not wait."""

    def note(trainer: pl.Trainer) -> None:
        is_uploading[:] = [trainer.global_step in range(5, 13) or trainer.global_step == 17]

    is_uploading = [False]
    monkeypatch.setattr(checkpoint_dir.CheckpointDir, "is_uploading", lambda _: is_uploading[0])
    callbacks = [At("end of batch .*", note)]
    fit(tmp_path, *callbacks, max_epochs=3, every_n_steps=4, keep=9)
    assert saved(tmp_path) == {4: "batch", 13: "batch", 16: "batch", 18: "epoch"}


def test_what_an_interruption_makes_begin_anew_says_so(tmp_path, capfd):
    """At its start, and when it is interrupted."""
    job = SageMakerEnvironment(is_job=True)
    with interrupted():
        fit(tmp_path, At("batch 3", press_ctrl_c), environment=job)
    output = capfd.readouterr()
    lost = "the job has no CheckpointConfig"
    assert output.out.splitlines()[0].startswith(
        f"an interruption makes this run begin anew: {lost}; give it one ("
    )
    assert (
        f"\ninterrupted, resume from step 0: SIGINT; {lost}, so the next run begins anew ["
    ) in output.err


class Stream:
    """Six batches, which are others each time."""

    count = 0

    def __iter__(self):
        for _ in range(6):
            Stream.count += 1
            yield [torch.full((2, 1), Stream.count / 100)]


class Streamed(Validated):
    """Trains on a stream that no checkpoint can hold."""

    def train_dataloader(self):
        return Stream()


ONLY_EPOCHS = "test_callback.Stream draws other batches each time"


@pytest.mark.parametrize(
    ("moment", "step", "says"),
    [
        ("batch 8", 6, "{} is complete; {}, so the run goes back to the end of an epoch"),
        ("validation 0", 0, "there is no checkpoint; {1}, so the run goes back to the end of an "),
        ("end of epoch 0", 6, "{} is complete ["),
    ],
)
def test_a_run_that_is_resumed_only_at_the_end_of_an_epoch_says_so(
    tmp_path, capfd, moment, step, says
):
    """Once."""
    with interrupted():
        fit(
            tmp_path,
            At(moment, press_ctrl_c),
            model=Streamed(),
            every_n_steps=2,
            max_epochs=3,
        )
    assert saved(tmp_path) == ({6: "epoch"} if step else {})
    output = capfd.readouterr()
    line = f"{ONLY_EPOCHS}: checkpoints are saved only at the end of an epoch, and a stopped run "
    assert output.out.count(line + "goes back to the last one") == 1
    said = says.format(tmp_path / "step-000000006.ckpt", ONLY_EPOCHS)
    assert f"interrupted, resume from step {step}: SIGINT; {said}" in output.err


class Unsized(IterableDataset):
    """Yields samples, and nobody knows how many."""

    def __iter__(self):
        yield from torch.ones(3, 1)


def test_a_stop_waits_for_the_end_of_a_validation_whose_length_nobody_knows(tmp_path):
    """Another rank may have no batch of it any more."""

    class Sized(Validated):
        def val_dataloader(self):
            return DataLoader(Unsized())

        def validation_step(self, batch, batch_idx):
            seen.append(batch_idx)

    seen = []
    with interrupted():
        model = Sized()
        fit(
            tmp_path,
            At("validation 0", press_ctrl_c),
            model=model,
            num_sanity_val_steps=0,
            max_epochs=2,
        )
    assert seen == [0, 1, 2] and saved(tmp_path) == {6: "epoch"}


# What it changes, and gives back ------------------------------------------------------------------


def process() -> dict[str, object]:
    """Return what a training changes in this process."""
    return {
        "entropy": np.random.bit_generator.randbits,
        "kernels": dynamo.recompile_limit,
        "signals": [signal.getsignal(number) for number in shutdown.SIGNALS],
        "locked": [*folder_lock._held],
    }


@pytest.mark.parametrize(
    ("moment", "happens"),
    [
        ("never", fail),
        ("batch 2", fail),
        ("batch 2", press_ctrl_c),
        ("check 0", fail),
        ("validation 0", press_ctrl_c),
    ],
)
def test_the_process_is_left_as_it_was(tmp_path, moment, happens):
    """Whether the training ends, fails or is stopped."""
    during = []
    notes = At("check 0|batch 1", lambda trainer: during.append(process()))
    before = process()
    used = trainer(tmp_path, notes, At(moment, happens))
    with nullcontext() if moment == "never" else pytest.raises((SystemExit, RuntimeError)):
        used.fit(model := Validated())
    assert process() == before
    for seen in during:
        assert all(seen[name] != before[name] for name in before)
        assert seen["locked"] == [tmp_path]
    used.callbacks[:] = [each for each in used.callbacks if type(each) is not At]
    used.fit(model)
    assert process() == before and type(used.fit_loop) is _FitLoop


def test_a_training_of_no_batch_leaves_the_process_as_it_was(tmp_path):
    """There is the check before training."""
    before = process()
    fit(tmp_path, model=Validated(), limit_train_batches=0)
    assert process() == before and saved(tmp_path) == {}


def test_an_evaluation_after_a_training_is_as_deterministic_as_that(tmp_path):
    """It leaves the process as it was, too, and what is known of the training."""
    during = []
    with interrupted():
        fit(tmp_path, At("batch 2", press_ctrl_c), model=Validated())
    used = trainer(tmp_path, At("test 0", lambda trainer: during.append(process())))
    used.fit(model := Validated())
    before = process()
    results = resume_of(used).resumes
    used.test(model, verbose=False)
    assert process() == before and len(results) == 1
    assert resume_of(used).resumes == results
    (seen,) = during
    assert seen["entropy"] != before["entropy"] and seen["kernels"] != before["kernels"]
    assert seen["locked"] == []


def test_a_training_that_is_not_exact_changes_nothing(tmp_path, capfd):
    """Its loader is the user's own, as Lightning uses it."""

    class Loads(Validated):
        def train_dataloader(self):
            self.loader = super().train_dataloader()
            return self.loader

    def note(trainer: pl.Trainer) -> None:
        during.append(process())
        loaders.append(trainer.train_dataloader)
        loops.append(type(trainer.fit_loop))

    during, loaders, loops = [], [], []
    before = process()
    model = fit(tmp_path, At("batch 1", note), model=Loads(), exact=False)
    assert loops == [_FitLoop] and loaders == [model.loader]
    assert [during[0][name] for name in ("kernels", "locked")] == [before["kernels"], []]
    assert during[0]["signals"][1] == before["signals"][1] and process() == before
    says = "this run is trained and saved as Lightning does; an interruption makes it start anew\n"
    assert capfd.readouterr().out == says


def test_the_command_lines_stop_is_told_what_is_going_on(tmp_path, monkeypatch):
    """Before and after the training, a signal ends the process at once; the last checkpoint alone
    may take longer.
    """

    def write(writer, checkpoint: dict, step: int, *rest) -> None:
        phases.append((step, stop.phase.name))
        written(writer, checkpoint, step, *rest)

    def note(trainer: pl.Trainer) -> None:
        seconds.append(stop.batch_seconds)
        handlers.append(signal.getsignal(signal.SIGTERM) == stop._handle)

    phases, seconds, handlers = [], [], []
    written = checkpoint_dir.BackgroundWriter.write
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "write", write)
    with shutdown.Stop(CheckpointHome(Path("nowhere")), print) as stop:
        callbacks = [At("batch .|test 0", note)]
        options = {"stop": stop, "every_n_steps": 3, "max_epochs": 2, "limit_train_batches": 4}
        used = trainer(tmp_path, *callbacks, **options)
        assert stop.home.folder == tmp_path and stop.phase is shutdown.Phase.IDLE
        used.fit(model := Validated())
        assert phases == [(step, "TRAINING") for step in (3, 4, 6)] + [(8, "SAVING")]
        assert stop.phase is shutdown.Phase.IDLE
        assert seconds[:2] == [0.0, 0.0] and all(seconds[2:])
        used.test(model, verbose=False)
        assert len(handlers) == 9 and all(handlers)


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        ("batch 4", {"max_epochs": 2}),
        ("validation 0", {"max_epochs": 2}),
        ("end of epoch 0", {"max_epochs": 2}),
        ("never", {"max_steps": 4}),
        ("never", {}),
    ],
)
def test_the_last_checkpoint_alone_may_take_longer(tmp_path, monkeypatch, moment, options):
    """A signal waits for it (contract/shutdown.py), and not for those before."""

    def write(writer, checkpoint: dict, step: int, *rest) -> None:
        seen.append(resume_of(used).stop.phase.name)
        written(writer, checkpoint, step, *rest)

    seen = []
    written = checkpoint_dir.BackgroundWriter.write
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "write", write)
    used = trainer(tmp_path, At(moment, press_ctrl_c), every_n_steps=3, **options)
    with nullcontext() if moment == "never" else interrupted():
        used.fit(Validated() if "validation" in moment else Line())
    assert seen == ["TRAINING", "SAVING"]


@pytest.fixture
def may_write(monkeypatch) -> threading.Event:
    """Checkpoints are written when this event is set."""
    event = threading.Event()

    def write(path: Path, checkpoint: dict, step: int, number: int) -> None:
        event.wait(5)
        checkpoint_file.write(path, checkpoint, step, number)

    monkeypatch.setattr(checkpoint_dir, "write", write)
    return event


def test_a_training_that_fails_waits_for_the_checkpoint_that_is_being_written(tmp_path, may_write):
    class Fails(pl.Callback):
        def on_exception(self, *_):
            threading.Timer(0.02, may_write.set).start()

    with failed():
        fit(tmp_path, Fails(), At("batch 4", fail), every_n_steps=3)
    assert saved(tmp_path) == {3: "batch"}


def test_other_callbacks_find_the_last_checkpoint_at_the_end_of_the_training(tmp_path, may_write):
    """It is on the disk then, however long that takes."""

    class Looks(pl.Callback):
        def on_train_epoch_end(self, *_):
            threading.Timer(0.02, may_write.set).start()

        def on_train_end(self, *_):
            found.update(saved(tmp_path))

    found: dict[int, str] = {}
    fit(tmp_path, Looks())
    assert found == {6: "epoch"}


@pytest.mark.parametrize("stops", [True, False])
def test_what_is_logged_by_hand_after_a_training_is_kept(tmp_path, stops):
    """And what an evaluation logs."""
    logger = CSVLogger(tmp_path / "logs", version=0)
    callbacks = [At("batch 2", press_ctrl_c)] if stops else []
    model = Validated()
    used = trainer(tmp_path, *callbacks, logger=logger)
    with interrupted() if stops else nullcontext():
        used.fit(model)
    if not stops:
        used.test(model, verbose=False)
    logger.log_metrics({"mine": 1.0}, step=1)
    fit(tmp_path, model=model, logger=logger, max_epochs=2)
    path = tmp_path / "logs/lightning_logs/version_0/metrics.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows if row["mine"]] == ["1"]
    assert [row["step"] for row in rows if row["loss"]] == [str(step) for step in range(12)]


def test_an_evaluation_in_a_new_process_goes_on_in_the_log(tmp_path):
    logs = tmp_path / "logs"
    fit(tmp_path / "run", logger=CSVLogger(logs))
    used = trainer(tmp_path / "run", logger=CSVLogger(logs))
    used.validate(Validated(), verbose=False)
    used.test(Validated(), verbose=False)
    (path,) = logs.rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [bool(row["error"]) for row in rows] == [False] * 6 + [True] * 2


class WritesConfig(SaveConfigCallback):
    def save_config(self, *_):
        pass


def test_a_command_lines_config_is_written_again_where_a_run_resumes(tmp_path):
    for overwrites in (False, True):
        writer = WritesConfig(None, None, save_to_log_dir=False)
        with nullcontext() if overwrites else interrupted():
            fit(tmp_path, writer, At(f"batch {'99' if overwrites else 1}", press_ctrl_c))
        assert writer.overwrite is overwrites


@pytest.mark.parametrize(
    ("kind", "is_command_line", "plain"),
    [(ModelCheckpoint, False, False), (BestModel, False, True), (ModelCheckpoint, True, True)],
)
def test_a_model_file_has_what_its_reader_can_read(tmp_path, kind, is_command_line, plain):
    """The command line reads its own without running code in them."""
    model = Line()
    model.save_hyperparameters({"path": tmp_path})
    options = {"enable_checkpointing": True}
    home = CheckpointHome(tmp_path)
    with shutdown.Stop(home, print) if is_command_line else nullcontext() as stop:
        fit(tmp_path / "run", kind(tmp_path, "model"), model=model, stop=stop, **options)
    read = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert (read["hyper_parameters"]["path"] == tmp_path) is not plain


class Averaged(Line):
    """Puts something in place of its weights into each checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["optimizer_states"]
        checkpoint["state_dict"] = {"average": torch.ones(2)}


@pytest.mark.parametrize("saves", [True, False])
def test_the_best_model_has_no_states_of_optimizers(tmp_path, saves):
    """The checkpoints to resume from have them: SageMaker uploads a third of the bytes.

    What hooks do to a model file is in it.
    """
    best = BestModel(tmp_path, "model")
    fit(tmp_path / "run", best, model=Averaged(), saves=saves, enable_checkpointing=True)
    read = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert list(read["state_dict"]) == ["average"]
    assert ("optimizer_states" in read) is not saves


# Other runs and other models ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "options", "refused"),
    [("never", {}, True), ("never", {"saves": False}, False), ("batch 2", {}, False)],
)
def test_another_model_with_the_same_folder_is_one_line(tmp_path, moment, options, refused):
    """It would get the weights of the first one. The same model may be trained on.

    A training that was interrupted goes on with any.
    """
    used = trainer(tmp_path, At(moment, press_ctrl_c), **options)
    with nullcontext() if moment == "never" else interrupted():
        used.fit(model := Line())
    if moment == "never":
        trainer(tmp_path, max_epochs=2, **options).fit(model)
    says = r"\): this program has already trained another model to its end with these checkpoints; "
    with pytest.raises(UserError, match=says) if refused else nullcontext():
        trainer(tmp_path, max_epochs=3, **options).fit(Line())


def test_a_training_that_saves_nothing_leaves_the_folder_to_other_models(tmp_path):
    trainer(tmp_path, saves=False).fit(Line())
    with interrupted():
        trainer(tmp_path, At("batch 2", press_ctrl_c)).fit(Line())
    trainer(tmp_path).fit(Line())
    assert [*saved(tmp_path)] == [2, 6]


def test_another_seed_is_one_line(tmp_path):
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c))
    with pytest.raises(UserError, match=r"ExactResume\(seed=...\) was 1, is 2; "):
        fit(tmp_path, seed=2)


def test_numbers_that_a_program_changes_between_two_trainings_are_no_matter(tmp_path, capfd):
    """They are compared where a new process goes on."""
    model = Line()
    model.patience = 3
    with interrupted():
        fit(tmp_path, At("batch 1", press_ctrl_c), model=model)
    model.patience = 4
    fit(tmp_path, model=model)
    assert "patience" not in capfd.readouterr().out


def longer_data() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(20.0)[:, None] / 20), 2, shuffle=True)


def test_a_program_that_trains_on_was_not_interrupted(tmp_path, capfd):
    """It may have other data then, and a callback that remembers its first training."""

    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    used = trainer(tmp_path, averaging, At("batch 25", press_ctrl_c), max_epochs=2, strict=True)
    used.fit(model := Line())
    used.fit_loop.max_epochs = 4
    model.train_dataloader = longer_data
    with pytest.raises(SystemExit):
        used.fit(model)
    assert "resuming from step 12" in (out := capfd.readouterr().out)
    assert "resumed at" not in out and "differ" not in out
    used.fit(model)  # this one was interrupted
    assert "resumed at step 25: " in capfd.readouterr().out
    assert [result["step"] for result in resume_of(used).resumes] == [25]


class Grows(Line):
    """Trains a second weight, too, from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.line.parameters(), self.lr, momentum=0.5)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.optimizers().add_param_group({"params": [self.more], "lr": 0.01})

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.more.square().mean()


def test_weights_that_are_added_to_an_optimizer_are_trained_on(tmp_path):
    expected = fit(tmp_path / "alone", model=Grows())
    with interrupted():
        fit(tmp_path / "run", At("batch 4", press_ctrl_c), model=Grows())
    assert equal(fit(tmp_path / "run", model=Grows()), expected)


class Keeps(pl.Callback):
    """Keeps the weights that its hooks at the start find."""

    def on_fit_start(self, trainer, pl_module):
        self.first = pl_module.line.weight.detach().clone()

    def on_train_start(self, trainer, pl_module):
        self.second = pl_module.line.weight.detach() * 2


def test_what_hooks_compute_at_the_start_is_of_the_first_start(tmp_path):
    with interrupted():
        fit(tmp_path, Keeps(), At("batch 2", press_ctrl_c))
    fit(tmp_path, keeps := Keeps())
    assert keeps.first.item() == 0.5 and keeps.second.item() == 1.0


def test_a_search_comes_again_in_another_training(tmp_path):
    """A resumed run does not search again; the same callback may be used once more."""
    finder = LearningRateFinder(num_training_steps=2)
    with interrupted():
        fit(tmp_path / "a", LearningRateFinder(num_training_steps=2), At("batch 2", press_ctrl_c))
    fit(tmp_path / "a", finder, At("never", fail), model=(model := Line()))
    assert getattr(finder, "optimal_lr", None) is None  # 2.5 has none yet
    fit(tmp_path / "b", finder, model=model)
    assert finder.optimal_lr is not None


def test_a_tuner_may_search_before_the_training(tmp_path):
    """Its run is none of the training's: it saves nothing, and reads nothing."""
    weights = []
    for name, moments in (("alone", ["never"]), ("run", ["batch 2", "never"])):
        for moment in moments:
            earlier_fits._finished.clear()
            used = trainer(tmp_path / name, At(moment, press_ctrl_c))
            Tuner(used).lr_find(model := Line(), num_training=3, update_attr=False)
            assert model.line.weight.item() == 0.5
            assert [*saved(tmp_path / name)] == ([2] if (name, moment) == ("run", "never") else [])
            with nullcontext() if moment == "never" else interrupted():
                used.fit(model)
        weights.append(model.line.weight.item())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("began", [True, False])
def test_ckpt_path_is_where_a_run_begins(tmp_path, capfd, began):
    """A run that began before goes on, and says so."""
    first = trainer(tmp_path / "first", max_epochs=2)
    first.fit(Line())
    first.save_checkpoint(path := tmp_path / "first.ckpt")
    if began:
        with interrupted():
            fit(tmp_path / "run", At("batch 2", press_ctrl_c))
    capfd.readouterr()
    steps = []
    notes = At("end of batch .*", lambda trainer: steps.append(trainer.global_step))
    trainer(tmp_path / "run", notes, max_epochs=3).fit(Line(), ckpt_path=path)
    assert steps == [*range(3 if began else 13, 19)] and 18 in saved(tmp_path / "run")
    says = (
        f"ckpt_path={path} is not loaded: this run began before, and resumes from its own newest "
        f"checkpoint in {tmp_path / 'run'}"
    )
    assert (says in capfd.readouterr().out.splitlines()) is began


def test_an_evaluation_takes_the_checkpoint_that_it_is_given(tmp_path):
    """So does a training that saves nothing."""
    used = trainer(tmp_path, max_epochs=2)
    used.fit(Validated())
    used.save_checkpoint(path := tmp_path / "model.ckpt")
    weight = used.lightning_module.line.weight.item()
    used.test(other := Validated(), ckpt_path=path, verbose=False)
    assert other.line.weight.item() == weight
    steps = []
    notes = At("end of batch .*", lambda trainer: steps.append(trainer.global_step))
    trainer(tmp_path, notes, saves=False, max_epochs=3).fit(Validated(), ckpt_path=path)
    assert steps == [*range(13, 19)]


def test_another_training_in_the_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "lock", lambda folder, patience: f"process 7 of {folder.name}")
    says = (
        rf"\(dirpath={tmp_path}\): process 7 of {tmp_path.name} trains with these checkpoints now; "
    )
    with pytest.raises(UserError, match=says):
        fit(tmp_path)
    fit(tmp_path, saves=False)


def test_a_diverged_model_is_not_saved(tmp_path):
    """Nor validated."""

    def spoil(trainer: pl.Trainer) -> None:
        trainer.lightning_module.line.weight.data.fill_(torch.nan)

    seen = []
    with pytest.raises(UserError, match="weights are NaN or infinite after step 4"):
        fit(tmp_path, At("end of batch 4", spoil), Divergence(), every_n_steps=4)
    with pytest.raises(UserError, match="weights are NaN or infinite after step 6"):
        callbacks = [At("end of batch 6", spoil), At("validation 0", seen.append), Divergence()]
        fit(tmp_path, *callbacks, model=Validated())
    assert saved(tmp_path) == {} and not seen


def test_a_model_that_was_the_best_is_removed_when_no_run_resumes_from_it(tmp_path):
    class Better(Line):
        def on_train_epoch_end(self):
            self.log("error", 1.0 / (1 + self.current_epoch))

    def count(trainer: pl.Trainer) -> None:
        counts.append(len([*(tmp_path / "best").iterdir()]))

    counts = []
    (tmp_path / "best").mkdir()
    best = BestModel(tmp_path / "best", "{epoch}", monitor="error")
    callbacks = [best, At("end of batch (6|12|18|24)", count)]
    options = {"max_epochs": 4, "keep": 1, "enable_checkpointing": True}
    fit(tmp_path, *callbacks, model=Better(), **options)
    assert counts == [0, 1, 2, 2]
    assert [file.name for file in (tmp_path / "best").iterdir()] == ["epoch=3.ckpt"]


@pytest.mark.parametrize(
    ("order", "warnings"),
    [
        ("model, callback, fit", 1),
        ("seed, model, callback, fit", 0),
        ("callback, model, fit", 0),
        ("model, callback, callback, fit", 1),
        ("callback, model, callback, fit", 0),
        ("model, callback, fit, callback, fit", 2),
        ("callback, model, fit, model, callback, fit", 0),
        ("model, callback without seed, fit", 0),
        ("model, callback with a search, fit", 1),
        ("model, callback, callback without seed, fit", 0),
    ],
)
def test_a_model_that_nothing_seeds_is_named(tmp_path, capfd, order, warnings):
    """Once a callback is made, what it and its training leave behind are seeds, too."""
    torch.seed()  # as a process begins
    used = None
    for number, what in enumerate(order.split(", ")):
        if what == "seed":
            torch.manual_seed(3)
        elif what == "model":
            model = Line()
        elif what == "fit":
            used.fit(model)
        else:
            seed = None if what == "callback without seed" else 1
            others = [LearningRateFinder(num_training_steps=2)] if "search" in what else []
            used = trainer(tmp_path / f"{number}", *others, seed=seed, reseeds=False)
    warning = (
        "warning: ExactResume(seed=...): the model was made before this callback, and nothing was "
        "seeded: what it has drawn, such as its first weights, is another draw whenever the "
        "program begins anew; make the callback first"
    )
    assert capfd.readouterr().out.splitlines().count(warning) == warnings


def test_a_stop_in_a_longer_validation_than_the_first_comes_within_it(tmp_path):
    """The loader of each epoch's validation may be another one."""

    class Reloads(Validated):
        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(2 + 2 * self.trainer.current_epoch, 1)))

    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}
    seen = []
    stop = At("validation 2", press_ctrl_c)
    with interrupted():
        fit(tmp_path, stop, At("validation .", seen.append), model=Reloads(), **options)
    assert saved(tmp_path) == {6: "epoch", 12: "validation"} and len(seen) == 5
    expected = fit(tmp_path / "alone", model=Reloads(), **options)
    assert equal(fit(tmp_path, model=Reloads(), **options), expected)


# Several ranks ------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch) -> list[tuple[int, int, int, int]]:
    """Let this process be one of two ranks: what another one says counts, too.

    It is what the other rank says each time: a signal, whether a checkpoint is due, whether it has
    diverged, and how its comparison stands; nothing once the list is empty.
    """

    def all_reduce(flags: torch.Tensor, **_) -> SimpleNamespace:
        if others:
            # Rank 0 alone says what is uploaded, and when a copy is due.
            said = torch.tensor([*others.pop(0), 0, 0])
            flags[:] = torch.maximum(flags, said)
        return SimpleNamespace(wait=lambda: None)

    def begin(self, trainer: pl.Trainer) -> None:
        alone(self, trainer)
        self.group = "gloo"

    others: list[tuple[int, int, int, int]] = []
    alone = agreement.Agreement.__init__
    monkeypatch.setattr(agreement.Agreement, "__init__", begin)
    monkeypatch.setattr(agreement.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(agreement, "gather", lambda value, group: [value])
    return others


@pytest.mark.parametrize(
    ("moment", "says", "when"),
    [
        ("batch 2", [], {3: "batch"}),
        ("never", [(15, 0, 0, 0)], {2: "batch"}),
        ("never", [(0, 0, 0, 0)] * 5 + [(15, 0, 0, 0)], {6: "epoch"}),
        ("end of epoch 0", [], {6: "epoch"}),
    ],
)
def test_ranks_stop_at_the_same_batch(tmp_path, heard, moment, says, when):
    """It is the next one: no step waits for what the others say; the end of an epoch does."""
    heard += says
    with interrupted(143 if says else 130):
        fit(tmp_path, At(moment, press_ctrl_c), max_epochs=2)
    assert saved(tmp_path) == when


def test_ranks_stop_at_the_same_batch_of_a_validation(tmp_path, heard):
    seen = []
    with interrupted():
        stop = At("validation 0", press_ctrl_c)
        fit(tmp_path, stop, At("validation .", seen.append), model=Validated())
    assert len(seen) == 2 and saved(tmp_path) == {6: "validation"}


def test_the_command_line_reports_a_stop_itself(tmp_path, heard):
    told = []
    heard.append((15, 0, 0, 0))
    home = CheckpointHome(tmp_path)
    with shutdown.Stop(home, lambda *given: told.append(given)) as stop, interrupted(143):
        fit(tmp_path, stop=stop)
    ((line, is_loud),) = told
    assert line.startswith("interrupted, resume from step 2: SIGTERM; ") and is_loud is True


def test_a_checkpoint_that_is_due_is_saved_by_all_ranks_at_the_next_batch(
    tmp_path, heard, monkeypatch
):
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", False)
    fit(tmp_path, Clock(monkeypatch, "", 0.0), every_n_minutes=2, keep=9)
    assert [*saved(tmp_path)] == [3, 6]


def test_all_ranks_end_if_one_has_diverged(tmp_path, heard, monkeypatch):
    def check(self, trainer: pl.Trainer) -> None:
        raise UserError(f"after step {trainer.global_step}")

    heard += [(0, 0, 0, 0), (0, 0, 1, 0)]
    monkeypatch.setattr(Divergence, "check", check)
    with pytest.raises(UserError, match="after step 3"):
        fit(tmp_path, Divergence())


@pytest.mark.parametrize(
    ("says", "order"),
    [
        ([(0, 0, 0, agreement.Comparison.OPEN)] * 9, ["4", "5", "6", "resumed"]),
        ([(0, 0, 0, agreement.Comparison.DIFFERENT)], ["4", "5", "resumed", "6"]),
    ],
)
def test_all_ranks_say_together_whether_steps_are_the_same(tmp_path, capfd, heard, says, order):
    """At the next batch if one has found a difference; else when all have compared all steps."""
    kill(tmp_path)
    capfd.readouterr()
    heard += says
    fit(tmp_path, Announces())
    lines = capfd.readouterr().out.splitlines()[1:]
    assert [
        line.split()[-1] if "batch " in line[:6] else line.split()[0] for line in lines
    ] == order


def test_a_step_that_is_another_is_not_saved_if_that_ends_the_job(tmp_path, heard, monkeypatch):
    """Although the others have not said yet how theirs was."""
    monkeypatch.setenv("FACTOR", "1")
    kill(tmp_path, Scaled)
    monkeypatch.setenv("FACTOR", "2")
    with pytest.raises(UserError, match="step 4 is not that of the interrupted run"):
        fit(tmp_path, model=Scaled(), strict=True, every_n_steps=1)
    assert [*saved(tmp_path)] == [3]


def test_a_rank_hears_why_another_one_cannot_be_resumed_within_an_epoch():
    assert agreement.common_reason([("", {}), ("others each time", {})]) == "others each time"
    assert agreement.common_reason([("", {}), ("", {})]) == ""


def test_why_a_run_cannot_be_resumed_within_an_epoch_is_said_once(capfd):
    """The first rank says so."""
    for first, said in ((True, 1), (False, 0)):
        this = SimpleNamespace(trainer=SimpleNamespace(is_global_zero=first))
        saves = stopping.Stopping(this, stopping.Intervals(0, 0))
        for _ in range(2):
            saves.epoch_begins("its data are others each time")
        says = "its data are others each time: checkpoints are saved only at the end of an epoch, "
        assert (
            capfd.readouterr().out == f"{says}and a stopped run goes back to the last one\n" * said
        )


@pytest.mark.parametrize("others", [{"train 0 Own": 2}, {}])
def test_a_sampler_that_shares_the_samples_out_is_one_line(others):
    agreement.refuse_other_orders([("", {"train Own": 1}), ("", {"train Own": 1})])
    says = r"^Trainer\(use_distributed_sampler=...\): found True, and Own, which draws other "
    with pytest.raises(UserError, match=says):
        agreement.refuse_other_orders([("", {"train Own": 1}), ("", others)])


@pytest.mark.parametrize(
    ("ranks", "first", "same", "warns"),
    [(2, True, True, 1), (2, True, False, 0), (2, False, True, 0), (1, True, True, 0)],
)
def test_ranks_that_train_on_the_same_batch_are_said_once(capfd, ranks, first, same, warns):
    batch = [torch.ones(2)]
    this = object.__new__(run.Run)
    this.saves, this.has_compared_batches = True, False
    this.check = SimpleNamespace(begin_batch=lambda *_: None)
    others = [digest_of(batch) if same else 1]
    this.agreement = SimpleNamespace(gather=lambda value: [value, *others])
    this.trainer = SimpleNamespace(world_size=ranks, is_global_zero=first)
    for number in range(2):
        this.batch_begins(batch, number)
    says = (
        "warning: all 2 ranks train on the same batch: they share the samples of a dataset with "
        "indices, while an IterableDataset has to yield the samples of its own rank\n"
    )
    assert capfd.readouterr().out == says * warns


@pytest.mark.parametrize(
    ("rank", "torchrun", "status"), [(0, False, 130), (0, True, 130), (1, True, 130), (1, False, 0)]
)
def test_lightning_would_take_a_stopped_rank_for_a_crash(
    tmp_path, monkeypatch, capfd, rank, torchrun, status
):
    """One rank of a host writes, and says that it stops."""

    def begin(trainer: pl.Trainer) -> None:
        monkeypatch.setattr(pl.Trainer, "local_rank", rank)
        press_ctrl_c(trainer)

    environment = SageMakerEnvironment(torchrun=torchrun)
    with interrupted(status):
        fit(tmp_path, At("batch 2", begin), environment=environment)
    assert saved(tmp_path) == ({} if rank else {2: "batch"})
    assert capfd.readouterr().err.count("interrupted, resume from step 2: SIGINT; ") == 1 - rank


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        ("ddp_spawn", {}, r"^Trainer\(strategy=...\): found DDPStrategy, which copies this "),
        ("fsdp", {}, r"^Trainer\(strategy=...\): found FSDPStrategy, whose runs cannot be resumed"),
        (
            "fsdp",
            {"settings": {"--trainer.strategy": "fsdp"}},
            "^--trainer.strategy: found FSDPStrategy, whose runs cannot be resumed; allowed are ",
        ),
        ("fsdp", {"saves": False}, ""),
    ],
)
def test_a_strategy_whose_runs_cannot_be_resumed_is_one_line(
    tmp_path, monkeypatch, capfd, strategy, options, says
):
    """Unless nothing is saved: it trains as Lightning does, then."""
    used = trainer(tmp_path, **options)
    used.state.fn = TrainerFn.FITTING
    resume = resume_of(used)
    spawns = strategy == "ddp_spawn"
    other = DDPStrategy(start_method="spawn") if spawns else FSDPStrategy()
    used._accelerator_connector.strategy = other
    resume.run_begins(used)
    with pytest.raises(UserError, match=says) if says else nullcontext():
        resume.setup(used, Line(), "fit")
    resume.changed.close()
    said = capfd.readouterr().out
    assert said.startswith("this run is trained and saved as Lightning does") == (says == "")


class Sharding(Line):
    def configure_model(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Line, r"Line: found no configure_model\(\), expected one that shards the model, as"),
        (Sharding, "expected two numbers whose product is 1, the number of ranks"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused_before_the_ranks_connect(
    tmp_path, model, expected
):
    used = trainer(tmp_path)
    used.state.fn = TrainerFn.FITTING
    strategy = ModelParallelStrategy(3, 1)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.connect(model())
    used._accelerator_connector.strategy = strategy
    resume = resume_of(used)
    with pytest.raises(UserError, match=expected):
        resume.run_begins(used)
    resume.changed.close()


TWO_HOSTS = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-2"}


def test_the_hosts_of_a_job_are_joined_unless_that_is_done(tmp_path, monkeypatch):
    """When a run of several begins, and not before: nothing waits while the callback is made."""
    joined = []
    monkeypatch.setattr(callback.rendezvous, "join", lambda *given: joined.append(given))
    fit(tmp_path / "alone", max_epochs=1)
    monkeypatch.setattr(pl.Trainer, "num_nodes", 2)
    fit(tmp_path / "done", environment=SageMakerEnvironment(), max_epochs=1)
    ours = trainer(tmp_path / "ours")
    assert joined == []
    ours.fit(Line())
    assert joined == [(SageMakerEnvironment.read(), os.environ)]


def test_making_the_callback_tells_no_host_where_it_is(tmp_path, monkeypatch):
    """It names this process, for the ranks that Lightning starts before any hook, and no more."""
    monkeypatch.delenv(parent_process.LAUNCHER_VARIABLE, raising=False)
    environment = SageMakerEnvironment(**TWO_HOSTS)
    monkeypatch.setattr(callback.SageMakerEnvironment, "read", lambda: environment)
    before = dict(os.environ)
    ExactResume(tmp_path)
    assert dict(os.environ) == before | {parent_process.LAUNCHER_VARIABLE: f"{os.getpid()}"}


class OfUser(ClusterEnvironment):
    """A plugin that knows where this host is."""

    creates_processes_externally = True
    main_address = "algo-1"
    main_port = 1
    detect = staticmethod(lambda: True)
    world_size = local_rank = node_rank = global_rank = lambda self: 0
    set_world_size = set_global_rank = lambda self, number: None


@pytest.mark.parametrize(
    ("told", "nodes", "plugins", "is_refused"),
    [
        ({}, 2, [], True),
        ({"NODE_RANK": "1"}, 2, [], True),
        ({"NODE_RANK": "1", "MASTER_ADDR": "algo-1"}, 2, [], False),
        ({}, 1, [], False),
        ({}, 2, [OfUser()], False),
    ],
)
def test_a_host_that_does_not_know_its_place_is_one_line(
    tmp_path, monkeypatch, told, nodes, plugins, is_refused
):
    """As a run begins, before the hosts wait for each other."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(callback.rendezvous, "join", lambda *_: None)
    environment = SageMakerEnvironment(**TWO_HOSTS)
    monkeypatch.setattr(callback.SageMakerEnvironment, "read", lambda: environment)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # the trainer sets it
    used = trainer(tmp_path, strategy="ddp", num_nodes=nodes, plugins=plugins)
    says = r"^Trainer\(num_nodes=...\): found 2 hosts, and no .*NODE_RANK|MASTER_ADDR.* on algo-2"
    with pytest.raises(UserError, match=says) if is_refused else nullcontext():
        resume_of(used).run_begins(used)
    resume_of(used).changed.close()


def test_a_drill_records_a_training_once(tmp_path, monkeypatch):
    monkeypatch.setattr(drilled_run, "_has_trained", [])
    asked = {"folder": f"{tmp_path}", "reached": f"{tmp_path / 'reached'}", "epochs": 1}
    asked |= {"steps": 3, "moment": None, "workers": None}
    environment = SageMakerEnvironment(drill=asked, checkpoint_dir=tmp_path / "run")
    drilled = drilled_run.Drilled(asked)
    fit(Path("unused"), drilled, environment=environment, max_epochs=3)
    assert saved(tmp_path / "run") == {2: "batch", 3: "epoch"}
    kinds = [json.loads(line)["at"][0] for line in (tmp_path / "steps-0.jsonl").open()]
    assert kinds == ["start", "batch", "batch", "batch", "epoch", "end"]
