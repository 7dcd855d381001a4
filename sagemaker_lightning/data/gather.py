"""Gathers a value of every rank."""

import io
from typing import TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")


def own_group() -> distributed.ProcessGroup:
    """Return a new group of all ranks, by gloo; all ranks call it."""
    group = distributed.new_group(backend="gloo")
    assert not isinstance(group, int)  # what a rank that is not a member gets
    return group


def gather(value: Value, group: distributed.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, by rank; all ranks call it.

    A process that is not a rank of any group is alone.

    Args:
        value: The value of this rank: anything that torch.save takes.
        group: The group of the ranks; the default group if None.
    """
    if not distributed.is_initialized():
        return [value]
    # torch.save, because pickle alone cannot read back tensors of uint16, uint32 or uint64.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    contents = [b""] * distributed.get_world_size(group)
    distributed.all_gather_object(contents, buffer.getvalue(), group=group)
    return [torch.load(io.BytesIO(content), weights_only=False) for content in contents]
