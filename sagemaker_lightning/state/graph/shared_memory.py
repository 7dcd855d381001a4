"""Whether an object's content lies in memory that processes share.

What one process writes there, the others read: there is one content, whoever has the object.
"""

import multiprocessing.synchronize
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sagemaker_lightning.state.graph.kinds.memory import pointer_of
from sagemaker_lightning.state.graph.kinds.states import BUFFERS, memory_of

MAPS = Path("/proc/self/maps")
"""The memory of this process: a line for each region, with its addresses and how it may be used
(proc(5))."""


class SharedMemory:
    """The memory that this process shares with others now."""

    @cached_property
    def regions(self) -> list[range]:
        """The addresses of each region, as they are when something is first looked for there."""
        found = []
        with suppress(OSError):  # Linux alone has the file
            for line in MAPS.read_text().splitlines():
                addresses, modes, _ = line.split(maxsplit=2)
                if modes.endswith("s"):
                    first, end = addresses.split("-")
                    found.append(range(int(first, 16), int(end, 16)))
        return found

    def has(self, value: Any) -> bool:
        """Return whether an object's content lies there, as a `multiprocessing.Value`'s does.

        A tensor on a GPU does not: data workers do not have it.
        """
        if isinstance(value, multiprocessing.synchronize.Event):
            return True
        address = _address_of(value)
        return any(address in region for region in self.regions)


def _address_of(value: Any) -> int:
    """Return where an object's content begins in memory; 0 if it is in no memory of its own."""
    if isinstance(value, Tensor):
        return pointer_of(value) if value.device.type == "cpu" else 0
    if isinstance(value, (*BUFFERS, memoryview)):
        with suppress(TypeError):  # a view with gaps
            value = np.frombuffer(memory_of(value), np.uint8)
    return value.ctypes.data if isinstance(value, np.ndarray) else 0
