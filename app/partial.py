"""What an epoch has gathered so far and a Lightning checkpoint leaves out: metrics, and the buffers of each rank.

Epoch-level metrics of training are sums over the batches that were seen; DDP keeps buffers (batch norm's statistics)
alike at the start of a forward pass only, and validation uses each rank's own.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch import Tensor, nn
from torchmetrics import Metric

from app import graph
from app.exact import has_state
from app.plain import decoded, encoded

METADATA = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
            "dataloader_idx", "metric_attribute")  # fmt: skip
SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def copied(data: Any) -> Any:
    """Return `data` with every tensor in it copied to the CPU."""
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def roots(trainer: Trainer) -> dict[str, Any]:
    """Return the objects of the user's in which there may be state, by name."""
    found: dict[str, Any] = {"model": trainer.lightning_module, "datamodule": trainer.datamodule}
    found |= {f"callbacks.{k} {type(one).__name__}": one for k, one in enumerate(trainer.callbacks)}
    for kind, loop in (("train", trainer.fit_loop), ("val", trainer.fit_loop.epoch_loop.val_loop)):
        loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
        for number, loader in enumerate(loaders):
            if not has_state(loader):
                for name in ("dataset", "collate_fn"):
                    found[f"{kind}.{number}.{name}"] = getattr(loader, name, None)
    return found


