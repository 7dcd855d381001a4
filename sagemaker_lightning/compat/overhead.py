"""Leaves out needless work of Lightning and torchmetrics.

They import or do these things in vain. Nothing is imported here before it is needed: the first of
the functions runs before torch is imported. Each saves 0.2 s or more of a start, or half of the
time of `log` in a step. SAGEMAKER_LIGHTNING_TRIM=0 leaves all of it as the libraries have it.

On an upgrade: if torchmetrics #3459 is merged, `skip_scipy_signal` can go. For the rest see
lightning_fabric's utilities/cloud_io.py and `_ResultMetric.to` in
trainer/connectors/logger_connector/result.py.
"""

import ast
import functools
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from sagemaker_lightning.contract.environment import trims


def skip_scipy_signal() -> None:
    """Let torchmetrics be imported without scipy.signal: saves 0.6 to 0.9 s.

    Three modules of torchmetrics (1.9) import it only to give it an old name that SRMRpy asks for
    (torchmetrics #3457). Only their code is changed, when they are imported: other threads find
    all that they import meanwhile as it is.
    """
    if trims() and _WithoutSignal not in sys.meta_path:
        sys.meta_path.insert(0, _WithoutSignal)  # it stays: others may be going through this list


class _WithoutSignal(SourceFileLoader):
    """Finds and loads modules of torchmetrics without the statement that imports scipy.signal."""

    names = ("torchmetrics", "torchmetrics.audio", "torchmetrics.functional.audio")

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where one of these modules is; None for all others."""
        if name not in cls.names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = cls(name, spec.loader.path)
        return spec

    def get_code(self, fullname: str) -> CodeType:
        """Return the module's code without that statement."""
        tree = ast.parse(self.get_data(self.path))
        tree.body = [node for node in tree.body if not _imports_signal(node)]
        return compile(tree, self.path, "exec")


def _imports_signal(node: ast.stmt) -> bool:
    """Return whether a statement is `if ...:` with `import scipy.signal` in its body."""
    return isinstance(node, ast.If) and any(
        isinstance(inner, ast.Import) and inner.names[0].name == "scipy.signal"
        for inner in node.body
    )


def trim_lightning() -> None:
    """Change two functions of Lightning, once in a process."""
    if not trims():
        return
    from lightning_fabric.utilities import cloud_io

    if cloud_io._is_object_storage.__module__ != __name__:
        _skip_s3fs_for_local_files(cloud_io)
        _move_only_between_devices()


def _skip_s3fs_for_local_files(cloud_io: ModuleType) -> None:
    """Stop Lightning from importing s3fs to ask if a local file system is S3's: saves 0.3 s."""
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
