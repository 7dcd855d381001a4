"""Checkpoint files and their folder: intact or absent, and the newest on all hosts."""

import errno
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from containers import ROOT
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import sagemaker_lightning
from sagemaker_lightning import ExactResume
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file, folder_lock, user_checkpoints
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.resume.files.checkpoint_dir import (
    BackgroundWriter,
    CheckpointDir,
    choose_checkpoint,
)
from sagemaker_lightning.resume.files.checkpoint_file import CheckedIO, damage, examine, read, write
from sagemaker_lightning.resume.files.selection import HostCheckpoints


def state(step: int) -> dict:
    return {
        "weights": torch.full((100,), float(step)),
        checkpoint_file.ENTRIES_KEY: {"parts": {"loggers": [{"version": 3}]}},
    }


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    """A folder with the checkpoints of steps 10, 20 and 30."""
    directory = CheckpointDir(CheckpointHome(tmp_path / "checkpoints"), keep=3)
    for step in (10, 20, 30):
        directory.save(state(step), step, number=step * 7)
    return directory


def chosen(
    folder: CheckpointDir, hosts: int = 1, missing_file: Callable[[Path], str] = lambda path: ""
) -> Path | None:
    return choose_checkpoint(
        CheckpointDir(CheckpointHome(folder.path), 3),
        "algo-1",
        lambda choice: [choice] * hosts,
        True,
        missing_file,
    )


def test_what_is_written_is_read(folder: CheckpointDir):
    path = chosen(folder)
    assert path == folder.path_of(30) == folder.path / "step-000000030.ckpt"
    assert torch.equal(read(path)["weights"], torch.full((100,), 30.0))
    assert examine(path) == (30, 210)
    # Somebody who knows only torch can read it.
    assert torch.equal(torch.load(path)["weights"], torch.full((100,), 30.0))
    assert len(list(folder.path.iterdir())) == 3  # SageMaker would upload another name as well
    os.mkfifo(folder.path_of(40))  # reading it would wait for ever
    torch.save(
        {checkpoint_file.ENTRIES_KEY: {"parts": {"loggers": []}}}, folder.path_of(50)
    )  # not ours
    assert CheckpointDir(CheckpointHome(folder.path), 3).logger_states() == [{"version": 3}]


def test_an_empty_folder_is_a_start(tmp_path: Path):
    assert chosen(CheckpointDir(CheckpointHome(tmp_path / "none"), 3)) is None
    assert CheckpointDir(CheckpointHome(tmp_path / "none"), 3).logger_states() == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none/notes.txt").write_text("someone else's")
    assert chosen(CheckpointDir(CheckpointHome(tmp_path / "none"), 3)) is None


def test_the_newest_step_is_the_newest_whatever_its_files_name(folder: CheckpointDir):
    folder.save(state(10**9), 10**9, 1)
    newest = folder.path / "step-1000000000.ckpt"
    assert folder.checkpoints()[0] == (10**9, newest) and chosen(folder) == newest


def test_one_that_resumed_counts_the_checkpoints_that_it_found(folder: CheckpointDir):
    """It keeps no more than it would have kept without the interruption."""
    folder.save(state(0), 0, 1)  # a stop before the first step
    assert folder.intact_steps == [10, 20, 30] and not folder.path_of(0).exists()
    write(folder.path_of(0), state(0), 0, 1)
    write(folder.path_of(40), {}, 40, 1)
    empty(folder.path_of(40), random.Random())
    resumed = CheckpointDir(CheckpointHome(folder.path), 3)
    path = choose_checkpoint(resumed, "a", lambda own: [own], True, lambda path: "")
    assert path == folder.path_of(30) and resumed.intact_steps == [0, 10, 20, 30]
    resumed.save(state(50), 50, 1)
    assert resumed.intact_steps == [20, 30, 50]
    assert [step for step, _ in resumed.checkpoints()] == [50, 40, 30, 20]


def with_copies(folder: CheckpointDir, copies: Path, *steps: int) -> CheckpointDir:
    """Return the folder with copies in memory of these steps, of which nothing is known."""
    for step in steps:
        write(copies / folder.path_of(step).name, state(step), step, step * 7)
    return CheckpointDir(folder.home, 3, copies=copies)


def test_a_copy_in_memory_is_chosen_as_a_checkpoint_is(folder: CheckpointDir, tmp_path, capsys):
    both = with_copies(folder, tmp_path / "shm", 35, 40)
    alone = lambda own: [own]  # noqa: E731
    damaged = tmp_path / "shm" / folder.path_of(40).name
    flip(damaged, random.Random(1))
    leftover(tmp_path / "shm" / folder.path_of(50).name, random.Random(1))
    path = choose_checkpoint(both, "a", alone, True, lambda path: "")
    assert path == tmp_path / "shm" / folder.path_of(35).name
    assert f"checkpoint {damaged} is damaged" in capsys.readouterr().out
    # What is kept and removed on the disk has nothing to do with it.
    assert both.intact_steps == [10, 20, 30]
    assert [step for step, _ in both.checkpoints()] == [30, 20, 10]
    both.save(state(50), 50, 1)
    assert [step for step, _ in both.with_copies()] == [50, 40, 35, 30, 20]


def test_without_a_copy_that_all_hosts_have_a_run_goes_on_from_the_disk(folder, tmp_path):
    hosts = copies(folder, tmp_path, 2)
    hosts = [
        with_copies(each, each.path / "shm", step)
        for each, step in zip(hosts, (35, 40), strict=True)
    ]
    assert everywhere(hosts) == [host.path_of(30) for host in hosts for _ in range(2)]
    for host in hosts:  # or begins anew
        for path in host.path.glob("*.ckpt"):
            path.unlink()
    assert everywhere(hosts) == [None] * 4


def test_a_logger_goes_on_where_the_newest_copy_was(folder: CheckpointDir, tmp_path):
    both = with_copies(folder, tmp_path / "shm", 35)
    for _, path in folder.checkpoints():
        path.unlink()
    assert both.logger_states() == [{"version": 3}]


