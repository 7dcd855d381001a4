"""Imports Lightning, torch and torchvision, without looking for garbage meanwhile.

No module that imports any of them may be imported before.
"""

import atexit
import gc
from importlib.util import find_spec

from sagemaker_lightning.compat import versions
from sagemaker_lightning.contract.environment import failure_file, host_and_rank
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import threads


def import_lightning() -> None:
    """Import torch, torchvision and pytorch_lightning, quickly.

    Python does not collect garbage during the import, which makes hundreds of thousands of objects
    that stay; nor does it look through them later, which took 0.2 s each time.

    Exits with status 1, and prints one line, if the installed version of Lightning is not
    supported: a job may have installed another one. torchvision may be absent.
    """
    with reported(failure_file(), host_and_rank()):
        check_version()
    threads.prepare()
    gc.disable()
    try:
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
