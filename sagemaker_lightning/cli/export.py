"""The trained model in the model directory: tested, written aside, then renamed, so that it is whole or absent."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
import torch
import torchvision
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from sagemaker_lightning.cli.lightning_cli import CLI
from sagemaker_lightning.contract.atomic_files import json_text
from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.resume import journal


def export(cli: CLI, environment: Environment) -> None:
    """Test the best model and write it to the model directory; no rank returns before it is there."""
    state, best = None, ""
    if cli.trainer.is_global_zero:  # on its host alone: hosts share no disk
        best = cli.config_init.checkpoint.readable()
        state = (
            torch.load(best, map_location="cpu", weights_only=True)["state_dict"] if best else None
        )
    if state := cli.trainer.strategy.broadcast(state):
        cli.model.load_state_dict(state, strict=cli.model.strict_loading)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    source = cli.model if cli.datamodule is None else cli.datamodule
    if is_overridden("test_step", cli.model) and is_overridden("test_dataloader", source):
        # none with limit_test_batches=0
        for found in cli.trainer.test(cli.model, cli.datamodule, verbose=False)[:1]:
            metrics |= found
    superfluous = uploaded_checkpoints(cli, environment)
    if cli.trainer.is_global_zero:
        config = cli.parser.dump(cli.config, skip_none=False)
        about = environment.revision, config, Path(best).name
        resumes = cli.config_init.resume.resumes
        path = save(environment.model_dir, cli.model, cli.datamodule, metrics, *about, resumes)
        print(
            " ".join(
                f"{name}={value:.4f}" for name, value in metrics.items() if name.startswith("test")
            )
        )
        print(f"model: {path}")
        print(f"logs: {logs(cli, environment)}")
        removed = "removed, as the run is finished; with a checkpoint folder, they stay there"
        print(f"checkpoints: {removed if superfluous else environment.checkpoint_dir}", flush=True)
    cli.trainer.strategy.barrier("artifacts")
    if cli.trainer.local_rank == 0:
        for path in superfluous:
            path.unlink(missing_ok=True)
        if superfluous:
            with suppress(OSError):  # somebody else's files are in it
                environment.checkpoint_dir.rmdir()


def uploaded_checkpoints(cli: CLI, environment: Environment) -> list[Path]:
    """Return this run's checkpoints if they are in the folder of the job's output, which SageMaker uploads.

    There they are for a run that is interrupted or fails; of one that is finished, nobody needs them. On a desk they
    stay: they are why a run that is started again trains nothing.
    """
    folder, output = environment.checkpoint_dir, environment.output_data_dir
    if output == Environment.output_data_dir or folder != output / "checkpoints":
        return []
    files = [
        path for _, path in cli.config_init.resume.folder.named()
    ] + cli.config_init.checkpoint.files()
    return [
        path for path in files + journal.files(folder) if path.parent.resolve() == folder.resolve()
    ]


def logs(cli: CLI, environment: Environment) -> str:
    """Return where the logs are, S3 included: this host's are below it, and those of the others."""
    folder = str(getattr(cli.trainer.logger, "save_dir", None) or environment.log_dir)
    return str(environment.log_dir.parent) if folder == str(environment.log_dir) else folder


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
            model_dir / "model.json": lambda file: file.write(
                json_text(description, indent=2).encode() + b"\n"
            ),
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
