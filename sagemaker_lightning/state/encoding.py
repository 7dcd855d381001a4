"""Values as a checkpoint can hold them that is read with weights_only=True, and back, each as it was.

torch reads numbers, text, lists, tuples, dicts and tensors back from a file without running code; not a numpy scalar,
an array, a deque, a path, a named tuple. These are written as the plain value that they hold, with a note of what they
were. Of classes, only those that the reading program has imported itself are made again, and none of their code runs.
"""

import dataclasses
import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.torch_modules import keep_metadata
from sagemaker_lightning.contract.errors import UserError

SCALARS = (type(None), bool, int, float, complex, str, bytes)
READABLE = (*SCALARS, torch.dtype, torch.device, torch.Size, bytearray)
FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool}
SEQUENCES = {"set": set, "frozenset": frozenset}
NOTE, VALUE = "#", "value"
"""The keys of a dict that stands for a value of another type."""
DATA = torch.utils.data.Dataset, torch.utils.data.Sampler, torch.utils.data.DataLoader  # never made from a file


MANY = 256
"""Elements from which on a list is looked at for what its elements have in common."""


class NotPlain(TypeError):
    """A value that no checkpoint can hold."""

    def __init__(self, path: tuple, value: Any) -> None:
        kind = type(value)
        self.path, self.kind = path, f"{kind.__module__}.{kind.__qualname__}"
        super().__init__(f"{'.'.join(map(str, path))} is a {self.kind}")


def lowered(value: Any) -> tuple[tuple, Any] | None:
    """Return what a value is and the plainer value that it holds; None of a plain one; TypeError if there is none."""
    kind = type(value)
    if kind in READABLE or kind in (list, tuple, dict, OrderedDict) or isinstance(value, Tensor):
        return None
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return ("scalar", value.dtype.str), value.item()
    if kind is np.ndarray and value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype.itemsize <= 16:
        try:
            return ("array", value.dtype.str), torch.from_numpy(np.ascontiguousarray(value)).reshape(
                value.shape
            ).clone()
        except TypeError:  # a type that torch does not have
            return ("bytes", value.dtype.str, value.shape), value.tobytes()
    if kind is np.ndarray and value.dtype.kind in "biufcSUmM":
        return ("bytes", value.dtype.str, value.shape), value.tobytes()
    if kind is deque:
        return ("deque", value.maxlen), list(value)
    if kind in (set, frozenset):
        return (kind.__name__,), sorted(value, key=lambda one: (type(one).__name__, repr(one)))
    if kind is defaultdict and (value.default_factory is None or value.default_factory in FACTORIES.values()):
        return ("defaultdict", getattr(value.default_factory, "__name__", None)), dict(value)
    if kind is Counter:
        return ("counter",), dict(value)
    if isinstance(value, PurePath):
        return ("path",), str(value)
    if kind in (range, slice):
        return (kind.__name__,), (value.start, value.stop, value.step)
    name = (kind.__module__, kind.__qualname__)
    if isinstance(value, enum.Enum):
        return ("enum", *name), value.name
    if isinstance(value, tuple) and hasattr(kind, "_fields") and _known(*name) is kind:
        return ("named", *name), list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (*DATA, torch.nn.Module)) and _known(*name) is kind:
        return ("fields", *name), dict(vars(value)) if hasattr(value, "__dict__") else {}
    raise TypeError


def raised(note: tuple, value: Any) -> Any:
    """Return the value that `lowered` took apart; UserError if this program knows no such thing."""
    what, *more = note
    if what == "scalar":
        return np.dtype(more[0]).type(value)
    if what == "array":
        return value.numpy().astype(np.dtype(more[0]), copy=True)
    if what == "bytes":
        return np.frombuffer(value, dtype=np.dtype(more[0])).reshape(more[1]).copy()
    if what == "deque":
        return deque(value, maxlen=more[0])
    if what in SEQUENCES:
        return SEQUENCES[what](value)
    if what == "defaultdict":
        return defaultdict(FACTORIES.get(more[0]), value)
    if what == "counter":
        return Counter(value)
    if what == "path":
        return Path(value)
    if what in ("range", "slice"):
        return {"range": range, "slice": slice}[what](*value)
    if what == "on":
        return _moved(value, more[0])
    kind = _known(*more)
    if what == "enum" and isinstance(kind, enum.EnumMeta):
        return kind[value]
    if what == "named" and isinstance(kind, type) and issubclass(kind, tuple) and len(kind._fields) == len(value):
        return tuple.__new__(kind, value)
    if what == "fields" and dataclasses.is_dataclass(kind):
        made = object.__new__(kind)
        made.__dict__.update(value)
        return made
    raise UserError(f"a checkpoint holds a {'.'.join(map(str, more))}, which this program does not have")


def _known(module: str, name: str) -> Any:
    """Return what a module that is already imported calls so, or None."""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def encoded(value: Any, path: tuple = ()) -> Any:
    """Return `value` copied into plain values and tensors on the CPU, from which `decoded` makes it; else NotPlain."""
    kind = type(value)
    if kind in READABLE:
        return value
    if isinstance(value, Tensor):
        held, where = _copy(value), value.device.type
        return held if where == "cpu" else {NOTE: ("on", where), VALUE: held}
    if kind is list and set(map(type, value)) <= set(SCALARS):  # long ones, fast
        return value.copy()
    if kind in (list, tuple):
        if len(value) > MANY and (found := _together(value)):
            return {NOTE: ("together", kind.__name__, found[0]), VALUE: found[1]}
        return kind(encoded(one, (*path, place)) for place, one in enumerate(value))
    if kind in (dict, OrderedDict) and NOTE not in value:
        return kind((_key(key, path), encoded(one, (*path, key))) for key, one in value.items())
    try:
        note, plain = lowered(value) or (("dict",), list(value.items()))
    except TypeError:
        raise NotPlain(path, value) from None
    return {NOTE: note, VALUE: encoded(plain, path)}


