"""The plain state of a user's objects: find changes, save and restore them.

Plain state is counters, lists, numbers and arrays.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import pickle
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from pytorch_lightning.core.mixins import HyperparametersMixin
from torch import Tensor, nn

from sagemaker_lightning.compat.torch_modules import buffers, parameters
from sagemaker_lightning.state.encoding import (
    NOTE_KEY,
    VALUE_KEY,
    NotPlain,
    decode,
    encode,
    fill_set,
    is_readable,
)
from sagemaker_lightning.state.object_graph import (
    GENERATORS,
    MAX_ELEMENTS,
    Added,
    attributes,
    closure,
    has_place_for,
    is_library_class,
    namespace,
    walk,
)

# Lightning saves these hyperparameters. It does not restore changes made while training.
HYPERPARAMETERS = "_hparams"
# Values with up to so many elements are compared in full. Of longer ones, which are mostly data,
# some elements are compared.
COMPARED_IN_FULL = 1 << 16
MAX_COPIED = 1 << 20  # elements, at most, of a value that `copies` returns
MAX_SAVED = 1 << 26  # elements, at most, of a value that is saved
MAX_CHECKSUMMED_BYTES = 1 << 28  # bytes, at most, of an array whose checksum is taken


Owners = list[tuple[str, Any]]
"""Objects that hold values, each with its path."""


class PlainState:
    """The plain state of the objects reached from `roots`.

    Values are known by (path of the object, name of the attribute). Only what has changed since
    `mark` matters: the program creates what was there at the start, and a resumed run may rightly
    have another value there, such as the name of a folder.

    Args:
        roots: Returns the objects to start from, by name.
        skip: Classes whose objects are not entered.
    """

    def __init__(self, roots: Callable[[], Mapping[str, Any]], skip: tuple = ()) -> None:
        self.roots = roots
        self.skip = skip
        self.at_start: dict[tuple[str, str], bytes] = {}
        self.opaque_at_start: dict[tuple[str, str], Any] = {}

    def mark(self) -> None:
        """Take the present state as the one at the start."""
        owners = self._owners()
        values = self._plain_values(owners)
        self.at_start = {key: _fingerprint(value) for key, value in values.items()}
        self.opaque_at_start = self._opaque_values(owners, values)

    def copies(self) -> dict[tuple[str, str], Any]:
        """Return copies of the present plain values, for `encode_changes` and `encode_all`.

        Values with more than MAX_COPIED elements are left out. Of other long containers, the
        elements are not copied.
        """
        return {
            key: _snapshot(value)
            for key, value in self._plain_values(self._owners()).items()
            if _size(value) <= MAX_COPIED
        }

    def encode_all(
        self, kept: Mapping[tuple[str, str], Any] | None = None
    ) -> dict[tuple[str, str], Any]:
        """Return all plain values, encoded.

        Args:
            kept: What `copies` returned; without it, the present values are returned.
        """
        values = {}
        present = self._plain_values(self._owners()) if kept is None else kept
        for key, value in present.items():
            with contextlib.suppress(NotPlain):
                values[key] = encode(value)
        return values

    def encode_changes(
        self, kept: Mapping[tuple[str, str], Any] | None = None
    ) -> dict[tuple[str, str], Any]:
        """Return the plain values that have changed since `mark`, encoded.

        Args:
            kept: What `copies` returned; without it, the present values are returned.
        """
        values = {}
        owners = self._owners()
        plain_values = self._plain_values(owners) if kept is None else kept
        for key, value in plain_values.items():
            with contextlib.suppress(NotPlain):
                is_large = _size(value) > COMPARED_IN_FULL
                encoded_value = None if is_large else encode(value)
                is_unchanged = self.at_start.get(key) == (
                    _sampled_hash(value) if is_large else _full_hash(encoded_value)
                )
                if not is_unchanged and _size(value) <= MAX_SAVED:
                    values[key] = encode(value) if is_large else encoded_value
        if kept is None:
            values |= {
                key: description
                for key, description in self._opaque_values(owners, plain_values).items()
                if self.opaque_at_start.get(key, description) != description
            }
        return values

    def _opaque_values(
        self, owners: Owners, plain: Container[tuple[str, str]]
    ) -> dict[tuple[str, str], Any]:
        """Return what the attributes are whose values are not plain: a class, or a function.

        Args:
            owners: What `_owners` returned.
            plain: The attributes whose values are plain.
        """
        return {
            (path, name): _describe(owner, value)
            for path, owner in owners
            if not _has_elements_only(owner)
            for name, value in attributes(owner).items()
            if (path, name) not in plain
        }

    def restore(self, saved: Mapping[tuple[str, str], Any]) -> None:
        """Restore what `encode_changes` returned.

        Args:
            saved: What `encode_changes` returned.
        """
        owners = dict(self._owners())
        settled_ids = _module_tensor_ids(owners.values())
        for (path, name), value in saved.items():
            if (owner := owners.get(path)) is None:
                continue
            restored = _method(owner, value) if _is_description(value) else decode(value)
            if restored is not NO_VALUE and self._saves(owner, name, restored):
                _set_attribute(owner, name, restored, settled_ids)

    def _saves(self, owner: Any, name: str, value: Any) -> bool:
        """Return whether `encode_changes` would return a value if an object had it by this name."""
        if name == HYPERPARAMETERS and isinstance(owner, HyperparametersMixin):
            return isinstance(value, dict)
        return self._is_owner(owner) and has_place_for(owner, name, value)

    def _is_owner(self, value: Any) -> bool:
        """Return whether the attributes of an object that is reached are its user's state."""
        left_out = (*GENERATORS, *self.skip, types.MethodType, type)
        return not _has_elements_only(value) and not isinstance(value, left_out)

    def _owners(self) -> Owners:
        """Return the objects that hold the values, each with its path."""
        return list(walk(self.roots(), self.skip, code=False))

    def _plain_values(self, owners: Owners) -> dict[tuple[str, str], Any]:
        """Return all plain values of owners by path and attribute."""
        values = {}
        owned = _module_tensor_ids(owner for _, owner in owners)
        for path, owner in owners:
            if not self._is_owner(owner):
                continue
            for name, value in (attributes(owner) | _hyperparameters(owner)).items():
                if _is_plain(value) and not _is_of_modules(value, owned):
                    values[path, name] = value
        return values


