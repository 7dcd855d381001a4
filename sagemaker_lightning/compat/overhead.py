"""What Lightning, torchmetrics and TensorBoard import or do in vain, left out.

Nothing is imported here before it is needed: the first of them comes before torch.

On an upgrade: if torchmetrics #3459 is merged, `signal_on_demand` can go. For the rest see
lightning_fabric's utilities/cloud_io.py, `_ResultMetric.to` in
trainer/connectors/logger_connector/result.py, and tensorboard's
compat/tensorflow_stub/io/gfile.py.
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
    """Have an import of scipy.signal meanwhile take no time.

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
    """In place of scipy.signal, which is imported if anything but the old name is asked for."""

    hamming = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules
            raise AttributeError(name)
        if sys.modules.get(SIGNAL) is self:
            del sys.modules[SIGNAL]
        return getattr(importlib.import_module(SIGNAL), name)


def import_tensorboard() -> None:
    """Import TensorBoard's writer as if there were no botocore: 0.4 s of 0.8.

    What it reads on S3 goes by s3fs.
    """
    if "botocore" in sys.modules or "torch.utils.tensorboard" in sys.modules:
        return
    sys.modules["botocore"] = None  # how Python marks a module that cannot be imported
    try:
        import torch.utils.tensorboard  # noqa: F401
    finally:
        del sys.modules["botocore"]


def trim_lightning() -> None:
    """Change two functions of Lightning's, once in a process."""
    from lightning_fabric.utilities import cloud_io

    if cloud_io._is_object_storage.__module__ != __name__:
        _ask_no_cloud_about_a_disk(cloud_io)
        _move_only_to_another_device()


def _ask_no_cloud_about_a_disk(cloud_io: ModuleType) -> None:
    """Have Lightning not import s3fs to ask whether a local file system is S3's."""
    from fsspec.implementations.local import LocalFileSystem

    asked = cloud_io._is_object_storage

    def is_object_storage(fs: Any) -> bool:
        return not isinstance(fs, LocalFileSystem) and asked(fs)

    cloud_io._is_object_storage = is_object_storage


def _move_only_to_another_device() -> None:
    """Have `log` not move tensors to where they are: half of what it takes in a step."""
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric

    move = _ResultMetric.to

    @functools.wraps(move)
    def to(metric: _ResultMetric, place: Any) -> _ResultMetric:
        return metric if metric.is_tensor and metric.value.device == place else move(metric, place)

    _ResultMetric.to = to
