"""The trained model in the model directory: written aside, then renamed, so that it is whole or absent."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
import torchvision
from torch import nn

from sagemaker_lightning.contract.atomic_files import json_text


def save(
    model_dir: Path,
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    metrics: dict[str, float],
    revision: str,
    config: str,
    best: str = "",
    resumes: Sequence[Mapping] = (),
) -> Path:
    """Write model.pt, model.json and config.yaml, and return the path of model.pt.

    model.pt is the state dict of `model.network`, or of the whole module if it has none of that name, on the CPU;
    `torch.load(..., weights_only=True)` reads it. model.json says what it is and how to feed it: class path, the
    module's hyperparameters, classes, input shape, normalisation, metrics, versions, revision, and of each of the
    `resumes` whether it went on as before (resume/verification.py). `config`, the text of config.yaml, is what all
    flags came to; `--config` reads it. `best` is the name of the best model's file whose weights these are, "" for
    those of the last step; model.json says so as well.
    """
    network = getattr(model, "network", model)
    network = network if isinstance(network, nn.Module) else model
    state = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    normalized = getattr(datamodule, "normalize", False)
    classes = getattr(datamodule, "classes", None)
    description = {
        "class_path": _class_path(network),
        "module_class_path": _class_path(model),
        "hyperparameters": json.loads(json.dumps(dict(model.hparams), default=str)),
        "data_class_path": _class_path(model if datamodule is None else datamodule),
        "num_classes": getattr(datamodule, "num_classes", None),
        "classes": list(classes) if classes else None,
        "input_shape": list(getattr(datamodule, "dims", None) or []) or None,
        "input_range": [0.0, 1.0],
        "normalization": {key: list(getattr(datamodule, key)) for key in ("mean", "std")}
        if normalized and hasattr(datamodule, "mean")
        else None,
        "metrics": metrics,
        "best_model": best or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "pytorch_lightning": pl.__version__,
        },
        "revision": revision,
        "resumes": list(resumes),
    }
    _write(
        {
            model_dir / "model.pt": lambda file: torch.save(state, file),
            model_dir / "config.yaml": lambda file: file.write(config.encode()),
            model_dir / "model.json": lambda file: file.write(json_text(description, indent=2).encode() + b"\n"),
        }
    )
    return model_dir / "model.pt"


def _class_path(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _write(files: Mapping[Path, Callable]) -> None:
    """Call each file's writer with a file beside it, put all on the disk, and then rename them, all at once."""
    aside = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, write in files.items():
            with aside[path].open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in files:
            os.replace(aside[path], path)
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
