"""What `LightningModule.log` has gathered: an epoch's sums, and newest values.

No Lightning checkpoint contains them, so a resumed epoch would log the mean over its rest only.
`trainer.callback_metrics` and the like are public, but can only be read.

On an upgrade: compare trainer/connectors/logger_connector/result.py (the fields of _Metadata and
_Sync; what _ResultMetric keeps) and logger_connector.py (the three dicts; what `_first_loop_iter`
decides).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

from sagemaker_lightning.compat import metrics
from sagemaker_lightning.compat.torch_modules import plain_name

METADATA = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""The fields of _Metadata that are plain values."""
REDUCTIONS = {
    **{each.__name__: each for each in (torch.mean, torch.sum, torch.min, torch.max)},
    **{f"builtins.{each.__name__}": each for each in (sum, min, max)},
}
"""What `log(reduce_fx=...)` takes, by name. Lightning refuses a second `log` with another one."""
OF_RANKS = {"min": dim_zero_min, "builtins.min": dim_zero_min}
OF_RANKS |= {"max": dim_zero_max, "builtins.max": dim_zero_max}
"""What makes one of several ranks' values, by the name of the reduction; else they are added."""
NEWEST_VALUES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Attributes that have the newest values. A checkpoint contains them by these names."""


class _ResumedMetadata(_Metadata):
    """The settings of a value that a run before has logged.

    Whether it is reduced over the ranks, the first `log` says: where there is one process,
    Lightning takes `sync_dist=True` for False, and refuses another value.
    """

    def __eq__(self, other: object) -> bool:
        """Take from other settings whether to reduce; return whether all others are the same."""
        if not isinstance(other, _Metadata):
            return NotImplemented
        self.sync.should = other.sync.should
        return all(
            getattr(self, field.name) == getattr(other, field.name) for field in fields(_Metadata)
        )


def newest_values(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the newest value of each metric, by where Lightning shows it."""
    return {name: dict(getattr(trainer._logger_connector, name)) for name in NEWEST_VALUES}


def set_newest_values(trainer: Trainer, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Give Lightning back what `newest_values` returned."""
    for name in NEWEST_VALUES:
        setattr(trainer._logger_connector, name, dict(values[name]))


def epoch_sums(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the settings and the state of each value that the training epoch has logged."""
    return {
        key: _settings_and_state(metric)
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
    }


def restore_epoch_sums(
    trainer: Trainer,
    own: Sequence[Mapping[str, Mapping[str, Any]]],
    everyone: Sequence[Mapping[str, Mapping[str, Any]]],
    device: torch.device,
) -> None:
    """Give the training epoch back what `epoch_sums` returned.

    Lightning decides by `_first_loop_iter` whether a batch is an epoch's first one, and then resets
    its sums.

    Args:
        trainer: Lightning's trainer.
        own: What it returned on this rank, or on the ranks from which this one takes over.
        everyone: What it returned on all ranks; with as many ranks as before, `own` will do.
        device: Where the sums are.
    """
    trainer._logger_connector._first_loop_iter = False
    modules = dict(trainer.lightning_module.named_modules())
    names = {plain_name(name): name for name in modules}
    for key in {key: None for saved in everyone for key in saved}:
        logged = dict(
            _combined(*([saved[key] for saved in of if key in saved] for of in (own, everyone)))
        )
        if not logged["is_tensor"]:
            name = plain_name(logged["metric_attribute"])
            logged["metric_attribute"] = names.get(name, name)
        is_known = logged["reduce"] in REDUCTIONS and (
            logged["is_tensor"] or isinstance(modules.get(logged["metric_attribute"]), Metric)
        )
        if is_known and not logged["has_group"]:  # a group of processes cannot be saved
            trainer.fit_loop.epoch_loop._results[key] = _accumulator(trainer, logged, device)


def _combined(
    own: Sequence[Mapping[str, Any]], everyone: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the settings and the state of a value with which a rank takes over from others."""
    first = everyone[0]
    if not first["is_tensor"]:
        return first
    counts_for_all = first["sync"] and not first["zero_only"]
    reductions = dict.fromkeys(first["defaults"], dim_zero_sum)
    reductions["value"] = OF_RANKS.get(first["reduce"], dim_zero_sum)
    taken = own or ([] if counts_for_all else everyone[:1])
    own_states, states = ([each["state"] for each in of] for of in (taken, everyone))
    state = metrics.combined(own_states, states, reductions, first["defaults"])
    return {**first, "state": state}


def _settings_and_state(metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    sync = metric.meta.sync
    saved = {name: getattr(meta, name) for name in METADATA}
    saved |= {
        "reduce": next(name for name, each in REDUCTIONS.items() if each is meta.reduce_fx),
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
        # It may have another dtype than the sums: those have that of the values, and the precision
        # plugin may have changed these.
        "defaults": dict(metric._defaults),
    }
    return saved


def _accumulator(trainer: Trainer, saved: Mapping[str, Any], device: torch.device) -> _ResultMetric:
    """Return the accumulator that LightningModule.log would have made for a value."""
    for name in METADATA:
        if not isinstance(saved[name], (str, int, type(None))):
            raise TypeError(f"{name}: {type(saved[name]).__name__}")
    meta = _ResumedMetadata(
        **{name: saved[name] for name in METADATA}, reduce_fx=REDUCTIONS[saved["reduce"]]
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
        for name in metric._defaults.keys() & saved["defaults"].keys():
            metric._defaults[name] = saved["defaults"][name].to(device)
    else:
        metric.value = trainer.lightning_module.get_submodule(saved["metric_attribute"])
    metric.has_reset = saved["has_reset"]
    metric._forward_cache = None if saved["cache"] is None else saved["cache"].to(device)
    return metric
