"""scripts/merge_parts.py with hostile parts: the right result, or an error of one line.

After an error the output folder is as it was before.
"""

import gzip
import io
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from containers import ROOT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import archives, blocks, manifests, merge, parts

ROW_COUNT = 30
HOST_COUNT = 3


def write_parts(folder: Path, sharded: bool = False) -> dict[str, np.ndarray]:
    """Write the parts of three hosts, each into its own folder.

    Return what merging them has to give.
    """
    numbers = np.arange(ROW_COUNT)
    arrays = {
        "neighbours": (numbers[:, None] + [1, 2]) % ROW_COUNT,
        "scores": numbers.astype(np.float32) / 7,
    }
    arrays["counts"] = np.ones(ROW_COUNT, np.int64)
    hosts = [f"algo-{host + 1}" for host in range(HOST_COUNT)]
    rows_per_host = ROW_COUNT // HOST_COUNT
    if sharded:
        arrays["neighbours"] = (
            numbers[:, None] // rows_per_host * rows_per_host
            + (numbers[:, None] + [1, 2]) % rows_per_host
        )
    for host, name in enumerate(hosts):
        rows = range(rows_per_host * host, rows_per_host * (host + 1))
        block = {key: array[rows.start : rows.stop] for key, array in arrays.items()}
        about = {
            "source": "s" if not sharded else name,
            "settings": {"k": 2, "numbers": ["neighbours"]},
            "host": name,
        }
        about |= {
            "total": None if sharded else ROW_COUNT,
            "hosts": hosts,
            "files": {"a.npy": 20, "b.npy": 10},
        }
        if sharded:
            block["neighbours"] = block["neighbours"] - rows.start
            rows = range(rows_per_host)
            about["files"] = {f"{name}.npy": rows_per_host}
        parts.write(folder / name, rows, [(rows, block)], about)
    return arrays


def archived(folder: Path, archive: Path) -> Path:
    """Return the parts in one model.tar.gz, as SageMaker makes it."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.name, recursive=False)
    return archive


def refused(models: list, output: Path) -> str:
    """Run a merge that has to fail, and return its line."""
    paths_before = sorted(output.rglob("*")) if output.exists() else None
    with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at it
        merge.merge([str(model) for model in models], output)
    assert (sorted(output.rglob("*")) if output.exists() else None) == paths_before
    return str(error.value)


def edited(folder: Path, **changes) -> Path:
    """Change the first part's manifest, and return the folder of all parts."""
    (path,) = (folder / "algo-1").glob("manifest-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def arrays_of(folder: Path) -> dict:
    """Return the part of the first manifest that describes the arrays."""
    (path,) = (folder / "algo-1").glob("manifest-*.json")
    return json.loads(path.read_text())["arrays"]


def loaded(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a merge."""
    return {path.stem: np.load(path) for path in folder.glob("*.npy")}


def same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Return whether two sets of arrays have the same names, kinds and numbers."""
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == array.dtype and np.array_equal(actual[name], array)
        for name, array in expected.items()
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_merge_says_what_it_has_merged(tmp_path, sharded, monkeypatch, capsys):
    """And it copies in pieces, here of two numbers."""
    expected = write_parts(tmp_path / "parts", sharded)
    monkeypatch.setattr(merge, "PIECE_BYTES", 16)
    output = tmp_path / "new/merged"
    monkeypatch.setattr(sys, "argv", ["merge", str(tmp_path / "parts"), f"--output={output}"])
    merge.main()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"{output}/counts.npy: int64 [30]",
        f"{output}/neighbours.npy: int64 [30, 2]",
        f"{output}/scores.npy: float32 [30]",
    ]
    assert same(loaded(output), expected)
    hosts = ("algo-1", "algo-2", "algo-3")
    whole_files = {"a.npy": [0, 20], "b.npy": [20, 30]}
    own_files = {f"{name}.npy": [10 * n, 10 * n + 10] for n, name in enumerate(hosts)}
    assert json.loads((output / "manifest.json").read_text()) == {
        "rows": 30,
        "files": own_files if sharded else whole_files,
        "settings": {"k": 2, "numbers": ["neighbours"]},
        "arrays": {
            "neighbours": {"dtype": "<i8", "shape": [30, 2]},
            "scores": {"dtype": "<f4", "shape": [30]},
            "counts": {"dtype": "<i8", "shape": [30]},
        },
    }


def test_hosts_without_rows_and_rows_without_entries(tmp_path):
    """There may be more hosts than rows, and no pair above a threshold."""
    hosts = ["algo-1", "algo-2", "algo-3"]
    about = {"source": "s", "settings": {}, "total": 2, "hosts": hosts, "files": {"a.npy": 2}}
    nothing = {"counts": np.zeros(1, np.int64), "scores": np.zeros((0, 3), np.float32)}
    for host, rows in zip(hosts, (range(1), range(1, 1), range(1, 2)), strict=True):
        given = [(rows, nothing)] if rows else []
        parts.write(tmp_path / "parts" / host, rows, given, about | {"host": host})
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
    expected = {"counts": np.zeros(2, np.int64), "scores": np.zeros((0, 3), np.float32)}
    assert same(loaded(tmp_path / "merged"), expected)


def rows_of(folder: Path, *bounds: tuple[int, int]) -> list[Path]:
    """Write a part of a job of 30 rows for each of these, and return the MODELs."""
    about = {"source": "s", "settings": {}, "total": 30, "hosts": ["a"], "host": "a"}
    about["files"] = {"a.npy": 30}
    for number, bound in enumerate(bounds):
        rows = range(*bound)
        given = [(rows, {"x": np.asarray(rows)})] if rows else []
        parts.write(folder / str(number), rows, given, about)
    return [folder / str(number) for number in range(len(bounds))]


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ([(0, 10), (20, 30)], "rows 10 to 19 are in no part; give the part that has them"),
        ([(10, 30)], "rows 0 to 9 are in no part; give the part that has them"),
        ([(0, 10), (10, 20)], "rows 20 to 29 are in no part; give the part that has them"),
        (
            [(0, 20), (10, 30)],
            "rows 10 to 19 are in both {0} (rows 0 to 19) and {1} (rows 10 to 29)",
        ),
        ([(0, 30), (5, 9)], "rows 5 to 8 are in both {0} (rows 0 to 29) and {1} (rows 5 to 8)"),
    ],
)
def test_rows_that_are_in_no_part_or_in_two_are_named(tmp_path, bounds, says):
    models = rows_of(tmp_path / "parts", *bounds)
    assert refused(models, tmp_path / "merged") == says.format(*models)