def test_what_a_killed_writer_left_is_removed(folder: CheckpointDir):
    """One rank of each host does so; files of others stay."""
    left = [
        folder.path / f"{name}.7.sagemaker-ignore"
        for name in ("step-000000040.ckpt", "best.ckpt", "journal-1.bin", "notes.txt")
    ]
    for path in left:
        path.touch()
    none = lambda own: [HostCheckpoints("algo-1")]  # noqa: E731
    assert choose_checkpoint(folder, "algo-1", none, False, lambda path: "") is None
    assert all(path.exists() for path in left)
    assert chosen(folder) == folder.path_of(30)
    assert [path.exists() for path in left] == [False, False, False, True]


def test_what_somebody_has_removed_does_not_stop_a_writer(folder: CheckpointDir):
    folder.path_of(10).unlink()
    folder.save(state(40), 40, 1)
    assert folder.intact_steps == [20, 30, 40]


def test_what_is_skipped_is_said(folder: CheckpointDir, capsys):
    """Those files that are newer than what is chosen, or of the same step."""
    content = bytearray(folder.path_of(30).read_bytes())
    content[300] ^= 1
    folder.path_of(30).write_bytes(content)
    empty(folder.path_of(10), random.Random())
    copy = folder.path / "copy.ckpt"
    shutil.copy(folder.path_of(20), copy)
    write(folder.path / "epoch=1.ckpt", {"state_dict": {}}, 30)  # Lightning's
    theirs = folder.path / "theirs.ckpt"
    theirs.touch()
    misnamed = f"{copy} has a wrong name; its own is step-000000020.ckpt"
    foreign = f"{theirs} is cut off, or not a checkpoint of this program"
    damaged = "is damaged: its checksum does not match"

    def said(*problems: str) -> bool:
        lines = [f"warning: checkpoint {problem}; it is skipped" for problem in problems]
        return capsys.readouterr().out.splitlines() == lines

    assert chosen(folder) == folder.path_of(20)
    assert said(misnamed, foreign, f"{folder.path_of(30)} {damaged}")
    folder.path_of(20).unlink()
    with pytest.raises(UserError, match="found checkpoints, but none that every host has intact"):
        chosen(folder)
    cut_off = f"{folder.path_of(10)} is cut off, or not a checkpoint of this program"
    assert said(misnamed, foreign, cut_off, f"{folder.path_of(30)} {damaged}")


def test_one_whose_best_model_is_missing_is_the_last_choice(folder: CheckpointDir, capsys):
    missing_at = lambda *steps: lambda path: "best.ckpt" if examine(path)[0] in steps else ""  # noqa: E731
    assert chosen(folder, missing_file=missing_at(30, 20)) == folder.path_of(10)
    assert capsys.readouterr().out.splitlines() == [
        f"warning: checkpoint {folder.path_of(step)} refers to best.ckpt; it is skipped"
        for step in (30, 20)
    ]
    assert chosen(folder, missing_file=missing_at(30, 20, 10)) == folder.path_of(30)


def test_only_so_many_are_kept(folder: CheckpointDir):
    for step in (40, 50):
        folder.save(state(step), step, 1)
    assert [step for step, _ in folder.checkpoints()] == [50, 40, 30] == folder.intact_steps[::-1]


def marked(folder: CheckpointDir, step: int, suffix: str) -> None:
    """Leave the mark of SageMaker's uploader beside a checkpoint."""
    path = folder.path_of(step)
    path.with_name(f"{path.name}.sagemaker-{suffix}").touch()


@pytest.fixture
def copied(tmp_path: Path) -> CheckpointDir:
    """The folder of a job's CheckpointConfig, without a checkpoint."""
    return CheckpointDir(CheckpointHome(tmp_path / "copied", is_copied=True), keep=2)


def test_none_is_removed_that_is_being_uploaded_or_is_the_newest_in_s3(copied: CheckpointDir):
    """To remove a file removes it in S3."""
    kept = lambda: [step for step, _ in copied.checkpoints()]  # noqa: E731
    copied.save(state(10), 10, 1)
    marked(copied, 10, "uploading")
    for step in (20, 30, 40):
        copied.save(state(step), step, 1)
    assert kept() == [40, 30, 10]
    marked(copied, 10, "uploaded")
    copied.save(state(50), 50, 1)
    assert kept() == [50, 40, 10]  # a job that is killed now resumes from step 10
    marked(copied, 40, "uploaded")
    copied.save(state(60), 60, 1)
    assert kept() == [60, 50, 40]
    # A mark that is older than its file is of another file of that name.
    os.utime(f"{copied.path_of(40)}.sagemaker-uploaded", (5000.0, 5000.0))
    copied.save(state(70), 70, 1)
    assert kept() == [70, 60]


def test_a_checkpoint_is_in_s3_when_its_best_model_is(copied: CheckpointDir):
    """A resumed run skips a checkpoint whose best model is missing."""
    best = copied.path / "best.ckpt"
    write(best, {"state_dict": {}}, 10)
    copied.save(state(10), 10, 1, [best])
    marked(copied, 10, "uploaded")
    assert copied.steps_in_s3() == []
    best.with_name("best.ckpt.sagemaker-uploaded").touch()
    assert copied.steps_in_s3() == [10]


def test_what_has_come_from_s3_is_in_s3(copied: CheckpointDir):
    """It has no marks, and is older than the container."""
    write(copied.path_of(10), state(10), 10, 1)
    copied.note_intact(10)
    assert copied.steps_in_s3() == []
    os.utime(copied.path_of(10), (5000.0, 5000.0))
    assert copied.steps_in_s3() == [10]
    here = CheckpointDir(CheckpointHome(copied.path), 2)
    here.note_intact(10)
    assert here.steps_in_s3() == []


def test_a_checkpoint_waits_for_the_copy_of_the_one_before(copied: CheckpointDir):
    def is_uploading() -> bool:
        copied.next_look = 0.0
        return copied.is_uploading()

    assert not is_uploading()
    copied.save(state(10), 10, 1)
    assert not is_uploading()  # without a mark, nothing is known
    marked(copied, 10, "uploading")
    assert is_uploading()
    marked(copied, 10, "uploaded")
    assert not is_uploading()
    copied.save(state(20), 20, 1)
    assert is_uploading()  # the uploader will get there
    os.utime(copied.path_of(20), (time.time() - 1000,) * 2)
    assert not is_uploading()  # or it never will


