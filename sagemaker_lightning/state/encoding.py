"""Encode values so that a checkpoint read with weights_only=True can hold them.

Decoding returns each value as it was. Without running code, torch reads numbers, text, lists,
tuples, dicts and tensors from a file. It does not read a numpy scalar, an array, a deque, a path or
a named tuple. Those are written as the plain value that they hold, with a note of what they were.
Objects are created only of classes that the reading program has imported itself, and none of the
classes' code runs.
"""

import contextlib
import dataclasses
import enum
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from inspect import getattr_static
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch import Tensor

from sagemaker_lightning.compat import namespaces
from sagemaker_lightning.compat.torch_modules import keep_metadata
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.state.object_graph import is_own_module, namespace

SCALARS = (type(None), bool, int, float, complex, str, bytes)
FUNCTIONS = (FunctionType, BuiltinFunctionType)
READABLE = (*SCALARS, torch.dtype, torch.device, torch.Size, bytearray)
FACTORIES = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
    "bool": bool,
}
NOTE_KEY = "#"
VALUE_KEY = "value"
"""The keys of a dict that stands for a value of another type."""
GRAPH = ("graph",)
"""The note of a tensor that is the result of a calculation with gradients."""
# Never created from a file.
DATA_CLASSES = torch.utils.data.Dataset, torch.utils.data.Sampler, torch.utils.data.DataLoader


PACKED_FROM = 256
"""Lists with more elements than this are encoded as few arrays if their elements are alike."""


class NotPlain(TypeError):
    """A value that no checkpoint can hold.

    Args:
        path: Where the value is.
        value: The value.
    """

    def __init__(self, path: tuple, value: Any) -> None:
        class_ = type(value)
        self.path = path
        self.value = value
        self.kind = f"{class_.__module__}.{class_.__qualname__}"
        if class_ is Tensor:  # most can be saved
            layout = "nested" if value.is_nested else "meta" if value.is_meta else value.layout
            self.kind += f" ({layout})"
        super().__init__(f"{'.'.join(map(str, path))} is a {self.kind}")


def to_plainer(value: Any) -> tuple[tuple, Any] | None:
    """Return a note of a value's type and the plainer value that it holds.

    Returns:
        None if the value is plain already.

    Raises:
        TypeError: No checkpoint can hold the value.
    """
    class_ = type(value)
    if (
        class_ in READABLE
        or class_ in (list, tuple, dict, OrderedDict)
        or (isinstance(value, Tensor) and not _is_of_users_class(value))
    ):
        return None
    if isinstance(value, (np.generic, np.ndarray)) and (plainer := _array_to_plainer(value)):
        return plainer
    if class_ is deque:
        return ("deque", value.maxlen), list(value)
    if class_ is set and all(map(_has_one_hash, value)):
        return ("set",), list(value)
    if class_ in (set, frozenset):
        return (class_.__name__,), _sorted(value)
    if class_ is defaultdict and (
        value.default_factory is None or value.default_factory in FACTORIES.values()
    ):
        return ("defaultdict", getattr(value.default_factory, "__name__", None)), dict(value)
    if class_ is Counter:
        return ("counter",), dict(value)
    if isinstance(value, PurePath):
        return ("path",), str(value)
    if class_ is array:
        return ("numbers", value.typecode), value.tobytes()
    if class_ in (range, slice):
        return (class_.__name__,), (value.start, value.stop, value.step)
    try:
        return _named_to_plainer(value)
    except Exception as error:  # an object of any class may raise anything when it is looked at
        raise TypeError(type(value)) from error


