"""resume/check/journal.py: records are read again, up to the first damaged one.

No file makes it fail.
"""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from open_files import open_files

from sagemaker_lightning.resume.check import journal
from sagemaker_lightning.resume.check.journal import (
    HEADER,
    MAX_RECORDS,
    MAX_WAITING_SHARE,
    RECORD,
    Journal,
    Step,
    files,
    read,
)

RUN_ID = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def each_at_once(monkeypatch, tmp_path: Path):
    """Write each record as soon as it comes; no file stays open."""
    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", float("inf"))
    yield
    assert open_files(tmp_path) == 0


def step(number: int) -> Step:
    return Step(number, number // 10, number % 10, 2**64 - 1 - number, number + 1, number)


def begun(folder: Path, known=(), rank: int = 0) -> Journal:
    rank_journal = Journal(folder, RUN_ID, rank, 2, "torch=2; device=cpu")
    rank_journal.start_file(known)
    return rank_journal


def test_what_was_written_is_read(tmp_path: Path):
    """Also without an end, as of a process that was killed; each rank its own."""
    rank_journal = begun(tmp_path)
    other_journal = begun(tmp_path, rank=1)
    for number in range(25):
        rank_journal.add(step(number))
    other_journal.add(step(3))
    assert read(tmp_path, RUN_ID, 0, 2) == (
        [step(number) for number in range(25)],
        "torch=2; device=cpu",
        "",
    )
    assert read(tmp_path, RUN_ID, 1, 2)[0] == [step(3)]
    assert files(tmp_path) == [tmp_path / "journal-0.bin", tmp_path / "journal-1.bin"]
    assert RECORD.size == 52 and files(tmp_path)[0].stat().st_size == HEADER.size + 25 * RECORD.size
    rank_journal.close()
    other_journal.close()


def test_it_continues_with_what_was_known_and_forgets_what_is_old(tmp_path: Path, monkeypatch):
    """Training does not wait until it is on the disk."""
    monkeypatch.setattr(os, "fsync", pytest.fail)
    rank_journal = begun(tmp_path, [step(number) for number in range(20)])
    other_step = Step(12, 1, 2, 5, 5, 5)
    rank_journal.add(other_step)  # another one at the same place
    rank_journal.remove_before((1, 1))
    expected = [step(11), other_step, *(step(number) for number in range(13, 20))]
    assert read(tmp_path, RUN_ID, 0, 2)[0] == expected
    assert files(tmp_path)[0].stat().st_size == HEADER.size + 9 * RECORD.size
    rank_journal.remove_after((1, 2))
    rank_journal.add(step(30))
    assert read(tmp_path, RUN_ID, 0, 2)[0] == [step(11), other_step, step(30)]
    rank_journal.close()


def test_a_journal_has_a_bound(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(journal, "MAX_RECORDS", 10)
    rank_journal = begun(tmp_path)
    for number in range(30):
        rank_journal.add(step(number))
    assert len(read(tmp_path, RUN_ID, 0, 2)[0]) == 10
    other_step = Step(3, 0, 3, 5, 5, 5)
    rank_journal.add(other_step)  # another one at the same place
    assert read(tmp_path, RUN_ID, 0, 2)[0][3] == other_step
    rank_journal.remove_before((1, 0))
    rank_journal.add(step(30))
    assert read(tmp_path, RUN_ID, 0, 2)[0] == [step(30)]
    rank_journal.close()


def test_the_beginning_of_a_file_that_is_too_long_is_read(tmp_path: Path, monkeypatch):
    assert MAX_RECORDS == 65536
    monkeypatch.setattr(journal, "MAX_RECORDS", 100)
    begun(tmp_path, [step(number) for number in range(201)]).close()
    assert read(tmp_path, RUN_ID, 0, 2) == (
        [step(number) for number in range(200)],
        "torch=2; device=cpu",
        "",
    )


def test_the_file_of_a_journal_has_a_bound(tmp_path: Path):
    """However long the run is, and however few steps come between two checkpoints.

    It is written again when more than half of it is outdated.
    """
    rank_journal = begun(tmp_path)
    lengths = []
    for number in range(200):
        rank_journal.add(step(number))
        if number % 10 == 9:
            rank_journal.remove_before((number // 10, 0))
            lengths.append((files(tmp_path)[0].stat().st_size - HEADER.size) / RECORD.size)
            assert len(read(tmp_path, RUN_ID, 0, 2)[0]) >= 10
    assert lengths == [10, 20] * 10
    rank_journal.close()


def test_a_journal_is_written_no_more_often_than_it_may_take_time(tmp_path: Path, monkeypatch):
    written = []
    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", 1e-9)
    rank_journal = begun(tmp_path)
    monkeypatch.setattr(
        os, "write", lambda file, content: written.append(len(content)) or len(content)
    )
    for number in range(100):
        rank_journal.add(step(number))
    assert written == [RECORD.size]
    rank_journal.close()
    assert written == [RECORD.size, 99 * RECORD.size]


def test_a_slow_disk_is_waited_for_no_longer_than_its_share_of_the_time(
    tmp_path: Path, monkeypatch
):
    """A write took an eighth of a second: the next one comes 62.5 seconds later."""
    now = [1000.0]
    written = []

    def write(file: int, content: bytes) -> int:
        now[0] += 0.125
        written.append(len(content) // RECORD.size)
        return len(content)

    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", MAX_WAITING_SHARE)
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rank_journal = begun(tmp_path)
    monkeypatch.setattr(os, "write", write)
    rank_journal.add(step(0))
    for number, seconds in enumerate((62.25, 0.25, 62.25, 0.25), 1):
        now[0] += seconds
        rank_journal.add(step(number))
    assert written == [1, 2, 2]
    rank_journal.close()


def test_a_step_that_waits_to_be_written_is_removed_like_the_others(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", 1e-9)
    rank_journal = begun(tmp_path)
    for number in range(5):
        rank_journal.add(step(number))
    rank_journal.remove_after((0, 2))
    rank_journal.close()
    assert read(tmp_path, RUN_ID, 0, 2)[0] == [step(number) for number in range(3)]
    assert files(tmp_path)[0].stat().st_size == HEADER.size + 3 * RECORD.size


@pytest.mark.slow
def test_a_damaged_journal_is_read_up_to_the_damage(tmp_path: Path):
    rank_journal = begun(tmp_path)
    for number in range(10):
        rank_journal.add(step(number))
    rank_journal.close()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        steps, _, problem = read(tmp_path, RUN_ID, 0, 2)
        assert len(steps) == max(0, (size - HEADER.size) // RECORD.size)
        assert bool(problem) is (size < HEADER.size)
    for position in range(0, len(content), 7):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        steps, _, problem = read(tmp_path, RUN_ID, 0, 2)
        assert problem and steps == [step(number) for number in range(len(steps))]
        assert len(steps) == max(0, (position - HEADER.size) // RECORD.size)


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path):
    begun(tmp_path, [step(number) for number in range(5)]).close()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])  # a record that is still being written
    expected = [step(number) for number in range(4)]
    assert read(tmp_path, RUN_ID, 0, 2) == (expected, "torch=2; device=cpu", "")
    position = HEADER.size + 3 * RECORD.size
    path.write_bytes(content[:position] + b"x" + content[position + 1 :])
    assert read(tmp_path, RUN_ID, 0, 2) == (
        expected[:3],
        "torch=2; device=cpu",
        f"{path} is damaged after 3 batches",
    )
    path.write_bytes(b"x" + content[1:])
    assert read(tmp_path, RUN_ID, 0, 2)[2] == f"{path} is damaged, or no journal of this program"
    path.unlink()
    assert read(tmp_path, RUN_ID, 0, 2) == ([], "", "")
    path.mkdir()
    assert read(tmp_path, RUN_ID, 0, 2) == ([], "", f"{path} is not a plain file")
    (tmp_path / "file").touch()
    below = tmp_path / "file/journal-0.bin"
    assert read(tmp_path / "file", RUN_ID, 0, 2) == (
        [],
        "",
        f"{below} cannot be read (Not a directory)",
    )


def test_nothing_is_read_of_another_run_or_of_other_ranks(tmp_path: Path):
    rank_journal = begun(tmp_path)
    rank_journal.add(step(1))
    rank_journal.close()
    assert read(tmp_path, b"another run     ", 0, 2) == ([], "", "")
    assert read(tmp_path, RUN_ID, 0, 3) == ([], "", "") == read(tmp_path, RUN_ID, 1, 2)
    (path,) = files(tmp_path)
    path.rename(tmp_path / "journal-1.bin")
    assert read(tmp_path, RUN_ID, 1, 2) == ([], "", "")


def test_no_file_does_harm(tmp_path: Path):
    path = tmp_path / "journal-0.bin"
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    for make in (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("elsewhere"),
        lambda: path.write_bytes(b"x" * 10_000_000),
    ):
        make()
        assert read(tmp_path, RUN_ID, 0, 2)[0] == [] and read(tmp_path, RUN_ID, 0, 2)[2]
        rank_journal = begun(tmp_path)
        rank_journal.add(step(1))
        assert (
            rank_journal.problem if path.is_dir() else read(tmp_path, RUN_ID, 0, 2)[0] == [step(1)]
        )
        rank_journal.close()
        path.rmdir() if path.is_dir() else path.unlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_text_in_it_is_harmless_to_print(tmp_path: Path):
    rank_journal = Journal(tmp_path, RUN_ID, 0, 1, "\x1b[31mred\n" + "é" * 500)
    rank_journal.start_file([])
    rank_journal.close()
    text = read(tmp_path, RUN_ID, 0, 1)[1]
    assert text.startswith("[31mredé") and text.isprintable() and len(text) < 410


def test_a_full_disk_ends_it_and_not_the_job(tmp_path: Path, monkeypatch):
    rank_journal = begun(tmp_path)

    tries = []

    def full(file: int, content: bytes) -> int:
        tries.append(content)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    rank_journal.add(step(1))
    rank_journal.add(step(2))
    content = files(tmp_path)[0].read_bytes()
    rank_journal.remove_before((9, 9))
    rank_journal.close()
    assert rank_journal.take_problem() == "No space left on device" and len(tries) == 1
    assert rank_journal.take_problem() == "" and files(tmp_path)[0].read_bytes() == content


def test_a_disk_that_takes_a_part_is_full(tmp_path: Path, monkeypatch):
    rank_journal = begun(tmp_path)
    monkeypatch.setattr(os, "write", lambda file, content: len(content) - 1)
    rank_journal.add(step(1))
    assert rank_journal.take_problem() == os.strerror(errno.ENOSPC)
