"""rows/table.py: rows from .npy and Parquet files, and errors in such files.

And rows/job.py in this process: what a host computes, says and leaves. test_similarity.py
has whole jobs.
"""

import io
import json
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sagemaker_lightning.contract.environment import SageMakerEnvironment
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
    assert isinstance(table.arrays["rows.npy"], np.memmap)


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
    assert list(table.arrays) == ["a.npy", "deep/b.npy"] and np.array_equal(table[range(4)], ROWS)
    assert table.places == {"a.npy": range(1), "deep/b.npy": range(1, 4)}


def test_one_file_is_a_table_and_a_folder_of_a_files_name_is_not(tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    (tmp_path / "b.npy").mkdir()
    for given in (tmp_path, tmp_path / "a.npy"):
        table = Table.read(given, "x")
        assert (table.folder, list(table.arrays), len(table)) == (tmp_path, ["a.npy"], 4)


def test_the_fingerprint_is_that_of_names_and_numbers(tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    fingerprint = Table.read(tmp_path, "x").fingerprint
    assert Table.read(tmp_path, "y").fingerprint == fingerprint
    assert len(fingerprint) == 16 and int(fingerprint, 16)
    np.save(tmp_path / "a.npy", ROWS.reshape(3, 4))
    assert Table.read(tmp_path, "x").fingerprint != fingerprint
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
    copy = np.ascontiguousarray
    lengths = []
    monkeypatch.setattr(
        np, "ascontiguousarray", lambda rows: lengths.append(len(rows)) or copy(rows)
    )
    for size, expected in ((1, [1, 1, 1, 1]), (2 * ROWS[0].nbytes, [2, 2])):
        monkeypatch.setattr(embeddings, "PIECE_BYTES", size)
        assert Table.read(tmp_path, "x").fingerprint == at_once
        assert lengths == expected
        lengths.clear()
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
        ({"e": [[1.0], [2.0]], "f": [1.0, 2.0]}, "it has 2 columns"),
        ({"e": [1.0, 2.0], "f": ["a", "b"]}, "its columns are of several types: double, string"),
        ({"e": ["a", "b"]}, "expected [rows, columns] of float16, float32, float64"),
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


def test_a_file_that_only_has_the_name_of_rows_is_not_opened_as_something_else(tmp_path):
    """A pickle could run any code, and an archive of arrays is not an array."""
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle/rows.npy").write_bytes(pickle.dumps(ROWS))
    (tmp_path / "archive").mkdir()
    with (tmp_path / "archive/rows.npy").open("wb") as file:
        np.savez(file, rows=ROWS)
    for name in ("pickle", "archive"):
        with pytest.raises(UserError, match="x: rows.npy cannot be read: the magic string is not"):
            Table.read(tmp_path / name, "x")


def test_a_folder_without_rows_is_named(tmp_path):
    (tmp_path / "README.txt").write_text("no rows")
    with pytest.raises(UserError, match=f"x: {tmp_path} holds no .npy or .parquet file; expected"):
        Table.read(tmp_path, "x")


def test_files_of_different_widths_are_named(tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    np.save(tmp_path / "b.npy", ROWS)
    np.save(tmp_path / "c.npy", ROWS[:, :2])
    says = "x: c.npy has 2 columns, a.npy has 3; expected files of equal width"
    with pytest.raises(UserError, match=says):
        Table.read(tmp_path, "x")


def test_a_number_beyond_float32(tmp_path):
    wide_rows = ROWS.astype(np.float64)
    wide_rows[2, 1] = 1e300
    np.save(tmp_path / "rows.npy", wide_rows)
    with pytest.raises(
        UserError, match="x: rows.npy, row 2 has a number that is not finite in float32"
    ):
        Table.read(tmp_path, "x")[range(4)]


def test_a_row_that_is_not_finite_is_named_by_its_number_in_its_file(tmp_path):
    wrong = ROWS.copy()
    wrong[3, 0] = np.nan
    np.save(tmp_path / "a.npy", ROWS)
    np.save(tmp_path / "b.npy", wrong)
    table = Table.read(tmp_path, "x")
    assert np.array_equal(table[range(2, 7)], np.concatenate([ROWS[2:], ROWS[:3]]))
    for part in (range(8), range(2, 8), range(6, 8)):
        with pytest.raises(UserError, match="x: b.npy, row 3 has"):
            table[part]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 1, 1)])
def test_a_table_has_rows_and_columns(tmp_path, shape):
    np.save(tmp_path / "rows.npy", np.zeros(shape, np.float32))
    with pytest.raises(UserError, match=r"x: rows.npy is float32 \[.*\]; .*, at least one"):
        Table.read(tmp_path, "x")