def _named_to_plainer(value: Any) -> tuple[tuple, Any]:
    """Return what `to_plainer` does of a function, and of an object of a user's class."""
    if type(value) in (Decimal, Fraction):  # Python writes no number of very many digits
        return (type(value).__name__,), str(value)
    if isinstance(value, FUNCTIONS) and (function_name := _function_name(value)):
        return ("function",), function_name
    class_ = type(value)
    name = (class_.__module__, class_.__qualname__)
    if isinstance(value, enum.Flag) and _imported(*name) is class_:  # which may have no one name
        return ("flag", *name), value.value
    if isinstance(value, enum.Enum) and _imported(*name) is class_:
        return ("enum", *name), value.name
    if isinstance(value, Tensor) and _imported(*name) is class_:
        tensor = value.as_subclass(Tensor)
        return ("tensor", *name), [tensor, vars(value).copy()] if vars(value) else tensor
    if isinstance(value, tuple) and hasattr(class_, "_fields") and _imported(*name) is class_:
        return ("named", *name), list(value)
    if _is_data_class(class_) and _imported(*name) is class_:
        # A field in a slot is not in `__dict__`, which may have more than fields. Any other
        # descriptor of the class is a user's code.
        slots = [
            field.name
            for field in dataclasses.fields(value)
            if isinstance(getattr_static(class_, field.name, None), MemberDescriptorType)
            and hasattr(value, field.name)
        ]
        return ("fields", *name), getattr(value, "__dict__", {}) | {
            slot: getattr(value, slot) for slot in slots
        }
    raise TypeError


def _function_name(function: Any) -> tuple[str, str] | None:
    """Return the module and the name by which `_function` finds a function, or None."""
    module = function.__module__
    # A function of a C++ extension may have no __qualname__ (Boost.Python's).
    for name in (getattr(function, "__qualname__", ""), function.__name__):
        if module and _imported(module, name) is function and _is_calculating(function):
            return module, name
    return None


def _function(names: tuple[str, str]) -> Any:
    """Return the function of a user or of torch that `_function_name` has named.

    Raises:
        UserError: This program does not have it.
    """
    function = _imported(*names)
    if not isinstance(function, FUNCTIONS) or not _is_calculating(function):
        raise UserError(f"a checkpoint holds {'.'.join(names)}, which this program does not have")
    return function


def _is_calculating(function: Any) -> bool:
    """Return whether a function is a user's, or calculates with tensors.

    A checkpoint names no other one, such as one that runs a program: it is input, and what the
    program has imported may do anything.
    """
    module = function.__module__ or ""
    is_builtin = isinstance(function, BuiltinFunctionType)
    return (
        module.startswith(("torch.nn.functional", "torch._C._nn", "torch._C._special"))
        or (module == "torch" and is_builtin)
        or (is_own_module(module) and not is_builtin)
    )


def _array_to_plainer(value: np.generic | np.ndarray) -> tuple[tuple, Any] | None:
    """Return what `to_plainer` does of an array or a scalar of numpy; None if it is not plain."""
    if isinstance(value, np.generic):
        if _is_plain_scalar(value):
            return ("scalar", value.dtype.str), value.item()
        # Such as a date, a record or a long double.
        if not is_readable(value.dtype):
            return None
        return ("item", dtype_to_descr(value.dtype)), value.tobytes()
    if type(value) is not np.ndarray:
        return None
    if value.dtype.kind in "biufc" and value.dtype.isnative:
        with contextlib.suppress(TypeError):  # torch does not have this type
            return ("array", value.dtype.str), torch.from_numpy(
                np.ascontiguousarray(value)
            ).reshape(value.shape).clone()
    if value.dtype.kind == "O":
        return ("objects", value.shape), value.ravel().tolist()
    if not is_readable(value.dtype):
        return None
    return ("bytes", dtype_to_descr(value.dtype), value.shape), value.tobytes()


def _is_plain_scalar(value: np.generic) -> bool:
    """Return whether a scalar of numpy is a number or a text that Python has, too.

    A date is none, nor is a long double.
    """
    return value.dtype.kind in "biufcSU" and type(value.item()) in SCALARS


