"""rows/manifests.py: what a manifest may say, alone and beside those of other hosts."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from row_parts import arrays_of, edited, refused, write_parts

from sagemaker_lightning.rows import manifests, merge


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
def test_a_wrong_shape_is_refused(tmp_path, shape):
    assert re.search(r"manifest-\S+\.json is damaged \(", refused_scores(tmp_path, shape=shape))


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
    "a host that is not one of them": (contradict("host", "algo-4"), "hosts are not names"),
    "files of less than a row": (contradict("files", {"a": 31, "b": -1}), "files: not whole"),
    "files of other rows": (
        contradict("files", {"a": 20, "b": 9}),
        "its files have 29 rows, which",
    ),
    "numbers that are a name": (
        contradict("settings", {"numbers": "x"}),
        "numbers: expected a list of names",
    ),
    "numbers that are not names": (
        contradict("settings", {"numbers": [1]}),
        "numbers: expected a list of names",
    ),
    "numbers that are fractions": (
        contradict("settings", {"k": 2, "numbers": ["scores"]}),
        "scores: expected integers, numbers of rows; found <f4",
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


def test_manifests_have_a_size_in_all(tmp_path, monkeypatch):
    write_parts(tmp_path / "parts")
    sizes = [path.stat().st_size for path in (tmp_path / "parts").rglob("manifest-*.json")]
    monkeypatch.setattr(manifests, "MAX_ALL_MANIFEST_BYTES", sum(sizes))
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
    monkeypatch.setattr(manifests, "MAX_ALL_MANIFEST_BYTES", sum(sizes) - 1)
    assert "it has more than" in refused([tmp_path / "parts"], tmp_path / "more")