@pytest.mark.parametrize(
    ("marks", "step", "said"),
    [
        ([], 30, "{newest} is complete here; no mark tells whether it is in S3"),
        ([30], 30, "{newest} is in S3"),
        ([20], 20, "step-000000020.ckpt is in S3, step-000000030.ckpt is so far only here"),
    ],
)
def test_what_is_said_of_the_next_start(copied: CheckpointDir, marks, step, said):
    for each in (20, 30):
        copied.save(state(each), each, 1)
    for each in marks:
        marked(copied, each, "uploaded")
    outlook = copied.outlook()
    assert (outlook.step, outlook.said) == (step, said.format(newest=copied.path_of(30)))


def test_what_is_said_where_no_checkpoint_is_in_s3(copied: CheckpointDir):
    copied.save(state(30), 30, 1)
    marked(copied, 30, "uploading")
    outlook = copied.outlook()
    said = "no checkpoint is known to be in S3, step-000000030.ckpt is so far only here"
    assert (outlook.step, outlook.said) == (0, said)


def test_a_stop_waits_for_the_copy_in_s3(copied: CheckpointDir, capsys):
    """Nothing is copied once the container has ended."""
    copied.save(state(10), 10, 1)
    copied.wait_for_s3(time.monotonic() + 600)  # nothing shows that there is an uploader
    marked(copied, 10, "uploading")
    copied.wait_for_s3(time.monotonic())
    assert copied.steps_in_s3() == []
    uploader = threading.Timer(0.2, marked, (copied, 10, "uploaded"))
    uploader.start()
    copied.wait_for_s3(time.monotonic() + 600)
    assert copied.steps_in_s3() == [10]
    uploader.join()
    line = f"{copied.path_of(10)} is complete; it is on its way to S3"
    assert capsys.readouterr().out.splitlines() == [line, line]
    copied.wait_for_s3(time.monotonic() + 600)


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1) // 2])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    start = draw.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def rename(path: Path, draw: random.Random) -> None:
    path.rename(
        path.with_name(
            draw.choice(
                ["step-000000099.ckpt", "step-000000005.ckpt", "step-1.ckpt", "old.ckpt.bak"]
            )
        )
    )


def link(path: Path, draw: random.Random) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(
        draw.choice([elsewhere, Path("/dev/zero"), Path("nowhere"), Path("/etc/passwd")])
    )


def become(path: Path, draw: random.Random) -> None:
    path.unlink()
    draw.choice([path.mkdir, lambda: os.mkfifo(path)])()


def take(path: Path, draw: random.Random) -> None:
    # ModelCheckpoint writes such a file, under this name.
    write(path, {"state_dict": {}}, int(path.stem.removeprefix("step-")))


def name(path: Path, draw: random.Random) -> None:
    path.with_name("strange\n\udcff.ckpt").write_bytes(b"x")


def mark(path: Path, draw: random.Random) -> None:
    path.with_name(path.name + draw.choice([".sagemaker-uploading", ".sagemaker-uploaded"])).touch()


def foreign(path: Path, draw: random.Random) -> None:
    name = draw.choice(
        ["theirs.ckpt", "step-000000040.ckpt", "step-000000070.ckpt", "last.ckpt.old", "README"]
    )
    torch.save({"state_dict": {}}, path.with_name(name))


def leftover(path: Path, draw: random.Random) -> None:
    path.with_name(f"step-000000040.ckpt.{draw.randrange(10**6)}.sagemaker-ignore").write_bytes(
        b"half"
    )


MUTATIONS = [
    cut,
    flip,
    zero,
    grow,
    empty,
    delete,
    rename,
    link,
    become,
    take,
    name,
    mark,
    foreign,
    leftover,
]


@pytest.mark.slow
def test_a_thousand_damaged_folders(folder: CheckpointDir, tmp_path: Path, capsys):
    """A chosen file is intact, and a damaged one is named.

    If no intact one is left, it is an error, and not a new start.
    """
    draw = random.Random(4)
    outcomes = {"whole": 0, "error": 0, "start": 0}
    for _ in range(1000):
        directory = CheckpointDir(CheckpointHome(tmp_path / "copy/checkpoints"), 3)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folder.path, directory.path)
        for _ in range(draw.randint(1, 6)):
            files = sorted(
                path
                for path in directory.path.glob("step-*.ckpt")
                if path.is_file() and not path.is_symlink()
            )
            if files:
                draw.choice(MUTATIONS)(draw.choice(files), draw)
        intact = {path for _, path in directory.checkpoints() if not isinstance(examine(path), str)}
        damaged = [path for _, path in directory.checkpoints() if path not in intact]
        capsys.readouterr()
        try:
            path = chosen(directory)
        except UserError as error:
            outcomes["error"] += 1
            assert not intact and "--resume.dirpath" in str(error) and "start anew" in str(error)
            assert len(str(error)) < 1000 and "\n" not in str(error)
            continue
        if path is None:
            outcomes["start"] += 1
            assert not intact and not damaged and not directory.misnamed()
            continue
        outcomes["whole"] += 1
        newest = max(examine(path)[0] for path in intact)
        assert torch.equal(read(path)["weights"], torch.full((100,), float(newest)))
        output = capsys.readouterr().out
        for _, newer in directory.checkpoints()[
            : [path_kept for _, path_kept in directory.checkpoints()].index(path)
        ]:
            assert f"warning: checkpoint {newer}" in output
        assert not list(directory.path.glob("*.sagemaker-ignore"))
    assert outcomes["whole"] > 500 and outcomes["error"] > 20


