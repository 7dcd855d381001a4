"""Tests the best model and writes it to the model directory, as a whole."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from sagemaker_lightning.callbacks.loggers import wandb_rows
from sagemaker_lightning.callbacks.progress import texts
from sagemaker_lightning.cli import safetensors_files
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.compat import dtensors, model_parallel
from sagemaker_lightning.compat.model_parallel import mesh_of
from sagemaker_lightning.compat.torch_modules import rename_as_in
from sagemaker_lightning.contract.atomic_files import (
    atomic_writes,
    json_text,
    remove_leftovers,
)
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.restart import RestartDescription
from sagemaker_lightning.resume.check import journal
from sagemaker_lightning.resume.files import first_start, shards
from sagemaker_lightning.resume.files.entries import ResumeResult


def export(cli: CommandLine, environment: SageMakerEnvironment) -> None:
    """Test the best model and write it to the model directory.

    No rank returns before the model is written. Checkpoints that SageMaker would upload with the
    job's output, though the run is finished, are removed.
    """
    state = None
    best = ""
    is_sharded = mesh_of(cli.trainer) is not None
    # Only one rank reads the file, because hosts share no disk.
    if cli.trainer.is_global_zero:
        best = cli.config_init.checkpoint.choose_intact()
        state = (
            # A sharded model need not fit the memory: each weight is read when it is loaded.
            torch.load(best, map_location="cpu", weights_only=True, mmap=is_sharded)["state_dict"]
            if best
            else None
        )
        if state:
            rename_as_in(cli.model, state)
    if is_sharded:
        model_parallel.load_best(cli.trainer, state)
        del state
    elif state := cli.trainer.strategy.broadcast(state):
        cli.model.load_state_dict(state, strict=cli.model.strict_loading)
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    tested: dict[str, float] = {}
    source = cli.model if cli.datamodule is None else cli.datamodule
    if is_overridden("test_step", cli.model) and is_overridden("test_dataloader", source):
        # With limit_test_batches=0 there is no result.
        for of_a_loader in cli.trainer.test(cli.model, cli.datamodule, verbose=False):
            tested |= of_a_loader
    metrics |= tested
    uploaded = uploaded_checkpoints(cli, environment)
    weights = network_of(cli.model).state_dict()
    file_bytes = safetensors_files.FILE_BYTES
    is_in_files = is_sharded and safetensors_files.size(weights) > file_bytes
    if is_in_files:
        writes = cli.trainer.is_global_zero
        safetensors_files.write(environment.model_dir, weights, writes, file_bytes)
    else:
        weights = dtensors.whole(weights, keeps=cli.trainer.is_global_zero)
    if cli.trainer.is_global_zero:
        config = cli.parser.dump(cli.config, skip_none=False)
        path = save(
            environment.model_dir,
            cli.model,
            cli.datamodule,
            metrics,
            environment.revision,
            config,
            Path(best).name,
            cli.resume.resumes,
            [restart.described() for restart in cli.resume.restarts],
            weights,
            is_in_files,
        )
        print(" ".join(f"{name}={text}" for name, text in texts(tested).items()))
        print(f"model: {path}")
        print(f"logs: {logs(cli, environment)}")
        if uploaded:
            where = "removed, as the run is finished; with a checkpoint folder, they stay there"
        else:
            where = str(environment.checkpoint_dir)
        print(f"checkpoints: {where}", flush=True)
    cli.trainer.strategy.barrier("artifacts")
    if cli.trainer.local_rank == 0:
        for path in uploaded:
            path.unlink(missing_ok=True)
        if uploaded:
            # The folder has files of somebody else.
            with suppress(OSError):
                environment.checkpoint_dir.rmdir()


def uploaded_checkpoints(cli: CommandLine, environment: SageMakerEnvironment) -> list[Path]:
    """Return this run's checkpoints if they are in the folder of the job's output.

    SageMaker uploads that folder. A run that is interrupted or fails needs the checkpoints there, a
    finished run does not. Outside of a job they stay: because of them, a finished run that is
    started again trains nothing.
    """
    folder = environment.checkpoint_dir
    output = environment.output_data_dir
    if output == SageMakerEnvironment.output_data_dir or folder != output / "checkpoints":
        return []
    files = [path for _, path in cli.resume.folder.checkpoints()]
    files += cli.config_init.checkpoint.files()
    files += journal.files(folder) + wandb_rows.files(folder) + shards.all_in(folder)
    files += first_start.files(folder)
    return [path for path in files if path.parent.resolve() == folder.resolve()]


def logs(cli: CommandLine, environment: SageMakerEnvironment) -> str:
    """Return where the logs are, a path or an s3:// address.

    If the folder is this host's default, the result is its parent, which has all hosts' folders.
    """
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
    resumes: Sequence[ResumeResult] = (),
    restarts: Sequence[RestartDescription] = (),
    weights: Mapping[str, Any] | None = None,
    is_in_files: bool = False,
) -> Path:
    """Write model.pt, model.json and config.yaml; return the path of the weights.

    Args:
        model_dir: The folder to write to.
        model: model.pt is the state dict, on the CPU, of `model.network`, or of the whole module if
            it has no submodule of that name; `torch.load(..., weights_only=True)` reads it.
        datamodule: The data module; None if the model has data of its own.
        metrics: The last value of each metric.
        revision: The revision of the source.
        config: The text of config.yaml, all flags with their values; `--config` reads it.
        best: The name of the best model's checkpoint, if the weights are from it; "" for the
            weights of the last step. model.json has it as well.
        resumes: One entry for each resumption, with whether the run continued as before
            (resume/check/verification.py).
        restarts: One entry for each restart of the program in its container (contract/restart.py).
        weights: The state dict, if the model has only a part of each of its tensors.
        is_in_files: Whether the weights are written already (safetensors_files.py), in place of
            model.pt.

    model.json describes the model and its input: class path, the module's hyperparameters, classes,
    input shape, range and normalization, metrics, versions, revision, `best`, `resumes` and
    `restarts`. What the data module does not say of itself is null.
    """
    network = network_of(model)
    weights = network.state_dict() if weights is None else weights
    is_normalized = getattr(datamodule, "normalize", False)
    classes = getattr(datamodule, "classes", None)
    description = {
        "class_path": _class_path(network),
        "module_class_path": _class_path(model),
        "hyperparameters": json.loads(json.dumps(dict(model.hparams), default=str)),
        "data_class_path": _class_path(model if datamodule is None else datamodule),
        "num_classes": getattr(datamodule, "num_classes", None),
        "classes": list(classes) if classes else None,
        "input_shape": list(getattr(datamodule, "dims", None) or []) or None,
        "input_range": list(getattr(datamodule, "input_range", None) or []) or None,
        "normalization": {key: list(getattr(datamodule, key)) for key in ("mean", "std")}
        if is_normalized and hasattr(datamodule, "mean")
        else None,
        "metrics": metrics,
        "best_model": best or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": getattr(sys.modules.get("torchvision"), "__version__", None),
            "pytorch_lightning": pl.__version__,
        },
        "revision": revision,
        "resumes": list(resumes),
        "restarts": list(restarts),
    }
    names = ["model.pt", "config.yaml", "model.json"]
    for name in names:
        remove_leftovers(model_dir, name)  # SageMaker would pack them with the model
    with atomic_writes([model_dir / name for name in names[is_in_files:]]) as files:
        *of_weights, flags, about = files
        for file in of_weights:
            torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, file)
        flags.write(config.encode())
        about.write(json_text(description, indent=2).encode() + b"\n")
    if is_in_files:
        (model_dir / "model.pt").unlink(missing_ok=True)
        return model_dir / safetensors_files.INDEX
    safetensors_files.remove(model_dir)
    return model_dir / "model.pt"


def network_of(model: pl.LightningModule) -> nn.Module:
    """Return the part of a model whose weights are exported: `model.network`, or else all of it."""
    network = getattr(model, "network", model)
    return network if isinstance(network, nn.Module) else model


def _class_path(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
