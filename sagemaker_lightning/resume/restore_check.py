"""Whether what a checkpoint says is there again in the run that goes on from it: weights, optimizers, all that is kept.

What cannot be found again, such as an attribute of a class that was renamed, would otherwise be missing without a word.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.encoding import without_devices

WEIGHTS = "state_dict", "current_model_state", "averaging_state"
"""Parts of a checkpoint, of which a model may rightly have more or less than was saved."""
KEPT = "buffers", "metrics"
HELD = "plain", "generators", "stateful", "settings"


def fingerprint(state: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, int]:
    """Return a digest of each value in a Lightning checkpoint, and in what a rank knows besides, by its name."""
    own = {name.removeprefix("model.") for name in known["buffers"]}  # of this rank; the checkpoint has the first one's
    found = {
        f"{part}.{name}": value for part in WEIGHTS for name, value in state.get(part, {}).items() if name not in own
    }
    for part in ("optimizer_states", "lr_schedulers"):
        found |= dict(_leaves(part, state[part]))
    callbacks = _leaves("callbacks", state.get("callbacks", {}))
    numbers = {name: value for name, value in callbacks if isinstance(value, Tensor) and value.is_floating_point()}
    # ModelCheckpoint's are by file, in a folder that may have moved.
    found |= {re.sub(r"(?<=\.best_k_models\.).*/", "", name): value for name, value in numbers.items()}
    for part in KEPT:
        found |= dict(_leaves(part, known[part]))
    for part in HELD:
        for path, value in known["held"][part].items():
            found[".".join(path) if isinstance(path, tuple) else f"{part} {path}"] = without_devices(value)
    for part in ("eval", "frozen"):
        found |= {f"{part} {name or 'model'}": True for name in known["held"][part]}
    return {name: batch_digest.folded(int(part) for part in batch_digest.parts(value)) for name, value in found.items()}


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a Lightning checkpoint would hold now; no code of the user's is asked to save, which may count."""
    model, strategy = trainer.lightning_module, trainer.strategy
    state = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
    }
    for callback in trainer.callbacks:
        if type(callback).on_save_checkpoint.__module__.startswith("pytorch_lightning."):
            callback.on_save_checkpoint(trainer, model, state)
    return state


def lost(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the names of what is not as it was."""
    return [
        name for name, value in before.items() if now.get(name, value if name.startswith(WEIGHTS) else 0) != value
    ] + [name for name in now if name.startswith(("eval ", "frozen ")) and name not in before]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value that is no list or dict, and its name."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _leaves(f"{name}.{number}", one)
    else:
        yield name, value
