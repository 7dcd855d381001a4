"""Leaves out needless work of Lightning, torchmetrics and TensorBoard.

They import or do these things in vain. Nothing is imported here before it is needed: the first of
the functions runs before torch is imported.

On an upgrade: if torchmetrics #3459 is merged, `signal_on_demand` can go. For the rest see
lightning_fabric's utilities/cloud_io.py, `_ResultMetric.to` in
trainer/connectors/logger_connector/result.py, and tensorboard's compat/tensorflow_stub/io/gfile.py.
"""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

SIGNAL = "scipy.signal"


@contextmanager
def signal_on_demand() -> Iterator[None]:
    """Make an import of scipy.signal in this context take no time.

    torchmetrics (1.9, __init__.py) imports it only to give it an old name that SRMRpy asks for
    (torchmetrics #3457).
    """
    if SIGNAL not in sys.modules:
        sys.modules[SIGNAL] = _Signal(SIGNAL)
    try:
        yield
    finally:
        if isinstance(sys.modules.get(SIGNAL), _Signal):
            del sys.modules[SIGNAL]


class _Signal(ModuleType):
    """A stand-in for scipy.signal.

    It imports the real module if anything but the old name is asked for.
    """

    hamming = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that looks through all modules asks for such names
            raise AttributeError(name)
        if sys.modules.get(SIGNAL) is self:
            del sys.modules[SIGNAL]
        return getattr(importlib.import_module(SIGNAL), name)


def import_tensorboard() -> None:
    """Import TensorBoard's writer as if there were no botocore: saves 0.4 s of 0.8.

    It reads from S3 by s3fs instead.
    """
    if "botocore" in sys.modules or "torch.utils.tensorboard" in sys.modules:
        return
    sys.modules["botocore"] = None  # how Python marks a module that cannot be imported
    try:
        import torch.utils.tensorboard  # noqa: F401
    finally:
        del sys.modules["botocore"]


def trim_lightning() -> None:
    """Change two functions of Lightning, once in a process."""
    from lightning_fabric.utilities import cloud_io

    if cloud_io._is_object_storage.__module__ != __name__:
        _skip_s3fs_for_local_files(cloud_io)
        _move_only_between_devices()


def _skip_s3fs_for_local_files(cloud_io: ModuleType) -> None:
    """Stop Lightning from importing s3fs to ask if a local file system is S3's."""
    from fsspec.implementations.local import LocalFileSystem

    original = cloud_io._is_object_storage

    def is_object_storage(fs: Any) -> bool:
        return not isinstance(fs, LocalFileSystem) and original(fs)

    cloud_io._is_object_storage = is_object_storage


def _move_only_between_devices() -> None:
    """Stop `log` from moving tensors to the device where they are.

    Such moves take half of the time of `log` in a step.
    """
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric

    original_to = _ResultMetric.to

    @functools.wraps(original_to)
    def to(metric: _ResultMetric, device: Any) -> _ResultMetric:
        return (
            metric
            if metric.is_tensor and metric.value.device == device
            else original_to(metric, device)
        )

    _ResultMetric.to = to