@pytest.mark.parametrize(
    "version", [checkpoint_file.FORMAT_VERSION - 1, checkpoint_file.FORMAT_VERSION + 1, 12]
)
def test_a_checkpoint_of_another_format_is_refused(folder: CheckpointDir, version: int):
    """In one line, before anything of it is read.

    It is not skipped in favour of an older one of this format.
    """
    footer = checkpoint_file.FOOTER.size
    content = folder.path_of(30).read_bytes()
    mark = f"\0sagemaker-lightning {version}\0".encode()
    folder.path_of(30).write_bytes(
        content[:-footer] + mark + content[-footer:][len(checkpoint_file.MARK) :]
    )
    assert checkpoint_file.other_format(folder.path_of(30)) == version
    assert checkpoint_file.other_format(folder.path_of(20)) is None
    with pytest.raises(UserError) as raised:
        chosen(folder)
    assert f"step-000000030.ckpt (on algo-1) has checkpoint format {version}, this version" in str(
        raised.value
    )
    assert "\n" not in str(raised.value) and "move the checkpoints away to start anew" in str(
        raised.value
    )


def stepped(path: Path) -> None:
    write(path, state(30), 31, 1)


def plain(path: Path) -> None:
    write(path, state(30))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)


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
    assert damage(path) == "cannot be read (there is a pathlib.PosixPath in it)"


def test_a_model_that_lightning_saves_has_a_checksum_and_is_none_to_resume_from(tmp_path: Path):
    files = CheckedIO(plain_values=True)
    for entries, step in (({"global_step": 7}, 7), ({}, 0)):
        files.save_checkpoint({"folder": tmp_path} | entries, tmp_path / "best.ckpt")
        assert checkpoint_file.read_footer(tmp_path / "best.ckpt")[:2] == (step, 0)
        assert read(tmp_path / "best.ckpt") == {"folder": str(tmp_path)} | entries
    CheckedIO(plain_values=False).save_checkpoint({"folder": tmp_path}, tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=False) == {"folder": tmp_path}
    write(tmp_path / "own.ckpt", {})
    assert checkpoint_file.read_footer(tmp_path / "own.ckpt")[:2] == (0, 0)


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


def test_no_model_is_removed_while_a_newer_one_could_not_be_written(tmp_path: Path, monkeypatch):
    files = CheckedIO(plain_values=True)
    paths = [tmp_path / f"{number}.ckpt" for number in range(3)]
    files.save_checkpoint({}, paths[0])
    monkeypatch.setattr(checkpoint_file, "write", fails_on_a_full_disk)
    files.save_checkpoint({}, paths[1])
    assert files.problem == f"{paths[1]} could not be written (No space left on device)"
    files.remove_checkpoint(paths[0])
    assert paths[0].exists()
    monkeypatch.undo()
    files.save_checkpoint({}, paths[2])
    assert files.problem == ""
    files.remove_checkpoint(paths[0])
    assert not paths[0].exists()


def fails_on_a_full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    assert folder.logger_states() == [{"version": 3}]  # of the newest one that can be read
    with pytest.raises(Exception, match="Weights only load failed"):
        BestModel(tmp_path, monitor="loss").missing_file(folder.path_of(40))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("hyperparameters", "says"),
    [
        ({"sizes": [1, (2.0, None)], "name": "x"}, ""),
        ({"folder": Path("x")}, r"there is a pathlib\.PosixPath in it"),
        ({"size": 10**700}, r"Unsupported operand \d+"),
    ],
)
def test_what_a_checkpoint_may_not_hold_is_named_before_it_is_written(hyperparameters, says):
    state = {"hyper_parameters": hyperparameters, "weights": torch.ones(3)}
    assert re.fullmatch(says, checkpoint_file.why_unreadable(state))


