"""Whether a checkpoint is of this run: what has changed since that changes what comes out."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pytorch_lightning import Trainer

# What may change: where things are, how long to train, what is shown, which machine trains. Two more are looked at.
FREE = re.compile(
    r"--(trainer\.(max_|min_|accelerator|devices|num_nodes|strategy|logger|enable_|log_every|profiler|benchmark"
    r"|num_sanity|limit_test|limit_predict|detect_anomaly|default_root_dir|use_distributed_sampler|inference_mode"
    r"|barebones|plugins|model_registry|sync_batchnorm)|(logger|progress|system|resume|config|divergence)\b|lr_scaling"
    r"|checkpoint(?!\.(monitor|mode|save_top_k)\b)|data\.(data_dir|download|batch_size)$"
    r"|(data|model)\.(.*workers|pin_memory|prefetch_factor)$)"
)

# What else may change if that is asked for, as after a divergence. A learning rate is in the checkpoint's optimizers,
# where app/world.py changes it.
CURES = re.compile(r"--(optimizer\.lr|model\.(lr|learning_rate)|trainer\.(gradient_clip_(val|algorithm)|precision))$")


def described(trainer: Trainer, flags: Mapping[str, object]) -> dict[str, Any]:
    """Return what a checkpoint says of its run, in plain values."""
    shapes = _shapes(trainer.lightning_module.state_dict())
    return {"flags": json.dumps(flags, default=str), "data": _data(trainer), "batch": _global_batch(trainer),
            "shapes": shapes}  # fmt: skip


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
    old, new = json.loads(before["flags"]), json.loads(now["flags"])
    changed = {flag for flag in old.keys() | new.keys() if old.get(flag) != new.get(flag)}
    # With another number of ranks, another size of a rank's batch may make the same batch of them all.
    of_size = {"--data.batch_size"} & changed if before["batch"] != now["batch"] else set()
    fixed = {flag for flag in changed if not FREE.match(flag) and not (cures and CURES.match(flag))}
    found = [f"{flag} was {old.get(flag)}, is {new.get(flag)}" for flag in sorted(fixed | of_size)]
    if before["data"] != now["data"]:
        found.append(f"the training data was {before['data']}, is {now['data']}")
    shapes = [before["shapes"], now["shapes"]]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        was, is_ = (each.get(name, "absent") for each in shapes)
        if was != is_ and None not in (was, is_) and not (is_ == "absent" and name.partition(".")[0] in to_come):
            found.append(f"the model's {name} was {was}, is {is_}")
    return found


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int] | None]:
    """Return the shapes of weights and buffers; None of what gets its shape from the first batch."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return {
        name: None if isinstance(value, lazy) else list(value.shape)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _global_batch(trainer: Trainer) -> int | None:
    """Return the number of samples that all ranks see in a batch, where that can be told."""
    size = getattr(trainer.datamodule, "batch_size", None)
    return size * trainer.world_size if isinstance(size, int) else None


def _data(trainer: Trainer) -> str:
    """Return what identifies the data that is trained on, where that can be told."""
    if getattr(trainer.datamodule, "sharded", False):
        return f"{trainer.num_nodes} parts"  # of which this host knows one
    found = getattr(trainer.datamodule, "fingerprint", None)
    return str(found() if callable(found) else found)
