"""resume/files/checkpoint_file.py: a file of a checkpoint is intact, or says why it is not."""

import errno
import os
import re
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from checkpoint_folders import (
    fails_on_a_full_disk,
    flipped,
    folder_of_three,  # noqa: F401  the fixture folder
    state,
)
from containers import ROOT
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

import sagemaker_lightning
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.checkpoint_file import CheckedIO, damage, examine, read, write


def stepped(path: Path) -> None:
    write(path, state(30), 31, 1)


def plain(path: Path) -> None:
    write(path, state(30))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (stepped, "has the name of another checkpoint: it is of step 31"),
        (plain, "is not one to resume from: Lightning's ModelCheckpoint wrote it"),
        (flipped, "is damaged: its checksum does not match"),
        (piped, "is not a plain file"),
        (Path.unlink, "cannot be read (No such file or directory)"),
        (lambda path: path.write_bytes(b"x" * 500), checkpoint_file.NOT_OURS),
        (lambda path: path.write_bytes(b"x"), checkpoint_file.NOT_OURS),
    ],
)
def test_a_file_that_cannot_be_resumed_from_says_why(folder: CheckpointDir, change, problem):
    change(folder.path_of(30))
    assert examine(folder.path_of(30)) == problem
    assert checkpoint_file.other_format(folder.path_of(30)) is None


def test_a_file_whose_content_cannot_be_read_says_why(folder: CheckpointDir, monkeypatch):
    """As on a disk with a bad block; its end, which is read first, can be read."""
    open_file = Path.open
    opened = []

    def open_once(path: Path, mode: str):
        opened.append(path)
        if len(opened) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(path, mode)

    monkeypatch.setattr(Path, "open", open_once)
    assert damage(folder.path_of(30)) == "cannot be read (Input/output error)"


def test_the_end_of_a_file_tells_what_it_is(folder: CheckpointDir):
    """However large the file is, no more of it is read for that."""
    path = folder.path_of(30)
    end = path.read_bytes()[-checkpoint_file.FOOTER.size :]
    os.truncate(path, 2**26)
    with path.open("ab") as file:
        file.write(end)
    tracemalloc.start()
    try:
        assert checkpoint_file.identify(path) == (30, 210)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_of_another_program_is_whole_if_torch_can_read_it(tmp_path: Path):
    """Otherwise a line says why, whatever torch says."""
    path = tmp_path / "theirs.ckpt"
    torch.save({"a": 1}, path)
    assert damage(path) == ""
    path.write_bytes(path.read_bytes()[:-60])
    assert re.fullmatch(r"cannot be read \([^\n]+\)", damage(path))
    path.write_bytes(b"\x80\x02")  # the beginning of a file of an old torch
    assert damage(path) == "cannot be read (EOFError)"
    torch.save({"folder": tmp_path}, path)
    folder = f"{type(tmp_path).__module__}.PosixPath"  # another one from Python 3.13 on
    assert damage(path) == f"cannot be read (there is a {folder} in it)"


def test_a_model_that_lightning_saves_has_a_checksum_and_is_not_resumed_from(tmp_path: Path):
    files = CheckedIO(plain_values=True)
    for entries, step in (({"global_step": 7}, 7), ({}, 0)):
        files.save_checkpoint({"folder": tmp_path} | entries, tmp_path / "best.ckpt")
        assert checkpoint_file.read_footer(tmp_path / "best.ckpt")[:2] == (step, 0)
        assert read(tmp_path / "best.ckpt") == {"folder": str(tmp_path)} | entries
    CheckedIO(plain_values=False).save_checkpoint({"folder": tmp_path}, tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=False) == {"folder": tmp_path}
    write(tmp_path / "own.ckpt", {})
    assert checkpoint_file.read_footer(tmp_path / "own.ckpt")[:2] == (0, 0)


def test_what_a_killed_run_has_left_of_a_model_is_removed_once_it_is_written_again(tmp_path: Path):
    """Files of another name may be another run's, which is still writing them."""
    left = tmp_path / "a[1].ckpt.x1.sagemaker-ignore"
    others = {tmp_path / "a1.ckpt.x2.sagemaker-ignore", tmp_path / "b.ckpt.x3.sagemaker-ignore"}
    for path in (left, *others):
        path.touch()
    CheckedIO(plain_values=False).save_checkpoint({}, tmp_path / "a[1].ckpt")
    assert {*tmp_path.iterdir()} == others | {tmp_path / "a[1].ckpt"}


