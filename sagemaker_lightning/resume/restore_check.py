"""Check that a resumed run has the checkpoint's values again.

These are weights, optimizer states and everything else that is saved. Without this check, something
that cannot be restored, such as an attribute of a class that was renamed, would be missing without
a message.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.resume.checkpoint_file import BEFORE_HOOKS
from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.encoding import NOTE_KEY, comparable
from sagemaker_lightning.state.graph.state import digests
from sagemaker_lightning.state.object_state import digest

WEIGHT_KEYS = "state_dict", "current_model_state", "averaging_state"
"""Parts of a checkpoint; the model may rightly have more or less of them than was saved."""
RANK_PARTS = "buffers", "metrics"  # parts of a rank's state
USER_PARTS = "generators", "stateful", "settings"  # parts of the user's objects' state
LOADER_ATTRIBUTES = "batch_size", "drop_last", "sampler"  # they decide a loader's batches
DATA_PREFIXES = (
    "the length of ",
    "the numbers in ",
    *(f"the {name} of " for name in LOADER_ATTRIBUTES),
)
"""How the names of values begin that tell the training and validation data from others."""
VALIDATION_PREFIXES = tuple(f"{beginning}val." for beginning in DATA_PREFIXES)


def fingerprint(state: Mapping[str, Any], rank_state: Mapping[str, Any]) -> dict[str, int]:
    """Return a digest of each value in a Lightning checkpoint and in a rank's state.

    Args:
        state: The Lightning checkpoint.
        rank_state: What epoch_state.rank_state returned for the rank.

    Returns:
        The digests by the values' names.
    """
    state = {**state, **state.get(BEFORE_HOOKS, {})}
    # This rank's own; the checkpoint has those of rank 0.
    rank_buffers = {name.removeprefix("model.") for name in rank_state["buffers"]}
    values = {
        f"{part}.{name}": value
        for part in WEIGHT_KEYS
        for name, value in state.get(part, {}).items()
        if name not in rank_buffers
    }
    for part in ("optimizer_states", "lr_schedulers"):
        values |= dict(_named_values(part, state[part]))
    callbacks = _named_values("callbacks", state.get("callbacks", {}))
    float_tensors = {
        name: value
        for name, value in callbacks
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    # ModelCheckpoint names its scores by file, in a folder that may have moved.
    values |= {
        re.sub(r"(?<=\.best_k_models\.).*/", "", name): value
        for name, value in float_tensors.items()
    }
    for part in RANK_PARTS:
        values |= dict(_named_values(part, rank_state[part]))
    values |= digests(rank_state["held"]["graph"])
    values |= rank_state["held"]["unsaved"]
    for part in USER_PARTS:
        for path, value in rank_state["held"][part].items():
            values[f"{part} {path}"] = comparable(value)
    values |= dict(_digests_of_parts("part", rank_state["parts"]))
    values |= rank_state["held"].get("data", {}) | rank_state["held"]["modules"]
    for part in ("eval", "frozen"):
        values |= {f"{part} {name or 'model'}": True for name in rank_state["held"][part]}
    return {
        name: batch_digest.combine(int(part) for part in batch_digest.leaf_digests(value))
        for name, value in values.items()
    }


def present_state(trainer: Trainer) -> dict[str, Any]:
    """Return what a Lightning checkpoint would hold now.

    The user's code is not asked to save anything, because it may count how often it saves.
    """
    model = trainer.lightning_module
    strategy = trainer.strategy
    state = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [
            strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
    }
    for callback in trainer.callbacks:
        if type(callback).on_save_checkpoint.__module__.startswith(
            ("pytorch_lightning.", "lightning.")
        ):
            callback.on_save_checkpoint(trainer, model, state)
    return state


def differing(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the names of values that differ.

    Args:
        before: What `fingerprint` returned for the checkpoint.
        now: What `fingerprint` returned for this run.
    """
    return [
        name
        for name, value in before.items()
        if now.get(name, value if name.startswith(WEIGHT_KEYS) else 0) != value
    ] + [name for name in now if name.startswith(("eval ", "frozen ")) and name not in before]


def _digests_of_parts(name: str, state: Any) -> Iterator[tuple[str, bytes]]:
    """Yield a digest of all of each value that is in dicts only, with its name.

    Args:
        name: The name of the state.
        state: What Parts.states returned, or a value in it.
    """
    if type(state) is dict and NOTE_KEY not in state:
        for key, value in state.items():
            yield from _digests_of_parts(f"{name}.{key}", value)
    else:
        yield name, digest(comparable(state))


def _named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value that is no list and no dict, with its name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_values(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named_values(f"{name}.{index}", item)
    else:
        yield name, value
