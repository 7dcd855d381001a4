"""Lightning, and what comes with it, imported in two thirds of the time; nothing that imports it may come before."""

import atexit
import gc

from sagemaker_lightning.compat import overhead, versions
from sagemaker_lightning.contract.environment import failure_file, place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import threads


def import_lightning() -> None:
    """Import torch, torchvision and pytorch_lightning: 2.5 s in place of 3.7 on a CPU whose cores are ours.

    Garbage is not looked for meanwhile, as hundreds of thousands of objects are made that stay; they are not looked
    through again later, either, which took 0.2 s each time. And torchmetrics imports scipy.signal in vain.

    Exits with status 1, and one line, where a job has installed a version of Lightning that is not supported.
    """
    with reported(failure_file(), place()):
        check_version()
    threads.prepare()
    gc.disable()
    try:
        with overhead.signal_on_demand():
            import pytorch_lightning  # noqa: F401
            import torchvision  # noqa: F401
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end nanobind, in Triton, names what is left over
        gc.enable()


def check_version() -> None:
    """Raise UserError if the version of Lightning that is installed is not supported; nothing is imported."""
    if problem := versions.unsupported(versions.installed()):
        raise UserError(problem)
