"""What `LightningModule.log` has gathered: sums of an epoch, and the newest values.

No Lightning checkpoint has them, so that an epoch that goes on would log the mean over its rest.
`trainer.callback_metrics` and the like are public and can be read only.

On an upgrade: compare trainer/connectors/logger_connector/result.py (the fields of _Metadata and
_Sync; what _ResultMetric keeps) and logger_connector.py (the three dicts; what `_first_loop_iter`
decides).
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

from sagemaker_lightning.compat import metrics

METADATA = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
            "dataloader_idx", "metric_attribute")  # fmt: skip
"""The fields of _Metadata that are plain values."""
SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Where the newest values are. A checkpoint has them by these names."""


def shown(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the newest value of each metric, by where Lightning shows it."""
    return {name: dict(getattr(trainer._logger_connector, name)) for name in SHOWN}


def show(trainer: Trainer, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Give Lightning back what `shown` returned."""
    for name in SHOWN:
        setattr(trainer._logger_connector, name, dict(values[name]))


def gathered(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the settings and the state of each value that the training epoch has logged."""
    return {key: _state(metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()}


def go_on_gathering(
    trainer: Trainer, saved: Mapping[str, Mapping[str, Any]], device: torch.device
) -> None:
    """Give the training epoch back what it had `gathered`.

    Lightning takes a batch for an epoch's first one, and resets its sums, by `_first_loop_iter`.
    """
    trainer._logger_connector._first_loop_iter = False
    for key, one in saved.items():
        if not one["has_group"]:  # a group of processes cannot be saved
            trainer.fit_loop.epoch_loop._results[key] = _made(trainer, one, device)


def _state(metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    sync = metric.meta.sync
    saved = {name: getattr(meta, name) for name in METADATA}
    saved |= {
        "reduce": meta.reduce_fx.__name__,
        "sync": sync.should,
        "op": sync.op,
        "zero_only": sync.rank_zero_only,
    }
    saved |= {
        "has_group": sync.group is not None,
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
    }
    saved |= {
        "cache": metric._forward_cache,
        "state": metrics.state_of(metric) if metric.is_tensor else {},
    }
    return saved


def _made(trainer: Trainer, saved: Mapping[str, Any], device: torch.device) -> _ResultMetric:
    """Return the accumulator of a logged value as LightningModule.log would have made it."""
    meta = _Metadata(
        **{name: saved[name] for name in METADATA}, reduce_fx=getattr(torch, saved["reduce"])
    )
    meta.sync = _Sync(
        _should=saved["sync"],
        fn=trainer.strategy.reduce,
        _op=saved["op"],
        rank_zero_only=saved["zero_only"],
    )
    metric = _ResultMetric(meta, saved["is_tensor"]).to(device)
    if saved["is_tensor"]:
        metrics.restore(metric, saved["state"], device)
        for name, value in saved["state"][
            "states"
        ].items():  # of the type that the precision has made it
            metric._defaults[name] = metric._defaults[name].to(value.dtype)
    else:
        metric.value = attrgetter(saved["metric_attribute"])(trainer.lightning_module)
    metric.has_reset = saved["has_reset"]
    metric._forward_cache = None if saved["cache"] is None else saved["cache"].to(device)
    return metric