def is_readable(dtype: np.dtype) -> bool:
    """Return whether an array of this type can be made again of its bytes."""
    try:
        return dtype.kind in "biufcSUmMV" and not dtype.hasobject and bool(dtype_to_descr(dtype))
    except ValueError:  # fields that overlap, or in another order than their bytes
        return False


def _has_one_hash(value: Any) -> bool:
    """Return whether a value has the same hash in each process, as numbers have."""
    return type(value) in (int, float, bool) or (
        type(value) is tuple and all(map(_has_one_hash, value))
    )


def _sorted(values: Iterable) -> list:
    return sorted(values, key=lambda element: (type(element).__name__, repr(element)))


def _array_of_objects(values: Sequence, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array whose elements are these values, even if they are lists."""
    array_ = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array_[index] = value
    return array_.reshape(shape)


NUMBERS = bool, int, float, complex
# How a value is made of the plainer one and the details of the note, by the kind of the note; and
# the types that the plainer one may have.
OF_PLAINER: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "scalar": (lambda value, dtype: _scalar(value, np.dtype(dtype)), (*NUMBERS, str, bytes)),
    "item": (lambda value, form: _from_bytes(value, form)[0], (bytes,)),
    "array": (lambda value, dtype: _numeric_array(value, np.dtype(dtype)), (Tensor,)),
    "bytes": (lambda value, form, shape: _from_bytes(value, form).reshape(shape), (bytes,)),
    "objects": (_array_of_objects, (list,)),
    "deque": (lambda value, length: deque(value, maxlen=length), (list,)),
    "set": (set, (list,)),
    "frozenset": (frozenset, (list,)),
    "defaultdict": (lambda value, factory: defaultdict(FACTORIES.get(factory), value), (dict,)),
    "counter": (Counter, (dict,)),
    "path": (Path, (str,)),
    "function": (_function, (tuple,)),
    "Decimal": (Decimal, (str,)),
    "Fraction": (lambda value: _fraction(value), (str,)),
    "numbers": (lambda value, typecode: array(typecode, value), (bytes,)),
    "range": (lambda value: range(*value), (tuple,)),
    "slice": (lambda value: slice(*value), (tuple,)),
    "on": (lambda value, device_type: on_device(value, device_type), (Tensor,)),
    "dict": (dict, (list,)),
    "OrderedDict": (OrderedDict, (list,)),
}


def _scalar(value: Any, dtype: np.dtype) -> np.generic:
    """Return a scalar of numpy. Its value has the type of the scalar, and not a length, say."""
    types = {"S": (bytes,), "U": (str,)}.get(dtype.kind, NUMBERS)
    if dtype.kind not in "biufcSU" or not isinstance(value, types):
        raise TypeError
    return dtype.type(value)


def _numeric_array(value: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return an array of numbers; an array of text would be of any size."""
    if dtype.kind not in "biufc":
        raise TypeError
    return value.numpy().astype(dtype, copy=True)


def _from_bytes(content: bytes, form: Any) -> np.ndarray:
    return np.frombuffer(content, dtype=descr_to_dtype(form)).copy()


def _fraction(text: str) -> Fraction:
    """Return the fraction that `str` has written; an exponent would make it of any size."""
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator), int(denominator or 1))


def from_plainer(note: tuple, value: Any) -> Any:
    """Return the value that `to_plainer` took apart.

    Args:
        note: The note of the value's type.
        value: The plainer value.

    Raises:
        UserError: This program does not have the value's class, or the value is none of it.
    """
    try:
        kind_of_value, *details = note
        if kind_of_value not in OF_PLAINER:
            return _of_class(kind_of_value, value, *details)
        make, types = OF_PLAINER[kind_of_value]
        if isinstance(value, types):
            return make(value, *details)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # what numpy and Python say of values that are none
        raise _refusal(note) from error
    raise _refusal(note)


