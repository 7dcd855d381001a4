"""The parameters and buffers of one torch.nn.Module, by name; and inner state of schedulers.

`named_parameters` and `named_buffers` leave out those that are None, which are filled later, and
those that have two names; and a user's module may override them. On an upgrade: see
`Module.__init__` in torch/nn/modules/module.py.
"""

from typing import Any

from torch import Tensor, nn

LAST_RATES = "_last_lr"
"""Where a scheduler keeps what `get_last_lr` returns; nothing public sets it.

On an upgrade: see torch/optim/lr_scheduler.py.
"""


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters, to be read or changed."""
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, to be read or changed."""
    return module._buffers


def keep_metadata(made: dict[str, Any], given: Any) -> None:
    """Give a copy of a state dict the versions of its modules, if the given one has them.

    `load_state_dict` knows older states by them. `state_dict()` sets them as an attribute
    (module.py, `state_dict`), which a copy of the items alone does not have.
    """
    if isinstance(metadata := getattr(given, "_metadata", None), dict):
        made._metadata = metadata


def inner_schedulers(scheduler: object) -> list[object]:
    """Return the schedulers in a SequentialLR or ChainedScheduler; [] of another one."""
    return getattr(scheduler, "_schedulers", [])