def everywhere(folders: list[CheckpointDir]) -> list:
    """Return what `choose_checkpoint` returns or raises on each host, of two ranks each."""
    gathered: dict[int, list] = {}
    barrier = threading.Barrier(2 * len(folders))
    answers = [None] * (2 * len(folders))

    def rank(number: int) -> None:
        rounds = 0

        def gather(own):
            nonlocal rounds
            rounds += 1
            gathered.setdefault(rounds, [None] * len(answers))[number] = own
            barrier.wait(20)
            return gathered[rounds]

        directory = folders[number // 2]
        try:
            answers[number] = choose_checkpoint(
                directory, f"algo-{number // 2 + 1}", gather, number % 2 == 0, lambda path: ""
            )
        except UserError as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def copies(folder: CheckpointDir, tmp_path: Path, hosts: int) -> list[CheckpointDir]:
    homes = [CheckpointHome(tmp_path / f"host-{host}") for host in range(hosts)]
    directories = [CheckpointDir(home, 3) for home in homes]
    for directory in directories:
        shutil.copytree(folder.path, directory.path)
    return directories


def test_hosts_go_on_from_the_newest_that_all_have_alike(folder: CheckpointDir, tmp_path: Path):
    hosts = copies(folder, tmp_path, 3)
    assert everywhere(hosts) == [host.path_of(30) for host in hosts for _ in range(2)]
    hosts[1].path_of(30).unlink()
    assert everywhere(hosts) == [host.path_of(20) for host in hosts for _ in range(2)]
    empty(hosts[2].path_of(20), random.Random())
    assert everywhere(hosts) == [host.path_of(10) for host in hosts for _ in range(2)]
    write(hosts[0].path_of(10), state(10), 10, number=8)  # of another run of the same steps
    for index, error in enumerate(everywhere(hosts)):
        assert error.startswith(
            f"--resume.dirpath={hosts[index // 2].path}: found checkpoints, but none that every "
            "host has intact"
        )
        assert (
            "algo-1 has step 30; algo-2 has step 20; algo-3 has step 30" in error
            and "start anew" in error
        )
    for host in hosts:
        shutil.rmtree(host.path)
    assert everywhere(hosts) == [None] * 6
    hosts[1].save(state(10), 10, 1)
    assert all(
        "algo-1 has none; algo-2 has step 10; algo-3 has none" in error
        for error in everywhere(hosts)
    )


def test_each_host_reads_its_own_file(folder: CheckpointDir, tmp_path: Path):
    """All hosts of a job but one give theirs a name that SageMaker does not copy to S3."""
    hosts = copies(folder, tmp_path, 2)
    homes = [
        CheckpointHome(host.path, is_copied=True, is_main_host=host is hosts[0]) for host in hosts
    ]
    hosts = [CheckpointDir(home, 3) for home in homes]
    for host in hosts:
        host.save(state(40), 40, 1)
    names = ["step-000000040.ckpt", "step-000000040.ckpt.sagemaker-ignore"]
    paths = [host.path / name for host, name in zip(hosts, names, strict=True) for _ in range(2)]
    assert everywhere(hosts) == paths
    # What came from S3 stays on that host: to remove it there would remove it in S3.
    hosts[1].note_intact(40)
    for step in (50, 60, 70, 80):
        hosts[1].save(state(step), step, 1)
    assert [step for step, _ in hosts[1].checkpoints()] == [80, 70, 60, 30, 20, 10]


KILLED_WRITER = """
import sys
from pathlib import Path
import torch
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir, choose_checkpoint
folder = CheckpointDir(CheckpointHome(Path(sys.argv[1])), 3)
choose_checkpoint(folder, "algo-1", lambda told: [told], True, lambda path: '')
weights = torch.rand(2_000_000)
print("writing", flush=True)
for step in range(int(sys.argv[2]), 10**9):
    folder.save({"weights": weights + step, "step": step, "sagemaker_lightning": {}}, step, 1)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path: Path):
    draw = random.Random(2)
    step = 1
    for _ in range(4):
        command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "checkpoints"), str(step)]
        process = warm.start(command, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
        assert process.stdout.readline() == "writing\n"
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
        directory = CheckpointDir(CheckpointHome(tmp_path / "checkpoints"), 3)
        assert all(not isinstance(examine(path), str) for _, path in directory.checkpoints())
        if path := chosen(directory):
            step = read(path)["step"] + 1
    assert step > 1 and len(directory.checkpoints()) <= 5


def test_a_disk_that_is_full_costs_no_training_while_there_is_an_older_one(
    folder: CheckpointDir, capsys
):
    """A limit on files' sizes makes this process's writing fail as a full disk does."""
    writer = BackgroundWriter(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        writer.write(state(40), 40, 1)
        writer.wait()
        writer.warn_of_problem("training continues, but")
        assert "training continues, but no checkpoint could be written" in (
            output := capsys.readouterr().out
        )
        assert "the newest intact one is step-000000030.ckpt" in output
        nothing = BackgroundWriter(CheckpointDir(CheckpointHome(folder.path.with_name("new")), 3))
        nothing.write(state(40), 40, 1)
        nothing.wait()
        with pytest.raises(UserError, match="no checkpoint could be written there.*; make room"):
            nothing.warn_of_problem("training continues, but")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(folder.path.glob("*.sagemaker-ignore")) and not folder.path_of(40).exists()
    writer.write(state(50), 50, 1)
    writer.wait()
    capsys.readouterr()
    writer.warn_of_problem("the training is done, and")
    assert chosen(folder) == folder.path_of(50) and capsys.readouterr().out == ""


def test_whatever_a_writer_dies_of_is_said(folder: CheckpointDir, capsys):
    """The next checkpoint is written all the same."""
    writer = BackgroundWriter(folder)
    writer.write(state(40) | {"lock": threading.Lock()}, 40, 1)
    writer.wait()
    writer.warn_of_problem("training continues, but")
    output = capsys.readouterr()
    assert (
        "no checkpoint could be written" in output.out
        and "(TypeError: cannot pickle '_thread.lock'" in output.out
    )
    assert "Traceback" in output.err
    writer.write(state(45) | {"lock": threading.Lock()}, 45, 1)
    assert "warning: training continues, but no checkpoint" in capsys.readouterr().out
    nothing = BackgroundWriter(CheckpointDir(CheckpointHome(folder.path.with_name("new")), 3))
    nothing.write({"lock": threading.Lock()}, 40, 1)
    nothing.wait()
    with pytest.raises(TypeError):
        nothing.warn_of_problem("training continues, but")
    writer.write(state(50), 50, 1)
    writer.wait()
    assert not writer.problem_text and chosen(folder) == folder.path_of(50)


def test_a_full_disk_is_no_traceback(folder: CheckpointDir, monkeypatch, capsys):
    """A file system may give no reason."""
    writer = BackgroundWriter(folder)
    for error, says in (
        (OSError(errno.ENOSPC, "No space left"), "(No space left)"),
        (OSError("lost\nconnection"), "(OSError: lost connection)"),
    ):

        def save(*_, error=error) -> None:
            raise error

        monkeypatch.setattr(folder, "save", save)
        writer.write(state(40), 40, 1)
        writer.wait()
        assert says == f"({writer.problem_text})"
    assert "Traceback" not in capsys.readouterr().err


def test_checkpoints_are_written_one_at_a_time(folder: CheckpointDir, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    events = []

    def save(checkpoint, step: int, number: int, best) -> None:
        events.append(f"{step} begins")
        begun.set()
        may_end.wait(5)
        events.append(f"{step} ends")

    monkeypatch.setattr(folder, "save", save)
    writer = BackgroundWriter(folder)
    assert not writer.is_writing
    writer.write(state(40), 40, 1)
    begun.wait(5)
    assert writer.is_writing
    threading.Timer(0.02, may_end.set).start()
    writer.write(state(50), 50, 1)
    writer.wait()
    assert events == ["40 begins", "40 ends", "50 begins", "50 ends"] and not writer.is_writing


@pytest.mark.parametrize(
    ("filename", "warns"), [("{epoch}-{nope:.2f}", True), ("{epoch}-{loss}", False)]
)
def test_a_file_name_with_a_metric_that_is_not_logged_is_warned_of_once(
    tmp_path: Path, capsys, filename, warns
):
    best = BestModel(tmp_path, monitor="loss", filename=filename)
    metrics = {name: torch.tensor(1.0) for name in ("loss", "epoch", "step")}
    for _ in range(2):
        best.format_checkpoint_name(dict(metrics))
    line = (
        f"warning: the best model's filename {filename}: nope is not logged, and 0 stands for it; "
        "logged are epoch, loss, step\n"
    )
    assert capsys.readouterr().out == line * warns


# The lock of a folder -----------------------------------------------------------------------------


class Holder:
    """Somebody else's lock of a folder, and a clock that only moves when this process waits."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.now = 50.0
        self.leaves_at = float("inf")
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(folder_lock, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.leaves_at:
            self.leave()

    def leave(self) -> None:
        os.close(self.descriptor)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_locked_folder_is_waited_for_until_patience_ends(tmp_path: Path, monkeypatch):
    opened = open_files()
    holder = Holder(tmp_path, monkeypatch)
    owner = f"process {os.getpid()}"
    assert folder_lock.lock(tmp_path, 0.0) == owner and holder.now == 50.0
    assert folder_lock.lock(tmp_path, 3.0) == owner and 53.0 <= holder.now < 53.2
    holder.leaves_at = holder.now + 2.0
    assert folder_lock.lock(tmp_path, 3.0) == "" and holder.now < holder.leaves_at + 0.2
    assert open_files() == opened + 1
    folder_lock.unlock(tmp_path)
    folder_lock.unlock(tmp_path)  # it has it no more
    assert open_files() == opened


def test_a_process_locks_a_folder_once_and_a_new_folder_again(tmp_path: Path, monkeypatch):
    folder = tmp_path / "checkpoints"
    opened = open_files()
    for _ in range(2):
        folder.mkdir()
        assert folder_lock.lock(folder, 0.0) == ""
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", pytest.fail)
            assert folder_lock.lock(folder, 0.0) == ""
        assert open_files() == opened + 1
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        folder.rename(tmp_path / str(time.time()))
    folder_lock.unlock(folder)
    assert open_files() == opened


def test_a_child_has_no_lock_of_its_parents(tmp_path: Path):
    """A data worker may live longer than the training."""
    said, may_end = os.pipe(), os.pipe()
    assert folder_lock.lock(tmp_path, 0.0) == ""
    if not (child := os.fork()):
        try:
            os.write(said[1], f"owner: {folder_lock.lock(tmp_path, 0.0)}".encode())
            os.close(may_end[1])
            os.read(may_end[0], 1)
        finally:
            os._exit(0)
    os.close(said[1])
    assert os.read(said[0], 100).decode() == f"owner: process {os.getpid()}"
    folder_lock.unlock(tmp_path)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (other, said[0], *may_end):
        os.close(descriptor)
    os.waitpid(child, 0)


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch):
    def has_none(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    opened = open_files()
    monkeypatch.setattr(fcntl, "flock", has_none)
    monkeypatch.setattr(folder_lock.time, "sleep", pytest.fail)
    assert folder_lock.lock(tmp_path, 9.0) == "" and open_files() == opened


LOCKS = """
1: POSIX  ADVISORY  WRITE 11 fe:01:{inode} 0 EOF
2: FLOCK  ADVISORY  WRITE 12 fe:01:9{inode} 0 EOF
2: -> FLOCK  ADVISORY  WRITE 13 fe:01:{inode} 0 EOF
3: FLOCK  ADVISORY  WRITE 0 fe:01:{inode} 0 EOF
"""


@pytest.mark.parametrize(
    ("locks", "owner"),
    [
        (LOCKS, "another process"),
        (f"{LOCKS}4: FLOCK  ADVISORY  WRITE 4242 fe:01:{{inode}} 0 EOF", "process 4242"),
        (f"{LOCKS}4: FLOCK  ADVISORY  WRITE 1 fe:01:{{inode}} 0 EOF", "process 1"),
        ("", "another process"),
        (None, "another process"),
    ],
)
def test_who_has_locked_a_folder_is_named(tmp_path: Path, monkeypatch, locks, owner):
    """As far as it can be known: a process of another container has no number here."""
    holder = Holder(tmp_path, monkeypatch)

    def read_text(path: Path) -> str:
        assert path == Path("/proc/locks")
        if locks is None:
            raise PermissionError
        return locks.format(inode=tmp_path.stat().st_ino).lstrip("\n")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert folder_lock.lock(tmp_path, 0.0) == owner
    holder.leave()


class Improving(LightningModule):
    """Each epoch's model is the best so far."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.weight(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", -float(self.current_epoch))

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of_four_epochs(*callbacks: Callback) -> Trainer:
    """Return a trainer that prints nothing and checks nothing first."""
    return Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(("exact", "kept_while_training"), [(None, 1), (False, 1), (True, 3)])
def test_files_that_are_not_the_best_any_more(tmp_path: Path, exact, kept_while_training):
    """Only checkpoints to resume from need them."""
    seen = []

    class Count(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append(len(list((tmp_path / "best").glob("*.ckpt"))))

    best = BestModel(tmp_path / "best", monitor="val_loss")
    resume = [] if exact is None else [ExactResume(tmp_path / "run", exact=exact)]
    trainer_of_four_epochs(best, Count(), *resume).fit(Improving())
    assert seen == [0, 1, min(2, kept_while_training), kept_while_training]
    assert [str(path) for path in (tmp_path / "best").iterdir()] == [best.best_model_path]


class Found(Improving):
    """Each validation finds the next of some values; a hyperparameter is no plain value."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.save_hyperparameters({"folder": Path("data")})
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.current_epoch])