def _refusal(note: Any) -> UserError:
    """Return the error for a value that is not what its note says."""
    return UserError(
        f"a checkpoint holds something noted as {printable(repr(note))[:200]}, which it is not, or "
        "no value is; restore the checkpoint from a copy, or move it away"
    )


def _of_class(kind_of_value: str, value: Any, module: str, name: str) -> Any:
    """Return an object of a class that this program has imported; none of its code runs."""
    class_ = _imported(module, name)
    if isinstance(class_, enum.EnumMeta):
        if kind_of_value == "flag" and issubclass(class_, enum.Flag) and type(value) is int:
            return class_(value)
        if kind_of_value == "enum" and value in class_.__members__:
            return class_[value]
    elif isinstance(class_, type):
        if kind_of_value == "named" and issubclass(class_, tuple):
            if len(class_._fields) == len(value):
                return tuple.__new__(class_, value)
        elif kind_of_value == "tensor" and issubclass(class_, Tensor) and _is_users(class_):
            tensor, attributes = value if isinstance(value, list) else (value, {})
            tensor = tensor.as_subclass(class_)
            tensor.__dict__.update(attributes)
            return tensor
        elif kind_of_value == "fields" and _is_data_class(class_):
            return _with_fields(class_, value)
    raise UserError(
        f"a checkpoint holds a {printable(f'{module}.{name}')[:200]}, which this program does not "
        "have"
    )


def _is_data_class(class_: type) -> bool:
    return dataclasses.is_dataclass(class_) and not issubclass(
        class_, (*DATA_CLASSES, torch.nn.Module)
    )


def _with_fields(class_: type, values: Mapping[str, Any]) -> Any:
    """Return an object of a dataclass with these attributes, none in place of a method."""
    object_ = object.__new__(class_)
    for field, part in values.items():
        member = getattr_static(class_, field, None)
        if isinstance(member, MemberDescriptorType):  # a slot
            object.__setattr__(object_, field, part)  # even if the class is frozen
        elif not isinstance(member, FUNCTIONS) or isinstance(part, FUNCTIONS):
            object_.__dict__[field] = part
    return object_


def _imported(module: str, name: str) -> Any:
    """Return the object of that name in a module that is already imported, or None.

    A checkpoint may have been written with the other distribution of Lightning.
    """
    object_: Any = sys.modules.get(module) or sys.modules.get(namespaces.first_name(module))
    for part in name.split("."):
        # A module may import what is asked for, and a class run code: neither is asked.
        is_class = isinstance(object_, type)
        object_ = getattr_static(object_, part, None) if is_class else namespace(object_).get(part)
        object_ = object_.__func__ if isinstance(object_, staticmethod) else object_
    return object_


def encode(value: Any, path: tuple = ()) -> Any:
    """Return a copy of `value` in plain values and tensors on the CPU, for `decode`.

    Args:
        value: The value.
        path: Where the value is, for the error.

    Raises:
        NotPlain: No checkpoint can hold it, or a part of it, or it holds itself.
    """
    try:
        return _encode(value, path)
    except RecursionError:
        raise NotPlain(path, value) from None


def _encode(value: Any, path: tuple) -> Any:
    class_ = type(value)
    if class_ in READABLE:
        return bytearray(value) if class_ is bytearray else value
    if isinstance(value, Tensor) and not _is_of_users_class(value):
        copy = _cpu_copy(value, path)
        device = value.device.type
        copy = copy if device == "cpu" else {NOTE_KEY: ("on", device), VALUE_KEY: copy}
        return copy if value.grad_fn is None else {NOTE_KEY: GRAPH, VALUE_KEY: copy}
    if class_ is list and set(SCALARS).issuperset(map(type, value)):  # fast for long lists
        return value.copy()
    if class_ in (list, tuple):
        if len(value) > PACKED_FROM and (arrays := _as_arrays(value)):
            return {NOTE_KEY: ("together", class_.__name__, arrays[0]), VALUE_KEY: arrays[1]}
        return class_(_encode(element, (*path, index)) for index, element in enumerate(value))
    if class_ in (dict, OrderedDict) and (keys := _plain_keys(value)) is not None:
        return class_(
            (plain, _encode(element, (*path, key)))
            for plain, (key, element) in zip(keys, value.items(), strict=True)
        )
    try:
        note, plainer = to_plainer(value) or ((class_.__name__,), list(value.items()))
    except TypeError:
        raise NotPlain(path, value) from None
    return {NOTE_KEY: note, VALUE_KEY: _encode(plainer, path)}


