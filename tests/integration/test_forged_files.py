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


def with_attribute() -> torch.Tensor:
    value = torch.ones(1)
    value.clone = 5
    return value


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (with_versions, "it is small, and what it holds is not"),
        (with_attribute, "it holds a tensor with attributes"),
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


def test_a_checkpoint_may_name_one_label_very_often(tmp_path):
    """Its file has the text once, and is small for what it holds."""
    path = tmp_path / "step-000000001.ckpt"
    labels = ["a label " * 24] * 600_000
    checkpoint_file.write(path, {ENTRIES: {"labels": labels}}, 1, 2)
    assert path.stat().st_size < 10_000_000 and checkpoint_file.examine(path) == (1, 2)
