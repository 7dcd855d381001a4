"""rows/merge.py with hostile parts: the right result, or an error of one line.

After an error the output folder is as it was before.
"""

import gzip
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from containers import ROOT
from row_parts import archived, arrays_of, edited, loaded, refused, same, write_parts

from sagemaker_lightning.rows import merge, parts


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


@pytest.mark.parametrize("sharded", [False, True])
def test_good_parts_are_merged(tmp_path, sharded):
    expected = write_parts(tmp_path / "parts", sharded)
    models = (
        [str(archived(tmp_path / "parts", tmp_path / "model.tar.gz"))],
        [str(tmp_path / "parts")],
    )
    for number, model in enumerate(models):
        merged = tmp_path / f"merged-{number}"
        merge.merge(model, merged)
        assert same(loaded(merged), expected)
        assert len(list(merged.iterdir())) == len(expected) + 1


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
    assert sorted(tmp_path.rglob("*")) == paths_before
    assert (tmp_path / "outside.npy").read_text() == "precious"


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    write_parts(tmp_path / "parts")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/scores.npy").write_text("precious")
    assert "holds scores.npy already" in refused([tmp_path / "parts"], tmp_path / "merged")
    assert (tmp_path / "merged/scores.npy").read_text() == "precious"
    assert "Not a directory" in refused([tmp_path / "parts"], tmp_path / "merged/scores.npy/deeper")


@pytest.mark.parametrize("last", ["manifest.json", "neighbours.npy"])
def test_a_merge_that_fails_at_its_end_leaves_nothing(tmp_path, monkeypatch, last):
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


CHECKSUM = "is damaged: its checksum does not match; copy it again"
DAMAGE = {
    "shorter": (lambda content: content[:-1], CHECKSUM),
    "much shorter": (lambda content: content[: 3 - 40], CHECKSUM),
    "longer": (lambda content: content + b"\0", CHECKSUM),
    "another number": (lambda content: content[:-1] + bytes([content[-1] ^ 255]), CHECKSUM),
    "another header": (
        lambda content: content[:10] + bytes([content[10] ^ 255]) + content[11:],
        "is not float32 [10], as its manifest says; copy it again",
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_damaged_is_named(tmp_path, damage, says, sharded):
    write_parts(tmp_path / "parts", sharded)
    (path,) = (tmp_path / "parts/algo-2").glob("scores-*.npy")
    path.write_bytes(damage(path.read_bytes()))
    line = refused([tmp_path / "parts"], tmp_path / "merged")
    assert line.endswith(f"{path.name} {says}")
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


@pytest.mark.parametrize("model", ["nothing", "a\0b", "n" * 5000, "/dev/zero", "pipe"])
def test_a_model_that_is_not_there_is_refused(tmp_path, model):
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
    line = "error: the following arguments are required: --output; --help lists all flags\n"
    assert (error.value.code, capsys.readouterr().err) == (2, line)


def test_without_numpy_the_command_says_how_to_install_it(monkeypatch):
    """It runs on the user's own machine."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, merge.__name__)
    with pytest.raises(SystemExit) as error:
        runpy.run_module(merge.__name__, run_name="__main__")
    assert error.value.code == (
        f"error: {sys.executable} has no numpy; install the extra `rows` of this "
        "package, or, in a checkout, run `make env` and use .venv/bin/python"
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
    assert completed.returncode == 1
    assert completed.stderr.startswith("error: ")
    assert completed.stderr.count("\n") == 1
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