class Held:
    """What the user's objects hold: plain state, generators of random numbers, metrics, modules and optimizers.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state = graph.State(partial(roots, trainer))
        self.first: set = set()
        self.settings: dict[str, Any] = {}

    def mark(self) -> None:
        """Take all that is there now for what was there from the beginning."""
        self.state.mark()
        self.first = self.state.objects()
        self.settings = self._settings()

    def told(self) -> dict[str, Any]:
        """Return what has changed since, encoded."""
        model, loop = self.trainer.lightning_module, self.trainer.fit_loop
        settings = {name: value for name, value in self._settings().items() if self.settings.get(name, value) != value}
        return {
            "plain": self.state.changed(),
            "made": sorted(self.state.objects() - self.first),
            "generators": {path: encoded(graph.state_of(one)) for path, one in self._generators().items()},
            "stateful": {path: encoded(one.state_dict()) for path, one in self._stateful().items()},
            "settings": settings,
            "eval": [name for name, module in model.named_modules() if not module.training],
            "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
            "loaders": loop._combined_loader.states(loop._data_fetcher, within=loop.epoch_loop.resume.within),
        }

    def restore(self, told: Mapping[str, Any], wholly: bool) -> None:
        """Give it back, as far as it is there; if not wholly, plain values only."""
        model = self.trainer.lightning_module
        self.state.restore(told["plain"])
        if not wholly:
            return
        for path, one in self._generators().items():
            if path in told["generators"]:
                graph.restore(one, decoded(told["generators"][path]))
        for path, one in self._stateful().items():
            if path in told["stateful"]:
                one.load_state_dict(decoded(told["stateful"][path]))
        for name, value in told["settings"].items():
            setattr(self.trainer, name, value)
            self.settings.setdefault(name, None)
        idle, frozen = set(told["eval"]), set(told["frozen"])
        for name, module in model.named_modules():
            module.training = name not in idle
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def lacking(self, told: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the attributes that there were and that are no plain values, and that are not there now."""
        now = self.state.objects()
        return [tuple(one) for one in told["made"] if tuple(one) not in now]

    def _settings(self) -> dict[str, Any]:
        """Return what a callback may change of the trainer."""
        plain = (int, float, bool, str, type(None))
        return {name: one for name, one in vars(self.trainer).items() if name[0] != "_" and type(one) in plain
                and name != "should_stop"}  # fmt: skip

    def _generators(self) -> dict[str, Any]:
        """Return the generators that belong to the model, callbacks and data module."""
        return graph.generators({name: one for name, one in roots(self.trainer).items() if "." not in name or
                                 name.startswith("callbacks")})  # fmt: skip

    def _stateful(self) -> dict[str, Any]:
        """Return a library's objects that save and load their state, such as an optimizer of a user's own."""
        known = {id(one) for one in self.trainer.optimizers}
        known |= {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        own = (nn.Module, Callback, LightningDataModule, torch.utils.data.DataLoader, *graph.GENERATORS, type)
        return {
            path: one
            for path, one in graph.walk(roots(self.trainer), code=False)
            if not isinstance(one, own) and id(one) not in known and graph.library(type(one)) and has_state(one)
        }


def adapt(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the model the buffers that came to be, or another shape, while it was trained, to load their values into."""
    present = model.state_dict()
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        now = present.get(name)
        if not isinstance(value, Tensor) or (now is not None and (not _has_values(now) or now.shape == value.shape)):
            continue
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue
        if last in owner._buffers:
            owner._buffers[last] = value.to(getattr(now, "device", "cpu"), copy=True)
        elif last in owner._parameters and owner._parameters[last] is not None:
            owner._parameters[last].data = value.to(owner._parameters[last].device, copy=True)
        elif now is None and not hasattr(owner, last):
            owner.register_buffer(last, value.clone())


SEARCHES = {LearningRateFinder: "_attr_name", BatchSizeFinder: "_batch_arg_name"}
NAMES = "lr", "learning_rate"


def searched(trainer: Trainer) -> dict[str, Any]:
    """Return what was found by a search before training."""
    found = {}
    for callback in trainer.callbacks:
        if isinstance(callback, tuple(SEARCHES)):
            kind = LearningRateFinder if isinstance(callback, LearningRateFinder) else BatchSizeFinder
            given = getattr(callback, SEARCHES[kind])
            for name in [given] if given else NAMES:
                if lightning_hasattr(trainer.lightning_module, name):
                    found[name] = encoded(lightning_getattr(trainer.lightning_module, name))
                    break
    return found


def settle_searches(trainer: Trainer, found: Mapping[str, Any]) -> None:
    """Have nothing searched for again."""
    for callback in trainer.callbacks:
        if isinstance(callback, tuple(SEARCHES)):
            callback.on_fit_start = lambda *_: None
    for name, value in found.items():
        lightning_setattr(trainer.lightning_module, name, decoded(value))


def make_again(trainer: Trainer, lacking: list[tuple[str, str]]) -> None:
    """Run on_train_epoch_start of those whose hook makes what is lacking: (path of an object, attribute)."""
    owners = roots(trainer)
    for name, owner in owners.items():
        if not isinstance(owner, (Callback, LightningModule)):
            continue
        wanted = {attribute for path, attribute in lacking if path == name}
        hook = type(owner).on_train_epoch_start
        if wanted & set(hook.__code__.co_names):
            if isinstance(owner, Callback):
                owner.on_train_epoch_start(trainer, trainer.lightning_module)
            else:
                owner.on_train_epoch_start()


def go_on_averaging(trainer: Trainer, groups: list[list[dict]], kind: str) -> bool:
    """Have StochasticWeightAveraging go on; it makes its schedule in a hook that a run within an epoch has behind it.

    A new schedule sets learning rates, which `groups`, as saved, bring back.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        model = trainer.lightning_module
        callback._accumulate_grad_batches = trainer.accumulate_grad_batches
        if callback._scheduler_state is None:
            continue
        if kind != "epoch" and trainer.current_epoch == callback.swa_end + 1:  # it only gathers batch norm's statistics
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            callback.on_train_epoch_start(trainer, model)
            model.load_state_dict(weights)
        elif callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            updated, callback._latest_update_epoch = callback._latest_update_epoch, trainer.current_epoch
            callback.on_train_epoch_start(trainer, model)
            callback._latest_update_epoch = updated
            for optimizer, saved in zip(trainer.optimizers, groups, strict=True):
                for group, values in zip(optimizer.param_groups, saved, strict=True):
                    group.update(values)
    return True


def of_rank(trainer: Trainer, gather: Callable[[Any], list], held: Held) -> dict[str, Any]:
    """Return what only this rank knows: buffers that differ between the ranks, or that no state dict has; the states of
    torchmetrics; the sums of what was logged; what the user's objects hold. All ranks call it; `gather` gives each
    what all say."""
    buffers = dict(_buffers(trainer))
    told = gather({name: graph.digest(buffer) for name, buffer in buffers.items()})
    alike = {name for name, digest in told[0].items() if all(other.get(name) == digest for other in told)}
    kept = {f"model.{name}" for name in trainer.lightning_module.state_dict()}
    buffers = {name: buffer for name, buffer in buffers.items() if name not in alike or name not in kept}
    metrics = {name: _state(metric) for name, metric in _metrics(trainer)}
    results = {key: _result(metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()}
    return copied({"buffers": buffers, "metrics": metrics, "results": results}) | {"held": held.told()}


def of_job(trainer: Trainer) -> dict[str, Any]:
    """Return the newest value of each metric, by where Lightning shows it."""
    shown = {name: dict(getattr(trainer._logger_connector, name)) for name in SHOWN}
    return copied(shown)


def restore_job(trainer: Trainer, shown: Mapping[str, Any]) -> None:
    """Give Lightning the newest value of each metric back."""
    for name in SHOWN:
        setattr(trainer._logger_connector, name, dict(shown[name]))


@torch.no_grad()
def restore_rank(trainer: Trainer, known: Mapping[str, Any], mid_epoch: bool) -> None:
    """Give this rank back what it knew; the sums of an epoch only in the middle of it."""
    for name, buffer in _buffers(trainer):
        if (saved := known["buffers"].get(name)) is not None and saved.shape == buffer.shape:
            buffer.copy_(saved)
    device = trainer.strategy.root_device
    for name, metric in _metrics(trainer):
        if saved := known["metrics"].get(name):
            _restore(metric, saved, device)
    if mid_epoch:
        trainer._logger_connector._first_loop_iter = False  # else the next batch would be taken for the epoch's first
        for key, saved in known["results"].items():
            if not saved["has_group"]:
                trainer.fit_loop.epoch_loop._results[key] = _restored_result(trainer, saved, device)


def _buffers(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model, and what modules have that are kept beside it, such as an average of its weights.

    Of those that Lightning's own callbacks keep, their buffers only: the callbacks save the rest.
    """
    model = trainer.lightning_module
    yield from ((f"model.{name}", buffer) for name, buffer in model.named_buffers() if _has_values(buffer))
    seen = {id(module) for module in model.modules()}
    for callback in trainer.callbacks:
        for name, module in vars(callback).items():
            if graph.library(type(callback)) and isinstance(module, nn.Module):
                seen |= {id(one) for one in module.modules()}
                for part, buffer in module.named_buffers():
                    yield f"{type(callback).__name__}.{name}.{part}", buffer
    for path, module in graph.walk(roots(trainer), code=False):
        if isinstance(module, nn.Module) and not isinstance(module, Metric) and id(module) not in seen:
            seen |= {id(one) for one in module.modules()}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if _has_values(tensor):
                    yield f"{path}.{name}", tensor


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def _metrics(trainer: Trainer) -> Iterator[tuple[str, Metric]]:
    return ((path, one) for path, one in graph.walk(roots(trainer), code=False) if isinstance(one, Metric))


def _state(metric: Metric) -> dict[str, Any]:
    return {"updates": metric._update_count, "states": {name: getattr(metric, name) for name in metric._defaults}}


def _restore(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    metric._update_count, metric._computed = saved["updates"], None
    for name, value in saved["states"].items():
        setattr(metric, name, apply_to_collection(value, Tensor, lambda tensor: tensor.to(device, copy=True)))


def _result(metric: _ResultMetric) -> dict[str, Any]:
    meta, sync = metric.meta, metric.meta.sync
    saved = {name: getattr(meta, name) for name in METADATA}
    saved |= {"reduce": meta.reduce_fx.__name__, "sync": sync.should, "op": sync.op, "zero_only": sync.rank_zero_only}
    saved |= {"has_group": sync.group is not None, "is_tensor": metric.is_tensor, "has_reset": metric.has_reset}
    saved |= {"cache": metric._forward_cache, "state": _state(metric) if metric.is_tensor else {}}
    return saved


def _restored_result(trainer: Trainer, saved: Mapping[str, Any], device: torch.device) -> _ResultMetric:
    """Return the accumulator of a logged value as LightningModule.log would have made it."""
    meta = _Metadata(**{name: saved[name] for name in METADATA}, reduce_fx=getattr(torch, saved["reduce"]))
    meta.sync = _Sync(
        _should=saved["sync"], fn=trainer.strategy.reduce, _op=saved["op"], rank_zero_only=saved["zero_only"]
    )
    metric = _ResultMetric(meta, saved["is_tensor"]).to(device)
    if saved["is_tensor"]:
        _restore(metric, saved["state"], device)
    else:
        metric.value = attrgetter(saved["metric_attribute"])(trainer.lightning_module)
    metric.has_reset = saved["has_reset"]
    metric._forward_cache = None if saved["cache"] is None else saved["cache"].to(device)
    return metric
