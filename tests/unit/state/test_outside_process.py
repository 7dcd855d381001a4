"""State that training keeps in files and environment variables is said, once, by name."""

import builtins
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from short_fits import Noted, trainer
from torch.utils.data import DataLoader, Dataset

from sagemaker_lightning.state.outside_process import OutsideState


class CountsInFile(Callback):
    """Counts batches in a file, as code does that is to survive its process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: object) -> None:
        count = json.loads(self.path.read_text()) if self.path.exists() else 0
        self.path.write_text(json.dumps(count + 1))


class KeepsTensorInFile(Callback):
    """Keeps a tensor in a file of torch's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: object) -> None:
        mean = torch.load(self.path) if self.path.exists() else torch.zeros(1)
        torch.save(mean * 0.9 + 1, self.path)


class RollsBack(Callback):
    """Keeps weights in a file, and goes back to them once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            torch.load(self.path)
        else:
            torch.save(torch.zeros(trainer.global_step), self.path)


class Appends(Callback):
    """Keeps a table of losses in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: object) -> None:
        with self.path.open("a", newline="") as file:
            file.write("0.5\n")


class CountsInEnvironment(Callback):
    """Counts batches in an environment variable."""

    def on_train_batch_end(self, *_: object) -> None:
        os.environ["BATCHES"] = str(int(os.environ.get("BATCHES", "0")) + 1)


class Replays(Callback):
    """Keeps each batch in a file of its own, and reads an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix("")
        self.path.mkdir()

    def on_train_batch_end(self, *_: object) -> None:
        files = sorted(self.path.iterdir())
        np.save(self.path / f"{len(files):03d}.npy", np.zeros(len(files)))
        if len(files) > 1:
            np.load(files[-1])


class CachedSamples(Dataset):
    """Keeps each sample in a file once it is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.folder / f"{index}.pt"
        if not path.exists():
            torch.save(torch.ones(2), path)
        return torch.load(path)


class Caches(Callback):
    """Writes a file and a variable once, and reads them in each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *_: object) -> None:
        os.environ.setdefault("BATCHES", "1")
        if not self.path.exists():
            self.path.write_text("prepared")
        assert self.path.read_text() == "prepared"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.setenv("BATCHES", "0")
    monkeypatch.delenv("BATCHES")


@pytest.mark.parametrize("kind", [CountsInFile, KeepsTensorInFile, RollsBack])
def test_a_file_that_training_writes_and_reads_is_named(tmp_path, capfd, kind):
    state = tmp_path / "state"
    trainer(tmp_path / "run", kind(state)).fit(Noted())
    printed = capfd.readouterr().out
    assert (
        printed.count(f"{state} is written and read again while training, and no checkpoint") == 1
    )


def test_files_that_training_writes_each_once_and_reads_later_are_named_once(tmp_path, capfd):
    trainer(tmp_path / "run", Replays(tmp_path / "replay")).fit(Noted())
    printed = capfd.readouterr().out
    assert printed.count("is written and read again while training, and no checkpoint") == 1
    assert f"{tmp_path / 'replay'}/002.npy is written" in printed


def test_samples_that_a_dataset_keeps_in_files_are_not_named(tmp_path, capfd):
    data = DataLoader(CachedSamples(tmp_path), 2)
    trainer(tmp_path / "run").fit(Noted(), data)
    assert len([*tmp_path.glob("*.pt")]) == 8
    assert "is written and read again" not in capfd.readouterr().out


class Reloads(Callback):
    """Reads each checkpoint that Lightning has written."""

    def on_train_epoch_end(self, trainer: Trainer, *_: object) -> None:
        for path in Path(trainer.checkpoint_callback.dirpath).glob("*.ckpt"):
            torch.load(path, weights_only=False)


def test_a_file_to_which_training_appends_is_named(tmp_path, capfd):
    rows = tmp_path / "rows.csv"
    trainer(tmp_path / "run", Appends(rows)).fit(Noted())
    assert capfd.readouterr().out.count(f"{rows} is appended to while training") == 1


def test_a_file_is_said_to_be_read_again_once_what_was_appended_is_read(tmp_path, capfd):
    class ReadsBack(Appends):
        def on_train_batch_end(self, trainer, *_):
            super().on_train_batch_end()
            if trainer.global_step == 2:
                assert len(self.path.read_text().splitlines()) == 2

    rows = tmp_path / "rows.csv"
    trainer(tmp_path / "run", ReadsBack(rows)).fit(Noted())
    assert capfd.readouterr().out.count(f"{rows} is written and read again while training") == 1


def test_a_file_that_was_opened_for_appending_before_the_training_is_named(tmp_path, capfd):
    with (tmp_path / "rows.csv").open("a") as file, (tmp_path / "new.csv").open("x") as new:
        model = Noted()
        model.files = [file, new]
        trainer(tmp_path / "run").fit(model)
    printed = capfd.readouterr().out
    assert printed.count(f"{file.name} is appended to while training") == 1
    assert f"{new.name} is" not in printed


def test_an_environment_variable_that_changes_is_named(tmp_path, capfd):
    trainer(tmp_path, CountsInEnvironment()).fit(Noted())
    printed = capfd.readouterr().out
    assert printed.count("the environment variable BATCHES changes while training") == 1


class Marks(Callback):
    """Sets an environment variable once, in the third batch."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 3:
            os.environ["BATCHES"] = "late"


def test_an_environment_variable_that_training_sets_later_is_named(tmp_path, capfd):
    puts = os.putenv
    trainer(tmp_path, Marks()).fit(Noted())
    assert os.putenv is puts
    assert capfd.readouterr().out.count("the environment variable BATCHES changes") == 1


class KeepsInTemporaryFolder(Callback):
    """Has a temporary folder, in which it has something from the start, and may write more."""

    def __init__(self, writes: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        Path(self.folder.name, "prepared").write_text("1")
        os.utime(Path(self.folder.name, "prepared"), (1, 1))
        self.writes = writes

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self.writes:
            Path(self.folder.name, str(trainer.global_step)).write_text("1")


@pytest.mark.parametrize("writes", [True, False])
def test_a_temporary_folder_in_which_training_writes_is_named(tmp_path, capfd, writes):
    trainer(tmp_path, keeps := KeepsInTemporaryFolder(writes)).fit(Noted())
    printed = capfd.readouterr().out
    assert printed.count(".folder is a temporary folder in which training writes") == writes
    keeps.folder.cleanup()


def test_what_is_written_once_and_what_lightning_writes_is_not_named(tmp_path, capfd):
    run = tmp_path / "run"
    own = ModelCheckpoint(run / "own", save_top_k=-1)
    callbacks = Caches(tmp_path / "cache"), own, Reloads()
    trainer(run, *callbacks, enable_checkpointing=True, logger=CSVLogger(run)).fit(Noted())
    assert "while training" not in capfd.readouterr().out


def test_open_is_as_it_was_after_the_watch():
    before = open
    with OutsideState().watching_files():
        assert open is not before
    assert open is before


def test_an_open_that_somebody_replaces_stays_theirs(monkeypatch):
    def theirs(*args, **options):
        return None

    with OutsideState().watching_files():
        monkeypatch.setattr("builtins.open", theirs)
    assert open is theirs


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(("none",), FileNotFoundError), (("none", 5), TypeError), (([],), TypeError)],
)
def test_wrong_arguments_get_the_errors_of_open(tmp_path, monkeypatch, arguments, error):
    monkeypatch.chdir(tmp_path)
    with OutsideState().watching_files():
        watched = builtins.open
        with pytest.raises(error):
            watched(*arguments)
