"""state/batch_digest.py: different batches have different digests; no value fails.

The digest of a batch is the same on each device.
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch

from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.batch_digest import MAX_WORDS, combine, leaf_digests


def digest_of(value: object) -> int:
    return combine(int(part) for part in leaf_digests(value))


@dataclass
class Sample:
    image: torch.Tensor
    label: str


class Plain:
    """A batch of the kind that torch's documentation of pin_memory has."""

    def __init__(self, inputs) -> None:
        self.inputs = inputs


Pair = namedtuple("Pair", ["one", "other"])
INPUTS = torch.arange(12.0).reshape(3, 4)
VALUES = {
    "a tensor": INPUTS,
    "float64": INPUTS.double(),
    "half": INPUTS.half(),
    "bfloat16": INPUTS.bfloat16(),
    "whole numbers": INPUTS.long(),
    "bytes": INPUTS.byte(),
    "truths": INPUTS > 3,
    "complex": torch.complex(INPUTS, INPUTS),
    "odd": torch.arange(9, dtype=torch.uint8),
    "transposed": INPUTS.T,
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "a slice": torch.arange(20.0)[1:8],
    "every second": torch.arange(20.0)[::2],
    "a slice between two words": torch.arange(20, dtype=torch.bfloat16)[1:9],
    "a width of two bytes": torch.arange(3.0).half(),
    "expanded": torch.ones(1, 4).expand(3, 4),
    "none": torch.zeros(0, 3),
    "one": torch.tensor(3.0),
    "with a gradient": (INPUTS + 1).requires_grad_(),
    "sparse": INPUTS.to_sparse(),
    "quantized": torch.quantize_per_tensor(INPUTS, 0.1, 0, torch.quint8),
    "without values": torch.zeros(3, device="meta"),
    "a pair": (INPUTS, torch.ones(3)),
    "a dict": {"x": INPUTS, "y": [1, 2.5, "three", b"four", None, True]},
    "named": Pair(INPUTS, INPUTS + 1),
    "a dataclass": Sample(INPUTS, "cat"),
    "an object": Plain(INPUTS),
    "of a library": UserDict(x=INPUTS),
    "an array": np.arange(6.0),
    "an array of text": np.array(["a", "b"]),
    "an array of objects": np.array([object()]),
    "an array of none": np.zeros((0, 3)),
    "a numpy scalar": np.float32(3),
    "empty": [[], {}, ()],
    "a set": {1, 2},
    "a function": len,
    "a class": Sample,
    "text": ["a"] * 100,
    "nothing": None,
}


def test_each_is_another_one():
    digests = {name: digest_of(value) for name, value in VALUES.items()}
    assert len(set(digests.values())) == len(digests) and all(map(leaf_digests, VALUES.values()))
    assert digests == {name: digest_of(value) for name, value in VALUES.items()}
    assert all(0 < digest < 2**64 for digest in digests.values())


@pytest.mark.parametrize(
    "name", [name for name, value in VALUES.items() if isinstance(value, torch.Tensor)]
)
def test_a_gpu_has_the_same(name, monkeypatch):
    """On a GPU, torch does the work of numpy here, and the sum stays a tensor."""

    class There(torch.Tensor):
        is_cpu = False

    words = batch_digest._words(VALUES[name])
    here = leaf_digests(VALUES[name])
    monkeypatch.setattr(batch_digest, "QUICK_DTYPES", ())
    monkeypatch.setattr(
        batch_digest, "_words", lambda value: None if words is None else words.as_subclass(There)
    )
    digests_on_gpu = leaf_digests(VALUES[name])
    assert words is None or isinstance(digests_on_gpu[1], torch.Tensor)
    assert combine(map(int, here)) == combine(map(int, digests_on_gpu))


