"""Long containers of rows that are alike, such as a replay buffer, as a few columns.

Of 100,000 steps, each a tuple with an array and two numbers, the arrays alone would be 100,000
nodes, which takes seconds at each checkpoint. Here, the container is one node whose content has a
column for each part of a row. Arrays of one form are one block, and an array that several rows hold
is one of them: the next state of a step is the state of the following one.

Only what the container alone refers to is packed. `Pack.ids` and `Pack.pointers` tell what else may
not be referred to.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sagemaker_lightning.state.graph import fingerprints, scalars
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import Kind, NotSaved, refusal
from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS, check_hashes
from sagemaker_lightning.state.graph.kinds.memory import array_of, dtype_text, is_readable
from sagemaker_lightning.state.graph.kinds.objects import ObjectKind, base_of, scalar_base

PACKED_FROM = 1 << 12
"""Elements of a container from which on its elements are packed, if they can be."""
MAX_BYTES = 1 << 26
"""Bytes, at most, of the arrays of a pack; fewer and larger ones cost little as nodes."""
MAX_FORMS = 1 << 12
"""Forms of arrays, at most, in a pack."""
MAX_DEPTH = 8
LEADING = {"defaultdict": 2, "OrderedDict": 2}
"""How many parts of a container come before its elements, by kind."""
MAPPINGS = "dict", "defaultdict", "OrderedDict", "Counter"
SEQUENCES = "list", "deque"
OF_NUMBERS: dict[type, torch.dtype] = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
}
ROWS = {"tuple": CONTAINERS[tuple], "list": CONTAINERS[list], "dict": CONTAINERS[dict]}
"""The kinds of rows besides objects."""


class Unlike(Exception):
    """Raised for elements that are not alike."""


class Pack:
    """The elements of a container, packed.

    Args:
        kind: The kind of the container.
        parts: Its parts.
        kind_of_class: Returns the kind of the objects of a class.

    Raises:
        Unlike: They cannot be packed.
    """

    def __init__(
        self, kind: Kind, parts: list[Any], kind_of_class: Callable[[type], Kind | None]
    ) -> None:
        self.kind_of_class = kind_of_class
        self.ids: set[int] = set()
        """The ids of the rows and arrays in it."""
        self.pointers: set[int] = set()
        """The addresses of the memory of its tensors."""
        self.classes: set[type] = set()
        """The classes of its rows that are not containers of Python's."""
        self.marks: list[bytes] = []
        self.forms: dict[Any, tuple[int, dict[int, int], list[Any]]] = {}
        self.size = 0
        self.first = LEADING.get(kind.name, 0)
        elements = parts[self.first :]
        if kind.name in MAPPINGS:
            columns = [self._column(elements[::2], 0), self._column(elements[1::2], 0)]
        else:
            columns = [self._column(elements, 0)]
        blocks = [self._block(form, arrays) for form, (_, _, arrays) in self.forms.items()]
        self.content = {"packed": columns, "blocks": blocks}
        self.mark = fingerprints.of_bytes(b" ".join(self.marks))

    def _column(self, values: list[Any], depth: int) -> dict[str, Any]:
        """Return what is written of values, of which each is the same part of a row."""
        classes = set(map(type, values))
        if classes <= SCALARS:
            return self._scalars(values, classes)
        if depth > MAX_DEPTH or len(classes) > 2:
            raise Unlike
        if type(None) in classes:
            present = [value for value in values if value is not None]
            absent = [number for number, value in enumerate(values) if value is None]
            self.marks.append(repr(absent).encode())
            return {"absent": torch.tensor(absent), "present": self._column(present, depth)}
        if len(classes) > 1:
            raise Unlike
        (class_,) = classes
        if class_ is np.ndarray or class_ is Tensor:
            return self._arrays(values)
        return self._rows(values, class_, depth)

    def _scalars(self, values: list[Any], classes: set[type]) -> dict[str, Any]:
        dtype = OF_NUMBERS.get(next(iter(classes))) if len(classes) == 1 else None
        if dtype is not None:
            try:
                numbers = torch.tensor(values, dtype=dtype)
            except (OverflowError, RuntimeError, ValueError):  # a whole number is too long
                numbers = None
            if numbers is not None:
                self.marks.append(fingerprints.of_tensor(numbers))
                return {"numbers": numbers}
        self.marks.append(fingerprints.of_plain_data(values))
        return {"scalars": values}

    def _arrays(self, values: list[Any]) -> dict[str, Any]:
        """Return where arrays or tensors are in the blocks."""
        groups: dict[Any, list[Any]] = {}
        forms = [(type(value), value.dtype, value.shape) for value in values]
        for form, value in zip(forms, values, strict=True) if len(set(forms)) > 1 else ():
            groups.setdefault(form, []).append(value)
        groups = groups or {forms[0]: values}
        for form, members in groups.items():
            _, index, arrays = self.forms.setdefault(form, (len(self.forms), {}, []))
            new = {id(value): value for value in members if id(value) not in index}
            self._check_arrays(list(new.values()))
            index.update(zip(new, itertools.count(len(index)), strict=False))
            arrays += new.values()
            self.ids |= new.keys()
        if len(self.forms) > MAX_FORMS:
            raise Unlike
        blocks = [self.forms[form][0] for form in forms]
        rows = [self.forms[form][1][id(value)] for form, value in zip(forms, values, strict=True)]
        places = {"block": torch.tensor(blocks), "row": torch.tensor(rows)}
        self.marks += map(fingerprints.of_tensor, places.values())
        return places

    def _check_arrays(self, arrays: list[Any]) -> None:
        """Raise Unlike unless all of these arrays have memory of their own, and no more."""
        if not arrays:
            return
        self.size += len(arrays) * arrays[0].nbytes
        if self.size > MAX_BYTES:
            raise Unlike
        if isinstance(arrays[0], Tensor):
            if not all(map(_is_plain, arrays)):
                raise Unlike
            pointers = {tensor.data_ptr() for tensor in arrays}
            if len(pointers) < len(arrays) or not pointers.isdisjoint(self.pointers):
                raise Unlike
            self.pointers |= pointers
        elif (
            arrays[0].dtype.hasobject
            or not is_readable(arrays[0].dtype)
            or not all(array.base is None and array.flags.c_contiguous for array in arrays)
        ):
            raise Unlike

    def _block(self, form: Any, arrays: list[Any]) -> dict[str, Any]:
        """Return what is written of arrays of one form."""
        class_, dtype, shape = form
        if class_ is Tensor:
            block = torch.stack([tensor.detach() for tensor in arrays])
            self.marks.append(fingerprints.of_tensor(block))
            return {"tensors": block}
        # An empty array has no bytes, and a block of none has no number of rows.
        if not arrays[0].nbytes:
            raise Unlike
        content = bytearray(b"".join(map(np.ndarray.tobytes, arrays)))
        self.marks.append(fingerprints.of_bytes(content))
        values = torch.frombuffer(content, dtype=torch.uint8)
        return {"dtype": dtype_text(dtype), "shape": [len(arrays), *shape], "values": values}

    def _rows(self, values: list[Any], class_: type, depth: int) -> dict[str, Any]:
        """Return what is written of containers or objects that are alike."""
        kind = self.kind_of_class(class_)
        if kind is None:
            raise Unlike
        is_object = (
            isinstance(kind, ObjectKind)
            and kind.name == "object"
            and not issubclass(class_, nn.Module)
            and base_of(values[0]) is None
            and scalar_base(class_) is None
        )
        if not is_object and ROWS.get(kind.name) is not kind:
            raise Unlike
        if is_object or class_ not in (tuple, list, dict):
            self.classes.add(class_)
        unique = {id(value): value for value in values}
        if len(unique) < len(values):
            numbers = dict(zip(unique, itertools.count(), strict=False))
            index = torch.tensor([numbers[id(value)] for value in values])
            self.marks.append(fingerprints.of_tensor(index))
            return {"index": index, "rows": self._rows(list(unique.values()), class_, depth)}
        note: Any
        rows: Sequence[Any]
        if class_ is dict:
            note = list(values[0])
            if not SCALARS.issuperset(map(type, note)):
                raise Unlike
            rows = [list(value.values()) for value in values]
            if any(list(value) != note for value in values):
                raise Unlike
        elif class_ is tuple or class_ is list:
            note, rows = "" if class_ is tuple else None, values
        else:
            notes, rows = zip(*map(kind.take, values), strict=True)
            note = notes[0]
            if any(each != note for each in notes):
                raise Unlike
            if is_object:
                note = kind.note_of_new(values[0], note)
        self.marks.append(scalars.text((kind.name, note)).encode())
        written: dict[str, Any] = {"kind": kind.name, "note": note}
        ids_before = len(self.ids)
        lengths = list(map(len, rows))
        if len(set(lengths)) > 1 or not lengths[0]:
            flat = list(itertools.chain.from_iterable(rows))
            written["lengths"] = torch.tensor(lengths)
            self.marks.append(fingerprints.of_tensor(written["lengths"]))
            written["columns"] = [self._column(flat, depth + 1)]
        else:
            columns = zip(*rows, strict=True)
            written["columns"] = [self._column(list(column), depth + 1) for column in columns]
        if class_ is not tuple or len(self.ids) > ids_before:  # a tuple of scalars is one, too
            if not unique.keys().isdisjoint(self.ids):
                raise Unlike
            self.ids |= unique.keys()
        return written


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is values on the CPU, in memory of their own."""
    return (
        tensor.layout == torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def packed(
    kind: Kind, parts: list[Any], kind_of_class: Callable[[type], Kind | None]
) -> Pack | None:
    """Return the elements of a container, packed; None if they are few, or not alike."""
    is_known = kind.name in MAPPINGS or kind.name in SEQUENCES
    if len(parts) < PACKED_FROM or not is_known or SCALARS.issuperset(map(type, parts)):
        return None
    try:
        return Pack(kind, parts, kind_of_class)
    except (Unlike, NotSaved, RecursionError):
        return None


def elements_of(content: Mapping[str, Any], classes: Mapping[str, type]) -> list[Any]:
    """Return the elements of which `Pack.content` was made.

    Args:
        content: The content; hostile.
        classes: The classes that the program has, by name.
    """
    blocks = [_unstacked(block) for block in content["blocks"]]
    columns = [_values(column, blocks, classes, 0) for column in content["packed"]]
    if len(columns) == 1:
        return columns[0]
    keys, values = columns
    return list(itertools.chain.from_iterable(zip(keys, values, strict=True)))


def _unstacked(block: Mapping[str, Any]) -> list[Any]:
    rows = block["tensors"] if "tensors" in block else array_of(block)
    if not rows.nbytes:  # there may be any number of them
        raise refusal("a block")
    return [row.clone() if isinstance(row, Tensor) else row.copy() for row in rows]


def _numbers(column: Any, dtypes: Collection[torch.dtype]) -> list[Any]:
    """Return the numbers of a tensor that has memory for each of them."""
    is_column = isinstance(column, Tensor) and column.dtype in dtypes and column.dim() == 1
    if not is_column or not column.is_contiguous():
        raise refusal("a column")
    numbers: list[Any] = column.tolist()
    return numbers


def _places(column: Any) -> list[int]:
    """Return numbers of elements."""
    places = _numbers(column, [torch.int64])
    if places and min(places) < 0:
        raise refusal("a column")
    return places


def _values(
    column: Mapping[str, Any], blocks: list[list[Any]], classes: Mapping[str, type], depth: int
) -> list[Any]:
    """Return the values of a column."""
    if depth > 2 * (MAX_DEPTH + 1):  # rows in rows, each of which may be absent
        raise refusal("a column")
    if "numbers" in column:
        return _numbers(column["numbers"], OF_NUMBERS.values())
    if "scalars" in column:
        values = [scalars.scalar(value) for value in column["scalars"]]
        if not SCALARS.issuperset(map(type, values)):
            raise refusal("a column")
        return values
    if "absent" in column:
        absent = set(_places(column["absent"]))
        present = _values(column["present"], blocks, classes, depth + 1)
        size = len(absent) + len(present)
        if max(absent) >= size:
            raise refusal("a column")
        following = iter(present)
        return [None if number in absent else next(following) for number in range(size)]
    if "block" in column:
        places = zip(_places(column["block"]), _places(column["row"]), strict=True)
        return [blocks[block][row] for block, row in places]
    if "index" in column:
        unique = _values(column["rows"], blocks, classes, depth)
        return [unique[number] for number in _places(column["index"])]
    columns = [_values(each, blocks, classes, depth + 1) for each in column["columns"]]
    rows: Iterable[Any]
    if "lengths" in column:
        lengths = _places(column["lengths"])
        if sum(lengths) != len(columns[0]):
            raise refusal("a column")
        flat = iter(columns[0])
        rows = (list(itertools.islice(flat, length)) for length in lengths)
    else:
        rows = zip(*columns, strict=True)
    return list(_rows(column["kind"], column["note"], rows, classes))


def _rows(name: Any, note: Any, rows: Iterable[Any], classes: Mapping[str, type]) -> Iterator[Any]:
    """Yield rows of a kind."""
    if name == "list":
        yield from map(list, rows)
    elif name == "dict":
        keys = list(map(scalars.scalar, note))
        check_hashes(keys)
        for row in rows:
            yield dict(zip(keys, row, strict=True))
    elif name == "tuple":
        for row in rows:
            yield ROWS["tuple"].build(note, row, classes)
    elif name == "object":
        kind = ObjectKind()
        if note.keys() != {"class", "names"}:  # what else there is would be done for each row
            raise refusal(name)
        for row in rows:
            made = kind.make(note, None, classes)
            if isinstance(made, nn.Module) or base_of(made) or len(row) != len(note["names"]):
                raise refusal(name)
            kind.fill(made, note, list(row), None)
            yield made
    else:
        raise refusal(name)
