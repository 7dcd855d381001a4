"""Settings that Python's and torch's libraries keep for the process, and what changes results."""

import decimal
from collections.abc import Callable, Mapping

import numpy as np
import torch

CONTEXT = "prec", "rounding", "Emin", "Emax", "capitals", "clamp"
"""What a context of `decimal` computes with; it also has flags of what has occurred."""
SETTINGS: dict[str, Callable[[], object]] = {
    "decimal.getcontext()": lambda: [getattr(decimal.getcontext(), name) for name in CONTEXT],
    "numpy.geterr()": np.geterr,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
}
"""By how they are asked for."""


def present() -> dict[str, object]:
    """Return the settings, by how they are asked for."""
    return {name: ask() for name, ask in SETTINGS.items()}


def changed(before: Mapping[str, object]) -> list[str]:
    """Return which settings are not what `present` has returned before."""
    return [name for name, value in present().items() if before.get(name, value) != value]
