"""Tensors and arrays, which may share their memory with others."""

import ast
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sagemaker_lightning.compat.dtensors import (
    chunk_of,
    has_partial_sums,
    local_part,
    placed_like,
)
from sagemaker_lightning.compat.torch_modules import is_unreadable
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.kinds.base import (
    Kind,
    NotSaved,
    class_name,
    kind_text,
    known_class,
    refusal,
)
from sagemaker_lightning.state.object_graph import has_place_for, hash_at_one_moment

OF_TORCH = Tensor, nn.Parameter, DTensor
MAX_DIMENSIONS = 64
"""Dimensions that an array of numpy's may have."""
MAX_FORM = 10_000
"""Characters, at most, of the text of an array's dtype."""


def dtype_text(dtype: np.dtype) -> str:
    """Return a dtype of numpy as a text."""
    return repr(dtype_to_descr(dtype))


def dtype_of(text: Any) -> np.dtype:
    """Return the dtype of a text."""
    if not isinstance(text, str) or len(text) > MAX_FORM:
        raise refusal("dtype")
    try:
        return descr_to_dtype(ast.literal_eval(text))
    except (SyntaxError, MemoryError):  # what Python says of a text with too many brackets
        raise refusal("dtype") from None


def is_readable(dtype: np.dtype) -> bool:
    """Return whether an array of this type can be made again of its bytes."""
    try:
        return dtype.kind in "biufcSUmMV" and not dtype.hasobject and bool(dtype_to_descr(dtype))
    except ValueError:  # fields that overlap, or in another order than their bytes
        return False


def torch_dtype(text: Any) -> torch.dtype:
    """Return the dtype of torch of that name."""
    dtype = getattr(torch, text, None) if isinstance(text, str) else None
    if not isinstance(dtype, torch.dtype):
        raise refusal("dtype")
    return dtype


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


def is_own_tensor(class_: type[Tensor]) -> bool:
    """Return whether a class of tensors is not torch's, and no wrapper of other tensors.

    It may be a user's or a library's, such as a mask of torchvision's.
    """
    is_wrapper = class_.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return class_.__module__.partition(".")[0] != "torch" and not is_wrapper


def pointer_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none to share."""
    if tensor.layout != torch.strided or is_unreadable(tensor) or tensor.is_quantized:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def size_of(shape: Any) -> int:
    """Return how many elements an array of a shape has.

    To multiply thousands of long numbers takes minutes.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise refusal("array")
    return math.prod(shape)


