"""Settings that Python's and torch's libraries keep for the process, and what changes results."""

import decimal
import logging
import os
import sys
import warnings
from collections.abc import Callable

import numpy as np
import torch

from sagemaker_lightning.state.object_graph import is_own_module


def _folder() -> str:
    """Return the current folder; "" if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109  (it may be gone)
    except FileNotFoundError:
        return ""


CONTEXT = "prec", "rounding", "Emin", "Emax", "capitals", "clamp"
"""What a context of `decimal` computes with; it also has flags of what has occurred."""
SETTINGS: dict[str, Callable[[], object]] = {
    "decimal.getcontext()": lambda: [getattr(decimal.getcontext(), name) for name in CONTEXT],
    "numpy.geterr()": np.geterr,
    "numpy.get_printoptions()": lambda: repr(np.get_printoptions()),
    "os.getcwd()": _folder,
    # Libraries add others when they are first used.
    "warnings.filters": lambda: [repr(each) for each in warnings.filters if each[0] == "error"],
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_default_device()": torch.get_default_device,
    # It is a flag of the processor's, which torch does not tell.
    "torch.set_flush_denormal()": lambda: sys.float_info.min * 0.5 == 0,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.utils.deterministic.fill_uninitialized_memory": lambda: (
        torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # it sets its module's class
    ),
}
"""By how they are asked for."""


def present() -> dict[str, object]:
    """Return the settings, by how they are asked for."""
    return {name: ask() for name, ask in SETTINGS.items()}


def logger_settings() -> dict[str, tuple[int, int]]:
    """Return level and number of filters of each of Python's loggers, by name."""
    loggers = logging.root.manager.loggerDict.copy().items()
    return {
        name: (logger.level, len(logger.filters))
        for name, logger in loggers
        if isinstance(logger, logging.Logger)
    }


def changed_loggers(first: dict[str, tuple[int, int]]) -> list[str]:
    """Return which of the user's loggers have another level, or other filters, now.

    Args:
        first: What `logger_settings` has returned first; it gets those of loggers that are not in
            it.
    """
    found = logger_settings().items()
    changed = [name for name, settings in found if first.setdefault(name, settings) != settings]
    return [
        f"logging.getLogger({name!r}) (its level or its filters)"
        for name in changed
        if is_own_module(name)
    ]
