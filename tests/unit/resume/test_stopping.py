"""When a checkpoint is saved and when training stops."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from short_trainings import (
    At,
    Line,
    Streamed,
    Validated,
    equal,
    fit,
    interrupted,
    press_ctrl_c,
    resume_of,
    saved,
    trainer,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sagemaker_lightning import SageMakerEnvironment
from sagemaker_lightning.contract import deadlines, shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume import stopping
from sagemaker_lightning.resume.files import checkpoint_dir, checkpoint_file
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.stopping import Action, Circumstances, Intervals, Stopping, decide

BATCH, VALIDATION, EPOCH = ResumePoint.BATCH, ResumePoint.VALIDATION, ResumePoint.EPOCH
NOTHING = Action()
SAVES = Action(saves=True)
COPIES = Action(copies=True)
WAITS = Action(saves=True, waits=True)
STOPS = Action(saves=True, waits=True, exits=True)
STOPS_UNSAVED = Action(exits=True)


@pytest.mark.parametrize(
    ("point", "now", "action"),
    [
        (BATCH, {}, NOTHING),
        (BATCH, {"is_due": True}, SAVES),
        (BATCH, {"is_due": True, "is_uploading": True}, NOTHING),
        (BATCH, {"is_due": True, "accumulates": True}, NOTHING),
        (BATCH, {"is_due": True, "only_epochs": True}, NOTHING),
        (BATCH, {"copy_is_due": True}, COPIES),
        (BATCH, {"copy_is_due": True, "is_due": True}, SAVES),
        (BATCH, {"copy_is_due": True, "is_due": True, "is_uploading": True}, COPIES),
        (BATCH, {"copy_is_due": True, "accumulates": True}, NOTHING),
        (BATCH, {"copy_is_due": True, "only_epochs": True}, NOTHING),
        (BATCH, {"copy_is_due": True, "stops": True, "only_epochs": True}, STOPS_UNSAVED),
        (BATCH, {"stops": True}, STOPS),
        (BATCH, {"stops": True, "is_uploading": True}, STOPS),
        (BATCH, {"stops": True, "accumulates": True}, STOPS),
        (BATCH, {"stops": True, "only_epochs": True}, STOPS_UNSAVED),
        (BATCH, {"is_done": True}, WAITS),
        (BATCH, {"is_done": True, "only_epochs": True}, WAITS),
        (BATCH, {"is_done": True, "stops": True}, WAITS),
        (EPOCH, {}, SAVES),
        (EPOCH, {"is_uploading": True}, Action(postpones=True)),
        (EPOCH, {"is_uploading": True, "stops": True}, STOPS),
        (EPOCH, {"is_uploading": True, "is_done": True}, WAITS),
        (EPOCH, {"is_done": True}, WAITS),
        (EPOCH, {"is_done": True, "stops": True}, WAITS),
        (EPOCH, {"stops": True}, STOPS),
        (EPOCH, {"stops": True, "only_epochs": True}, STOPS),
        (EPOCH, {"epoch_was_cut": True}, NOTHING),
        (EPOCH, {"epoch_was_cut": True, "is_done": True}, NOTHING),
        (EPOCH, {"epoch_was_cut": True, "stops": True}, STOPS_UNSAVED),
        (VALIDATION, {}, NOTHING),
        (VALIDATION, {"is_due": True, "copy_is_due": True}, NOTHING),
        (EPOCH, {"is_uploading": True, "copy_is_due": True}, Action(postpones=True)),
        (VALIDATION, {"stops": True}, STOPS),
        (VALIDATION, {"stops": True, "only_epochs": True}, STOPS_UNSAVED),
    ],
)
def test_what_is_done_where_nothing_is_half_done(point, now, action):
    assert decide(point, Circumstances(**now)) == action


def test_no_stop_is_forgotten_and_the_last_state_is_waited_for():
    """Whatever else is the case."""
    for values in product([False, True], repeat=len(Circumstances._fields)):
        now = Circumstances(*values)
        for point in ResumePoint:
            action = decide(point, now)
            assert action.exits is (now.stops and (not now.is_done or point is VALIDATION))
            assert action.saves or not action.waits
            assert action.waits or not (action.saves and action.exits)
            assert not (action.copies and (action.saves or action.exits))


def test_a_copy_that_is_due_waits_until_it_is_taken(monkeypatch):
    """While gradients are added up, none is taken."""
    adds = [True, False, False]
    monkeypatch.setattr(stopping, "gradients_accumulate", lambda trainer: adds.pop(0))
    copied = []
    said = SimpleNamespace(checkpoint_due=False, uploading=False, copy_due=True)
    said.copy_taken = lambda: setattr(said, "copy_due", False)
    noted = []
    copies = SimpleNamespace(state_saved=lambda: noted.append(True))
    run = SimpleNamespace(agreement=said, trainer=None, step=3, copies=copies)
    run.copy = copied.append
    stops = Stopping(run, Intervals(0, 0))
    monkeypatch.setattr(stops, "agree", lambda now=False: False)
    stops.batch_committed(done=False)
    assert copied == noted == []
    for _ in range(2):
        stops.batch_committed(done=False)
    assert copied == [BATCH] and noted == [True]


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
def test_a_stop_that_comes_at_the_end_is_ignored(tmp_path, moment, options, when):
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


def test_the_command_lines_stop_hears_what_is_happening(tmp_path, monkeypatch):
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