# A job --------------------------------------------------------------------------------------------


class Host:
    """A host of a job, whose parts run in this process."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.computed: list[range] = []
        self.handlers: dict[int, Callable] = {}
        self.calls: list[tuple] = []
        monkeypatch.setattr(job.signal, "signal", self.handlers.__setitem__)
        for module, name in ((job.threads, "divide_cpus"), (job.allocator, "keep_freed_memory")):
            monkeypatch.setattr(
                module, name, lambda *given, name=name: self.calls.append((name, *given))
            )
        monkeypatch.setattr(job.start_notice, "end", lambda: self.calls.append(("end",)))
        self.set_devices(0)
        self.environment = SageMakerEnvironment(
            hosts=("algo-1",),
            current_host="algo-1",
            model_dir=folder / "model",
            checkpoint_dir=folder / "checkpoints",
            channels={"rows": folder / "channel"},
            revision="1.2",
        )

    def set_devices(self, count: int) -> None:
        """Have the host this many GPUs."""
        self.monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    def flags(self, *given: str):
        """Return parsed flags."""
        return job.parse(job.parser(""), self.environment, list(given))

    def write_rows(self, count: int) -> None:
        """Write the channel's rows, which are their numbers."""
        (self.folder / "channel").mkdir()
        np.save(self.folder / "channel/rows.npy", np.arange(count, dtype=np.float32)[:, None])

    def run(self, *given: str, settings=None, function: Callable | None = None) -> dict:
        """Compute this host's rows; return the manifest of its part."""

        def compute(rows: range) -> np.ndarray:
            self.computed.append(rows)
            return np.arange(rows.start, rows.stop)

        flags = self.flags(*given)
        table = job.read(self.environment, flags)
        job.run(self.environment, table, flags, settings or {}, lambda device: function or compute)
        (manifest,) = self.environment.model_dir.glob("manifest-*.json")
        return json.loads(manifest.read_text())


@pytest.fixture
def host(tmp_path, monkeypatch) -> Host:
    """The only host of a job; it has no GPU."""
    return Host(tmp_path, monkeypatch)


def test_a_host_computes_its_rows_in_blocks_and_says_so(host, capsys):
    host.write_rows(2500)
    manifest = host.run()
    assert host.computed == [range(1024), range(1024, 2048), range(2048, 2500)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "algo-1: rows 0 to 2500 of 2500"
    assert lines[1].startswith("algo-1: rows=2500/2500 rows/s=") and lines[1].endswith(" left=0s")
    path = host.folder / "model/manifest-000000000000000-000000000002500.json"
    assert lines[2:] == [f"model: {path}"]
    about = {"host": "algo-1", "hosts": ["algo-1"], "files": {"rows.npy": 2500}, "total": 2500}
    assert manifest == manifest | about | {"rows": [0, 2500], "settings": {}, "revision": "1.2"}
    assert set(host.calls) == {("divide_cpus", 1, "cpu"), ("keep_freed_memory",), ("end",)}
    host.run()
    assert len(host.computed) == 3  # the blocks are those of the same job
    assert "algo-1: rows 0 to 2500: 2500 are done already" in capsys.readouterr().out
    host.run(settings={"power": 2})
    assert len(host.computed) == 6  # and these of another


def test_what_a_host_says_is_in_its_log_at_once(host, monkeypatch):
    """Even if its output is a file, or if it is killed after that."""
    host.write_rows(10)
    log = io.BytesIO()
    logs = []

    def compute(rows: range) -> np.ndarray:
        logs.append(log.getvalue())
        return np.zeros(len(rows))

    write = job.parts.write
    monkeypatch.setattr(
        job.parts, "write", lambda *given: logs.append(log.getvalue()) or write(*given)
    )
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log))
    host.run(function=compute)
    assert [text.count(b"\n") for text in (*logs, log.getvalue())] == [1, 2, 3]


def test_a_block_has_as_many_rows_as_flag_and_function_allow(host):
    host.write_rows(10)
    host.run("--block_rows=4")
    assert host.computed == [range(4), range(4, 8), range(8, 10)]

    def compute(rows: range) -> np.ndarray:
        host.computed.append(rows)
        return np.zeros(len(rows))

    compute.size = 6
    host.computed.clear()
    host.run("--block_rows=9", settings={"a": 1}, function=compute)
    assert host.computed == [range(6), range(6, 10)]