def test_a_part_without_rows_fits_anywhere(tmp_path):
    """It is that of a host for which there were no rows, however many hosts there were."""
    models = rows_of(tmp_path / "parts", (0, 20), (15, 15), (20, 30), (30, 30))
    merge.merge([str(model) for model in models], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), {"x": np.arange(30)})


def test_models_on_s3_are_downloaded_and_leave_nothing(tmp_path, monkeypatch, bucket):
    expected = write_parts(tmp_path / "parts")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, bucket.variables[name])
    for number in range(1, HOST_COUNT + 1):
        archive = archived(tmp_path / f"parts/algo-{number}", tmp_path / f"{number}.tar.gz")
        bucket.client.upload_file(str(archive), bucket.name, f"algo-{number}")
    addresses = [bucket.uri(f"algo-{number}") for number in (1, 2, 3)]
    merge.merge(addresses, tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)
    assert len(list((tmp_path / "merged").iterdir())) == len(expected) + 1
    line = refused([addresses[0].replace("algo", "other")], tmp_path / "more")
    assert "other-1 could not be fetched: " in line and "404" in line


def test_a_part_may_be_larger_than_the_headers_of_an_archive(tmp_path):
    rows = range(2**18 + 1)
    about = {"source": "s", "settings": {}, "host": "a", "hosts": ["a"], "total": len(rows)}
    array = np.asfortranarray(np.arange(2 * len(rows)).reshape(-1, 2))
    about["files"] = {"x.npy": len(rows)}
    parts.write(tmp_path / "parts", rows, [(rows, {"n": array})], about)
    model = tmp_path / "model.tar"
    with tarfile.open(model, "w") as tar:
        for path in (tmp_path / "parts").iterdir():
            tar.add(path, path.name)
    merge.merge([str(model)], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), {"n": array})


@pytest.mark.parametrize("sharded", [False, True])
def test_good_parts(tmp_path, sharded):
    expected = write_parts(tmp_path / "parts", sharded)
    models = (
        [str(archived(tmp_path / "parts", tmp_path / "model.tar.gz"))],
        [str(tmp_path / "parts")],
    )
    for number, model in enumerate(models):
        merge.merge(model, tmp_path / f"merged-{number}")
        merged_arrays = {
            path.stem: np.load(path) for path in (tmp_path / f"merged-{number}").glob("*.npy")
        }
        assert (
            all(np.array_equal(merged_arrays[name], expected[name]) for name in expected)
            and merged_arrays.keys() == expected.keys()
        )
        assert len(list((tmp_path / f"merged-{number}").iterdir())) == len(expected) + 1


