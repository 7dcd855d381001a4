"""Whether an object's content lies in memory that processes share.

What one process writes there, the others read: there is one content, whoever has the object.
"""

import ctypes
import mmap
import multiprocessing.sharedctypes
import multiprocessing.synchronize
from typing import Any

import numpy as np
from torch import Tensor

from sagemaker_lightning.state.graph.kinds.memory import pointer_of

OF_PROCESSES = multiprocessing.sharedctypes.SynchronizedBase, multiprocessing.synchronize.Event


def is_shared(value: Any) -> bool:
    """Return whether processes share an object's content, as a `multiprocessing.Value`'s.

    A tensor on a GPU is not: data workers do not have it.
    """
    while isinstance(value, np.ndarray | memoryview):
        value = value.base if isinstance(value, np.ndarray) else value.obj
    if isinstance(value, Tensor):
        is_on_cpu = value.device.type == "cpu" and bool(pointer_of(value))
        return is_on_cpu and value.untyped_storage().is_shared()
    # multiprocessing keeps the memory of a RawValue and of a RawArray as this attribute.
    is_raw = isinstance(value, ctypes._SimpleCData | ctypes.Array)  # noqa: SLF001 (see nodes.py)
    return isinstance(value, (*OF_PROCESSES, mmap.mmap)) or (is_raw and hasattr(value, "_wrapper"))
