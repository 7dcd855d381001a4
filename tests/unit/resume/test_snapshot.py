"""resume/snapshot.py in a short training: what a checkpoint has of it."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from short_fits import Noted, alone_and_resumed, interrupted, trainer, training, weights

from sagemaker_lightning import ExactResume
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import snapshot as snapshot_module
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.parts import epoch_position
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.snapshot import (
    EQUAL_ON_ALL_RANKS,
    OfRank,
    Snapshot,
    sums_of_bits,
    trained_tensors,
)
from sagemaker_lightning.state.graph import values


class After(pl.Callback):
    """Does something with the snapshot after the third batch."""

    def __init__(self, do: Callable[[Snapshot], None]) -> None:
        self.do = do

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            resume = next(each for each in trainer.callbacks if isinstance(each, ExactResume))
            self.do(resume.run.snapshot)


def in_training(folder: Path, do: Callable[[Snapshot], None], model=None, *callbacks) -> None:
    """Do something with the snapshot of a training."""
    options = {"max_epochs": 1, "enable_checkpointing": bool(callbacks)}
    trainer(folder, After(do), *callbacks, **options).fit(model or Noted())


@pytest.fixture
def two_ranks(monkeypatch) -> Callable[..., dict]:
    """A function that takes the state of one of two ranks, of which the other differs."""

    def take(snapshot: Snapshot, rank: int, digest=None, rates=None, sums=None) -> dict:
        def gather(value):
            if (rates is None and sums is None) or not isinstance(value, OfRank):
                return [value, value]
            other = OfRank(digest or value.others, rates or value.rates, sums or value.sums)
            return [other, value] if rank else [value, other]

        with monkeypatch.context() as patched:
            patched.setattr(pl.Trainer, "global_rank", rank)
            patched.setattr(pl.Trainer, "is_global_zero", not rank)
            patched.setattr(snapshot.run, "agreement", SimpleNamespace(gather=gather))
            return snapshot.take(ResumePoint.BATCH)[checkpoint_file.ENTRIES_KEY]

    return take


class Own(Noted):
    """Puts something of its own into a checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = np.int64(1)

    def on_load_checkpoint(self, checkpoint):
        """Load nothing; what nothing may load is not saved."""


def test_what_ranks_have_alike_is_saved_once(tmp_path, two_ranks):
    def do(snapshot):
        for rank, digest in ((0, None), (1, None), (1, "another"), (0, "another")):
            taken.append(two_ranks(snapshot, rank, digest, [0.1])["ranks"][0])

    taken = []
    in_training(tmp_path, do, Own())
    rank_0, alike, rank_1, of_rank_0 = taken
    for each in (rank_0, alike, of_rank_0):
        assert each["rank_overrides"] == {"entries": {}, "exact_values": {}}
    overrides = rank_1["rank_overrides"]
    assert overrides["entries"].keys() >= {"callbacks", "lr_schedulers", "own"}
    assert not overrides["entries"].keys() & EQUAL_ON_ALL_RANKS
    assert values.decode(overrides["exact_values"]["users"]) == {("own",): np.int64(1)}


OUTCOME = (
    "so the ranks do not train one model: an interrupted run continues with those of each rank, "
    "and the models that are saved for use are rank 0's; "
)


def test_other_learning_rates_on_a_rank_are_reported_once(tmp_path, two_ranks, capfd):
    """By rank 0."""

    def do(snapshot):
        two_ranks(snapshot, 0, rates=[0.1])
        two_ranks(snapshot, 1, rates=[0.05])
        snapshot.has_warned_of_ranks = False
        for rates in ([0.05, 1 / 3, 0.05], [0.05], [0.1]):
            two_ranks(snapshot, 0, rates=rates)

    in_training(tmp_path, do)
    warnings = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert warnings == [
        f"warning: the learning rates are 0.1 on rank 0 and 0.05, 0.333333 on rank 1, {OUTCOME}"
        "learning rates may be set from values that all ranks have, such as "
        "self.log(..., sync_dist=True)"
    ]