def test_a_best_model_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch, capfd
):
    """What a later epoch writes is the best again."""
    best = BestModel(tmp_path / "best", monitor="val_loss", filename="{epoch}")
    kept = []

    def write_or_fail(path: Path, *arguments) -> None:
        if path.name == "epoch=1.ckpt":
            fails_on_a_full_disk()
        write(path, *arguments)

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            kept.append(Path(best.best_model_path).name)

    monkeypatch.setattr(checkpoint_file, "write", write_or_fail)
    trainer_of_four_epochs(best, Looks(), ExactResume(tmp_path / "run")).fit(
        Found([3.0, 2.0, 5.0, 1.0])
    )
    assert kept == ["", "epoch=0.ckpt", "epoch=0.ckpt", "epoch=0.ckpt"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["epoch=3.ckpt"]
    assert best.best_model_score == 1.0
    assert read(tmp_path / "best/epoch=3.ckpt")["hyper_parameters"] == {"folder": "data"}
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert lines == [
        f"warning: training continues, but {tmp_path}/best/epoch=1.ckpt could not be written (No "
        f"space left on device); the best model is still {tmp_path}/best/epoch=0.ckpt"
    ]


def ranked(folder: Path, mode: str, *values: float) -> BestModel:
    """Return the callback that has written a model for each value, `epoch=N.ckpt`."""
    best = BestModel(folder, monitor="loss", mode=mode, save_top_k=-1, filename="{epoch}")
    trainer = without_ranks()
    trainer.callbacks = trainer.loggers = []
    trainer.save_checkpoint = lambda path, weights_only: Path(path).touch()
    for number, value in enumerate(values):
        trainer.global_step = number
        candidates = {"epoch": torch.tensor(number), "loss": torch.tensor(value)}
        best.write_ranked(torch.tensor(value), trainer, candidates)
    assert len(best.best_k_models) == len(values)
    return best


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("mode", "values", "name"),
    [
        ("min", (NAN, 0.5, -INF), "epoch=1.ckpt"),
        ("max", (NAN, 0.5, INF), "epoch=1.ckpt"),
        ("min", (NAN, NAN), ""),
        ("max", (INF,), ""),
    ],
)
def test_a_model_with_a_metric_that_is_no_number_is_written_and_is_never_the_best(
    tmp_path, mode, values, name
):
    best = ranked(tmp_path, mode, *values)
    assert Path(best.best_model_path).name == name
    assert best.best_model_score == (0.5 if name else None)
    assert len(list(tmp_path.iterdir())) == len(values)


