"""The parameters and buffers of one torch.nn.Module; inner state of schedulers.

`named_parameters` and `named_buffers` leave out those that are None, which are filled later, and
the second name of those that have two; and a user's module may override them. On an upgrade: see
`Module.__init__` in torch/nn/modules/module.py.
"""

from typing import Any

from torch import Tensor, nn

LAST_RATES_ATTRIBUTE = "_last_lr"
"""Attribute of a scheduler that has what `get_last_lr` returns; nothing public sets it.

On an upgrade: see torch/optim/lr_scheduler.py.
"""
INNER_SCHEDULERS = "_schedulers"
"""Attribute of a SequentialLR or ChainedScheduler that has its schedulers; nothing public does."""


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, to be read or changed."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers by name, to be read or changed."""
    return module._buffers


def hooks(module: nn.Module) -> int:
    """Return how many hooks for its forward and backward pass a module has got.

    A lazy module has one of its own until the first batch (torch/nn/modules/lazy.py).
    """
    hooks_by_kind = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return sum(map(len, hooks_by_kind)) - hasattr(module, "_initialize_hook")


def keep_metadata(copied: dict[str, Any], original: Any) -> None:
    """Give a copy of a state dict its modules' versions, if the original has them.

    `load_state_dict` recognises older states by them. `state_dict()` sets them as an attribute
    (module.py, `state_dict`), which a copy of the items alone lacks.
    """
    if isinstance(metadata := getattr(original, "_metadata", None), dict):
        copied._metadata = metadata


def inner_schedulers(scheduler: object) -> list[object]:
    """Return the schedulers in a SequentialLR or ChainedScheduler; [] for others."""
    return getattr(scheduler, INNER_SCHEDULERS, [])