def decode(value: Any) -> Any:
    """Return the value that `encode` was given.

    Args:
        value: What `encode` returned.

    Raises:
        UserError: `encode` returned no such value: it is of a forged checkpoint, or of one whose
            classes this program does not have.
    """
    try:
        return _decode(value)
    except RecursionError:
        raise UserError("a checkpoint holds a value within too many others") from None


def _decode(value: Any) -> Any:
    class_ = type(value)
    if class_ in (list, tuple):
        return class_(_decode(element) for element in value)
    if class_ not in (dict, OrderedDict):
        if class_ is bytearray:
            return bytearray(value)
        return value.clone() if isinstance(value, Tensor) else value
    if NOTE_KEY not in value:
        return class_((key, _decode(element)) for key, element in value.items())
    note = _note_of(value)
    if note[0] == "together":
        return _unpacked(note, value[VALUE_KEY])
    plain_value = _decode(value[VALUE_KEY])
    return _with_graph(plain_value) if note == GRAPH else from_plainer(note, plain_value)


def _note_of(value: Mapping) -> tuple:
    """Return the note of a dict that stands for a value of another type.

    Raises:
        UserError: `encode` returned no such dict.
    """
    note = value[NOTE_KEY]
    if not isinstance(note, tuple) or not note or not isinstance(note[0], str):
        raise _refusal(note)
    if VALUE_KEY not in value:
        raise _refusal(note)
    return note