def test_a_model_that_has_diverged_replaces_no_file(tmp_path: Path):
    model = LightningModule()
    model.weight = torch.nn.Parameter(torch.tensor([NAN]))
    trainer = without_ranks()
    trainer.callbacks = [Divergence()]
    trainer.lightning_module, trainer.precision, trainer.global_step = model, "32-true", 4
    trainer.save_checkpoint = pytest.fail
    with pytest.raises(UserError, match="weights are NaN or infinite after step 4"):
        BestModel(tmp_path, monitor="loss").write(trainer, str(tmp_path / "best.ckpt"))


def without_ranks(removed: list[str] | None = None) -> SimpleNamespace:
    """Return what a callback uses of a trainer of one rank; it notes what is removed."""
    strategy = SimpleNamespace(
        checkpoint_io=None,
        reduce_boolean_decision=lambda decision, all=True: decision,
        broadcast=lambda value: value,
        remove_checkpoint=(removed if removed is not None else []).append,
    )
    return SimpleNamespace(strategy=strategy, is_global_zero=True)


def test_a_file_is_removed_when_no_checkpoint_may_refer_to_it(tmp_path: Path):
    best = BestModel(tmp_path, monitor="loss", save_top_k=2)
    trainer = without_ranks(removed := [])
    best.discard(trainer, "a.ckpt")
    assert removed == ["a.ckpt"] and best.files() == []
    best.keep_retired(True)
    best.discard(trainer, "b.ckpt")
    for _ in range(2):
        best.remove_outdated(trainer, keep=2)
    assert removed == ["a.ckpt"] and best.files() == [Path("b.ckpt")]
    best.remove_outdated(trainer, keep=2)
    assert removed == ["a.ckpt", "b.ckpt"] and best.files() == []
    for path in ("c.ckpt", "d.ckpt"):
        best.discard(trainer, path)
    best.best_model_path = "c.ckpt"  # these are the best again
    best.best_k_models = {"d.ckpt": torch.tensor(1.0), "s3://bucket/e.ckpt": torch.tensor(1.0)}
    best.remove_outdated(trainer, keep=0)
    assert removed == ["a.ckpt", "b.ckpt"] and not best.retired
    assert sorted(best.files()) == [Path("c.ckpt"), Path("d.ckpt")]


@pytest.mark.parametrize(
    ("save_top_k", "value", "is_best"),
    [(1, 1.0, True), (1, NAN, False), (1, INF, False), (-1, NAN, True)],
)
def test_a_model_is_one_of_the_best_if_its_metric_is_a_number(tmp_path, save_top_k, value, is_best):
    best = BestModel(tmp_path, monitor="loss", save_top_k=save_top_k)
    assert best.check_monitor_top_k(without_ranks(), torch.tensor(value)) is is_best


def test_a_model_that_a_checkpoint_refers_to_is_looked_for(tmp_path: Path):
    """In the folder of this run, wherever the run that saved it had its own."""
    best = BestModel(tmp_path, monitor="loss")
    assert best.state_key == "sagemaker_lightning.best_model monitor=loss mode=min"  # for ever
    write(tmp_path / "best.ckpt", state(1))

    def problem(**entries) -> str:
        write(tmp_path / "step.ckpt", entries, 1, 1)
        return best.missing_file(tmp_path / "step.ckpt")

    callback = {"best_model_path": "/before/best.ckpt", "dirpath": "/before"}
    assert problem(callbacks={best.state_key: callback}) == ""
    flipped(tmp_path / "best.ckpt")
    assert problem(callbacks={best.state_key: callback}) == (
        "best.ckpt, the best model, which is damaged: its checksum does not match"
    )
    (tmp_path / "best.ckpt").unlink()
    assert problem(callbacks={best.state_key: callback}) == (
        "best.ckpt, the best model, which is missing"
    )
    callback = {"best_model_path": ""}
    assert problem() == problem(callbacks={best.state_key: callback}) == ""


def test_of_several_models_the_one_with_the_best_metric_is_read(tmp_path: Path):
    for mode, chosen_name in (("max", "3.ckpt"), ("min", "1.ckpt")):
        best = BestModel(tmp_path, monitor="score", mode=mode, save_top_k=3)
        for number in (2, 3, 1):
            write(tmp_path / f"{number}.ckpt", state(number))
            best.best_k_models[str(tmp_path / f"{number}.ckpt")] = torch.tensor(float(number))
        assert best.choose_intact() == str(tmp_path / chosen_name)


