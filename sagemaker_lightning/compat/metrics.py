"""The state of a torchmetrics.Metric, saved and restored.

Public names can read it (`metric_state`, `update_count`), but not set it. `load_state_dict` handles
only states that were declared persistent, and no number of updates.

On an upgrade: compare `Metric.__init__`, `reset` and `compute` in torchmetrics/metric.py: whatever
`reset` sets besides the states has to be set here. `add_state` has the reductions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum


def state_of(metric: Metric) -> dict[str, Any]:
    """Return how often a metric was updated, and its states by name.

    A state is a tensor or a list of tensors.
    """
    return {"updates": metric.update_count, "states": metric.metric_state}


def restore(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    """Give a metric back what `state_of` returned, copied to `device`; nothing else is set."""
    metric._update_count = saved["updates"]
    metric._computed = None
    for name in metric.metric_state.keys() & saved["states"].keys():
        value = saved["states"][name]
        setattr(
            metric,
            name,
            apply_to_collection(value, Tensor, lambda tensor: tensor.to(device, copy=True)),
        )


def taken_over(
    metric: Metric, own: Sequence[Mapping[str, Any]], everyone: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the state with which a metric continues, as `combined` does."""
    if not metric.sync_on_compute:
        own = own or everyone[:1]
    reductions: dict[str, Any] = metric._reductions  # torchmetrics' type has the words given for it
    return combined(own, everyone, reductions, metric._defaults)


def combined(
    own: Sequence[Mapping[str, Any]],
    everyone: Sequence[Mapping[str, Any]],
    reductions: Mapping[str, Callable[..., Any] | None],
    defaults: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return a state with which a rank takes over from others; None if only its metric knows how.

    All ranks' states are then together what those before were together.

    Args:
        own: What `state_of` returned on the ranks from which this one takes over.
        everyone: The same of all ranks.
        reductions: What makes one of all ranks' states, by the state's name.
        defaults: The states before the first update, by name.
    """
    made: dict[str, Any] = {}
    for name, default in defaults.items():
        reduction = reductions[name]
        of = everyone if reduction is dim_zero_mean else own
        values = [state["states"][name] for state in of if name in state["states"]]
        if isinstance(default, list):
            made[name] = [tensor for value in values for tensor in value]
        elif len(values) < 2:
            made[name] = values[0] if values else default
        elif reduction in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min):
            made[name] = reduction(torch.stack(values))
        else:
            return None
    return {"updates": sum(state["updates"] for state in own), "states": made}