def _with_graph(tensor: Any) -> Tensor:
    """Return a tensor that requires a gradient and, as a result, is no leaf."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        raise _refusal(GRAPH)
    with torch.enable_grad():  # a leaf could not be changed in place
        return tensor.requires_grad_().clone()


def comparable(value: Any) -> Any:
    """Return what `encode` returned, without what may differ where the values are equal.

    That is the device of a tensor, and the order of a set.
    """
    class_ = type(value)
    if class_ in (list, tuple):
        return class_(map(comparable, value))
    if class_ not in (dict, OrderedDict):
        return value
    kind_of_value = _note_of(value)[0] if NOTE_KEY in value else ""
    if kind_of_value == "on":
        return value[VALUE_KEY]
    if kind_of_value == "set" and isinstance(value[VALUE_KEY], list):
        return {NOTE_KEY: ("set",), VALUE_KEY: _sorted(value[VALUE_KEY])}
    return class_((key, comparable(element)) for key, element in value.items())


def _as_arrays(values: Sequence) -> tuple[tuple, Any] | None:
    """Return very many values as few arrays, with a note; None if they are not alike.

    A replay buffer of 100,000 steps, each of two arrays and three numbers, is encoded and written
    in half a second of a core; one by one, that takes eleven.
    """
    classes = set(map(type, values))
    class_ = classes.pop()
    if classes:
        return None
    if class_ in SCALARS:
        return ("plain",), list(values)
    first_value = values[0]
    if class_ is np.ndarray and first_value.size and first_value.dtype.kind in "biufc":
        if len({(value.dtype, value.shape) for value in values}) == 1:
            return ("arrays", first_value.shape), encode(np.concatenate(values, axis=None))
    elif class_ is Tensor and first_value.layout == torch.strided and first_value.numel():
        if first_value.is_quantized or any(
            value.grad_fn is not None or value.is_nested or value.is_meta for value in values
        ):
            return None
        if len({(value.dtype, value.shape, value.device, value.layout) for value in values}) == 1:
            return ("tensors",), encode(torch.stack([value.detach() for value in values]))
    elif issubclass(class_, np.generic) and len({value.dtype for value in values}) == 1:
        return ("scalars",), encode(np.array(values))
    elif issubclass(class_, tuple) and len(first_value) and len(set(map(len, values))) == 1:
        class_name = (
            (class_.__module__, class_.__qualname__)
            if hasattr(class_, "_fields") and class_ is not tuple
            else ()
        )
        parts = [_as_arrays(part) for part in zip(*values, strict=True)]
        if all(parts) and (class_ is tuple or (class_name and _imported(*class_name) is class_)):
            return ("rows", class_name, [note for note, _ in parts]), [
                arrays for _, arrays in parts
            ]
    return None


def _unpacked(note: tuple, arrays: Any) -> list | tuple:
    """Return the list or tuple of which `_as_arrays` has made arrays."""
    try:
        _, class_name, form = note
        return {"list": list, "tuple": tuple}[class_name](_from_arrays(form, arrays))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # what torch and Python say of values that are none
        raise _refusal(note) from error


def _from_arrays(note: tuple, arrays: Any) -> Iterable:
    """Return the values that `_as_arrays` was given."""
    form, *details = note
    if form == "plain" and isinstance(arrays, list):
        return arrays
    if form == "rows":
        rows = zip(
            *(_from_arrays(*part) for part in zip(details[1], arrays, strict=True)), strict=True
        )
        return (
            [from_plainer(("named", *details[0]), row) for row in rows]
            if details[0]
            else list(rows)
        )
    array = decode(arrays)
    size = array.numel() if isinstance(array, Tensor) else array.size
    if not size:  # it may have any number of empty rows
        raise TypeError
    if form == "tensors":
        return [tensor.clone() for tensor in array]
    if form in ("arrays", "scalars") and isinstance(array, np.ndarray):
        return list(array.reshape(-1, *details[0]) if form == "arrays" else array)
    raise TypeError


class _HoldsItself(Exception):
    """Raised with the id of an object that is part of itself."""


def to_plain(
    value: Any,
    notes: dict[tuple, tuple],
    on_refusal: Callable[[NotPlain], Any],
    path: tuple = (),
    copies: bool = True,
    within: frozenset[int] = frozenset(),
) -> Any:
    """Return a copy of `value` in plain values that other programs can read, too.

    Args:
        value: The value.
        notes: Gets a note for each value of another type, by its path.
        on_refusal: Is called with the error for what no checkpoint can hold, or what holds itself;
            what it returns is used instead.
        path: Where the value is.
        copies: Whether tensors are copied to the CPU. If not, they are left as they are.
        within: The ids of the objects that the value is part of.
    """
    class_ = type(value)
    if class_ in READABLE:
        return bytearray(value) if class_ is bytearray and copies else value
    if isinstance(value, Tensor) and not _is_of_users_class(value):
        try:
            return _cpu_copy(value, path) if copies else value
        except NotPlain as error:
            return on_refusal(error)
    if id(value) in within:
        raise _HoldsItself(id(value))
    try:
        return _to_plain(value, notes, path, on_refusal, copies, within | {id(value)})
    except _HoldsItself as error:
        if error.args != (id(value),):
            raise
        for noted_path in [noted_path for noted_path in notes if noted_path[: len(path)] == path]:
            del notes[noted_path]
        return on_refusal(NotPlain(path, value))


def _to_plain(
    value: Any,
    notes: dict[tuple, tuple],
    path: tuple,
    on_refusal: Callable[[NotPlain], Any],
    copies: bool,
    within: frozenset[int],
) -> Any:
    class_ = type(value)
    try:
        if class_ in (list, tuple):
            return class_(
                to_plain(element, notes, on_refusal, (*path, index), copies, within)
                for index, element in enumerate(value)
            )
        if isinstance(value, (dict, Mapping)) and class_ not in (defaultdict, Counter):
            copy = OrderedDict() if class_ is OrderedDict else {}
            copy.update(
                (
                    _plain_key(key, path),
                    to_plain(element, notes, on_refusal, (*path, key), copies, within),
                )
                for key, element in value.items()
            )
            keep_metadata(copy, value)
            return copy
        note, plain_value = to_plainer(value)
    except NotPlain as error:
        return on_refusal(error)
    except TypeError:
        return on_refusal(NotPlain(path, value))
    notes[path] = note
    return to_plain(plain_value, notes, on_refusal, path, copies, within)


RECREATED = "own"
"""The kind of the note of an object that this program makes again; with the object's name."""


