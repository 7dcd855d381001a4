"""rows/table.py: rows from .npy and Parquet files, and errors in such files."""

import time
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import job
from sagemaker_lightning.rows import table as embeddings
from sagemaker_lightning.rows.table import Table

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3) + 1


def parquet(folder, **columns):
    """Write a Parquet file, in row groups of two rows, and return its folder."""
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet", row_group_size=2)
    return folder


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(tmp_path, dtype, order):
    np.save(tmp_path / "rows.npy", np.asarray(ROWS, dtype=dtype, order=order))
    table = Table.read(tmp_path, "x")
    assert len(table) == 4 and table.columns == 3
    assert np.array_equal(table[range(1, 4)], ROWS[1:4]) and table[range(4)].dtype == np.float32
    assert isinstance(table.arrays[0], np.memmap)


@pytest.mark.parametrize(
    "list_type", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float64(), 3)]
)
def test_parquet_with_a_column_of_lists(tmp_path, list_type):
    table = Table.read(parquet(tmp_path, embedding=pyarrow.array(ROWS.tolist(), list_type)), "x")
    assert np.array_equal(table[range(4)], ROWS)


def test_parquet_with_columns_of_numbers(tmp_path):
    table = Table.read(parquet(tmp_path, a=ROWS[:, 0], b=ROWS[:, 1], c=ROWS[:, 2]), "x")
    assert np.array_equal(table[range(4)], ROWS)


def test_several_files_are_one_table(tmp_path):
    (tmp_path / "deep").mkdir()
    np.save(tmp_path / "deep/b.npy", ROWS[1:])
    np.save(tmp_path / "a.npy", ROWS[:1])
    (tmp_path / "README.txt").write_text("no rows")
    table = Table.read(tmp_path, "x")
    assert table.files == ("a.npy", "deep/b.npy") and np.array_equal(table[range(4)], ROWS)
    assert table.places == {"a.npy": range(1), "deep/b.npy": range(1, 4)}


def test_the_fingerprint_is_that_of_names_and_numbers(tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    fingerprint = Table.read(tmp_path, "x").fingerprint
    assert Table.read(tmp_path, "y").fingerprint == fingerprint
    changed = ROWS.copy()
    changed[3, 2] += 1e-3
    np.save(tmp_path / "a.npy", changed)
    assert Table.read(tmp_path, "x").fingerprint != fingerprint
    np.save(tmp_path / "a.npy", ROWS)
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert Table.read(tmp_path, "x").fingerprint != fingerprint


def test_the_fingerprint_is_that_of_all_rows_however_many_are_read_at_a_time(tmp_path, monkeypatch):
    """Here 2 of 4 at a time; the pieces of a real file have 64 MiB."""
    np.save(tmp_path / "a.npy", ROWS)
    at_once = Table.read(tmp_path, "x").fingerprint
    monkeypatch.setattr(embeddings, "PIECE_BYTES", 2 * ROWS[0].nbytes)
    assert Table.read(tmp_path, "x").fingerprint == at_once
    fingerprints = set()
    for row in range(len(ROWS)):
        changed = ROWS.copy()
        changed[row, 2] += 1e-3
        np.save(tmp_path / "a.npy", changed)
        fingerprints.add(Table.read(tmp_path, "x").fingerprint)
    assert len(fingerprints - {at_once}) == len(ROWS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"e": [[1.0, 2.0], [1.0]]}, "its lists have 1 to 2 numbers"),
        ({"e": [[1.0, 2.0], None]}, "it has rows that are null"),
        ({"e": [[1.0, 2.0], [1.0, None]]}, "it has numbers that are null"),
        ({"e": [[1.0], [2.0]], "f": [[1.0], [2.0]]}, "it has 2 columns"),
        ({"e": [1.0, 2.0], "f": ["a", "b"]}, "its columns are of several types: double, string"),
        ({"e": ["a", "b"]}, "allowed is [rows, columns] of float16, float32, float64"),
        ({"e": [1, 2]}, "is int64 [2, 1]"),
    ],
)
def test_a_parquet_file_that_is_wrong(tmp_path, columns, message):
    with pytest.raises(UserError, match="x: rows.parquet") as error:
        Table.read(parquet(tmp_path, **columns), "x")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_parquet_file_that_is_damaged(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="x: rows.parquet cannot be read: .*; copy it again"):
        Table.read(tmp_path, "x")


def test_a_number_beyond_float32(tmp_path):
    wide_rows = ROWS.astype(np.float64)
    wide_rows[2, 1] = 1e300
    np.save(tmp_path / "rows.npy", wide_rows)
    with pytest.raises(
        UserError, match="x: rows.npy, row 2 has a number that is not finite in float32"
    ):
        Table.read(tmp_path, "x")[range(4)]


def test_an_error_on_one_device_ends_the_work_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name in ("allocator.keep_freed_memory", "threads.divide_cpus", "signal.signal"):
        monkeypatch.setattr(f"sagemaker_lightning.rows.job.{name}", lambda *_: None)
    np.save(tmp_path / "rows.npy", np.zeros((100, 1), np.float32))
    environment = SimpleNamespace(
        training_is_sharded=False,
        current_host="algo-1",
        hosts=["algo-1"],
        model_dir=tmp_path / "model",
        checkpoint_dir=tmp_path / "checkpoints",
        revision="",
    )
    computed = []

    def make(device):
        def compute(rows):
            if device.index == 1:
                raise UserError("cuda:1 is broken")
            time.sleep(0.02)
            computed.append(rows)
            return np.zeros(len(rows))

        return compute

    flags = SimpleNamespace(input=None, weights=None, block_rows=1)
    with pytest.raises(UserError, match="cuda:1 is broken"):
        job.run(environment, Table.read(tmp_path, "channel"), flags, {}, make)
    assert len(computed) < 50
