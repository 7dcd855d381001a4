"""Hashes that tell, within a process, whether content has changed."""

import contextvars
import gc
import hashlib
import io
import multiprocessing.synchronize
import pickle
import sys
import threading
import types
import weakref
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sagemaker_lightning.compat.dtensors import local_part
from sagemaker_lightning.compat.torch_modules import is_unreadable, stored_parts
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.object_graph import (
    LIBRARIES,
    is_library_class,
    namespace,
    owner_of_method,
)

HASHED_IN_FULL = 1 << 20
"""Bytes, at most, of which a cryptographic hash is taken; of more, a checksum."""
CHECKSUMMED = 1 << 28
"""Bytes, at most, of which a checksum is taken (a second for 2 GB); of more, some elements."""
SAMPLED = 256
"""Elements of which a hash is taken of what is larger."""
HANDLES = {"asyncio", "concurrent", "io", "logging", "multiprocessing", "selectors", "socket"}
HANDLES |= {"ssl", "subprocess", "tempfile", "threading"}
"""Modules of Python's library whose objects do something, and hold no values of the user's."""
NO_HOLDERS = HANDLES | {"builtins", "random"}
"""Modules of which no object is compared as a holder: containers and generators have kinds."""
LOCK = type(threading.Lock())
LOCKS = LOCK, type(threading.RLock())
COUNTED = threading.Semaphore, multiprocessing.synchronize.Semaphore
"""What has a count that code takes from and gives to."""
PYTHONS = {"builtins", *sys.stdlib_module_names}
OF_CODE = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType
NUMBERS_AND_TEXT = int, float, bool, str, bytes
LAST_STANDARD_FILE = 2
"""The number of the standard error's file; those before it are standard, too."""
STREAMS = io.StringIO, io.BytesIO
"""The classes of files in memory."""
MAX_PICKLED = 1 << 22
"""Bytes of an object's pickle, at most, of which a hash is taken."""


def of_bytes(content: Any) -> bytes:
    """Return a hash of bytes."""
    view = memoryview(content).cast("B")
    if len(view) <= HASHED_IN_FULL:
        return hashlib.blake2b(view, digest_size=8).digest()
    return b"%d %d" % (len(view), zlib.crc32(view))


