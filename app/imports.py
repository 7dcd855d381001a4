"""Lightning, and what comes with it, imported in two thirds of the time; nothing that imports it may come before."""

import atexit
import gc
import importlib
import sys
from types import ModuleType
from typing import Any

from app import threads

SIGNAL = "scipy.signal"


def import_lightning() -> None:
    """Import torch, torchvision and pytorch_lightning: 2.5 s in place of 3.7 on a CPU whose cores are ours.

    Garbage is not looked for meanwhile, as hundreds of thousands of objects are made that stay; they are not looked
    through again later, either, which took 0.2 s each time. And torchmetrics imports scipy.signal only to give it an
    old name that SRMRpy asks for (torchmetrics/__init__.py, 1.9).
    """
    threads.prepare()
    gc.disable()
    if SIGNAL not in sys.modules:
        sys.modules[SIGNAL] = _Signal(SIGNAL)
    try:
        import pytorch_lightning  # noqa: F401
        import torchvision  # noqa: F401
    finally:
        if isinstance(sys.modules.get(SIGNAL), _Signal):
            del sys.modules[SIGNAL]
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end nanobind, in Triton, names what is left over
        gc.enable()


class _Signal(ModuleType):
    """In place of scipy.signal, which is imported after all if anything but the old name is asked for."""

    hamming = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules
            raise AttributeError(name)
        if sys.modules.get(SIGNAL) is self:
            del sys.modules[SIGNAL]
        return getattr(importlib.import_module(SIGNAL), name)