METHOD = ("method",)
OBJECT = ("object",)
"""Notes of the description of a value that is not plain: a method of its owner, or any other."""


def _describe(owner: Any, value: Any) -> dict[str, Any]:
    """Return, encoded, the name of a method of the owner's, or of an object's class or function."""
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return {NOTE_KEY: METHOD, VALUE_KEY: value.__func__.__name__}
    return {NOTE_KEY: OBJECT, VALUE_KEY: _name_of(value)}


NO_VALUE = object()


def _method(owner: Any, description: Mapping[str, Any]) -> Any:
    """Return the method of the owner's that `_describe` has described; NO_VALUE if it is none."""
    name = description.get(VALUE_KEY)
    if description[NOTE_KEY] != METHOD or isinstance(owner, Added) or not isinstance(name, str):
        return NO_VALUE
    is_method = isinstance(getattr_static(type(owner), name, None), types.FunctionType)
    return getattr(owner, name) if is_method else NO_VALUE


def _name_of(value: Any) -> str:
    """Return a name by which another function, or an object of another class, is recognised."""
    if isinstance(value, functools.partial):
        return f"{_name_of(value.func)} {digest([value.args, value.keywords]).hex()}"
    if isinstance(value, types.FunctionType):
        # Lambdas of one function have one name.
        return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
    is_named = isinstance(value, (type, types.MethodType, types.BuiltinFunctionType))
    named = value if is_named and hasattr(value, "__qualname__") else type(value)
    # A lazy module gets its final class with the first batch.
    return f"{named.__module__}.{named.__qualname__.removeprefix('Lazy')}"


def _is_description(value: Any) -> bool:
    """Return whether an encoded value is what `_describe` returned."""
    return type(value) is dict and value.get(NOTE_KEY) in (METHOD, OBJECT)


def _snapshot(value: Any) -> Any:
    """Return a copy of a value; a shallow one if it is a long container."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if _size(value) > MAX_ELEMENTS:
        return copy.copy(value)
    with contextlib.suppress(NotPlain):
        return decode(encode(value))
    return value


CONTAINERS = (list, tuple, dict, deque, set)


def _module_tensor_ids(owners: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters and buffers of all modules among objects."""
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    return {
        id(tensor)
        for module in modules
        for tensor in (*parameters(module).values(), *buffers(module).values())
    }


def _is_of_modules(value: Any, owned: set[int]) -> bool:
    """Return whether a value is only parameters and buffers that modules have.

    An example is an LSTM's list of its own weights.
    """
    if isinstance(value, Tensor):
        return id(value) in owned
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(_is_of_modules(element, owned) for element in value)
    )


