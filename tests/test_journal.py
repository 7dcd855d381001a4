"""resume/journal.py: records are read again, up to the first damaged one.

No file makes it fail.
"""

import os
from pathlib import Path

import pytest

from sagemaker_lightning.resume import journal
from sagemaker_lightning.resume.journal import HEADER, RECORD, Journal, Step, files, read

RUN = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def each_at_once(monkeypatch):
    """Write each record as soon as it comes."""
    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", float("inf"))


def step(number: int) -> Step:
    return Step(number, number // 10, number % 10, 2**64 - 1 - number, number + 1, number)


def begun(folder: Path, known=(), rank: int = 0) -> Journal:
    made = Journal(folder, RUN, rank, 2, "torch=2; device=cpu")
    made.start_file(known)
    return made


def test_what_was_written_is_read(tmp_path: Path):
    """Also without an end, as of a process that was killed; each rank its own."""
    made = begun(tmp_path)
    other = begun(tmp_path, rank=1)
    for number in range(25):
        made.add(step(number))
    other.add(step(3))
    assert read(tmp_path, RUN, 0, 2) == (
        [step(number) for number in range(25)],
        "torch=2; device=cpu",
        "",
    )
    assert read(tmp_path, RUN, 1, 2)[0] == [step(3)]
    assert files(tmp_path) == [tmp_path / "journal-0.bin", tmp_path / "journal-1.bin"]
    assert RECORD.size == 52 and files(tmp_path)[0].stat().st_size == HEADER.size + 25 * RECORD.size
    made.close()
    other.close()


def test_it_goes_on_with_what_was_known_and_forgets_what_is_old(tmp_path: Path):
    made = begun(tmp_path, [step(number) for number in range(20)])
    other = Step(12, 1, 2, 5, 5, 5)
    made.add(other)  # another one at the same place
    made.remove_before((1, 1))
    kept = [step(11), other, *(step(number) for number in range(13, 20))]
    assert read(tmp_path, RUN, 0, 2)[0] == kept
    assert files(tmp_path)[0].stat().st_size == HEADER.size + 9 * RECORD.size
    made.remove_after((1, 2))
    made.add(step(30))
    assert read(tmp_path, RUN, 0, 2)[0] == [step(11), other, step(30)]
    made.close()


def test_it_has_a_bound(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(journal, "MAX_RECORDS", 10)
    made = begun(tmp_path)
    for number in range(30):
        made.add(step(number))
    assert len(read(tmp_path, RUN, 0, 2)[0]) == 10
    made.remove_before((1, 0))
    made.add(step(30))
    assert read(tmp_path, RUN, 0, 2)[0] == [step(30)]
    made.close()


def test_it_is_written_no_more_often_than_it_may_take_time(tmp_path: Path, monkeypatch):
    written = []
    monkeypatch.setattr(journal, "MAX_WAITING_SHARE", 1e-9)
    made = begun(tmp_path)
    monkeypatch.setattr(
        os, "write", lambda file, content: written.append(len(content)) or len(content)
    )
    for number in range(100):
        made.add(step(number))
    assert written == [RECORD.size]
    made.close()
    assert written == [RECORD.size, 99 * RECORD.size]


def test_of_a_damaged_one_what_is_before_it_is_read(tmp_path: Path):
    made = begun(tmp_path)
    for number in range(10):
        made.add(step(number))
    made.close()
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        steps, _, problem = read(tmp_path, RUN, 0, 2)
        assert len(steps) == max(0, (size - HEADER.size) // RECORD.size)
        assert bool(problem) is (size < HEADER.size)
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        steps, _, problem = read(tmp_path, RUN, 0, 2)
        assert problem and steps == [step(number) for number in range(len(steps))]
        assert len(steps) == max(0, (place - HEADER.size) // RECORD.size)


def test_of_another_run_or_other_ranks_nothing_is_read(tmp_path: Path):
    made = begun(tmp_path)
    made.add(step(1))
    made.close()
    assert read(tmp_path, b"another run     ", 0, 2) == ([], "", "")
    assert read(tmp_path, RUN, 0, 3) == ([], "", "") == read(tmp_path, RUN, 1, 2)
    (path,) = files(tmp_path)
    path.rename(tmp_path / "journal-1.bin")
    assert read(tmp_path, RUN, 1, 2) == ([], "", "")


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
        assert read(tmp_path, RUN, 0, 2)[0] == [] and read(tmp_path, RUN, 0, 2)[2]
        made = begun(tmp_path)
        made.add(step(1))
        assert made.problem if path.is_dir() else read(tmp_path, RUN, 0, 2)[0] == [step(1)]
        made.close()
        path.rmdir() if path.is_dir() else path.unlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_text_in_it_is_harmless_to_print(tmp_path: Path):
    made = Journal(tmp_path, RUN, 0, 1, "\x1b[31mred\n" + "é" * 500)
    made.start_file([])
    made.close()
    text = read(tmp_path, RUN, 0, 1)[1]
    assert text.startswith("[31mredé") and text.isprintable() and len(text) < 410


def test_a_full_disk_ends_it_and_not_the_job(tmp_path: Path, monkeypatch):
    made = begun(tmp_path)

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    made.add(step(1))
    made.add(step(2))
    made.remove_before((9, 9))
    made.close()
    assert made.problem == "No space left on device"
