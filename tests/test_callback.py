"""ExactResume in trainings of a few batches: when it saves and stops, what it says and leaves.

They run in this process and take some hundredths of a second each.
"""

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sagemaker_lightning import ExactResume, UserError
from sagemaker_lightning.contract import reporting
from sagemaker_lightning.resume import callback, checkpoint_dir, checkpoint_file

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
    callback._finished.clear()
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
    return {each["step"]: each["kind"] for each in entries}


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


class Clock(pl.Callback):
    """A clock that moves a minute with each batch; to save one checkpoint takes some seconds."""

    def __init__(self, monkeypatch, slow: str, seconds: float) -> None:
        now = [1000.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], time=callback.time.time)
        monkeypatch.setattr(callback, "time", clock)
        self.tick = lambda seconds: now.__setitem__(0, now[0] + seconds)
        self.slow, self.seconds = slow, f"{seconds}"

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if f"{trainer.global_step}" == self.slow:
            self.tick(float(self.seconds))

    def on_train_batch_start(self, *_):
        self.tick(60)


@pytest.mark.parametrize(
    ("minutes", "slow", "seconds", "steps"),
    [
        (1, "", 0.0, [1, 2, 3, 4, 5, 6]),
        (1.5, "", 0.0, [2, 4, 6]),
        (2, "", 0.0, [2, 4, 6]),
        (0, "", 0.0, [6]),
        (1, "2", 1.75, [1, 2, 5, 6]),
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


@pytest.mark.parametrize("model", [Line, ByHand])
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
def test_steps_that_are_done_again_are_compared(tmp_path, capfd, model, last, options, says):
    """As many as there are until the training ends; none if the run may be another one."""
    kill(tmp_path, model)
    capfd.readouterr()
    fit(tmp_path, At(f"end of {last}", end), Announces(), model=model(), **options)
    assert capfd.readouterr().out.splitlines()[1:] == [
        f"batch {line}" if line.isdigit() else f"resumed at step 3: {line}" for line in says
    ]


class Scaled(Line):
    """Multiplies the loss by what a variable of the environment says."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float(os.environ["FACTOR"])


def test_other_steps_than_before_are_said_at_once(tmp_path, capfd, monkeypatch):
    """`strict` ends the job by them."""
    monkeypatch.setenv("FACTOR", "1")
    kill(tmp_path, Scaled)
    monkeypatch.setenv("FACTOR", "2")
    says = (
        "resumed at step 3: step 4 is not that of the interrupted run: on rank 0, the loss differs"
    )
    with pytest.raises(UserError, match=f"^--resume.strict: {says}"):
        fit(tmp_path, model=Scaled(), strict=True)
    capfd.readouterr()
    fit(tmp_path, Announces(), model=Scaled())
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
        ("batch 2", 2, "batch", 0),
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