def _hyperparameters(owner: Any) -> dict[str, Any]:
    """Return a module's or data module's plain hyperparameters, as one attribute."""
    hyperparameters = (
        namespace(owner).get(HYPERPARAMETERS) if isinstance(owner, HyperparametersMixin) else None
    )
    return (
        {}
        if hyperparameters is None
        else {
            HYPERPARAMETERS: {
                key: value for key, value in hyperparameters.items() if _is_plain(value)
            }
        }
    )


def _has_elements_only(value: Any) -> bool:
    """Return whether a value is a container of a library's class.

    One of a user's class may have attributes, too, and so may a partial function.
    """
    return (
        isinstance(value, (dict, list, tuple, deque))
        and not isinstance(value, functools.partial)
        and is_library_class(type(value))
    )


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value can be encoded, judged by its first elements."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.parameter.UninitializedTensorMixin)
    if isinstance(
        value,
        (str, bytes, int, float, complex, bool, type(None), np.generic, torch.dtype, torch.device),
    ):
        return True
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return depth == 0 or is_readable(value.dtype)  # one that cannot be saved is told
    if depth > 8:
        return False
    if isinstance(value, (list, tuple, dict, deque, set, frozenset, np.ndarray)):
        elements = itertools.islice(_elements(value), MAX_ELEMENTS)
        return all(_is_plain(element, depth + 1) for element in elements)
    try:
        encode(value)
    except NotPlain:
        return False
    return True


def _elements(value: Any) -> Iterable[Any]:
    """Return the elements of a container or an array; of a dict, its values."""
    if isinstance(value, dict):
        return value.values()
    return value.ravel() if isinstance(value, np.ndarray) else value


def _size(value: Any) -> int:
    """Return the number of elements of a value; 1 if it is no container."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return (
        len(value)
        if isinstance(value, (list, tuple, dict, deque, set, frozenset, str, bytes))
        else 1
    )


def is_small(value: Any) -> bool:
    """Return whether a value has so few elements that all of them can be read at any time."""
    return _size(value) <= COMPARED_IN_FULL


def digest(value: Any) -> bytes:
    """Return bytes that identify a plain value; empty if it is not plain."""
    try:
        return _full_hash(encode(value))
    except NotPlain:
        return b""


def _fingerprint(value: Any) -> bytes:
    """Return bytes that tell, in this process, whether a value changes.

    Of what a container holds that is not plain, it tells which objects they are. Empty for any
    other value that is not plain, but for an array: a memory map is in a file already.
    """
    try:
        return (
            _sampled_hash(value) if _size(value) > COMPARED_IN_FULL else _full_hash(encode(value))
        )
    except NotPlain:
        if isinstance(value, Tensor):
            # One of torch's own classes has no values that can be read, such as on "meta".
            is_torchs = is_library_class(type(value))
            return b"" if is_torchs else digest(value.as_subclass(Tensor))
        if isinstance(value, CONTAINERS):
            return _full_hash(_with_ids(value))
        is_in_memory = isinstance(value, np.ndarray) and not isinstance(value, np.memmap)
        return _full_hash(value.tobytes()) if is_in_memory else b""


def _with_ids(value: Any) -> Any:
    """Return a container's elements, encoded; of one that is not plain, its id."""
    if isinstance(value, dict):
        return [type(value).__name__, _with_ids(list(value)), _with_ids(list(value.values()))]
    if isinstance(value, CONTAINERS):
        return [type(value).__name__, *map(_with_ids, value)]
    try:
        return encode(value)
    except NotPlain:
        return id(value)


def _sampled_hash(value: Any) -> bytes:
    """Return bytes that tell whether a large value changes.

    They depend on its length and some of its elements. For a list they also depend on which objects
    its elements are, and for an array on a checksum of all of it, up to MAX_CHECKSUMMED_BYTES (a
    second for two gigabytes).
    """
    step = 1 + _size(value) // MAX_ELEMENTS
    checksum: Any = 0
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.ravel().tolist()
    if isinstance(value, (Tensor, np.ndarray)):
        array = value.detach() if isinstance(value, Tensor) else value
        if (
            isinstance(array, Tensor)
            and array.layout == torch.strided
            and not (array.is_quantized or array.is_nested or array.is_meta)
            and array.is_contiguous()
        ):
            sample = array.view(-1)[::step].cpu()
            all_bytes = array.view(-1).view(torch.uint8)
            if not array.is_cuda and len(all_bytes) <= MAX_CHECKSUMMED_BYTES:
                checksum = zlib.crc32(all_bytes.numpy())
        elif type(array) is np.ndarray and array.flags.c_contiguous:
            sample = array.ravel()[::step].copy()
            if array.nbytes <= MAX_CHECKSUMMED_BYTES:
                checksum = zlib.crc32(array.ravel().view(np.uint8))
        else:
            return _full_hash(encode(value))
        return _full_hash(encode([sample, list(value.shape), checksum]))
    if isinstance(value, (str, bytes)):
        return _full_hash(value)
    items = list(value.items() if isinstance(value, dict) else value)
    ids_hash = hash(tuple(map(id, _elements(value))))
    return _full_hash(encode([items[::step], len(items), ids_hash]))