def decoded(value: Any) -> Any:
    """Return what `encoded` was given."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(decoded(one) for one in value)
    if kind not in (dict, OrderedDict):
        return value.clone() if isinstance(value, Tensor) else value
    if NOTE in value and value[NOTE][0] == "together":
        return {"list": list, "tuple": tuple}[value[NOTE][1]](_apart(value[NOTE][2], value[VALUE]))
    if NOTE in value:
        note, held = value[NOTE], decoded(value[VALUE])
        return dict(held) if note[0] == "dict" else raised(note, held)
    return kind((key, decoded(one)) for key, one in value.items())


def without_devices(value: Any) -> Any:
    """Return what `encoded` has returned, without which device its tensors were on."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(without_devices, value))
    if kind not in (dict, OrderedDict):
        return value
    if NOTE in value and value[NOTE][0] == "on":
        return value[VALUE]
    return kind((key, without_devices(one)) for key, one in value.items())


def _together(values: Sequence) -> tuple[tuple, Any] | None:
    """Return what very many values have in common, and all of them as few arrays; None of those that differ.

    A replay buffer of 100,000 steps, each of two arrays and three numbers, is encoded and written in half a second of a
    core; one by one, that takes eleven.
    """
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds:
        return None
    if kind in SCALARS:
        return ("plain",), list(values)
    first = values[0]
    if kind is np.ndarray and first.size and first.dtype.kind in "biufc":
        if len({(one.dtype, one.shape) for one in values}) == 1:
            return ("arrays", first.shape), encoded(np.concatenate(values, axis=None))
    elif kind is Tensor and first.layout == torch.strided and not first.is_quantized:
        if len({(one.dtype, one.shape, one.device) for one in values}) == 1:
            return ("tensors",), encoded(torch.stack(tuple(values)))
    elif issubclass(kind, np.generic) and len({one.dtype for one in values}) == 1:
        return ("scalars",), encoded(np.array(values))
    elif issubclass(kind, tuple) and len(first) and len(set(map(len, values))) == 1:
        named = (kind.__module__, kind.__qualname__) if hasattr(kind, "_fields") and kind is not tuple else ()
        parts = [_together(part) for part in zip(*values, strict=True)]
        if all(parts) and (kind is tuple or (named and _known(*named) is kind)):
            return ("rows", named, [note for note, _ in parts]), [held for _, held in parts]
    return None


def _apart(note: tuple, held: Any) -> Iterable:
    """Return the values that `_together` took."""
    what, *more = note
    if what == "plain":
        return held
    if what == "tensors":
        return [one.clone() for one in decoded(held)]
    if what == "rows":
        rows = zip(*(_apart(*part) for part in zip(more[1], held, strict=True)), strict=True)
        return [raised(("named", *more[0]), row) for row in rows] if more[0] else list(rows)
    array = decoded(held)
    return list(array.reshape(-1, *more[0]) if what == "arrays" else array)


def plain(
    value: Any, notes: dict[tuple, tuple], otherwise: Callable[[NotPlain], Any], path: tuple = (), copies: bool = True
) -> Any:
    """Return `value` as others than this program can read it, too; `notes` gets what was of other types.

    `otherwise` is asked for what no checkpoint can hold. Tensors are copied to the CPU, or left where they are.
    """
    kind = type(value)
    if kind in READABLE:
        return value
    if isinstance(value, Tensor):
        return _copy(value) if copies else value
    try:
        if kind in (list, tuple):
            return kind(plain(one, notes, otherwise, (*path, place), copies) for place, one in enumerate(value))
        if isinstance(value, (dict, Mapping)) and kind not in (defaultdict, Counter):
            made = OrderedDict() if kind is OrderedDict else {}
            made.update(
                (_key(key, path), plain(one, notes, otherwise, (*path, key), copies)) for key, one in value.items()
            )
            keep_metadata(made, value)
            return made
        note, held = lowered(value)
    except NotPlain as error:
        return otherwise(error)
    except TypeError:
        return otherwise(NotPlain(path, value))
    notes[path] = note
    return plain(held, notes, otherwise, path, copies)


def restored(value: Any, notes: Mapping[tuple, tuple], path: tuple = ()) -> Any:
    """Return what `plain` was given; what has no note is not copied."""
    if not notes:
        return value
    kind = type(value)
    if kind in (dict, OrderedDict) and any(place[: len(path)] == path for place in notes):
        value = kind((key, restored(one, notes, (*path, key))) for key, one in value.items())
    elif kind in (list, tuple) and any(place[: len(path)] == path for place in notes):
        value = kind(restored(one, notes, (*path, place)) for place, one in enumerate(value))
    return raised(notes[path], value) if path in notes else value


def _key(key: Any, path: tuple) -> Any:
    if type(key) in SCALARS:
        return key
    if isinstance(key, np.generic):
        return key.item()
    if type(key) is tuple:
        return tuple(_key(one, path) for one in key)
    raise NotPlain((*path, key), key)


def _moved(tensor: Tensor, kind: str) -> Tensor:
    """Return a tensor on this process's device of a kind, such as "cuda"; where there is none, on the CPU."""
    there = torch.accelerator.current_accelerator(check_available=True)
    return tensor.to(kind) if there is not None and there.type == kind else tensor


def _copy(tensor: Tensor) -> Tensor:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return torch.empty(0, dtype=tensor.dtype)  # it has no values yet; the first batch gives it some
    return tensor.detach().to("cpu", copy=True)
