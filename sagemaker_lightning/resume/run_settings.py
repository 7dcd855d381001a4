"""Whether a checkpoint is of this run: what has changed since that changes what comes out."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer

from sagemaker_lightning.compat.lightning_loaders import flat

# What may change: where things are, how long to train, what is shown, which machine trains. Two more are looked at.
FREE = re.compile(
    r"--(trainer\.(max_|min_|accelerator|devices|num_nodes|strategy|logger|enable_|log_every|profiler|benchmark"
    r"|num_sanity|limit_test|limit_predict|detect_anomaly|default_root_dir|use_distributed_sampler|inference_mode"
    r"|barebones|plugins|model_registry|sync_batchnorm)|(logger|progress|system|resume|config|divergence)\b|lr_scaling"
    r"|checkpoint(?!\.(monitor|mode|save_top_k)\b)|data\.(data_dir|download)$"
    r"|(data|model)\.(.*workers|pin_memory|prefetch_factor)$)"
)

# What else may change if that is asked for, as after a divergence. A learning rate is in the checkpoint's optimizers,
# where callbacks/rank_consistency.py changes it.
CURES = re.compile(r"--(optimizer\.lr|model\.(lr|learning_rate)|trainer\.(gradient_clip_(val|algorithm)|precision))$")


def described(trainer: Trainer, flags: Mapping[str, object]) -> dict[str, Any]:
    """Return what a checkpoint says of its run, in plain values."""
    shapes = _shapes(trainer.lightning_module.state_dict())
    return {"flags": json.dumps(flags, default=str), "data": _data(trainer), "shapes": shapes,
            "ranks": trainer.world_size} | _of_loaders(trainer)  # fmt: skip


def differences(
    trainer: Trainer,
    flags: Mapping[str, object],
    before: Mapping[str, Any],
    cures: bool = False,
    to_come: Collection[str] = (),
) -> list[str]:
    """Return what differs between this run and that of a checkpoint, which `described` it where it began.

    `cures` says whether CURES may differ; `to_come` are parts of the model that a hook makes before training.
    """
    now = described(trainer, flags)
    changed = _changed(before, flags)
    fixed = {flag for flag in changed if not FREE.match(flag) and not (cures and CURES.match(flag))}
    fixed -= _numbers_of_loaders(changed, before, trainer.world_size)
    found = [_line(flag, *changed[flag]) for flag in sorted(fixed)]
    if before["data"] != now["data"]:
        found.append(f"the training data was {before['data']}, is {now['data']}")
    shapes = [before["shapes"], now["shapes"]]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        was, is_ = (each.get(name, "absent") for each in shapes)
        if was != is_ and None not in (was, is_) and not (is_ == "absent" and name.partition(".")[0] in to_come):
            found.append(f"the model's {name} was {was}, is {is_}")
    return found


def loaders_differ(trainer: Trainer, flags: Mapping[str, object], before: Mapping[str, Any]) -> list[str]:
    """Return what differs of what `differences` has let pass, now that there are loaders to look at."""
    changed, ranks = _changed(before, flags), trainer.world_size
    passed = _numbers_of_loaders(changed, before, ranks)
    wrong = passed - _numbers_of_loaders(changed, before, ranks, _of_loaders(trainer)) if passed else ()
    return [_line(flag, *changed[flag]) for flag in sorted(wrong)]


def _numbers_of_loaders(
    changed: Mapping[str, tuple[Any, Any]], before: Mapping[str, Any], ranks: int, now: Mapping[str, list] | None = None
) -> set[str]:
    """Return the flags, by whatever name, of the number of data workers, and of the samples of a rank's batch where a
    batch of all ranks has as many as before; those that may be such flags, unless the loaders are there `now`."""
    found = set()
    for flag, (was, is_) in changed.items():
        if not flag.startswith(("--data.", "--model.")) or not type(was) is type(is_) is int:
            continue
        size = was in before["sizes"] and was * before["ranks"] == is_ * ranks
        workers = was in before["workers"]
        if now:
            size = size and _of_all_ranks(now, ranks) == _of_all_ranks(before, before["ranks"])
            workers = workers and is_ in now["workers"]
        if size or workers:
            found.add(flag)
    return found


def _of_all_ranks(loaders: Mapping[str, list], ranks: int) -> list[int | None]:
    """Return the samples of a batch of all ranks."""
    return [size and size * ranks for size in loaders["sizes"]]


def _changed(before: Mapping[str, Any], flags: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Return the flags that had another value before, with that and the one they have."""
    old, new = json.loads(before["flags"]), json.loads(json.dumps(flags, default=str))
    names = {flag for flag in old.keys() | new.keys() if old.get(flag) != new.get(flag)}
    return {flag: (old.get(flag), new.get(flag)) for flag in names}


def _line(flag: str, was: Any, is_: Any) -> str:
    return f"{flag} was {was}, is {is_}"


def changed(before: Mapping[str, Any], flags: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return each flag of the trainer, the model and the data that had another value in the run that `described` told
    of, that value, and the one it has now."""
    found = sorted(_changed(before, flags).items())
    return [(flag, str(was), str(is_)) for flag, (was, is_) in found if re.match(r"--(trainer|model|data)\b", flag)]


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int] | None]:
    """Return the shapes of weights and buffers; None of what gets its shape from the first batch."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return {
        name: None if isinstance(value, lazy) else list(value.shape)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _of_loaders(trainer: Trainer) -> dict[str, list]:
    """Return the samples of a rank's batch, and the data workers, of each training loader, where that can be told."""
    loaders = flat(trainer.train_dataloader)
    sizes = [getattr(one, "batch_size", None) for one in [*loaders, trainer.datamodule]]
    return {
        "sizes": [size if type(size) is int else None for size in sizes],
        "workers": [getattr(one, "num_workers", None) for one in loaders],
    }


def _data(trainer: Trainer) -> str:
    """Return what identifies the data that is trained on, where that can be told."""
    if getattr(trainer.datamodule, "sharded", False):
        return f"{trainer.num_nodes} parts"  # of which this host knows one
    found = getattr(trainer.datamodule, "fingerprint", None)
    return str(found() if callable(found) else found)