def test_weights_that_two_layers_share_are_written_once(tmp_path: Path):
    weights = torch.ones(3)
    path = tmp_path / "best.ckpt"
    CheckedIO(plain_values=True).save_checkpoint({"first": weights, "second": weights}, path)
    first, second = read(path).values()
    assert torch.equal(first, weights) and first.data_ptr() == second.data_ptr()


def test_a_model_at_a_url_is_written_by_lightning(tmp_path: Path, monkeypatch):
    given = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        TorchCheckpointIO, "save_checkpoint", lambda _, *values: given.append(values)
    )
    CheckedIO(plain_values=True).save_checkpoint({"a": 1}, "s3://bucket/best.ckpt", "options")
    assert given == [({"a": 1}, "s3://bucket/best.ckpt", "options")]


def test_an_error_of_the_file_system_is_raised_as_it_is(tmp_path: Path, monkeypatch):
    """torch.save makes a RuntimeError of it if it has written something before."""
    written = []

    def write_once(data: bytes) -> int:
        written.append(data)
        return len(data) if len(written) == 1 else fails_on_a_full_disk()

    @contextmanager
    def full(path: Path):
        yield SimpleNamespace(write=write_once)

    monkeypatch.setattr(checkpoint_file, "atomic_write", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path / "step-000000010.ckpt", state(10))


def strings(value) -> set[str]:
    """Return all texts in a checkpoint, keys included."""
    if isinstance(value, dict):
        return strings(list(value)) | strings(list(value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return set().union(*map(strings, value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.slow
def test_a_checkpoint_names_no_class_of_ours(tmp_path: Path):
    """A class of ours can then be renamed, and old checkpoints stay readable."""
    run = warm.run(
        [
            "python",
            str(ROOT / "app/train_multi_node.py"),
            "--trainer.max_steps=2",
            "--trainer.limit_val_batches=1",
        ],
        tmp_path,
        os.environ | {"PYTHONPATH": str(ROOT), "SM_CHECKPOINT_DIR": str(tmp_path / "checkpoints")},
    )
    assert run.returncode == 0, run.stdout
    checkpoint = read(tmp_path / "checkpoints/step-000000002.ckpt")
    # These are the flags, which choose classes.
    run_settings = checkpoint[checkpoint_file.ENTRIES_KEY].pop("run")
    assert run_settings
    assert set(checkpoint["callbacks"]) >= {
        "sagemaker_lightning.rank_consistency",
        "sagemaker_lightning.best_model monitor=val_loss mode=min",
    }
    classes = {
        name
        for name in vars(sagemaker_lightning)["PUBLIC"]
        if name not in ("Environment", "Logger")
    }
    named = {text for text in strings(checkpoint) for name in classes if name in text}
    assert not named


def test_a_checkpoint_that_is_code_is_refused(folder: CheckpointDir, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    write(folder.path_of(40), {"weights": Evil()}, 40, 1)
    with pytest.raises(Exception, match="Weights only load failed"):
        read(folder.path_of(40))
    assert folder.newest_loggers()[0] == [{"version": 3}]  # of the newest one that can be read
    with pytest.raises(Exception, match="Weights only load failed"):
        BestModel(tmp_path, monitor="loss").missing_file(folder.path_of(40))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("hyperparameters", "says"),
    [
        ({"sizes": [1, (2.0, None)], "name": "x"}, ""),
        ({"folder": Path("x")}, r"there is a pathlib\.(_local\.)?PosixPath in it"),
        ({"size": 10**700}, r"Unsupported operand \d+"),
    ],
)
def test_what_a_checkpoint_may_not_hold_is_named_before_it_is_written(hyperparameters, says):
    state = {"hyper_parameters": hyperparameters, "weights": torch.ones(3)}
    assert re.fullmatch(says, checkpoint_file.why_unreadable(state))


def test_the_stamps_of_torch_say_nothing_of_a_flipped_bit(folder: CheckpointDir):
    """The reason for our checksum: torch loads most files with a flipped bit silently."""
    content = folder.path_of(30).read_bytes()
    silent = 0
    for position in range(0, len(content) - 100, 41):
        changed = bytearray(content)
        changed[position] ^= 1
        folder.path_of(30).write_bytes(changed)
        assert isinstance(examine(folder.path_of(30)), str)
        try:
            silent += bool(torch.load(folder.path_of(30), weights_only=True))
        except Exception:
            continue
    assert silent
