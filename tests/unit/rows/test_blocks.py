"""rows/blocks.py: blocks of rows make a part, and a damaged one is done again."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from row_parts import ABOUT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import blocks, parts


@pytest.mark.parametrize(
    "block",
    [
        {"a/b": np.zeros(3)},
        {"..": np.zeros(3)},
        {"x": np.zeros(3, [("a", "<f4")])},
        {"x": np.array([{}] * 3, object)},
    ],
    ids=str,
)
def test_what_could_not_be_merged_is_refused_in_its_first_block(block):
    with pytest.raises(ValueError, match="found an array|the function returned x"):
        blocks.check(block, range(3))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([(0, 5), (6, 10)], "rows 5 to 6 are missing"),
        ([(0, 5), (4, 10)], "rows 5 to 4 are missing"),
        ([(0, 5)], "rows 5 to 10 are missing"),
        ([(0, 5), (5, 10, {"y": np.zeros(5)})], "or have other arrays than those before"),
        (
            [(0, 5), (5, 10, {"x": np.zeros(5, np.int64)})],
            r"rows of int64 \[\] after rows of float64",
        ),
        (
            [(0, 5), (5, 10, {"x": np.zeros((5, 2))})],
            r"rows of float64 \[2\] after rows of float64",
        ),
    ],
)
def test_blocks_that_make_no_part(tmp_path, given, says):
    def made() -> list:
        return [
            (range(start, stop), (arrays or [{"x": np.zeros(stop - start)}])[0])
            for start, stop, *arrays in given
        ]

    with pytest.raises(ValueError, match=says):
        parts.write(tmp_path, range(10), made(), ABOUT)
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_overlap_are_read_once(tmp_path):
    """The one that begins first is used, and of several the longest."""
    run_blocks = blocks.Blocks(tmp_path / "new/checkpoints", {"b": 1, "a": 2})
    for start, stop, block in ((0, 4, 1), (0, 6, 2), (2, 6, 3), (5, 9, 4), (9, 10, 5)):
        rows = range(start, stop)
        counts = np.arange(stop - start) % 3
        entries = np.repeat(np.arange(start, stop), counts)
        run_blocks.commit(rows, {"counts": counts, "row": entries, "block": 0 * entries + block})
    for part in (range(10), range(3, 9), range(5, 6), range(9, 9)):
        pieces = [(rows, arrays) for rows, arrays in run_blocks.read(part)]
        assert [row for rows, _ in pieces for row in rows] == list(part)
        for rows, arrays in pieces:
            assert np.array_equal(arrays["row"], np.repeat(rows, arrays["counts"]))
    pieces = [(rows, set(arrays["block"].tolist())) for rows, arrays in run_blocks.read(range(10))]
    assert pieces == [(range(6), {2}), (range(6, 9), {4}), (range(9, 10), set())]
    plain = blocks.cut({"x": np.arange(5)}, range(3, 8), range(4, 6))
    assert plain["x"].tolist() == [1, 2]


def test_nothing_in_a_block_is_unpickled(tmp_path):
    run_blocks = blocks.Blocks(tmp_path, {})
    run_blocks.commit(range(3), {"x": np.array([{}] * 3, object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        list(run_blocks.read(range(3)))


def test_a_run_is_known_by_its_settings_in_any_order(tmp_path):
    folders = [
        blocks.Blocks(tmp_path, run).folder
        for run in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3})
    ]
    assert folders[0] == folders[1] != folders[2]
    assert (
        folders[0] == tmp_path / "blocks-ec55c9ec4b598e6f"
    )  # a later version finds what this one left


def test_progress_is_said_every_five_seconds_and_at_the_end(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(blocks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lines = []

    def compute(rows: range) -> np.ndarray:
        clock.now += 2.5
        return np.zeros(len(rows))

    def run(part: range, done: list[range]) -> None:
        given = blocks.Blocks(tmp_path, {"part": str(part)})
        blocks.compute(given, part, done, 10, compute, lines.append, threading.Event())

    run(range(50), [])
    assert lines == [
        "rows=20/50 rows/s=4.0 left=8s",
        "rows=40/50 rows/s=4.0 left=2s",
        "rows=50/50 rows/s=4.0 left=0s",
    ]
    lines.clear()
    run(range(20, 50), [range(15, 40)])
    assert lines == ["rows 20 to 50: 20 are done already", "rows=10/10 rows/s=4.0 left=0s"]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (np.zeros(2), r"result: float64 \[2\] for 3 rows; .* whose first dimension is 3"),
        (np.float64(1), r"result: float64 \[\] for 3 rows"),
        ({"counts": [1, 2], "x": np.zeros(3)}, "counts: int64 .* first dimension is 3"),
        ({"counts": [1, 2, 1], "x": np.zeros(3)}, "x: float64 .* first dimension is 4"),
    ],
)
def test_what_does_not_fit_the_rows(returned, says):
    with pytest.raises(UserError, match=f"the function returned {says}"):
        blocks.check(returned, range(3))


def test_what_fits_the_rows():
    assert list(blocks.check([1, 2, 3], range(3))) == ["result"]
    counted = blocks.check({"counts": [1, 0, 1], "x": np.zeros(2)}, range(3))
    assert {name: len(array) for name, array in counted.items()} == {"counts": 3, "x": 2}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (8, 1, "File 'x.npy' is encrypted, password required for extraction"),
        (10, 8, "x.npy"),
        (10, 99, "That compression method is not supported"),
        (6, 255, "zip file version 25.5"),
        (0, 0, "Bad magic number for central directory"),
    ],
)
def test_a_damaged_block_is_done_again(tmp_path, capsys, place, value, says):
    """The directory at a zip's end may say: encrypted, compressed, or of a later version."""
    run_blocks = blocks.Blocks(tmp_path, {})
    for rows in (range(0, 5), range(5, 9)):
        run_blocks.commit(rows, {"x": np.arange(len(rows))})
    damaged, intact = sorted(run_blocks.folder.iterdir())
    content = bytearray(damaged.read_bytes())
    content[content.rindex(b"PK\1\2") + place] = value
    damaged.write_bytes(content)
    for name in ("0-5.npz", "1x-2.npz", f"{9:015d}-{9:015d}.npz"):
        (run_blocks.folder / name).touch()  # somebody else's
    assert run_blocks.whole() == run_blocks.named() == [range(5, 9)] and not damaged.exists()
    line = f"warning: {damaged} is damaged ({says}); its rows are done again\n"
    assert capsys.readouterr().out == line