def test_a_checkpoint_names_no_file_outside_of_its_folder(tmp_path: Path, monkeypatch):
    """The state may be forged. A URL is no path below the working directory.

    test_forged_checkpoints.py resumes trainings with such states.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    here = BestModel(tmp_path / "here", monitor="loss", save_top_k=3)
    there = BestModel(tmp_path / "there", monitor="loss", save_top_k=3)
    own_name = str(tmp_path / "there/epoch=0-step=9.ckpt")
    foreign_names = [
        str(tmp_path / "code.ckpt"),
        str(tmp_path / "there/../code.ckpt"),
        str(tmp_path / "there/code.py"),
        "s3://bucket/code.ckpt",
        5,
    ]
    for foreign_name in foreign_names:
        forged = there.state_dict() | {
            name: foreign_name
            for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        forged["best_k_models"] = {path: torch.tensor(1.0) for path in (own_name, foreign_name)}
        forged["retired"] = {foreign_name: 9, own_name: 9}
        here.load_state_dict(forged)
        moved_name = str(tmp_path / "here/epoch=0-step=9.ckpt")
        assert here.retired == {moved_name: 9} and [*here.best_k_models] == [moved_name]
        assert here.best_model_path == here.last_model_path == ""
        assert here.kth_best_model_path == moved_name  # one of those that are known
    on_s3 = BestModel("s3://bucket/run", monitor="loss")
    kept = {"retired": {"s3://bucket/run/epoch=0-step=9.ckpt": 0}}
    on_s3.load_state_dict(on_s3.state_dict() | kept)
    assert on_s3.retired == kept["retired"]


@pytest.mark.parametrize(
    ("options", "names", "others"),
    [
        ({}, ["epoch=0-step=9.ckpt", "epoch=12-step=3-v1.ckpt"], ["best.ckpt", "last.ckpt"]),
        ({"save_last": True}, ["last.ckpt", "last-v2.ckpt"], ["last-model.ckpt", "Last.ckpt"]),
        (
            {"filename": "best-{epoch:03d}-{val/loss:.2e}"},
            ["best-epoch=004-val/loss=1.25e-03.ckpt", "best-epoch=004-val/loss=nan-v1.ckpt"],
            ["best-epoch=004-val/loss=a.ckpt", "best-epoch=4.ckpt", "val/loss=1.ckpt"],
        ),
        (
            {"filename": "{epoch}", "auto_insert_metric_name": False},
            ["0.ckpt", "-1.5.ckpt", "12-v3.ckpt"],
            ["pretrained.ckpt", "0.pt", "v1.ckpt"],
        ),
        ({"filename": "best"}, ["best.ckpt", "best-v1.ckpt"], ["best-of-all.ckpt", "best1.ckpt"]),
    ],
)
def test_files_are_removed_that_have_a_name_that_the_callback_gives(
    tmp_path, options, names, others
):
    """Others may be those of somebody else, though a checkpoint names them."""
    best = BestModel(tmp_path, monitor="loss", **options)
    trainer = without_ranks(removed := [])
    paths = [f"{tmp_path}/{name}" for name in (*names, *others)]
    best.load_state_dict(best.state_dict() | {"retired": dict.fromkeys(paths, 9)})
    best.remove_outdated(trainer, keep=0)
    assert sorted(removed) == sorted(paths[: len(names)]) and best.files() == []
    best.discard(trainer, "named by this run.ckpt")
    assert removed[-1] == "named by this run.ckpt"


def test_a_best_model_is_read_only_if_it_is_whole(tmp_path: Path, capsys):
    """Otherwise the next best one is read, if there is one.

    A file that another program has written is read if torch can read it.
    """
    best = BestModel(tmp_path, monitor="loss", save_top_k=3)
    names = [str(tmp_path / f"best-{number}.ckpt") for number in range(3)]
    for number, name in enumerate(names):
        write(Path(name), state(number))
        best.best_k_models[name] = torch.tensor(float(number))
    best.best_model_path = names[0]
    assert best.choose_intact() == names[0] and capsys.readouterr().out == ""
    content = bytearray(Path(names[0]).read_bytes())
    content[300] ^= 1
    Path(names[0]).write_bytes(content)
    assert best.choose_intact() == names[1]
    damaged = f"warning: {names[0]}, the best model, is damaged: its checksum does not match"
    assert capsys.readouterr().out == f"{damaged}; {names[1]} is written in its place\n"
    Path(names[1]).write_bytes(Path(names[1]).read_bytes()[:-100])  # cut off
    torch.save(state(2), names[2])
    assert best.choose_intact() == names[2]
    Path(names[2]).unlink()
    assert best.choose_intact() == ""
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == (
        f"warning: {names[2]}, the best model, is missing; the last one is written in its place"
    )


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


# The user's own ModelCheckpoints ------------------------------------------------------------------


def test_what_was_written_after_the_checkpoint_is_written_again_once(tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "mine")
    others = [ModelCheckpoint(), ModelCheckpoint(tmp_path / "none"), Callback()]
    trainer = without_ranks()
    trainer.checkpoint_callbacks = [callback, *others]
    (tmp_path / "mine").mkdir()
    for name in ("b.ckpt", "a.ckpt", "notes.txt", "step-000000004.ckpt"):
        (tmp_path / "mine" / name).touch()
    names = user_checkpoints.file_names(trainer)
    assert names == {callback.state_key: ["a.ckpt", "b.ckpt"]}
    (tmp_path / "mine/c.ckpt").touch()
    trainer.is_global_zero = False  # rank 0 decides
    user_checkpoints.overwrite_later_files(trainer, names)
    trainer.is_global_zero = True
    exists = lambda name: callback.file_exists(str(tmp_path / "mine" / name), trainer)  # noqa: E731
    assert exists("c.ckpt")
    user_checkpoints.overwrite_later_files(trainer, names)
    assert [exists(name) for name in ("a.ckpt", "c.ckpt", "c.ckpt", "d.ckpt")] == [
        True,
        False,
        True,
        False,
    ]
    user_checkpoints.overwrite_later_files(trainer, {})  # the callback is a new one
    assert not exists("a.ckpt") and exists("a.ckpt")
