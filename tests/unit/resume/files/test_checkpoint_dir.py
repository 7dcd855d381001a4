"""A folder of checkpoints: full, removed, another program's, used twice."""

import errno
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import warm
from checkpoint_folders import (
    chosen,
    empty,
    flip,
    folder_of_three,  # noqa: F401  the fixture folder
    leftover,
    state,
)
from containers import ROOT
from own_fits import short_trainer
from own_trainer import Classifier

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_dir, checkpoint_file
from sagemaker_lightning.resume.files.checkpoint_dir import (
    BackgroundWriter,
    CheckpointDir,
    choose_checkpoint,
)
from sagemaker_lightning.resume.files.checkpoint_file import examine, read, write
from sagemaker_lightning.resume.files.selection import HostCheckpoints
from sagemaker_lightning.resume.same_run import earlier_fits


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
    assert CheckpointDir(CheckpointHome(folder.path), 3).newest_loggers()[0] == [{"version": 3}]


def test_an_empty_folder_is_a_start(tmp_path: Path):
    assert chosen(CheckpointDir(CheckpointHome(tmp_path / "none"), 3)) is None
    assert CheckpointDir(CheckpointHome(tmp_path / "none"), 3).newest_loggers() == ([], 0)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/notes.txt").write_text("someone else's")
    assert chosen(CheckpointDir(CheckpointHome(tmp_path / "none"), 3)) is None


def test_the_newest_step_is_the_newest_whatever_its_files_name(folder: CheckpointDir):
    folder.save(state(10**9), 10**9, 1)
    newest = folder.path / "step-1000000000.ckpt"
    assert folder.checkpoints()[0] == (10**9, newest) and chosen(folder) == newest


def test_a_resumed_run_counts_the_checkpoints_that_it_found(folder: CheckpointDir):
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


def test_without_a_copy_that_all_hosts_have_a_run_continues_from_the_disk(folder, tmp_path):
    hosts = copies(folder, tmp_path, 2)
    hosts = [
        with_copies(each, each.path / "shm", step)
        for each, step in zip(hosts, (35, 40), strict=True)
    ]
    assert everywhere(hosts) == [host.path_of(30) for host in hosts for _ in range(2)]
    for host in hosts:  # or starts over
        for path in host.path.glob("*.ckpt"):
            path.unlink()
    assert everywhere(hosts) == [None] * 4


def test_a_logger_continues_where_the_newest_copy_was(folder: CheckpointDir, tmp_path):
    both = with_copies(folder, tmp_path / "shm", 35)
    for _, path in folder.checkpoints():
        path.unlink()
    assert both.newest_loggers()[0] == [{"version": 3}]


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


def test_a_checkpoint_whose_best_model_is_missing_is_the_last_choice(folder: CheckpointDir, capsys):
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


def test_hosts_continue_from_the_newest_that_all_have_alike(folder: CheckpointDir, tmp_path: Path):
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
            f"(algo-1 has step 30 in {hosts[0].path}; algo-2 has step 20 in {hosts[1].path}; algo-3"
            in error
            and "start over" in error
        )
    for host in hosts:
        shutil.rmtree(host.path)
    assert everywhere(hosts) == [None] * 6
    hosts[1].save(state(10), 10, 1)
    assert all(
        f"(algo-1 has none in {hosts[0].path}; algo-2 has step 10 in {hosts[1].path};" in error
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
choose_checkpoint(folder, "algo-1", lambda own: [own], True, lambda path: '')
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


def test_a_full_disk_prints_no_traceback(folder: CheckpointDir, monkeypatch, capsys):
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
