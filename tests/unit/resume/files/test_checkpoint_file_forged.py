"""Forged positions of streams, and files that would grow or stall as they are read."""

import io
import itertools
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from forged import (
    ENTRIES,
    expanded,
    forge,
    little_memory,  # noqa: F401  the fixture bounded
    rewrite,
    state_of_rank,
)
from pytorch_lightning.utilities import CombinedLoader
from short_fits import Noted, as_in_a_new_process, interrupted, trainer
from torch.utils.data import DataLoader, IterableDataset, Sampler

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Endless(IterableDataset):
    """A stream without an end."""

    def __iter__(self):
        return map(torch.rand, itertools.repeat(2))


class EndlessOrder(Sampler):
    """The indices of two samples, again and again."""

    def __iter__(self):
        return itertools.cycle([0, 1])


SOURCES = {
    "a stream": lambda: DataLoader(Endless(), 2),
    "an iterator": lambda: map(torch.rand, itertools.repeat((2, 2))),
    "a sampler": lambda: DataLoader(torch.rand(2, 2), 2, sampler=EndlessOrder()),
    "loaders": lambda: CombinedLoader([DataLoader(torch.rand(1, 2))] * 2, "max_size_cycle"),
}


class Drawing(Noted):
    """Trains on a source of samples."""

    def __init__(self, source: str, stop: str = "") -> None:
        super().__init__(stop)
        self.source = source

    def train_dataloader(self):
        return SOURCES[self.source]()


def draw_on(folder: Path, source: str, stop: str = "") -> Drawing:
    as_in_a_new_process()
    options = {"max_steps": 8, "max_epochs": 9, "limit_val_batches": 0, "logger": False}
    trainer(folder, **options).fit(model := Drawing(source, stop))
    return model


def move_on(content: dict, batches: int, *counts: str) -> None:
    """Have a checkpoint be of a later batch, by some of its counts."""
    progress = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    states = state_of_rank(content)["loader_positions"]
    for count in counts:
        if count in progress:
            progress[count] = dict.fromkeys(progress[count], batches)
        elif count == "drawn":
            states["drawn"] = batches
        else:
            states["loaders"][0]["given"] = batches


@pytest.mark.parametrize("source", ["a stream", "an iterator", "a sampler"])
@pytest.mark.parametrize(
    "counts", [["current"], ["current", "total"], ["drawn"], ["given"], ["given", "drawn", "total"]]
)
def test_no_stream_is_drawn_to_a_batch_that_the_run_cannot_have_had(
    tmp_path, bounded, source, counts
):
    with interrupted():
        draw_on(tmp_path, source, "batch 0:3")
    forge(tmp_path, lambda content: move_on(content, 10**12, *counts))
    with pytest.raises(UserError, match=r"found loops that .* batches of .* drawn, at step 4\)"):
        draw_on(tmp_path, source)


def test_loaders_that_begin_again_have_no_more_batches_than_an_epoch(tmp_path, bounded):
    with interrupted():
        draw_on(tmp_path, "loaders", "batch 3:0")
    forge(tmp_path, lambda content: move_on(content, 10**12, "current"))
    draw_on(tmp_path, "loaders")


def with_versions() -> OrderedDict:
    state = OrderedDict()
    state._metadata = expanded()
    return state


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (with_versions, "it is small, and what it holds is not"),
        (lambda: [torch._utils._rebuild_tensor_v2], "it holds a function"),  # noqa: SLF001
        (lambda: [OrderedDict], "it holds a function"),
        (lambda: [torch.Size], "it holds a type"),
        (lambda: {"a": torch.ones(1).untyped_storage()}, "it holds a TypedStorage"),
    ],
)
def test_what_torch_reads_and_nothing_here_writes_is_forged(tmp_path, make, found):
    path = tmp_path / "step-000000001.ckpt"
    checkpoint_file.write(path, {ENTRIES: {"events": make()}}, 1, 2)
    assert checkpoint_file.examine(path) == f"is forged: {found}"


ALIKE = [number * (2**61 - 1) for number in range(1, 20_000)]


def one_by_one(numbers: list[int]) -> bytes:
    """Return a pickle that sets each key of a dict by an instruction of its own."""
    keys = b"".join(pickle.dumps(number, 2)[2:-1] + b"Ns" for number in numbers)
    text = b"X\x13\0\0\0sagemaker_lightning"
    return b"\x80\x02}" + text + b"}" + keys + b"s."


@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset, Counter, OrderedDict.fromkeys])
def test_no_file_makes_python_compare_each_key_with_all_others(tmp_path, make):
    """Keys with one hash; other ones are read, as many as there are."""
    path = tmp_path / "step-000000001.ckpt"
    numbers = [number * 3**30 for number in range(1, 5_000)]
    found = {}
    for keys in (numbers, ALIKE[: checkpoint_file.torch_unpickler.MAX_ALIKE + 1]):
        checkpoint_file.write(path, {ENTRIES: {"values": make(keys)}}, 1, 2)
        found[keys[0]] = checkpoint_file.examine(path)
    of_numbers, of_alike = found.values()
    assert of_numbers == (1, 2) or make is frozenset  # which torch does not read
    assert type(of_alike) is str and (make is frozenset or "have one hash" in of_alike)


def test_keys_of_one_hash_that_are_set_one_by_one_are_not_read(tmp_path, bounded):
    path = tmp_path / "step-000000001.ckpt"
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as parts:
        parts.writestr("archive/data.pkl", one_by_one(ALIKE))
        parts.writestr("archive/version", "3\n")
    checkpoint_file.write(path, {}, 1, 2)
    rewrite(path, output.getvalue())
    assert "very many keys in it have one hash" in checkpoint_file.examine(path)