def test_devices_share_the_rows_of_a_host(host, capsys):
    host.set_devices(2)
    host.write_rows(10)
    host.run()
    assert sorted(host.computed, key=lambda rows: rows.start) == [range(5), range(5, 10)]
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines if "rows/s" in line} == {
        "algo-1 cuda",
    }
    assert any(line.startswith("algo-1 cuda:1: rows=5/5") for line in lines)


def test_hosts_share_the_rows_by_number_or_by_weight(host):
    host.write_rows(10)
    groups = {"big": ("algo-1",), "small": ("algo-2",)}
    two = {"hosts": ("algo-1", "algo-2"), "groups": groups}
    for name, flags, rows in (
        ("algo-1", [], range(5)),
        ("algo-2", [], range(5, 10)),
        ("algo-1", ['--weights={"big": 4, "small": 1}'], range(8)),
        ("algo-2", ['--weights={"big": 4, "small": 1}'], range(8, 10)),
    ):
        host.environment = replace(
            host.environment, current_host=name, **two, model_dir=host.folder / str(len(host.calls))
        )
        assert host.run(*flags, settings={"n": len(host.calls)})["rows"] == [rows.start, rows.stop]
        assert host.computed.pop() == rows


def test_a_host_with_files_of_its_own_computes_all_of_them(host, capsys):
    host.write_rows(10)
    host.environment = replace(
        host.environment, hosts=("algo-1", "algo-2"), sharded_channels=frozenset({"rows"})
    )
    manifest = host.run("--rows=20")  # how many there are on other hosts, nobody knows
    assert (manifest["total"], manifest["rows"]) == (None, [0, 10])
    assert "algo-1: rows 0 to 10 of 10 of its own files\n" in capsys.readouterr().out
    host.environment = replace(host.environment, model_dir=host.folder / "other")
    manifest = host.run(f"--input={host.folder}/channel", settings={"a": 1})
    assert (manifest["total"], manifest["rows"]) == (10, [0, 5])  # everybody has these


@pytest.mark.parametrize(("folder", "what"), [("model", "the result"), ("checkpoints", "blocks")])
def test_where_nothing_can_be_written_nothing_is_computed(host, folder, what):
    host.write_rows(10)
    (host.folder / folder).write_text("a file")
    with pytest.raises(UserError, match=f"{folder}: {what} cannot be written there"):
        host.run()
    assert host.computed == []


def compute_eight_of_ten_rows(host) -> None:
    """Run a job that ends with an error after two blocks of four rows."""
    host.write_rows(10)

    def compute(rows: range) -> np.ndarray:
        if rows.start == 8:
            raise UserError("enough")
        return np.zeros(len(rows))

    with pytest.raises(UserError, match="enough"):
        host.run("--block_rows=4", function=compute)


def test_a_job_that_is_asked_to_stop_says_what_is_left(host, monkeypatch):
    compute_eight_of_ten_rows(host)
    monkeypatch.setattr(job.os, "_exit", sys.exit)
    monkeypatch.setenv("SM_OUTPUT_DIR", str(host.folder))
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
        log = io.BytesIO()
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(log))
        with pytest.raises(SystemExit) as error:
            host.handlers[number](number, None)
        assert error.value.code == 128 + number
        line = f"interrupted, resume from step 8: {name}; 2 of 10 rows are left [host localhost"
        # os._exit writes nothing that is not in the log yet.
        assert log.getvalue().decode().startswith(line)
    reason = (host.folder / "failure").read_text()
    assert reason.startswith("interrupted, resume from step 8: SIGTERM; 2 of 10 rows are left")


@pytest.mark.parametrize(
    ("job_has", "says"),
    [
        ("no folder", "0: SIGTERM; 10 of 10 rows are left: the job has no CheckpointConfig ["),
        ("no marks", "8: SIGTERM; 2 of 10 rows are left ["),
        ("a mark", "4: SIGTERM; 6 of 10 rows are left: 4 of them are done, and not known to be in"),
    ],
)
def test_only_rows_that_come_back_are_done(host, monkeypatch, capsys, job_has, says):
    copied = None if job_has == "no folder" else host.environment.checkpoint_dir
    host.environment = replace(host.environment, is_job=True, copied_dir=copied)
    compute_eight_of_ten_rows(host)
    notice = "an interruption makes this run start over: the job has no CheckpointConfig; give"
    assert (notice in capsys.readouterr().out) == (job_has == "no folder")
    if job_has == "a mark":
        (first, _) = sorted(host.environment.checkpoint_dir.glob("blocks-*/*.npz"))
        first.with_name(f"{first.name}.sagemaker-uploaded").touch()
    monkeypatch.setattr(job.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        host.handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert capsys.readouterr().err.startswith(f"interrupted, resume from step {says}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rows=0"], "--rows: found 0, expected 1 or more"),
        (["--block_rows=0"], "--block_rows: found 0, expected 1 or more"),
        (["--rows=9"], "--rows: found 9, but channel channel has 10"),
        (["--rows=11"], "--rows: found 11, but channel channel has 10"),
    ],
)
def test_a_flag_of_every_job(host, flags, says):
    host.write_rows(10)
    with pytest.raises(UserError, match=says):
        host.run(*flags)
    host.run("--rows=10", "--block_rows=1")
    assert len(host.computed) == 10