def _added(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor that are not torch's, by name.

    Those of a parameter are of a root of their own.
    """
    variables = vars(tensor)
    if type(tensor) is not Tensor or not variables:
        return variables if variables and is_own_tensor(type(tensor)) else {}
    return {name: value for name, value in variables.items() if not name.startswith("_")}


class TensorKind(Kind):
    """A tensor; what a program has added to it, or a class that is not torch's, is its parts."""

    name = "tensor"

    def take(self, value: Tensor) -> tuple[Any, list[Any]]:
        """Return the names and the values of the attributes."""
        added = _added(value)
        return list(added), list(added.values())

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the attribute's name."""
        return f".{note[index]}"

    def mark(self, value: Tensor) -> bytes:
        """Return a hash of the values."""
        return hash_at_one_moment(value, fingerprints.of_tensor)

    def content(self, value: Tensor) -> Any:
        """Return the values, on the CPU, and what else the tensor is."""
        if is_unreadable(value):
            raise NotSaved(f"{kind_text(value)} without values that can be read")
        if has_partial_sums(value):
            raise NotSaved("DTensor of partial sums")
        values = value.detach() if isinstance(value, DTensor) else fingerprints.plain(value)
        try:
            values = values.to("cpu", copy=True)
        except (NotImplementedError, RuntimeError):
            raise NotSaved(kind_text(value)) from None
        content: dict[str, Any] = {"values": values}
        if value.device.type != "cpu":
            content["device"] = value.device.type
        if _is_calculated(value):
            content["calculated"] = True
        elif value.requires_grad:
            content["requires_grad"] = True
        return content

    def note_of_new(self, value: Tensor, note: Any) -> Any:
        """Return the names of the attributes, and the class."""
        class_ = nn.Parameter if isinstance(value, nn.Parameter) else type(value)
        if class_ not in OF_TORCH and not is_own_tensor(class_):
            raise NotSaved(kind_text(value))
        return [class_name(class_), *note]

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Tensor:
        """Return a tensor with these values."""
        values = content["values"]
        if not isinstance(values, Tensor):
            raise refusal(self.name)
        tensor = values.clone()
        if isinstance(device := content.get("device"), str):
            tensor = on_device(tensor, device)
        return as_class(tensor, note[0], content, classes)

    def fill(self, value: Tensor, note: Any, parts: list[Any], content: Any) -> None:
        """Copy the values, and set the attributes."""
        if content is not None:
            copy_values(value, content["values"])
        if is_own_tensor(type(value)) or type(value) is Tensor:
            names = note[-len(parts) :] if parts else []
            for name in _added(value).keys() - names:
                del vars(value)[name]
            for name, part in zip(names, parts, strict=True):
                if type(name) is str and has_place_for(value, name, part):
                    vars(value)[name] = part


def as_class(tensor: Tensor, name: Any, content: Any, classes: Any) -> Tensor:
    """Return a tensor as one of that class, which may require a gradient."""
    requires_grad = content.get("requires_grad") is True
    if name == class_name(nn.Parameter):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    if name not in map(class_name, OF_TORCH):
        class_ = known_class(classes, name)
        if not issubclass(class_, Tensor) or not is_own_tensor(class_):
            raise refusal(name)
        tensor = tensor.as_subclass(class_)
    if "calculated" in content:
        with torch.enable_grad():  # a leaf could not be changed in place
            return tensor.requires_grad_().clone()
    return tensor.requires_grad_() if requires_grad else tensor


@torch.no_grad()
def copy_values(tensor: Tensor, values: Any) -> None:
    """Give a tensor that is there other values, in place.

    Raises:
        UserError: They are another part of a tensor that is shared out.
    """
    if not isinstance(values, Tensor):
        raise refusal("tensor")
    values = placed_like(values, tensor)
    if part_of(values) != part_of(tensor):
        raise UserError(
            "a checkpoint holds a DTensor beside the model that was shared out in another way "
            "than this run's in its place, and not as any weight of the model; give as many ranks "
            "as before, and the same sizes of the mesh"
        )
    values = local_part(values)
    tensor = local_part(tensor)
    if (tensor.shape, tensor.dtype, tensor.layout) == (values.shape, values.dtype, values.layout):
        has_strides = tensor.layout == torch.strided
        target = tensor.detach() if has_strides else tensor  # detached, a sparse one parts
        for dimension, step in enumerate(target.stride() if has_strides and target.numel() else ()):
            if step == 0:  # of elements that share memory (expand), the first one is written
                target = target.narrow(dimension, 0, 1)
                values = values.narrow(dimension, 0, 1)
        try:
            target.copy_(values)
        except RuntimeError:  # it is an inference tensor
            tensor.data = values.to(tensor.device).expand_as(tensor)
    else:  # a user has set its data
        tensor.data = values.to(tensor.device)


def part_of(tensor: Tensor) -> Any:
    """Return which part of a tensor this rank has; None for a tensor of which it has all."""
    return (chunk_of(tensor), tensor.shape) if isinstance(tensor, DTensor) else None


def _is_calculated(value: Tensor) -> bool:
    """Return whether a gradient flows back from a tensor to what it was calculated from."""
    try:
        return value.grad_fn is not None
    except RuntimeError:  # of a view that was made without gradients, and written in place since
        return False


class ArrayKind(Kind):
    """An array of numpy; the objects in one are its parts."""

    name = "array"

    def take(self, value: np.ndarray) -> tuple[Any, list[Any]]:
        """Return the shape, and the elements of an array of objects."""
        return (
            (list(value.shape), value.ravel().tolist()) if value.dtype.kind == "O" else (None, [])
        )

    def mark(self, value: np.ndarray) -> bytes:
        """Return a hash of the values; a memory map that is only read stays as it is."""
        is_read_only = isinstance(value, np.memmap) and not value.flags.writeable
        return b"" if is_read_only else hash_at_one_moment(value, fingerprints.of_array)

    def content(self, value: np.ndarray) -> Any:
        """Return the values."""
        if type(value) is not np.ndarray:
            raise NotSaved(kind_text(value))
        if value.dtype.kind == "O":
            return None
        if not is_readable(value.dtype):
            raise NotSaved(f"array of {value.dtype}")
        form = {"dtype": dtype_text(value.dtype), "shape": list(value.shape)}
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else value
        return form | {"values": torch.from_numpy(content.copy()) if value.size else torch.empty(0)}

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> np.ndarray:
        """Return an array with these values; one of objects is filled later."""
        if content is None:
            return np.empty(note, dtype=object)
        return array_of(content).copy()

    def fill(self, value: np.ndarray, note: Any, parts: list[Any], content: Any) -> None:
        """Copy the values."""
        if content is not None:
            values = array_of(content)
            if value.shape != values.shape and value.size == values.size:
                value.resize(values.shape, refcheck=False)  # its memory stays
            if is_read_only := not value.flags.writeable:
                value.setflags(write=True)  # an array that has its own memory allows that
            value[...] = values
            if is_read_only:
                value.setflags(write=False)
        elif note is not None and value.shape == tuple(note) and value.size == len(parts):
            for place, part in zip(np.ndindex(value.shape), parts, strict=True):
                value[place] = part


def array_of(content: Any) -> np.ndarray:
    """Return the array that `ArrayKind.content` has written."""
    dtype = dtype_of(content["dtype"])
    values = content["values"]
    if dtype.hasobject or not isinstance(values, Tensor):
        raise refusal("array")
    if not values.numel():
        shape = content["shape"]
        if size_of(shape):
            raise refusal("array")
        return np.empty(shape, dtype)
    return (
        values.contiguous().numpy().view(np.uint8).reshape(-1).view(dtype).reshape(content["shape"])
    )