NAMES = [
    "{outside}",
    "../outside",
    "a/../../outside",
    "/",
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "a\0b",
    "n" * 300,
    "a\nb",
    "-x",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_array_whose_name_is_no_files_name(tmp_path, name):
    write_parts(tmp_path / "parts")
    (tmp_path / "outside.npy").write_text("precious")
    name = name.format(outside=tmp_path / "outside")
    arrays = arrays_of(tmp_path / "parts")
    edited(tmp_path / "parts", arrays=arrays | {name: arrays.pop("scores")})
    paths_before = sorted(tmp_path.rglob("*"))
    assert "found an array" in refused([tmp_path / "parts"], tmp_path / "merged")
    assert (
        sorted(tmp_path.rglob("*")) == paths_before
        and (tmp_path / "outside.npy").read_text() == "precious"
    )


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    write_parts(tmp_path / "parts")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/scores.npy").write_text("precious")
    assert "holds scores.npy already" in refused([tmp_path / "parts"], tmp_path / "merged")
    assert (tmp_path / "merged/scores.npy").read_text() == "precious"
    assert "Not a directory" in refused([tmp_path / "parts"], tmp_path / "merged/scores.npy/deeper")


@pytest.mark.parametrize("last", ["manifest.json", "neighbours.npy"])
def test_of_a_merge_that_fails_at_its_very_end_nothing_is_left(tmp_path, monkeypatch, last):
    write_parts(tmp_path / "parts")
    replace = os.replace

    def full(aside, path):
        if Path(path).name == last:
            raise OSError(28, "No space left on device")
        replace(aside, path)

    monkeypatch.setattr(os, "replace", full)
    (tmp_path / "merged").mkdir()
    assert "cannot be written (No space left on device)" in refused(
        [tmp_path / "parts"], tmp_path / "merged"
    )


def refused_scores(folder: Path, **description: object) -> str:
    """Return why parts are refused if their manifest describes the scores differently."""
    write_parts(folder / "parts")
    arrays = arrays_of(folder / "parts")
    arrays["scores"] |= description
    edited(folder / "parts", arrays=arrays)
    return refused([folder / "parts"], folder / "merged")


DTYPES = [
    "|O",
    "O",
    "object",
    "<f4,<f4",
    [["a", "<f4"]],
    {"names": ["a"], "formats": ["O"]},
    "<f3",
    "<U0",
    "|V99999999999",
]
DTYPES += ["float32", "f4", ">x9", None, 4, "<M8[nonsense]", "<f4\n", "|S0", "m8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_that_is_not_plain(tmp_path, dtype):
    assert "is damaged (scores " in refused_scores(tmp_path, dtype=dtype)


SHAPES = [
    [],
    [-1],
    [10, -1],
    [True],
    [10.0],
    [[10]],
    [2**70],
    [2**40, 2**40],
    [10] + [1] * 200,
    "10",
    None,
    {},
    ["10"],
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shape_that_is_none(tmp_path, shape):
    assert "is damaged (" in refused_scores(tmp_path, shape=shape)


def test_what_would_be_merged_wrongly_is_refused(tmp_path):
    """Each of these once lost rows or gave wrong numbers, without an error."""
    write_parts(tmp_path / "parts")
    arrays = arrays_of(tmp_path / "parts")
    arrays.pop("scores")
    edited(tmp_path / "parts", arrays=arrays)
    model = tmp_path / "parts"
    assert refused([model], tmp_path / "merged") == (
        f"{model} (rows 10 to 19) has counts, neighbours, scores, and {model} (rows 0 to 9) has "
        "counts, neighbours; merge parts of one job"
    )
    write_parts(tmp_path / "sharded", sharded=True)
    edited(tmp_path / "sharded", hosts=["algo-1"])
    assert "is of another hosts" in refused([tmp_path / "sharded"], tmp_path / "merged")
    rows = range(100)
    about = {"source": "s", "settings": {"numbers": ["n"]}, "total": None, "hosts": ["a", "b"]}
    for host in "ab":
        block = {"n": np.arange(100, dtype=np.int8)}
        parts.write(
            tmp_path / "small",
            rows,
            [(rows, block)],
            about | {"host": host, "files": {f"{host}.npy": 100}},
        )
    assert "cannot number 200 rows" in refused([tmp_path / "small"], tmp_path / "merged")


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


def contradict(key: str, value: object) -> Callable[[Path], None]:
    """Return what changes a key of the first manifest."""
    return lambda folder: edited(folder, **{key: value})


def contradict_array(name: str, **changes: object) -> Callable[[Path], None]:
    """Return what changes the first manifest's description of an array."""

    def change(folder: Path) -> None:
        arrays = arrays_of(folder)
        edited(folder, arrays=arrays | {name: arrays[name] | changes})

    return change


def without_total(folder: Path) -> None:
    (path,) = (folder / "algo-1").glob("manifest-*.json")
    about = json.loads(path.read_text())
    del about["total"]
    path.write_text(json.dumps(about))


def with_arrays(count: int) -> Callable[[Path], None]:
    """Return what gives the first part so many arrays."""

    def change(folder: Path) -> None:
        array = arrays_of(folder)["scores"]
        edited(folder, arrays={f"scores{n}": array | {"file": f"{n}.npy"} for n in range(count)})

    return change


def nested(levels: int) -> list:
    """Return lists in lists, on so many levels."""
    return [nested(levels - 1)] if levels > 1 else []


CONTRADICTIONS = {
    "no total": (without_total, "total is missing, or of another kind than int"),
    "rows below 0": (contradict("rows", [-1, 9]), "rows: not whole numbers from 0 on"),
    "rows backwards": (contradict("rows", [20, 10]), r"rows are \[20, 10\], of 30 in all"),
    "a total below 0": (contradict("total", -1), "total: not whole numbers from 0 on"),
    "more rows than there are": (contradict("rows", [0, 31]), r"rows are \[0, 31\], of 30 in all"),
    "three borders of rows": (contradict("rows", [0, 5, 10]), r"rows are \[0, 5, 10\], of 30"),
    "hosts that are numbers": (contradict("hosts", ["algo-1", 2]), "hosts are not names"),
    "a host twice": (contradict("hosts", ["algo-1", "algo-1"]), "hosts are not names"),
    "a host that is none of them": (contradict("host", "algo-4"), "hosts are not names"),
    "files of less than a row": (contradict("files", {"a": 31, "b": -1}), "files: not whole"),
    "files of other rows": (
        contradict("files", {"a": 20, "b": 9}),
        "its files have 29 rows, which",
    ),
    "numbers that are a name": (contradict("settings", {"numbers": "x"}), "is no list of names"),
    "numbers that are no names": (contradict("settings", {"numbers": [1]}), "is no list of names"),
    "numbers that are fractions": (
        contradict("settings", {"k": 2, "numbers": ["scores"]}),
        "scores is to have numbers of rows, and is <f4",
    ),
    "no array": (contradict("arrays", {}), "it has 0 arrays; expected 1 to 100"),
    "100 arrays": (with_arrays(100), "merge parts of one job"),
    "101 arrays": (with_arrays(101), "it has 101 arrays; expected 1 to 100"),
    "counts of too few rows": (
        contradict_array("counts", shape=[9]),
        "its arrays have .*'counts': 9",
    ),
    "arrays of two lengths": (
        contradict_array("scores", shape=[9]),
        "its arrays have .*'scores': 9",
    ),
    "two arrays in a file": (
        lambda folder: contradict_array("scores", file=arrays_of(folder)["counts"]["file"])(folder),
        "two of its arrays are in one file",
    ),
    "an array without a checksum": (
        contradict_array("scores", blake2b=None),
        "scores has no dtype, file or blake2b",
    ),
    "an array of 2**60 bytes": (contradict_array("scores", shape=[2**58, 1]), "its arrays have"),
    "an array of more": (contradict_array("scores", shape=[2**58 + 1]), "which is too large"),
    "an array of nothing of more": (
        contradict_array("scores", shape=[0, 2**58 + 1]),
        "which is too large",
    ),
    "a length of more": (contradict_array("scores", shape=[2**60 + 1]), "the shape of scores: not"),
    "20 levels": (
        contradict("settings", {"a": nested(18)}),
        "is of another settings",
    ),
    "21 levels": (contradict("settings", {"a": nested(19)}), "or too deep a one"),
    "a row of another kind": (
        contradict_array("scores", dtype="<i4"),
        r"scores is <f4 \[\] a row, others have <i4",
    ),
    "a row of another kind and shape": (
        contradict_array("neighbours", dtype="<i4", shape=[10, 3]),
        r"neighbours is <i8 \[2\] a row, others have <i4 \[3\]",
    ),
    "the file of another part": (
        contradict_array("scores", file="scores-000000000000010-000000000000020.npy"),
        r"scores-000000000000010-000000000000020.npy is of both .*rows 0 to 9.*rows 10 to 19",
    ),
}


@pytest.mark.parametrize(("change", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_or_another(tmp_path, change, says):
    write_parts(tmp_path / "parts")
    change(tmp_path / "parts")
    with pytest.raises(ValueError, match=says):
        merge.merge([str(tmp_path / "parts")], tmp_path / "merged")


def test_parts_of_hosts_with_files_of_their_own_that_contradict_each_other(tmp_path):
    write_parts(tmp_path / "parts", sharded=True)
    folders = [tmp_path / f"parts/algo-{number}" for number in (1, 2, 3)]
    line = refused([*folders, folders[1]], tmp_path / "merged")
    assert line.endswith("are both of algo-2")
    assert refused(folders[:2], tmp_path / "merged").startswith("the part of algo-3 is missing")
    assert refused(folders[:1], tmp_path / "merged").startswith("the part of algo-2 is missing")
    edited(tmp_path / "parts", files={"algo-3.npy": 10})
    assert refused(folders, tmp_path / "merged").startswith("algo-3.npy is in both ")
    edited(tmp_path / "parts", files={"algo-1.npy": 10}, rows=[1, 10])
    assert "rows are [1, 10], of None in all" in refused(folders, tmp_path / "merged")


def small_numbers(folder: Path, rows: list[int], **arrays: np.ndarray) -> list[str]:
    """Write a part for each of these numbers of rows, and return the MODELs.

    Their hosts have files of their own; `n` has numbers of rows, int8.
    """
    about = {"source": "s", "settings": {"numbers": ["n"]}, "total": None}
    about["hosts"] = [f"host-{number}" for number in range(len(rows))]
    for host, count in zip(about["hosts"], rows, strict=True):
        block = {"n": arrays.get(host.replace("-", "_"), np.arange(count, dtype=np.int8))}
        about |= {"host": host, "files": {f"{host}.npy": count}}
        parts.write(folder / host, range(count), [(range(count), block)], about)
    return [str(folder / host) for host in about["hosts"]]


def test_row_numbers_fit_their_kind_and_are_those_of_the_hosts_rows(tmp_path):
    merge.merge(small_numbers(tmp_path / "fit", [100, 28]), tmp_path / "merged")
    assert np.load(tmp_path / "merged/n.npy").tolist() == list(range(128))
    merge.merge(small_numbers(tmp_path / "one", [5]), tmp_path / "merged-one")
    assert np.load(tmp_path / "merged-one/n.npy").tolist() == list(range(5))
    models = small_numbers(tmp_path / "many", [100, 29])
    assert "is int8, which cannot number 129 rows" in refused(models, tmp_path / "more")
    for number, least_and_most in ((3, "0 to 3"), (-1, "-1 to 1")):
        numbers = np.array([0, 1, number], np.int8)
        models = small_numbers(tmp_path / str(number), [3, 3], host_1=numbers)
        line = refused(models, tmp_path / "more")
        assert f"has {least_and_most}; expected numbers of its 3 rows" in line


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("length", [-1, 1, 3 - 160])
def test_a_file_that_is_longer_or_shorter_than_its_manifest_says(tmp_path, length, sharded):
    write_parts(tmp_path / "parts", sharded)
    (path,) = (tmp_path / "parts/algo-2").glob("neighbours-*.npy")
    content = path.read_bytes()
    path.write_bytes(content[:length] if length < 0 else content + bytes(length))
    line = refused([tmp_path / "parts"], tmp_path / "merged")
    assert line.endswith(f"{path.name} is damaged: its checksum does not match; copy it again")
    path.unlink()
    assert f"{path.name} is missing, which its manifest names" in refused(
        [tmp_path / "parts"], tmp_path / "merged"
    )


def test_what_is_too_large_in_all_is_refused_before_anything_is_read(tmp_path):
    """Each part has an array of 2**60 bytes, as far as its manifest goes."""
    write_parts(tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/algo-3")
    for number, rows in ((1, [0, 10]), (2, [10, 20])):
        (path,) = (tmp_path / f"parts/algo-{number}").glob("manifest-*.json")
        about = json.loads(path.read_text())
        arrays = {"counts": about["arrays"]["counts"]}
        arrays["scores"] = about["arrays"]["scores"] | {"shape": [2**58]}
        about |= {"arrays": arrays, "total": 20, "files": {"a.npy": 20}, "rows": rows}
        path.write_text(json.dumps(about))
    line = refused([tmp_path / "parts"], tmp_path / "merged")
    assert line == f"scores is <f4 [{2**59}] in all, which is too large"


def test_manifests_have_a_size_in_all(tmp_path, monkeypatch):
    write_parts(tmp_path / "parts")
    sizes = [path.stat().st_size for path in (tmp_path / "parts").rglob("manifest-*.json")]
    monkeypatch.setattr(manifests, "MAX_ALL_MANIFEST_BYTES", sum(sizes))
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
    monkeypatch.setattr(manifests, "MAX_ALL_MANIFEST_BYTES", sum(sizes) - 1)
    assert "it has more than" in refused([tmp_path / "parts"], tmp_path / "more")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("n" * 100, True),
        ("n" * 101, False),
        ("é" * 50, True),
        ("é" * 50 + "n", False),
        ("a b.c", True),
    ],
)
def test_the_name_of_an_array(name, allowed):
    if allowed:
        parts.check_name(name)
    else:
        with pytest.raises(UserError, match="names of up to 100 letters"):
            parts.check_name(name)


def test_a_name_that_is_much_too_long_is_cut_in_its_error():
    with pytest.raises(UserError, match=f"found an array '{'n' * 120}'; expected"):
        parts.check_name("n" * 300)


def test_the_rows_of_a_part_begin_at_byte_256(tmp_path):
    """Parts that an earlier version has written can be merged with this one."""
    parts.write(tmp_path, range(10), [(range(10), {"x": np.zeros(10)})], ABOUT)
    (array,) = tmp_path.glob("*.npy")
    assert np.load(array, mmap_mode="r").offset == 256


ABOUT = {"host": "a", "total": 10, "source": "s", "settings": {}, "hosts": ["a"], "files": {}}


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


def test_what_a_killed_process_left_of_a_part_is_removed(tmp_path):
    left = tmp_path / "x-000000000000000-000000000000010.npy.abc.sagemaker-ignore"
    others = tmp_path / "x-000000000000010-000000000000020.npy.abc.sagemaker-ignore"
    for path in (left, others):
        path.touch()
    parts.write(tmp_path, range(10), [(range(10), {"x": np.zeros(10)})], ABOUT)
    assert not left.exists() and others.exists()


def test_what_a_host_has_from_an_earlier_job_is_removed(tmp_path):
    rows, array = range(10), np.zeros(10)
    keep = ["manifest-hostile.json", "manifest-list.json", "strange.npy", "x.npy"]
    for name in keep[2:]:
        (tmp_path / name).touch()
    outside = [str(tmp_path / "x.npy"), "../parts/strange.npy", 5, "absent.npy"]
    for file in outside:
        hostile = {"host": "a", "arrays": {"n": {"file": file}}}
        (tmp_path / "manifest-hostile.json").write_text(json.dumps(hostile))
        (tmp_path / "manifest-list.json").write_text('{"host": "a", "arrays": ["x.npy"]}')
        parts.write(tmp_path, range(4), [(range(4), {"x": array[:4]})], ABOUT | {"total": 4})
        parts.write(tmp_path, rows, [(rows, {"x": array, "y": array})], ABOUT)
        parts.write(tmp_path, rows, [(rows, {"x": array})], ABOUT)
        span = "000000000000000-000000000000010"
        left = {path.name for path in tmp_path.iterdir()} - {"manifest-hostile.json"}
        assert left == {f"manifest-{span}.json", f"x-{span}.npy", *keep[1:]}


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


def hostile(text: bytes | None = None, **attributes) -> bytes:
    """Return a model.tar.gz with one member.

    The member is manifest-x.json unless its attributes say otherwise.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("manifest-x.json")
        member.size = len(text or b"")
        for name, value in attributes.items():
            setattr(member, name, value)
        tar.addfile(member, io.BytesIO(text or b""))
    return packed.getvalue()


class Bomb(NamedTuple):
    """A gzipped archive, made when it is written: a header, then 128 MiB of other bytes."""

    header: bytes

    def packed(self) -> bytes:
        return gzip.compress(self.header + b"0\n" * 2**26, compresslevel=1)


def header_of(member_type: bytes, size: int) -> bytes:
    """Return the header of a member of an archive."""
    member = tarfile.TarInfo("x")
    member.type = member_type
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


ARCHIVES = {
    "a link": (
        hostile(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "manifest-x.json is a link or no regular file",
    ),
    "a hard link": (
        hostile(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "is a link or no regular file",
    ),
    "a device": (hostile(type=tarfile.CHRTYPE), "is a link or no regular file"),
    "a pipe": (hostile(type=tarfile.FIFOTYPE), "is a link or no regular file"),
    "a file with holes": (hostile(type=tarfile.GNUTYPE_SPARSE), "is a link or no regular file"),
    "a name of a megabyte": (hostile(name="n" * 1_040_000), "has no part"),
    "a name of a mebibyte": (hostile(name="n" * 2**20), "its headers are too long"),
    "a link of another name": (hostile(type=tarfile.SYMTYPE, name="x"), "has no part"),
    "an absolute name": (hostile(b"{}", name="/etc/manifest-x.json"), "which is outside of it"),
    "a name above": (hostile(b"{}", name="../manifest-x.json"), "which is outside of it"),
    "depth": (hostile(b"[" * 10**6), "maximum recursion depth"),
    "some depth": (hostile(b'{"a":' * 50 + b"1" + b"}" * 50), "too deep a one"),
    "a manifest of zeros": (hostile(bytes(2**25)), "it has more than 16777216 bytes"),
    "not UTF-8": (hostile(b"\xff\xfe\xfa"), "is damaged ("),
    "a long number": (hostile(b'{"rows": [1' + b"0" * 5000 + b"]}"), "is damaged ("),
    "no number": (hostile(b'{"rows": NaN}'), "NaN is no JSON"),
    "a name of a gigabyte": (
        Bomb(header_of(tarfile.GNUTYPE_LONGNAME, 2**30)),
        "its headers are too long",
    ),
    "a pax header of a gigabyte": (
        Bomb(header_of(tarfile.XHDTYPE, 2**30)),
        "its headers are too long",
    ),
    "holes that are no numbers": (
        hostile(b"abc\n", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        "is damaged or no archive (invalid literal for int()",
    ),
    "a negative length": (Bomb(header_of(tarfile.REGTYPE, -(2**30))), "is damaged or no archive"),
    "half an archive": (hostile(b"{}" * 9999)[:60], "is damaged or no archive"),
    "half a header of gzip": (b"\x1f\x8b\x08", "is damaged or no archive"),
    "no archive": (b"PK\3\4", "is damaged or no archive"),
    "nothing": (b"", "is damaged or no archive"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_a_hostile_archive(tmp_path, case):
    content, says = ARCHIVES[case]
    packed = content.packed() if isinstance(content, Bomb) else content
    (tmp_path / "model.tar.gz").write_bytes(packed)
    assert says in refused([tmp_path / "model.tar.gz"], tmp_path / "merged")


def test_headers_may_have_a_mebibyte_between_two_files(tmp_path, monkeypatch):
    """Here 513 bytes: the last one of the file before, and the header of a short name."""
    expected = write_parts(tmp_path / "parts")
    model = tmp_path / "model.tar"
    with tarfile.open(model, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in (tmp_path / "parts").rglob("*.*"):
            tar.add(path, path.name)
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", 513)
    merge.merge([str(model)], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", 512)
    assert "its headers are too long" in refused([model], tmp_path / "more")


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo], ids=["a link", "a pipe"]
)
@pytest.mark.parametrize("pattern", ["scores-*.npy", "manifest-*.json"])
def test_a_folder_with_a_link_or_a_pipe_in_a_files_place(tmp_path, make, pattern):
    write_parts(tmp_path / "parts")
    path = next((tmp_path / "parts/algo-2").glob(pattern))
    path.unlink()
    make(path)
    assert refused([tmp_path / "parts"], tmp_path / "merged") == (
        f"{tmp_path}/parts: {path.name} is a link or no regular file; give the file itself"
    )


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("scores-*.npy", "is missing, which its manifest names"),
        ("manifest-*.json", "rows 10 to 19 are in no part"),
    ],
)
def test_a_folder_in_a_files_place_is_no_file(tmp_path, pattern, says):
    write_parts(tmp_path / "parts")
    path = next((tmp_path / "parts/algo-2").glob(pattern))
    path.unlink()
    path.mkdir()
    assert says in refused([tmp_path / "parts"], tmp_path / "merged")


def test_a_folder_with_a_link_or_a_pipe_of_another_name(tmp_path):
    expected = write_parts(tmp_path / "parts")
    (tmp_path / "parts/README").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "parts/pipe")
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
        (os.mkfifo, "manifest-x.json is damaged"),
    ],
    ids=["a link", "a pipe"],
)
def test_a_file_that_becomes_something_else_after_a_look_at_it(tmp_path, monkeypatch, make, says):
    (tmp_path / "parts").mkdir()
    make(tmp_path / "parts/manifest-x.json")
    monkeypatch.setattr(archives.stat, "S_ISREG", lambda mode: True)
    assert says in refused([tmp_path / "parts"], tmp_path / "merged")


def test_too_many_files(tmp_path, monkeypatch):
    write_parts(tmp_path / "parts")
    files = sum(path.is_file() for path in (tmp_path / "parts").rglob("*"))
    monkeypatch.setattr(archives, "MAX_FILES", files - 1)
    assert f"more than {files - 1} files" in refused([tmp_path / "parts"], tmp_path / "merged")
    monkeypatch.setattr(archives, "MAX_FILES", files)
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")


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


@pytest.mark.parametrize("model", ["nothing", "a\0b", "n" * 5000, "/dev/zero", "pipe"])
def test_a_model_that_is_none(tmp_path, model):
    os.mkfifo(tmp_path / "pipe")
    assert "found no such file" in refused([tmp_path / model], tmp_path / "merged")


@pytest.mark.parametrize(("length", "shown"), [(1000, "x" * 1000), (1001, "x" * 997 + "...")])
def test_a_long_line_of_the_command_is_cut(monkeypatch, length, shown):
    def refuse(names, output) -> None:
        raise ValueError("x" * length)

    monkeypatch.setattr(merge, "merge", refuse)
    monkeypatch.setattr(sys, "argv", ["merge", "model.tar.gz", "--output=merged"])
    with pytest.raises(SystemExit) as error:
        merge.main()
    assert error.value.code == f"error: {shown}"


def test_the_module_is_the_command_and_needs_an_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["merge", "model.tar.gz"])
    monkeypatch.delitem(sys.modules, merge.__name__)
    with pytest.raises(SystemExit) as error:
        runpy.run_module(merge.__name__, run_name="__main__")
    assert error.value.code == 2
    assert "the following arguments are required: --output" in capsys.readouterr().err


def test_without_numpy_the_command_says_how_to_install_it(monkeypatch):
    """It runs on the user's own machine."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, merge.__name__)
    with pytest.raises(SystemExit) as error:
        runpy.run_module(merge.__name__, run_name="__main__")
    assert error.value.code == (
        f"error: {sys.executable} has no numpy; run `make env` and use .venv/bin/python, or "
        "install the extra `rows` of this package"
    )


@pytest.mark.slow
def test_the_command_says_it_in_one_line_and_hands_no_escape_to_the_terminal(tmp_path):
    write_parts(tmp_path / "parts")
    edited(
        tmp_path / "parts",
        host="algo-1\n\x1b[2J",
        hosts=["algo-1\n\x1b[2J"],
        source="x\n\x1b]0;" + "y" * 5000,
    )
    command = [
        sys.executable,
        ROOT / "scripts/merge_parts.py",
        tmp_path / "parts",
        f"--output={tmp_path / 'merged'}",
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (
        completed.returncode == 1
        and completed.stderr.startswith("error: ")
        and completed.stderr.count("\n") == 1
    )
    assert "\x1b" not in completed.stderr and len(completed.stderr) <= 1010


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    9.5,
    2**64,
    "",
    "x",
    "../x",
    "\0",
    [],
    [1],
    {},
    {"a": 1},
    [[[]]],
    "|O",
    "<i8",
    "9" * 400,
]


def mutated(value, draw: random.Random):
    """Return a copy of a JSON value with one change."""
    value = json.loads(json.dumps(value))
    container = value
    while type(container) in (dict, list) and container:
        keys = list(container) if type(container) is dict else list(range(len(container)))
        key = draw.choice(keys)
        if draw.random() < 0.4 or not (type(container[key]) in (dict, list) and container[key]):
            act = draw.randrange(4)
            if act == 0:
                del container[key]
            elif act == 1 and type(container) is dict:
                container[draw.choice(["x", "..", "/x", "counts", "a/b", "", "x" * 300])] = (
                    container.pop(key)
                )
            elif act == 2 and type(container) is list:
                container.append(container[key])
            else:
                container[key] = draw.choice(VALUES)
            return value
        container = container[key]
    return draw.choice(VALUES)


def mutate(folder: Path, draw: random.Random) -> None:
    """Change one thing of the parts in a folder."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    act = draw.randrange(8)
    if path.suffix == ".json" and act < 5:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
    elif act == 5:
        path.unlink()
    elif act == 6:
        path.rename(path.with_name(draw.choice(["x.npy", "manifest-y.json", ".hidden", "z"])))
    elif act == 7:
        shutil.copy(path, folder / draw.choice([path.name, "manifest-z.json", "z.npy"]))
    else:
        content = bytearray(path.read_bytes())
        position = draw.randrange(len(content))
        size = draw.choice([0, 1, 7, 500])
        content[position : position + size] = draw.randbytes(draw.choice([0, 1, 9]))
        path.write_bytes(content)


def fuzz(folder: Path, seeds: range) -> dict[str, int]:
    """Merge mutated parts; return how many merges succeeded and how many were refused.

    Anything else is an error.
    """
    outcomes = {"merged": 0, "refused": 0}
    for seed in seeds:
        draw = random.Random(seed)
        case_folder = folder / str(seed)
        output = folder / f"{seed}-merged"
        sharded = draw.random() < 0.4
        expected = write_parts(case_folder, sharded)
        for _ in range(draw.choice([1, 1, 2])):
            mutate(case_folder, draw)
        model = case_folder
        if draw.random() < 0.5:
            model = archived(case_folder, folder / "model.tar.gz")
            if draw.random() < 0.5:
                content = bytearray(gzip.decompress(model.read_bytes()))
                content[draw.randrange(len(content))] ^= draw.randrange(256)
                model.write_bytes(draw.choice([gzip.compress, bytes])(content))
        paths_before = sorted(path for path in folder.rglob("*"))
        try:
            about = merge.merge([str(model)], output)
        except ValueError as error:
            assert str(error) and "\n" not in str(error).replace("\\n", ""), seed
            assert sorted(path for path in folder.rglob("*")) == paths_before, seed
            outcomes["refused"] += 1
        else:
            result = {path.stem: np.load(path, allow_pickle=False) for path in output.glob("*.npy")}
            assert {*about["arrays"]} == {*result}, seed
            # The mutation may have given an array another name in all parts.
            for name in expected.keys() & result.keys():
                assert np.array_equal(result[name], expected[name]), (seed, name)
            outcomes["merged"] += 1
            shutil.rmtree(output)
        shutil.rmtree(case_folder)
    return outcomes


@pytest.mark.slow
def test_mutated_parts_are_merged_rightly_or_refused(tmp_path):
    outcomes = fuzz(tmp_path, range(40))
    assert outcomes["merged"] > 3 and outcomes["refused"] > 15
