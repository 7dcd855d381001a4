"""The state of a torchmetrics.Metric, saved and restored.

Public names can read it (`metric_state`, `update_count`), but not set it. `load_state_dict` handles
only states that were declared persistent, and no number of updates.

On an upgrade: compare `Metric.__init__`, `reset` and `compute` in torchmetrics/metric.py: whatever
`reset` sets besides the states has to be set here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric


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
