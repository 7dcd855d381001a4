"""resume/memory_copies.py: when a copy is taken, where it has no room, and what a kill leaves.

Ranks that continue from one: test_container_restarts.py.
"""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import warm
from containers import ROOT

from sagemaker_lightning.resume import memory_copies
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY, examine
from sagemaker_lightning.resume.memory_copies import (
    FIRST_SECONDS,
    MemoryCopies,
    available_memory,
    room_problem,
)
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.run import Run

MIB = 2**20


def state(step: int) -> dict:
    return {"weights": torch.ones(5), ENTRIES_KEY: {"step": step, "number": step * 7}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "shm/job/training"


@pytest.fixture(autouse=True)
def room(monkeypatch) -> SimpleNamespace:
    """The bytes that are free, in memory and in the file system."""
    room = SimpleNamespace(files=1000 * MIB, memory=1000 * MIB)
    monkeypatch.setattr(
        memory_copies.os, "statvfs", lambda path: SimpleNamespace(f_bavail=room.files, f_frsize=1)
    )
    monkeypatch.setattr(memory_copies, "available_memory", lambda: room.memory)
    return room


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time, and what the next copy costs its thread."""
    clock = SimpleNamespace(now=1000.0, used=0.0)
    monkeypatch.setattr(memory_copies.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(memory_copies.time, "thread_time", lambda: clock.used)
    monkeypatch.setattr(memory_copies, "usable_cpus", lambda: 4)
    return clock


def copies_in(folder: Path, hosts: int = 1, writes: bool = True, **options) -> MemoryCopies:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return MemoryCopies(folder, hosts, writes, **options)


def take(copies: MemoryCopies, *steps: int) -> None:
    for step in steps:
        copies.write(state(step), memory_copies.time.monotonic())
        copies.state_saved()
        copies.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("on_cpu", "costs"), [(False, (0.72, 0.05, 0.03)), (True, (0.78, 0.11, 0.09))]
)
def test_copies_take_a_hundredth_of_the_time(folder, clock, on_cpu, costs):
    """The first one, too. On a CPU, training misses all of what the writing thread uses."""
    copies = copies_in(folder, on_cpu=on_cpu)
    began = clock.now
    interval = FIRST_SECONDS
    for waits, cost in zip((0.7, 0.03, 0.01), costs, strict=True):
        clock.now += interval - 0.1
        assert not copies.ask()
        clock.now += 0.2
        assert copies.ask() and not copies.ask()  # the ranks agree on it meanwhile
        asked = clock.now
        clock.now += waits
        clock.used = 0.08  # a fourth of it is 0.02
        copies.write(state(4), asked)
        copies.state_saved()
        copies.wait()
        interval = 100 * cost
        assert copies.interval == pytest.approx(interval)
    clock.now += interval
    assert copies.spent == pytest.approx(sum(costs)) and copies.ask()
    assert copies.spent < 0.01 * (clock.now - began)


def test_a_copy_costs_what_the_slowest_rank_takes(folder, clock):
    copies = copies_in(folder)
    others_time = clock.now

    def take(point: ResumePoint) -> dict:
        nonlocal others_time
        clock.now += 0.1
        others_time += 0.3
        return state(4)

    def gather(problem: str) -> list[str]:
        clock.now = max(clock.now, others_time)  # the ranks wait for each other
        return [problem, problem]

    run = SimpleNamespace(
        copies=copies,
        divergence=SimpleNamespace(check=lambda trainer: None),
        trainer=None,
        agreement=SimpleNamespace(gather=gather),
        part=lambda kind: SimpleNamespace(reports=SimpleNamespace(wait_for_checkpoint=nullcontext)),
        snapshot=SimpleNamespace(take=take),
    )
    Run.copy(run, ResumePoint.BATCH)
    copies.wait()
    assert names(folder) == ["step-000000004.ckpt"]
    assert copies.seconds == pytest.approx(0.3)


def test_a_copy_that_costs_nothing_is_due_at_once(folder, clock):
    copies = copies_in(folder)
    take(copies, 1, 2)
    assert copies.ask()


@pytest.mark.parametrize(
    ("deaths", "seconds", "interval"),
    [
        ([], 0.08, 8.0),
        ([975.0], 0.08, 2.0),  # the square root of 2 * 0.08 s * 25 s
        ([900.0, 950.0, 990.0, 995.0], 0.08, 2.0),
        ([400.0], 0.08, 8.0),  # it was long ago: they take a hundredth of the time again
        ([995.0], 0.0, 0.0),
    ],
)
def test_after_deaths_they_come_more_often(folder, clock, deaths, seconds, interval):
    copies = MemoryCopies(folder, 1, True, deaths)
    copies.seconds = seconds
    assert copies.interval == pytest.approx(interval)
    clock.now = copies.taken_at + interval / 2 - 0.001
    copies.taken_at -= interval / 2
    assert not copies.ask()
    clock.now += 0.1
    assert copies.ask()


def test_a_checkpoint_is_as_good_as_a_copy(folder, clock):
    copies = copies_in(folder)
    clock.now += FIRST_SECONDS
    assert copies.ask()
    copies.state_saved()
    clock.now += FIRST_SECONDS - 1
    assert not copies.ask()


def test_a_copy_is_a_checkpoint_in_a_folder_of_ones_own(folder):
    take(copies_in(folder), 4)
    (path,) = folder.iterdir()
    assert examine(path) == (4, 28) and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("hosts", "left"), [(1, [9]), (2, [7, 9])])
def test_on_several_hosts_the_one_before_stays(folder, hosts, left):
    """One may be killed while it writes; then no other has lost what they have in common."""
    copies = copies_in(folder, hosts)
    take(copies, 4, 7, 9, 9)
    assert names(folder) == [f"step-00000000{step}.ckpt" for step in left]
    copies.remove()
    assert names(folder) == []


def test_one_rank_of_a_host_writes(folder):
    copies = copies_in(folder, writes=False)
    take(copies, 4)
    copies.remove()
    assert not folder.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from sagemaker_lightning.resume.memory_copies import MemoryCopies
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume import memory_copies
memory_copies.room_problem = lambda folder, size: ""
copies = MemoryCopies(Path(sys.argv[1]), int(sys.argv[2]), True)
def take(step):
    entries = {"step": step, "number": step * 7}
    copies.write({"weights": torch.ones(10**5), "sagemaker_lightning": entries}, 0.0)
    copies.wait()
take(4)
take(7)
class Killing(checkpoint_file._HashingFile):
    def write(self, data):
        super().write(data)
        self.file.flush()
        if len(data) > 1000:
            os.kill(os.getpid(), signal.SIGKILL)
checkpoint_file._HashingFile = Killing
take(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["1", "2"])
def test_a_process_that_is_killed_while_it_writes_leaves_the_one_before(folder, hosts):
    folder.parent.mkdir(parents=True)
    command = [sys.executable, "-c", KILLED, str(folder), hosts]
    killed = warm.start(command, folder.parent, os.environ | {"PYTHONPATH": str(ROOT)})
    assert killed.wait(60) == -signal.SIGKILL
    whole = [path for path in folder.iterdir() if not isinstance(examine(path), str)]
    assert [path.name for path in whole] == ["step-000000007.ckpt"]
    assert len(names(folder)) == 2  # and what it has begun


def test_a_full_file_system_ends_no_training(folder, monkeypatch, capsys):
    copies = copies_in(folder)
    take(copies, 4)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_file, "write", full)
    take(copies, 7)
    assert capsys.readouterr().out == (
        f"warning: no copies of the state are kept in memory: {folder}: No space left on device; "
        "ranks that die continue from a checkpoint\n"
    )
    assert names(folder) == [] and copies.problem and not copies.ask()


def test_a_folder_that_is_gone_ends_no_training(folder, capsys):
    copies = MemoryCopies(folder, 1, True)
    take(copies, 4)
    assert "No such file or directory" in capsys.readouterr().out and copies.problem


def test_what_has_no_room_is_said_before_it_is_written(folder, room, capsys):
    room.files = 0
    take(copies_in(folder), 4)
    assert capsys.readouterr().out == (
        "warning: no copies of the state are kept in memory: a copy has 0 MiB, and "
        f"{folder.parents[1]} has 0 MiB free; 4 times a copy are needed, half of it for data "
        "workers (docker run --shm-size); ranks that die continue from a checkpoint\n"
    )
    assert names(folder) == []


@pytest.mark.parametrize(
    ("size", "free", "memory", "problem"),
    [
        (30, 120, 1000, ""),
        (30, 119, 1000, "a copy has 30 MiB, and"),
        (30, 120, 59, "a copy has 30 MiB, and 59 MiB of memory are available"),
    ],
)
def test_how_much_room_a_copy_needs(folder, room, size, free, memory, problem):
    folder.mkdir(parents=True)
    (folder / "former").write_bytes(b"x" * MIB)  # gives way to it
    room.files, room.memory = (free - 1) * MIB, memory * MIB
    said = room_problem(folder, size * MIB)
    assert said.startswith(problem) and bool(said) == bool(problem)


@pytest.mark.parametrize(
    ("limit", "available"),
    [
        ("3000", 3000 - 1000 + 300),  # a limit, what is used, and files that are kept for nobody
        ("max", 9000),
        ("10000000", 9000),
        (None, 9000),
    ],
)
def test_a_containers_limit_counts(tmp_path, monkeypatch, limit, available):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("anon 700\nfile 500\nshmem 200\n")
    assert available_memory(tmp_path) == available


def test_a_states_size_is_that_of_its_tensors_and_texts():
    weights = {"a": torch.ones(3), "b": [torch.ones(2, dtype=torch.float64), "text", 1, None]}
    assert checkpoint_file.size(weights) == 12 + 16 + len("textab")


def test_without_a_folder_there_are_none():
    copies = MemoryCopies(None, 1, True)
    assert copies.problem and not copies.ask()
    copies.state_saved()
    copies.wait()
    copies.give_up("")
    copies.remove()