def test_rows_that_are_not_those_of_the_input_name_the_flag(host):
    host.write_rows(10)
    path = host.folder / "channel/rows.npy"
    with pytest.raises(UserError, match=f"--rows: found 9, but --input={path} has 10; give it"):
        host.run("--rows=9", f"--input={path}")


def test_all_flags_that_are_wrong_are_named(host, monkeypatch):
    """A flag is written out. What counts is the command line that was parsed."""
    wrong = ["--row=3", "--block_rows=x"]
    for arguments, args in ((["--rows=1"], wrong), (wrong, None)):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(UserError, match="--row: is not a flag here") as error:
            job.parse(job.parser(""), host.environment, args)
        assert "--block_rows: found 'x', expected int" in str(error.value)


def test_without_rows_the_job_says_which_channels_there_are(host):
    for channels, names in (({}, "none"), ({"a": Path("/a"), "b": Path("/b")}, "a, b")):
        host.environment = replace(host.environment, channels=channels)
        with pytest.raises(UserError, match=f"--input: not given, and the channels are {names};"):
            host.run()


def test_the_flags_of_a_job_are_its_hyperparameters(host, monkeypatch):
    """The toolkit's command line loses some of them; a user's own does not."""
    host.environment = replace(
        host.environment, user_args=("--rows", "1"), hyperparameters={"rows": "7"}
    )
    for arguments, rows in ((["--rows", "1"], 7), (["--rows", "2"], 2)):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        assert job.parse(job.parser(""), host.environment, None).rows == rows
    assert job.parse(job.parser(""), host.environment, ["--rows", "3"]).rows == 3


def test_function_and_settings_decide_the_result(host, monkeypatch, capsys):
    host.write_rows(10)
    (host.folder / "mine_of_rows.py").write_text(
        "def one(block, power=1):\n    return block[:, 0] ** power\n\n\ntwo = one\n"
    )
    (host.folder / "other").mkdir()
    (host.folder / "other/mine_of_rows.py").write_text("")  # the job's own source comes first
    monkeypatch.chdir(host.folder)
    monkeypatch.setattr(sys, "path", [str(host.folder / "other"), *sys.path])
    asked = []
    monkeypatch.setattr(job, "run", lambda *given: asked.append(given))

    def settings(*flags: str) -> dict:
        job.main([f"--input={host.folder}/channel", *flags])
        return asked[-1][3]

    plain = settings("--function=mine_of_rows.one")
    assert asked[-1][4](None)(range(3, 5)).tolist() == [3, 4]
    powers = [
        settings("--function=mine_of_rows.one", f'--settings={{"power": {n}}}') for n in (2, 3)
    ]
    assert asked[-1][4](None)(range(3, 5)).tolist() == [27, 64]
    named = settings("--function=mine_of_rows.one", '--settings={"function": "mine_of_rows.two"}')
    others = [plain, *powers, settings("--function=mine_of_rows.two"), named]
    named = settings("--function=mine_of_rows.two", '--settings={"function": "mine_of_rows.two"}')
    others.append(named)
    assert all(others.count(each) == 1 for each in others)
    for name in ("mine_of_rows.", "mine_of_rows", "nothing_like_it.one", "mine_of_rows.three"):
        with pytest.raises(SystemExit):
            settings(f"--function={name}")
        assert f"error: --function: found '{name}' (" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        settings()
    assert "error: --function: is needed, and not given" in capsys.readouterr().err


def test_an_error_on_one_device_ends_the_work_of_the_others(host):
    host.set_devices(2)
    host.write_rows(100)
    computed = []

    def make(device):
        def compute(rows):
            if device.index == 1:
                raise UserError("cuda:1 is broken")
            time.sleep(0.02)
            computed.append(rows)
            return np.zeros(len(rows))

        return compute

    flags = host.flags("--block_rows=1")
    with pytest.raises(UserError, match="cuda:1 is broken"):
        job.run(host.environment, job.read(host.environment, flags), flags, {}, make)
    assert len(computed) < 50