def _full_hash(encoded_value: Any) -> bytes:
    """Return a hash of an encoded value, 8 bytes."""
    hash_ = hashlib.blake2b(digest_size=8)
    _update_hash(encoded_value, hash_.update)
    return hash_.digest()


def _update_hash(value: Any, update: Callable[[bytes], None]) -> None:
    """Pass an encoded value to a hash's `update`."""
    if isinstance(value, Tensor):
        update(repr((value.dtype, value.shape)).encode())
        value = value.to_dense()
        update(value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, dict):
        for key, element in value.items():
            update(repr(key).encode())
            _update_hash(element, update)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(element, (Tensor, dict, list, tuple)) for element in value
    ):
        update(f"{type(value).__name__}{len(value)}".encode())
        for element in value:
            _update_hash(element, update)
    else:
        # Pickle is faster for numbers. What it makes of text depends on which are one object.
        is_pickled = (
            isinstance(value, list)
            and len(value) > MAX_ELEMENTS
            and {int, float, bool}.issuperset(map(type, value))
        )
        update(pickle.dumps(value) if is_pickled else repr(value).encode())


@torch.no_grad()
def _in_place(current: Any, value: Any, settled_ids: set[int]) -> Any:
    """Return the present tensor with the saved values, or else the saved tensor.

    Other objects may hold the same tensor, so that it is changed in place where that is possible. A
    saved tensor that was on a GPU is not copied into a present tensor that is not on the GPU yet.

    Args:
        current: The present value.
        value: The saved value.
        settled_ids: Ids of tensors that belong to a module or were restored already. They stay as
            they are.
    """
    if not isinstance(current, Tensor) or not isinstance(value, Tensor) or not current.is_leaf:
        return value
    if (current.shape, current.dtype, current.layout) != (value.shape, value.dtype, value.layout):
        return value
    # One that a step has calculated has had no place there before.
    if not value.is_leaf or value.device not in (current.device, torch.device("cpu")):
        return value
    if id(current) in settled_ids:
        return current if digest(current) == digest(value) else value
    settled_ids.add(id(current))
    try:
        return current.copy_(value)
    except RuntimeError:  # its elements share memory (expand), or it was made in inference mode
        return value


@torch.no_grad()
def _set_attribute(owner: Any, name: str, value: Any, settled_ids: set[int]) -> None:
    """Set an attribute, in place if possible.

    Other objects may hold the same list, array or tensor.

    Args:
        owner: The object.
        name: Name of the attribute.
        value: The saved value.
        settled_ids: Ids of tensors that belong to a module or were restored already.
    """
    variables = closure(owner) if isinstance(owner, types.FunctionType) else namespace(owner)
    current = variables.get(name)
    if name == HYPERPARAMETERS and isinstance(current, dict):
        current.update(value)
        return
    if type(current) is type(value):
        if isinstance(current, (list, deque)) and getattr(current, "maxlen", None) == getattr(
            value, "maxlen", None
        ):
            if len(current) == len(value):
                value = [_in_place(*pair, settled_ids) for pair in zip(current, value, strict=True)]
            current.clear()
            current.extend(value)
            return
        if isinstance(current, set):
            fill_set(current, list(value), sys.getsizeof(value))
            return
        if isinstance(current, dict):
            value = {
                key: _in_place(current.get(key), element, settled_ids)
                for key, element in value.items()
            }
            current.clear()
            current.update(value)
            return
        if (
            isinstance(current, np.ndarray)
            and current.shape == value.shape
            and current.dtype == value.dtype
            and current.flags.writeable
        ):
            current[...] = value
            return
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        if _in_place(current, value, settled_ids) is current:
            return
        value = value.to(current.device) if value.is_cpu else value
    if isinstance(owner, types.FunctionType):
        if name in owner.__code__.co_freevars:  # of the function that was there before, too
            owner.__closure__[owner.__code__.co_freevars.index(name)].cell_contents = value
    elif isinstance(getattr(type(owner), name, None), types.MemberDescriptorType):  # a slot
        object.__setattr__(owner, name, value)
    elif hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