@pytest.mark.parametrize("most", [snapshot_module.MOST_OF_RANKS, 0])
@pytest.mark.parametrize("name", ["line.weight", "optimizer 0.1.exp_avg"])
def test_each_rank_has_its_own_weights_if_they_differ(
    tmp_path, two_ranks, capfd, monkeypatch, name, most
):
    """DDP does not reduce the gradients of weights that were frozen when it wrapped the model.

    Weights may be equal where the states of optimizers are not.
    """

    def do(snapshot):
        monkeypatch.setattr(pl.Trainer, "world_size", 2)
        monkeypatch.setattr(snapshot_module, "MOST_OF_RANKS", most)
        own = sums_of_bits(trained_tensors(snapshot.trainer)) | {name: 4}
        monkeypatch.setattr(snapshot_module, "sums_of_bits", lambda tensors: own)
        taken[:] = [
            two_ranks(snapshot, rank, sums=sums)["ranks"][1]["rank_overrides"]["entries"].keys()
            for rank, sums in ((0, own), (0, own | {name: 5}), (1, own | {name: 5}))
        ]
        monkeypatch.undo()

    taken = []
    in_training(tmp_path, do)
    alike, of_first, of_other = taken
    of_model = {"state_dict", "optimizer_states"}
    assert not alike and not of_first
    assert of_other & of_model == (of_model if most else set())
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "differ on rank" in line]
    what = "weights line.weight" if name == "line.weight" else "states of the optimizers"
    assert line.startswith(f"warning: the {what} differ on rank 0 and rank 1, so")
    assert (OUTCOME in line) is bool(most)
    assert ("after an interruption this run is not exact" in line) is not bool(most)


def test_a_sum_of_bits_is_of_each_weight():
    line = torch.nn.Linear(3, 2)
    named = dict(line.named_parameters())
    before = sums_of_bits(named)
    assert before.keys() == {"weight", "bias"} and sums_of_bits(named) == before
    with torch.no_grad():
        line.weight[1, 2] += 1e-3
    after = sums_of_bits(named)
    assert after["bias"] == before["bias"] and after["weight"] != before["weight"]


@pytest.mark.parametrize("point", [ResumePoint.VALIDATION, ResumePoint.BATCH])
def test_a_state_has_copies_of_the_optimizers_states(tmp_path, point):
    """A validation may change them: some optimizers swap an average in."""

    def do(snapshot):
        model = snapshot.trainer.lightning_module
        present = snapshot.trainer.optimizers[0].state[model.line.weight]["momentum_buffer"]
        copied = snapshot.take(point)["optimizer_states"][0]["state"][0]["momentum_buffer"]
        assert torch.equal(copied, present) and copied is not present
        assert copied.data_ptr() != present.data_ptr()
        done.append(True)

    done = []
    in_training(tmp_path, do)
    assert done


def test_a_checkpoint_says_when_it_was_saved_and_what_there_was(tmp_path, monkeypatch):
    """The models, and how far the epoch was."""
    monkeypatch.setattr(epoch_position, "reached", lambda trainer: trainer.global_step)

    def do(snapshot):
        before = time.time()
        entries = snapshot.take(ResumePoint.BATCH)[checkpoint_file.ENTRIES_KEY]
        assert before <= entries["number"] / 1e9 <= time.time()
        at_the_end = snapshot.take(ResumePoint.EPOCH)[checkpoint_file.ENTRIES_KEY]
        taken.extend((entries, at_the_end))

    taken = []
    models = ModelCheckpoint(tmp_path / "models", save_top_k=-1, every_n_train_steps=1)
    in_training(tmp_path, do, None, models)
    assert [entries["parts"]["epoch_position"] for entries in taken] == [3, None]
    assert taken[0]["parts"]["model_files"] == {
        models.state_key: ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]
    }


class Scale:
    """An object that is not a plain value."""

    def __init__(self) -> None:
        self.factor = 1.0


class Saving(Noted):
    """Saves an object, which it has itself or not."""

    def __init__(self, has: bool = True, stop: str = "") -> None:
        super().__init__(stop)
        self.scale = Scale()
        self.has = has

    def training_step(self, batch, batch_idx):
        self.scale.factor += 1
        self.note(f"scale {self.scale.factor}")
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["scale"] = self.scale if self.has else Scale()

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["scale"] is self.scale


def test_an_object_that_the_model_has_may_be_saved(tmp_path):
    """It is made by the program again; its state is saved with that of all its objects."""
    trainer(tmp_path / "alone").fit(alone := Saving())
    with interrupted():
        trainer(tmp_path).fit(Saving(stop="batch 1:0"))
    assert "(test_snapshot.Scale)" in str(
        checkpoint_file.read(max(tmp_path.glob("step-*.ckpt")))["scale"]
    )
    trainer(tmp_path).fit(model := Saving())
    assert model.events == alone.events and weights(model) == weights(alone)


