"""A process without what most jobs pay for and have nothing of: clients of S3, and moving what need not move."""

import sys

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric.utilities import cloud_io
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
from torch import device


def install() -> None:
    """Change Lightning, once in a process."""
    if cloud_io._is_object_storage.__module__ != __name__:
        _ask_no_cloud_about_a_disk()
        _move_only_to_another_device()


def import_tensorboard() -> None:
    """Import TensorBoard's writer as if there were no botocore, 0.4 s of 0.8. What it reads on S3 goes by s3fs."""
    if "botocore" in sys.modules:
        return
    sys.modules["botocore"] = None  # how Python marks a module that cannot be imported
    try:
        import torch.utils.tensorboard  # noqa: F401
    finally:
        del sys.modules["botocore"]


def _ask_no_cloud_about_a_disk() -> None:
    """Have Lightning import s3fs only where a file system is not the local one: it asks whether that is S3's."""
    asked = cloud_io._is_object_storage

    def is_object_storage(fs: AbstractFileSystem) -> bool:
        return not isinstance(fs, LocalFileSystem) and asked(fs)

    cloud_io._is_object_storage = is_object_storage


def _move_only_to_another_device() -> None:
    """Have Lightning's `log` not look for tensors to move where they are already: half of what it takes in a step."""
    move = _ResultMetric.to

    def to(metric: _ResultMetric, place: device) -> _ResultMetric:
        return metric if metric.is_tensor and metric.value.device == place else move(metric, place)

    _ResultMetric.to = to
