"""Decides whether a checkpoint is of this run: compares settings that change results."""

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_trainer import data_module_of
from sagemaker_lightning.compat.torch_modules import (
    buffers,
    is_lazy,
    named_modules,
    parameters,
    unsaved_buffers,
)
from sagemaker_lightning.resume.files.entries import LoaderNumbers, RunSettings

MAY_CHANGE = {
    r"trainer\.(max_|min_)": "how long to train",
    r"trainer\.(accelerator|devices|num_nodes|strategy|plugins|sync_batchnorm)": "which machines",
    r"trainer\.(benchmark|inference_mode|use_distributed_sampler)": "how they compute the same",
    r"trainer\.(logger|enable_|log_every|profiler|model_registry|barebones)": "what is shown",
    r"trainer\.(num_sanity|limit_test|limit_predict|detect_anomaly)": "what trains nothing",
    r"trainer\.default_root_dir": "where files are",
    r"(logger|progress|system)\b": "what is shown",
    r"(resume|config)\b": "how to resume, and where settings come from",
    r"divergence\b": "when a job ends that learns nothing",
    r"lr_scaling": "the learning rate is scaled again for the number of ranks",
    r"checkpoint(?!\.(monitor|mode|save_top_k)\b)": "all but which model is the best",
    r"data\.(data_dir|download)$": "where files are",
    r"(data|model)\.(.*workers|pin_memory|prefetch_factor)$": "how batches are loaded",
}
"""Flags that a resumed run may change (patterns of what follows "--"), and what they are about.

_allowed_loader_flags allows two more: numbers of workers, and batch sizes with the same total.
"""
MAY_CHANGE_IF_ALLOWED = {
    r"optimizer\.lr$": "the learning rate",
    r"model\.(lr|learning_rate)$": "the learning rate",
    r"trainer\.gradient_clip_(val|algorithm)$": "gradient clipping",
    r"trainer\.precision$": "precision",
}
"""Flags that may also change if the user allows it, such as after a divergence.

The learning rate is in the checkpoint's optimizers, where callbacks/rank_consistency.py changes it.
"""


TRAINER_ATTRIBUTES = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "precision",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)
"""What a Trainer was given that changes the results."""


def trainer_settings(trainer: Trainer) -> dict[str, object]:
    """Return the settings of a trainer that change the results, by flag."""
    return {f"--trainer.{name}": getattr(trainer, name) for name in TRAINER_ATTRIBUTES}


def describe(trainer: Trainer, flags: Mapping[str, object]) -> RunSettings:
    """Return the settings that identify a run, in plain values.

    Args:
        trainer: Lightning's trainer.
        flags: All settings by flag.
    """
    return {
        "flags": json.dumps(flags, default=str),
        "data": _data_identity(trainer),
        "ranks": trainer.world_size,
        **_loader_numbers(trainer),
    }


def differences(
    trainer: Trainer,
    flags: Mapping[str, object],
    before: RunSettings,
    other_settings: bool = False,
) -> list[str]:
    """Return what differs between this run and a checkpoint's run, a line for each.

    Args:
        trainer: Lightning's trainer.
        flags: All settings of this run by flag.
        before: What `describe` returned when the checkpoint's run began.
        other_settings: Whether the flags MAY_CHANGE_IF_ALLOWED may differ.
    """
    current = describe(trainer, flags)
    changed = _changed_flags(before, flags)
    allowed = [*MAY_CHANGE, *(MAY_CHANGE_IF_ALLOWED if other_settings else ())]
    forbidden = {
        flag for flag in changed if not any(re.match(f"--{pattern}", flag) for pattern in allowed)
    }
    forbidden -= _allowed_loader_flags(changed, before, trainer.world_size)
    lines = [_described_change(flag, *changed[flag]) for flag in sorted(forbidden)]
    if before["data"] != current["data"]:
        lines.append(f"the training data was {before['data']}, is {current['data']}")
    return lines


def loader_differences(
    trainer: Trainer, flags: Mapping[str, object], before: RunSettings
) -> list[str]:
    """Return forbidden differences that `differences` allowed for lack of loaders.

    Call it as soon as the trainer has its training loaders.

    Args:
        trainer: Lightning's trainer.
        flags: All settings of this run by flag.
        before: What `describe` returned when the checkpoint's run began.
    """
    changed = _changed_flags(before, flags)
    ranks = trainer.world_size
    allowed = _allowed_loader_flags(changed, before, ranks)
    forbidden = (
        allowed - _allowed_loader_flags(changed, before, ranks, _loader_numbers(trainer))
        if allowed
        else ()
    )
    return [_described_change(flag, *changed[flag]) for flag in sorted(forbidden)]