def from_plain(
    value: Any, notes: Mapping[tuple, tuple], objects: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return the value that `to_plain` was given; parts without notes are not copied.

    Args:
        value: What `to_plain` returned.
        notes: The notes that it made.
        objects: The objects that notes of kind RECREATED name.
    """
    noted = {path[:length] for path in notes for length in range(len(path) + 1)}
    return _from_plain(value, notes, objects, (), noted)


def _from_plain(
    value: Any,
    notes: Mapping[tuple, tuple],
    objects: Mapping[str, Any],
    path: tuple,
    noted: Container[tuple],
) -> Any:
    if path not in noted:
        return value
    note = notes.get(path, ("",))
    if note[0] == RECREATED:
        if note[1] not in objects:
            raise UserError(
                f"a checkpoint holds {printable(str(note[1]))[:200]}, which this program does not "
                "have"
            )
        return objects[note[1]]
    class_ = type(value)
    if class_ in (dict, OrderedDict):
        value = class_(
            (key, _from_plain(element, notes, objects, (*path, key), noted))
            for key, element in value.items()
        )
    elif class_ in (list, tuple):
        value = class_(
            _from_plain(element, notes, objects, (*path, index), noted)
            for index, element in enumerate(value)
        )
    return from_plainer(note, value) if path in notes else value


def _plain_keys(value: Mapping) -> list | None:
    """Return the keys of a dict as plain values; None if one has none, such as an Enum's member."""
    try:
        return None if NOTE_KEY in value else [_plain_key(key, ()) for key in value]
    except NotPlain:
        return None


def _plain_key(key: Any, path: tuple) -> Any:
    """Return the key of a dict as a plain value; NotPlain if it has none."""
    if type(key) in SCALARS:
        return key
    if isinstance(key, np.generic) and _is_plain_scalar(key):
        return key.item()
    if type(key) is tuple:
        return tuple(_plain_key(element, path) for element in key)
    raise NotPlain((*path, key), key)


def on_device(tensor: Tensor, device_type: str) -> Tensor:
    """Return a tensor on this process's device of a kind, such as "cuda".

    Without such a device, it is on the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (
        tensor.to(device_type)
        if accelerator is not None and accelerator.type == device_type
        else tensor
    )


def _is_of_users_class(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that torch does not read: a tensor that knows more.

    A class that wraps other tensors, such as quantized ones, reads and writes itself.
    """
    return _is_users(type(tensor))


def _is_users(class_: type[Tensor]) -> bool:
    is_wrapper = class_.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return class_.__module__.partition(".")[0] != "torch" and not is_wrapper


def _cpu_copy(tensor: Tensor, path: tuple) -> Tensor:
    """Return a copy of a tensor on the CPU; an empty one for a lazy tensor.

    Raises:
        NotPlain: It has rows of different lengths, or no values ("meta"), or its layout is one that
            torch does not copy.
    """
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return torch.empty(0, dtype=tensor.dtype)  # it has no values before the first batch
    if tensor.is_nested:
        raise NotPlain(path, tensor)
    try:
        return tensor.detach().to("cpu", copy=True)
    except NotImplementedError:
        raise NotPlain(path, tensor) from None