@pytest.mark.parametrize("size", [5, 8, 1000, 2 * MAX_WORDS, 10 * MAX_WORDS + 3])
def test_a_batch_that_differs_has_another_digest(size):
    """Any element where there are few, any region where there are many; and another order."""
    original = torch.arange(size, dtype=torch.int64)
    for index in range(0, size, max(1, size // 50)):
        changed = original.clone()
        changed[index : index + 1 + size // MAX_WORDS] += 1
        assert digest_of(changed) != digest_of(original)
    assert digest_of(original.flip(0)) != digest_of(original)
    assert digest_of(original[None]) != digest_of(original) != digest_of(original.double())


def test_what_is_in_it_counts():
    batch = {"x": INPUTS, "y": [1, 2.5, "three"], "z": Sample(INPUTS, "cat")}
    for changed in (
        {**batch, "x": INPUTS + 1},
        {**batch, "y": [2, 2.5, "three"]},
        {**batch, "y": [1, 2.5, "four"]},
        {**batch, "y": [1, 2.25, "three"]},
        {**batch, "z": Sample(INPUTS, "dog")},
        {**batch, "w": 1},
        list(batch.values()),
    ):
        assert digest_of(changed) != digest_of(batch)


class Index:
    """Keeps its answers, as pandas' Index does, which neuralforecast has in its batches."""

    names: list[str] = ()

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._cache: dict = {}

    @cached_property
    def number(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._cache.setdefault("engine", set(self.names))


def test_what_an_object_keeps_of_its_answers_does_not_count():
    index = Index(["a", "b"])
    digest = digest_of(index)
    assert index.number == 2 and "a" in index and set(vars(index)) > {"number"}
    assert digest_of(index) == digest
    assert digest_of(Index(["a", "c"])) != digest


def test_nothing_makes_it_fail_or_take_long():
    endless: list = []
    endless.append(endless)

    class Hostile:
        @property
        def __dict__(self):
            raise RuntimeError

    batches = [{"x": torch.ones(2), "y": torch.ones(2)} for _ in range(10_000)]
    assert (
        len(leaf_digests(batches)) <= batch_digest.MAX_LEAVES + 80
        and len(leaf_digests(endless)) < 100
    )
    assert digest_of([INPUTS, Hostile(), INPUTS]) and digest_of({"a": endless})
    assert digest_of(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_the_digest_of_what_may_change_is_taken_at_once():
    value = INPUTS.clone()
    digests = leaf_digests(value)
    value.zero_()
    assert combine(map(int, digests)) == digest_of(INPUTS)


def test_the_digest_is_the_same_in_another_version():
    """A checkpoint has the digests of batches that a resumed run, of a later one, compares."""
    rows = torch.arange(24_581, dtype=torch.float64)
    batch = {
        "x": INPUTS,
        "many": (rows, rows.numpy().reshape(-1, 1), list(range(40))),
        "few": [None, True, 3, 0.5, "text", b"bytes", np.int16([1, 2, 3]), Sample, Plain(7)],
        "none": [(), np.zeros((0, 2)), INPUTS.T, INPUTS.bfloat16()],
    }
    assert digest_of(batch) == 0x26C75A8B50C79D40


def test_the_order_of_digests_counts_and_none_is_0():
    assert combine([1, 2]) != combine([2, 1])
    assert combine([-1]) == combine([2**64 - 1])
    assert combine([combine([])]) == 1


def test_the_bytes_count_in_the_order_in_memory():
    (_, words), (_, words_of_array) = leaf_digests(INPUTS), leaf_digests(INPUTS.numpy())
    assert words == words_of_array
    assert words == leaf_digests(INPUTS.T)[1] == leaf_digests(INPUTS.view(4, 3))[1]
    assert {type(words) for words in leaf_digests([INPUTS.bfloat16(), INPUTS])} == {int}
    assert len(leaf_digests(torch.zeros(0, 3))) == len(leaf_digests(np.zeros((0, 3)))) == 1
    for value in (INPUTS[1:2, :3].bfloat16(), torch.arange(6, dtype=torch.uint8), INPUTS > 3):
        array = (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
        assert leaf_digests(value)[1] == leaf_digests(array)[1]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_of_the_same_values_have_one_digest(layout):
    def digest_of_rows(first):
        rows = [torch.full((2, 3), first), torch.ones(4, 3)]
        return digest_of(torch.nested.nested_tensor(rows, layout=layout))

    assert digest_of_rows(0.0) == digest_of_rows(0.0) != digest_of_rows(1.0)


class Viewed(torch.Tensor):
    """A tensor of a class with methods of its own in place of torch's."""

    def view(self, name: str) -> None:
        raise NotImplementedError

    def numpy(self, name: str) -> None:
        raise NotImplementedError


def test_a_tensor_of_a_users_class_is_read_as_any_other():
    assert digest_of(INPUTS.as_subclass(Viewed)) == digest_of(INPUTS)


@pytest.mark.parametrize(("size", "read"), [(0, 0), (1, 1), (32, 32), (33, 17), (64, 32), (65, 22)])
def test_elements_of_a_long_list_at_equal_distances_are_read(size, read):
    assert len(leaf_digests(list(range(size)))) == 2 + read
    assert len(leaf_digests({str(index): index for index in range(size)})) == 2 + 2 * read


def test_the_first_128_parts_of_a_batch_are_read():
    assert len(leaf_digests([list(range(32))] * 10)) == 128


def test_a_number_in_eight_lists_is_read():
    def within(lists: int, value: int) -> list:
        return value if lists == 0 else [within(lists - 1, value)]

    assert digest_of(within(8, 1)) != digest_of(within(8, 2))
    assert digest_of(within(9, 1)) == digest_of(within(9, 2))


def test_text_of_any_characters_is_read():
    """A path may have a character that no bytes stand for."""
    assert leaf_digests(["\udcff", 5])[-1] == 5 and leaf_digests({"\udcff": 5})[-1] == 5


def test_only_the_kind_of_a_class_counts(monkeypatch):
    digest = digest_of(Sample)
    monkeypatch.setattr(Sample, "count", 1, raising=False)
    assert digest_of(Sample) == digest


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("value", [0.1, [0.1], [1.0, 3.0]])
def test_the_bits_of_a_number_on_a_gpu_stay_there(value):
    number = torch.tensor(value, dtype=torch.float64)
    loss = number.clone().as_subclass(OnGpu)
    bits = batch_digest.float_bits(loss)
    loss.zero_()
    assert isinstance(bits, torch.Tensor) and bits.shape == ()
    assert int(bits) == batch_digest.float_bits(number)


def test_bits():
    assert (
        batch_digest.float_bits(0.1)
        == batch_digest.float_bits(torch.tensor(0.1, dtype=torch.float64))
        != batch_digest.float_bits(torch.tensor(0.1))
    )
    assert batch_digest.float_bits(torch.tensor(1.0)) != batch_digest.float_bits(
        torch.tensor(1.0 + 2**-23)
    )
    assert type(batch_digest.float_bits(torch.tensor(1.0))) is int
    assert batch_digest.float_bits(float("nan")) and batch_digest.float_bits(
        torch.tensor([1.0, 3.0])
    ) == batch_digest.float_bits(2.0)
