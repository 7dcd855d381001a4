"""Imports Lightning, torch and torchvision in two thirds of the usual time.

No module that imports any of them may be imported before.
"""

import atexit
import gc
from importlib.util import find_spec

from sagemaker_lightning.compat import overhead, versions
from sagemaker_lightning.contract.environment import failure_file, place
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import threads


def import_lightning() -> None:
    """Import torch, torchvision and pytorch_lightning in 2.5 s instead of 3.7 s.

    These times are of a CPU whose cores no other process used. Two things save time. Python does
    not collect garbage during the import, which makes hundreds of thousands of objects that stay;
    nor does it look through them later, which took 0.2 s each time. And scipy.signal, which
    torchmetrics imports in vain, is left out (compat/overhead.py).

    Exits with status 1, and prints one line, if the installed version of Lightning is not
    supported: a job may have installed another one. torchvision may be absent.
    """
    with reported(failure_file(), place()):
        check_version()
    threads.prepare()
    gc.disable()
    try:
        overhead.skip_scipy_signal()
        import pytorch_lightning  # noqa: F401

        if find_spec("torchvision"):
            import torchvision  # noqa: F401
    finally:
        gc.freeze()
        # At exit, nanobind (in Triton) would report the frozen objects as left over.
        atexit.register(gc.unfreeze)
        gc.enable()


def check_version() -> None:
    """Raise UserError if the installed Lightning or torch is not supported.

    It imports neither.
    """
    versions.check()