@torch.no_grad()
def of_tensor(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's values, dtype, shape and device; empty if they are unreadable."""
    if is_unreadable(tensor):
        return b""
    form = repr((tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.layout)).encode()
    try:
        values = plain(tensor)
        if values.is_quantized:
            values = values.int_repr()
        return form + b"".join(map(_of_stored, stored_parts(values)))
    except (RuntimeError, NotImplementedError):  # a library's class that wraps other tensors
        return b""


def plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, those that this rank has, as one of torch's own class."""
    values = local_part(tensor.detach())
    return values if type(values) is Tensor else values.as_subclass(Tensor)


def _of_stored(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    size = tensor.numel() * tensor.itemsize
    if size > CHECKSUMMED or (tensor.is_cuda and size > HASHED_IN_FULL):
        tensor = tensor.flatten()[:: 1 + tensor.numel() // SAMPLED]
    flat = tensor.contiguous().cpu().resolve_conj().resolve_neg().view(-1)
    return of_bytes(flat.view(torch.uint8).numpy())


def of_array(array: np.ndarray) -> bytes:
    """Return a hash of an array's values, dtype and shape; empty if it holds objects."""
    if array.dtype.hasobject:
        return b""
    form = repr((array.dtype.str, array.shape)).encode()
    if array.nbytes > CHECKSUMMED:
        array = array.ravel()[:: 1 + array.size // SAMPLED]
    return form + (
        of_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""
    )


class _Unlike(Exception):
    """Raised for what is not plain data."""


class _Checksum:
    """A file that keeps the checksum of what is written, up to a length."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.length = 0
        self.checksum = 0

    def write(self, content: Any) -> None:
        self.count(len(content))
        self.checksum = zlib.crc32(content, self.checksum)

    def count(self, length: int) -> None:
        self.length += length
        if self.limit is not None and self.length > self.limit:
            raise _Unlike

    def digest(self) -> bytes:
        return b"%d %d" % (self.length, self.checksum)


class _PlainPickler(pickle.Pickler):
    """Pickles lists, dicts, tuples, numbers and text alone."""

    fast = True  # text of two elements may be one object or two

    def reducer_override(self, _value: Any) -> Any:
        raise _Unlike


def of_plain_data(value: Any) -> bytes:
    """Return a checksum of a container of numbers, text and such containers; empty for others."""
    file = _Checksum(None)
    pickler = _PlainPickler(file, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except (_Unlike, RecursionError, ValueError, pickle.PicklingError):
        return b""
    return file.digest()


class _ShallowPickler(pickle.Pickler):
    """Pickles an object; of the others that it refers to and that are known, their names."""

    file: _Checksum
    known: dict[int, Any]
    value: Any

    def persistent_id(self, value: Any) -> Any:
        if value is self.value:
            return None
        if id(value) in self.known:
            return id(value)
        if isinstance(value, Tensor):
            return of_tensor(value) or None
        return of_array(value) or None if isinstance(value, np.ndarray) else None


class _HolderPickler(_ShallowPickler):
    """Pickles what Python's own library holds values in, such as queues and weak dictionaries.

    What makes them unfit for a file, such as a lock, is not part of their content.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, LOCKS):
            return str, ()
        if isinstance(value, weakref.ReferenceType):
            return id, (id(value()),)
        if isinstance(value, types.FunctionType):  # one that the holder has made for itself
            return str, (value.__qualname__,)
        if isinstance(value, contextvars.ContextVar):
            return str, (value.get(None),)
        if isinstance(value, threading.local):
            return str, (vars(value),)
        return NotImplemented


class _ShownPickler(_HolderPickler):
    """Pickles what an object of C code shows of what it holds; of what is unfit, the class."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)) and id(value) not in self.known:
            self.file.count(value.nbytes)
        return super().persistent_id(value)

    def reducer_override(self, value: Any) -> Any:
        if value is self.value:
            if not (held := _shown(value)):
                raise _Unlike
            return tuple, (held,)
        reduced = super().reducer_override(value)
        if reduced is NotImplemented and not isinstance(value, type):
            try:
                value.__reduce_ex__(4)
            except Exception:  # as above
                return str, (repr(type(value)),)
        return reduced


@kept
def is_shown(class_: type) -> bool:
    """Return whether the objects of a class are of C code that shows what it holds, if anything.

    Handles do something, and an iterator's position is the matter of others.
    """
    package = class_.__module__.partition(".")[0]
    return (
        package.lstrip("_") not in HANDLES
        and (package not in LIBRARIES or package in PYTHONS)
        and not hasattr(class_, "__next__")
        and not issubclass(class_, OF_CODE)
        and not any(
            isinstance(member, types.FunctionType)
            for base in class_.__mro__[:-1]
            for member in vars(base).values()
        )
    )


def _shown(value: Any) -> list[Any]:
    """Return what an object of C code shows: its memory, else the objects, numbers and text in it.

    Python's collector of garbage knows which objects it holds
    (https://docs.python.org/3/library/gc.html#gc.get_referents); weak references hold none.
    """
    try:
        return [of_bytes(memoryview(value).tobytes())]
    except (TypeError, ValueError, BufferError):
        # A writer holds what its file writes by, and so the file.
        referents = (_of_method(each) for each in gc.get_referents(value))
        held = [each for each in referents if not isinstance(each, OF_CODE)]
    held = [
        [part for part in each if not isinstance(part, weakref.ReferenceType)]
        if type(each) is list
        else each
        for each in held
    ]
    for base in type(value).__mro__[:-1]:
        for name, member in vars(base).items():
            if isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                try:
                    shown = member.__get__(value)
                except Exception:  # as above
                    continue
                held += [name, shown] if type(shown) in NUMBERS_AND_TEXT else []
    return held


def _of_method(value: Any) -> Any:
    """Return the object whose method of C code a value is; any other value as it is."""
    owner = owner_of_method(value)
    return value if owner is None else owner


def held_arrays(value: Any) -> list[Tensor | np.ndarray]:
    """Return the tensors and arrays that an object of C code holds.

    None if it is an array itself, or has attributes.
    """
    if isinstance(value, (Tensor, np.ndarray, *OF_CODE)) or namespace(value):
        return []
    return [each for each in gc.get_referents(value) if isinstance(each, (Tensor, np.ndarray))]


def of_held_arrays(value: Any) -> bytes:
    """Return a hash of what `held_arrays` returns, alike in all processes; empty for nothing."""
    return b"".join(
        of_tensor(each) if isinstance(each, Tensor) else of_array(each)
        for each in held_arrays(value)
    )


def hides_state(value: Any) -> bool:
    """Return whether an object of C code holds values that it shows nobody, such as a hash's.

    It refers to no object of Python's, no file has it, and yet its class makes copies of it: so
    there is something to be copied.
    """
    class_ = type(value)
    if not hasattr(class_, "copy") or not is_shown(class_):
        return False
    if not all(isinstance(each, OF_CODE) for each in gc.get_referents(value)):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:  # as above
        try:
            return type(value.copy()) is class_
        except Exception:  # as above
            return False
    return False


def of_object(value: Any, known: dict[int, Any]) -> bytes:
    """Return a checksum of what an object of any class is; empty if there is none.

    Args:
        value: The object.
        known: The objects, by id, that count as themselves, whatever they hold.
    """
    if isinstance(value, LOCK):
        return repr(value.locked()).encode()
    if isinstance(value, COUNTED):
        return repr(value).encode()
    if isinstance(value, memoryview):
        return b"" if id(value.obj) in known else of_bytes(value.tobytes())
    if isinstance(value, io.IOBase) and not isinstance(value, STREAMS):
        return _place_in_file(value)
    pickled = _pickled(_HolderPickler if _is_holder(value) else _ShallowPickler, value, known)
    pickled = pickled or (_pickled(_ShownPickler, value, known) if is_shown(type(value)) else b"")
    # Such as a subclass of Decimal leaves them out.
    added = {} if is_library_class(type(value)) else dict(namespace(value))
    return pickled + (_pickled(_ShallowPickler, added, known) if pickled and added else b"")


def _place_in_file(file: io.IOBase) -> bytes:
    """Return where a file is written that its opening has emptied; b"" for any other file."""
    is_emptied = str(getattr(file, "mode", "")).startswith(("w", "x"))
    try:
        is_standard = file.fileno() <= LAST_STANDARD_FILE
        return b"" if is_standard or not is_emptied else b"%d" % file.tell()
    except (OSError, ValueError):  # a pipe, a closed file
        return b""


def _pickled(pickler_class: "type[_ShallowPickler]", value: Any, known: dict[int, Any]) -> bytes:
    """Return a checksum of what a pickler writes of an object; empty if it cannot."""
    file = _Checksum(MAX_PICKLED)
    pickler = pickler_class(file, protocol=4)
    pickler.file = file
    pickler.known = known
    pickler.value = value
    try:
        pickler.dump(value)
    except Exception:  # what an object of any class says when it is looked at
        return b""
    return file.digest()


def of_holder(value: Any) -> bytes:
    """Return a checksum of what an object of Python's own library holds; empty for others."""
    return of_object(value, {}) if _is_holder(value) or isinstance(value, COUNTED) else b""


def _is_holder(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return module in sys.stdlib_module_names and module not in NO_HOLDERS