TEXT = b"X\x00\x00\x10\x00" + b"a" * 2**20
LATIN1 = b"X\x06\0\0\0latin1"
PAIRS = b"](" + b"".join(b"M" + n.to_bytes(2, "little") + b"N\x86" for n in range(1000)) + b"e"
NUMBERS = b"](" + b"K\1" * 100_000 + b"e"
TWICE = b"h\1h\1\x86q\1"
MANY = b"K\1\x85q\1" + TWICE * 60
AGAIN = {
    "the bytes of a text": b"c_codecs\nencode\nq\0" + TEXT + LATIN1 + b"\x86q\1",
    "a dict of pairs": b"ccollections\nOrderedDict\nq\0" + PAIRS + b"\x85q\1",
    "a set of a list": b"c__builtin__\nset\nq\0" + PAIRS + b"\x85q\1",
}
OTHERS_CALLS = {
    "a tensor of a list": b"ctorch\nTensor\nq\0" + NUMBERS + b"\x85R",
    "a tensor of a size": b"ctorch\nFloatTensor\nJ\0\0\0\x7f\x85R",
    "a new tensor": b"ctorch\nFloatTensor\nJ\0\0\0\x7f\x85\x81",
    "a mesh": b"ctorch.distributed.device_mesh\nDeviceMesh\nX\3\0\0\0cpu](K\0K\1e\x86R",
}
HASHED = {
    "a key": b"}" + MANY + b"Ns",
    "keys": b"}(" + MANY + b"NK\2Nu",
    "deep": b"}" + b"K\1" + b"\x85" * 200_000 + b"Ns",
    "a set": b"c__builtin__\nset\n](" + MANY + b"e\x85R",
    "pairs": b"ccollections\nOrderedDict\n](" + MANY + b"N\x86e\x85R",
}


def of_pickle(path: Path, content: bytes) -> str:
    """Return what is found wrong with a checkpoint that has a pickle."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as parts:
        parts.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        parts.writestr("archive/version", "3\n")
    checkpoint_file.write(path, {}, 1, 2)
    rewrite(path, output.getvalue())
    return checkpoint_file.examine(path)


@pytest.mark.parametrize("name", AGAIN)
def test_what_is_made_of_one_value_again_and_again_is_not_read(tmp_path, bounded, name):
    """Each of these bytes would be copied thousands of times."""
    path = tmp_path / "step-000000001.ckpt"
    calls = b"h\0h\1R" * 10_000
    found = of_pickle(path, AGAIN[name] + b"](" + calls + b"e")
    assert found == "cannot be read (it would expand far beyond its size)"


@pytest.mark.parametrize("name", OTHERS_CALLS)
def test_a_checkpoint_calls_nothing_that_plain_values_do_not_need(tmp_path, bounded, name):
    """A mesh would wait for the other processes, also before there are any."""
    found = of_pickle(tmp_path / "step-000000001.ckpt", OTHERS_CALLS[name])
    assert "cannot be read (it calls" in found and "expected plain values only" in found


@pytest.mark.parametrize("name", HASHED)
def test_no_file_makes_python_hash_a_value_again_and_again(tmp_path, bounded, name):
    """Of 60 tuples, each has the one before twice; of 200,000, Python's stack has no room."""
    found = of_pickle(tmp_path / "step-000000001.ckpt", HASHED[name])
    assert found == "cannot be read (it would hash too much data for its size)"


def test_attributes_of_a_dict_are_no_pairs(tmp_path, bounded):
    pairs = b"](" + MANY + b"N\x86e"
    path = tmp_path / "step-000000001.ckpt"
    found = of_pickle(path, b"ccollections\nOrderedDict\n)R" + pairs + b"b")
    assert found == "cannot be read (attributes in it are not as pickle writes them)"


def test_tuples_may_be_keys_in_many_dicts(tmp_path):
    path = tmp_path / "step-000000001.ckpt"
    key = tuple((number, "a") for number in range(200))
    checkpoint_file.write(path, {ENTRIES: {"dicts": [{key: 1, "b": 2}] * 100}}, 1, 2)
    assert checkpoint_file.examine(path) == (1, 2)
    (found, *_) = checkpoint_file.read(path)[ENTRIES]["dicts"]
    assert found == {key: 1, "b": 2}


def test_a_file_has_one_list_of_its_parts(tmp_path, bounded):
    """torch would read the other one, whose parts are compressed."""
    archives = []
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w", method) as parts:
            parts.writestr("archive/data.pkl", b"\x80\x02" + TEXT + b".")
            parts.writestr("archive/version", "3\n")
        archives.append(output.getvalue())
    starts = [content.rfind(b"PK\5\6") for content in archives]
    places = [
        content[start + 16 : start + 20] for content, start in zip(archives, starts, strict=True)
    ]
    path = tmp_path / "step-000000001.ckpt"
    checkpoint_file.write(path, {}, 1, 2)
    end = archives[1][starts[1] :].replace(places[1], places[0])
    rewrite(path, archives[0][: starts[0]] + archives[1][: starts[1]] + end)
    assert checkpoint_file.examine(path) == (
        "cannot be read (it has more than one list of its parts)"
    )


def test_a_checkpoint_may_name_one_label_very_often(tmp_path):
    """Its file has the text once, and is small for what it holds."""
    path = tmp_path / "step-000000001.ckpt"
    labels = ["a label " * 24] * 600_000
    checkpoint_file.write(path, {ENTRIES: {"labels": labels}}, 1, 2)
    assert path.stat().st_size < 10_000_000 and checkpoint_file.examine(path) == (1, 2)