def test_an_object_that_nobody_has_is_refused(tmp_path):
    with pytest.raises(UserError) as raised:
        trainer(tmp_path).fit(Saving(has=False))
    assert str(raised.value) == (
        "a checkpoint of this run could not be read again: scale is a test_snapshot.Scale "
        "(on_save_checkpoint() or state_dict() of test_snapshot.Saving); keep numbers, text, "
        "tensors, arrays, lists and dicts there"
    )


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_lightning_continues_with_the_epoch_after_a_checkpoint(tmp_path):
    """A trainer without this package, too, as from a checkpoint of its own."""
    models = ModelCheckpoint(tmp_path / "models", filename="own", save_on_train_epoch_end=True)
    trainer(tmp_path, models, max_epochs=1, enable_checkpointing=True).fit(Noted())
    (path,) = tmp_path.glob("step-*.ckpt")
    progress = [
        torch.load(each, weights_only=False)["loops"]["fit_loop"]["epoch_progress"]
        for each in (path, tmp_path / "models/own.ckpt")
    ]
    assert progress[0] == progress[1]
    lightnings = trainer(tmp_path)
    lightnings.callbacks = []
    lightnings.fit(model := Noted(), ckpt_path=path)
    assert [event for event in model.events if event.startswith("batch")] == [
        f"batch 1:{number}" for number in range(4)
    ]


CALLS = Counter()


class Counting(Noted):
    """A model that counts how often it is asked for its state; it has a buffer, and may load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def state_dict(self, *args, **options) -> dict:
        """Count a call, and return the state."""
        CALLS["state_dict of the model"] += 1
        return super().state_dict(*args, **options)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Count a call."""
        CALLS["on_save_checkpoint of the model"] += 1

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Load nothing."""


class CountingCallback(pl.Callback):
    """A callback that counts how often it is asked for its state."""

    def state_dict(self) -> dict:
        """Count a call, and return a state."""
        CALLS["state_dict of the callback"] += 1
        return {"a": 1}

    def on_save_checkpoint(self, *_) -> None:
        """Count a call."""
        CALLS["on_save_checkpoint of the callback"] += 1


def test_a_users_hooks_are_called_once_for_each_checkpoint(tmp_path, monkeypatch):
    CALLS.clear()
    of_each = []
    take = Snapshot.take

    def counting(*args):
        assert not CALLS  # nobody has asked before, or since the last one
        state = take(*args)
        of_each.append(dict(CALLS))
        CALLS.clear()
        return state

    monkeypatch.setattr(Snapshot, "take", counting)
    trainer(tmp_path, CountingCallback(), every_n_steps=1).fit(Counting())
    assert len(of_each) > 4
    assert all(len(calls) == 4 and {*calls.values()} == {1} for calls in of_each), of_each


class Numbering(Noted):
    """Trains by how often it has saved, and writes what it has noted to a file."""

    folder: Path

    def __init__(self, **moments) -> None:
        super().__init__(**moments)
        self.version = 0
        self.pending: list[str] = []

    def on_save_checkpoint(self, checkpoint):
        self.version += 1
        checkpoint["version"] = self.version
        with (self.folder / "notes").open("a") as file:
            file.writelines(self.pending)
        self.pending.clear()

    def on_load_checkpoint(self, checkpoint):
        self.version = checkpoint["version"]

    def training_step(self, batch, batch_idx):
        self.pending.append(f"{self.global_step}\n")
        return super().training_step(batch, batch_idx) / (1 + self.version)


@pytest.mark.parametrize("stop", ["batch 0:2", "batch 1:1", "batch 2:2"])
def test_what_a_save_hook_counts_is_what_lightning_alone_has_it_count(tmp_path, stop):
    def train(folder: Path, **moments) -> Numbering:
        model = Numbering(**moments)
        model.folder = tmp_path
        files = ModelCheckpoint(folder / "files", every_n_epochs=2, save_top_k=-1)
        options = {"max_epochs": 4, "enable_checkpointing": True, "every_n_steps": 3}
        fit = trainer(folder, files, **options).fit
        with interrupted() if moments else nullcontext():
            fit(model)
        return model

    alone = train(tmp_path / "alone")
    assert (tmp_path / "notes").read_text().split() == [*map(str, range(16))]
    train(tmp_path / "stopped", stop=stop)
    resumed = train(tmp_path / "stopped")
    assert weights(resumed) == weights(alone) and resumed.version == alone.version == 2


class Keeping(Noted):
    """Keeps a list in the file, and takes it from there."""

    def __init__(self, **moments) -> None:
        super().__init__(**moments)
        self.rows: list[int] = []

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rows"] = self.rows

    def on_load_checkpoint(self, checkpoint):
        self.rows = checkpoint["rows"]

    def training_step(self, batch, batch_idx):
        self.rows.append(batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stop", ["batch 0:2", "batch 1:1"])
def test_a_list_that_a_load_hook_has_taken_from_the_file_continues(tmp_path, stop):
    alone, resumed = alone_and_resumed(training(Keeping), tmp_path, stop)
    assert resumed.rows == alone.rows == [0, 1, 2, 3] * 2
