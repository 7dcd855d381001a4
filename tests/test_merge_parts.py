"""scripts/merge_parts.py with hostile parts: the right result, or an error of one line.

After an error the output folder is as it was before.
"""

import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from containers import ROOT

from sagemaker_lightning.rows import archives, blocks, merge, parts

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
    assert "(rows 10 to 19) has counts, neighbours, scores" in refused(
        [tmp_path / "parts"], tmp_path / "merged"
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


def bomb(header: bytes) -> bytes:
    """Return a gzipped archive: this header, then 128 MiB of other bytes."""
    return gzip.compress(header + b"0\n" * 2**26, compresslevel=1)


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
    "an absolute name": (hostile(b"{}", name="/etc/manifest-x.json"), "which is outside of it"),
    "a name above": (hostile(b"{}", name="../manifest-x.json"), "which is outside of it"),
    "depth": (hostile(b"[" * 10**6), "maximum recursion depth"),
    "some depth": (hostile(b'{"a":' * 50 + b"1" + b"}" * 50), "too deep a one"),
    "a manifest of zeros": (hostile(bytes(2**25)), "it has more than 16777216 bytes"),
    "not UTF-8": (hostile(b"\xff\xfe\xfa"), "is damaged ("),
    "a long number": (hostile(b'{"rows": [1' + b"0" * 5000 + b"]}"), "is damaged ("),
    "no number": (hostile(b'{"rows": NaN}'), "NaN is no JSON"),
    "a name of a gigabyte": (
        bomb(header_of(tarfile.GNUTYPE_LONGNAME, 2**30)),
        "its headers are too long",
    ),
    "a pax header of a gigabyte": (
        bomb(header_of(tarfile.XHDTYPE, 2**30)),
        "its headers are too long",
    ),
    "a negative length": (bomb(header_of(tarfile.REGTYPE, -(2**30))), "is damaged or no archive"),
    "half an archive": (hostile(b"{}" * 9999)[:60], "is damaged or no archive"),
    "half a header of gzip": (b"\x1f\x8b\x08", "is damaged or no archive"),
    "no archive": (b"PK\3\4", "is damaged or no archive"),
    "nothing": (b"", "is damaged or no archive"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_a_hostile_archive(tmp_path, case):
    content, says = ARCHIVES[case]
    (tmp_path / "model.tar.gz").write_bytes(content)
    assert says in refused([tmp_path / "model.tar.gz"], tmp_path / "merged")


def test_a_folder_with_a_link_or_a_pipe_in_a_files_place(tmp_path):
    for number, make in enumerate(
        (lambda path: path.symlink_to("/etc/passwd"), lambda path: os.mkfifo(path), Path.mkdir)
    ):
        folder = tmp_path / str(number)
        write_parts(folder)
        for pattern, says in (("scores-*.npy", "scores-"), ("manifest-*.json", "manifest-")):
            path = next((folder / "algo-2").glob(pattern))
            path.unlink()
            make(path)
            assert says in (line := refused([folder], tmp_path / "merged")) or "in no part" in line


def test_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_FILES", 3)
    write_parts(tmp_path / "parts")
    assert "more than 3 files" in refused([tmp_path / "parts"], tmp_path / "merged")


@pytest.mark.parametrize(("place", "value"), [(8, 1), (10, 8), (10, 99), (6, 255), (0, 0)])
def test_a_damaged_block_is_done_again(tmp_path, capsys, place, value):
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
    assert f"warning: {damaged} is damaged (" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["nothing", "a\0b", "n" * 5000, "/dev/zero", "pipe"])
def test_a_model_that_is_none(tmp_path, model):
    os.mkfifo(tmp_path / "pipe")
    assert "found no such file" in refused([tmp_path / model], tmp_path / "merged")


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