def _allowed_loader_flags(
    changed: Mapping[str, tuple[Any, Any]],
    before: RunSettings,
    ranks: int,
    now: LoaderNumbers | None = None,
) -> set[str]:
    """Return the changed flags, of any name, that a resumed run may change.

    They are the number of data workers, and the batch size of a rank if a batch of all ranks has as
    many samples as before.

    Args:
        changed: The changed flags with their values before and now.
        before: What `describe` returned when the checkpoint's run began.
        ranks: Number of ranks of this run.
        now: What `_loader_numbers` returns for this run. Without it, flags are returned that may be
            such flags.
    """
    matching = set()
    for flag, (before_value, now_value) in changed.items():
        if (
            not flag.startswith(("--data.", "--model."))
            or not type(before_value) is type(now_value) is int
        ):
            continue
        is_batch_size = (
            before_value in before["sizes"] and before_value * before["ranks"] == now_value * ranks
        )
        is_number_of_workers = before_value in before["workers"]
        if now:
            is_batch_size = is_batch_size and _batch_sizes_of_all_ranks(
                now, ranks
            ) == _batch_sizes_of_all_ranks(before, before["ranks"])
            is_number_of_workers = is_number_of_workers and now_value in now["workers"]
        if is_batch_size or is_number_of_workers:
            matching.add(flag)
    return matching


def _batch_sizes_of_all_ranks(loaders: LoaderNumbers, ranks: int) -> list[int | None]:
    """Return the number of samples in a batch of all ranks, for each loader."""
    return [size and size * ranks for size in loaders["sizes"]]


def _changed_flags(before: RunSettings, flags: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Return the flags that have changed, with their values before and now."""
    old = json.loads(before["flags"])
    new = json.loads(json.dumps(flags, default=str))
    names = {flag for flag in old.keys() | new.keys() if old.get(flag) != new.get(flag)}
    return {flag: (old.get(flag), new.get(flag)) for flag in names}


def _described_change(flag: str, before_value: Any, now_value: Any) -> str:
    """Return a line for a flag that has changed."""
    return f"{flag} was {before_value}, is {now_value}"


def changed_settings(
    before: RunSettings, flags: Mapping[str, object]
) -> list[tuple[str, str, str]]:
    """Return changed flags of trainer, model and data, with both values as text.

    Args:
        before: What `describe` returned when the earlier run began.
        flags: All settings of this run by flag.
    """
    changes = sorted(_changed_flags(before, flags).items())
    return [
        (flag, str(before_value), str(now_value))
        for flag, (before_value, now_value) in changes
        if re.match(r"--(trainer|model|data)\b", flag)
    ]


def shapes_of(model: torch.nn.Module) -> dict[str, list[int] | None]:
    """Return the shapes of weights and buffers, by the names that a state dict has for them.

    The shape is None for a lazy one, which gets it from the first batch. The model is not asked for
    its state dict: its class may count how often it is.
    """
    shapes = {}
    for path, module in named_modules(model, remove_duplicate=False):
        prefix = f"{path}." if path else ""
        unsaved = unsaved_buffers(module)
        for name, value in (parameters(module) | buffers(module)).items():
            if value is not None and name not in unsaved:
                shape = None if is_lazy(value) else list(value.shape)
                shapes[prefix + name] = shape
    return shapes


def _loader_numbers(trainer: Trainer) -> LoaderNumbers:
    """Return batch size of a rank and number of workers, for each training loader.

    An entry is None if it is unknown. The sizes have one entry more, for the data module.
    """
    loaders = flattened(trainer.train_dataloader)
    sizes = [getattr(loader, "batch_size", None) for loader in [*loaders, data_module_of(trainer)]]
    return {
        "sizes": [size if type(size) is int else None for size in sizes],
        "workers": [getattr(loader, "num_workers", None) for loader in loaders],
    }


def _data_identity(trainer: Trainer) -> str:
    """Return what identifies the training data, as far as that is known."""
    if getattr(data_module_of(trainer), "sharded", False):
        return f"{trainer.num_nodes} parts"  # this host knows only one of them
    fingerprint = getattr(data_module_of(trainer), "fingerprint", None)
    return str(fingerprint() if callable(fingerprint) else fingerprint)


def other_shapes(
    before: Mapping[str, list[int] | None], now: Mapping[str, list[int] | None]
) -> list[str]:
    """Return which weights and buffers have another shape, or only one run has, a line for each.

    Args:
        before: What `shapes_of` returned when the checkpoint's run began.
        now: What it returns now.
    """
    lines = []
    for name in sorted(before.keys() | now.keys()):
        shapes = before.get(name, "absent"), now.get(name, "absent")
        if shapes[0] != shapes[1] and None not in shapes:
            lines.append(f"the model's {name} was {shapes[0]}, is {shapes[1]}")
    return lines
