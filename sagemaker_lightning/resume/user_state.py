"""What the user's objects hold and no Lightning checkpoint has: plain state, generators, modes, an optimizer beside."""

import io
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn

from sagemaker_lightning.compat.lightning_loaders import flat
from sagemaker_lightning.compat.lightning_loops import combined_loader, fetcher
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.encoding import NotPlain, decoded, encoded
from sagemaker_lightning.state.object_state import State

CHANGED = object()  # in place of a setting as it was at the beginning, of a run that goes on with another one


def roots(trainer: Trainer) -> dict[str, Any]:
    """Return the objects of the user's in which there may be state, by name."""
    found: dict[str, Any] = {"model": trainer.lightning_module, "datamodule": trainer.datamodule}
    found |= {f"callbacks.{k} {type(one).__name__}": one for k, one in enumerate(trainer.callbacks)}
    # Of a library's optimizers, state_dict() has all; not the plain attributes of a class of the user's.
    own = [(k, one) for k, one in enumerate(trainer.optimizers) if not object_graph.library(type(one))]
    found |= {f"optimizers.{k}": one for k, one in own}
    for kind, loaders in (("train", trainer.train_dataloader), ("val", trainer.val_dataloaders)):
        for number, loader in enumerate(flat(loaders)):
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
        self.state = State(partial(roots, trainer))
        self.within = False  # whether an epoch is half done
        self.first: set = set()
        self.settings: dict[str, Any] = {}
        self.boxes: dict[tuple[str, str], list] = {}
        self.said: set = set()

    def mark(self) -> None:
        """Take all that is there now for what was there from the beginning."""
        self.state.mark()
        self.first = self.state.objects()
        self.boxes = {key: what for key, (_, *what) in self.state.boxes().items()}
        self.settings = self._settings()

    def told(self, loaders: bool = True) -> dict[str, Any]:
        """Return what has changed since, encoded; without what the loaders say, it can be asked before they begin."""
        self._warn_of_iterators()
        model, trainer = self.trainer.lightning_module, self.trainer
        settings = {name: value for name, value in self._settings().items() if self.settings.get(name, value) != value}
        plain = self.state.changed()
        self._say_what_is_lost()
        return {
            "plain": plain,
            "made": sorted(self.state.objects() - self.first),
            "generators": {path: encoded(generators.state_of(one)) for path, one in self._generators().items()},
            "stateful": {path: encoded(one.state_dict()) for path, one in self._stateful().items()},
            "settings": settings,
            "eval": [name for name, module in model.named_modules() if not module.training],
            "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
            "loaders": combined_loader(trainer).states(fetcher(trainer), within=self.within) if loaders else None,
        }

    def before_data(self) -> dict[str, Any]:
        """Return what the data that is made next may depend on, encoded."""
        return {
            "plain": self.state.changed(),
            "generators": {path: encoded(generators.state_of(one)) for path, one in self._generators().items()},
        }

    def restore_before_data(self, told: Mapping[str, Any]) -> None:
        """Give it back."""
        self.state.restore(told["plain"])
        for path, one in self._generators().items():
            if path in told["generators"]:
                generators.restore(one, decoded(told["generators"][path]))

    def _say_what_is_lost(self) -> None:
        """Say, once, what lists and the like hold that has changed and no checkpoint can hold."""
        lost = {key: why for key, why in self.state.unsaved.items() if key not in self.said}
        for key, (value, *what) in self.state.boxes().items():
            if key not in self.said and self.boxes.get(key) != what:
                try:
                    encoded(value)
                except NotPlain as error:
                    if error.kind.partition(".")[0] not in object_graph.LIBRARIES:
                        lost[key] = f"holds a {error.kind}"
        self.said |= lost.keys()
        owners = (
            dict(object_graph.walk(roots(self.trainer), code=False)) if lost and self.trainer.is_global_zero else {}
        )
        for (path, name), why in lost.items():
            if path in owners:
                kind = type(owners[path])
                print(
                    f"{kind.__module__}.{kind.__qualname__}.{name} {why}, which no checkpoint can hold: a run that "
                    "goes on begins without it; keep numbers, text, arrays, tensors, tuples and dataclasses there",
                    flush=True,
                )

    def restore(self, told: Mapping[str, Any], wholly: bool) -> None:
        """Give it back, as far as it is there; if not wholly, plain values only."""
        model = self.trainer.lightning_module
        # What says that something was made is not true where that is missing, as in a dataset that makes it once.
        lacking = {path for path, _ in self.lacking(told) if path in self._data()}
        plain = {key: value for key, value in told["plain"].items() if key[0] not in lacking or type(value) is not bool}
        self.state.restore(plain)
        if not wholly:
            return
        for path, one in self._generators().items():
            if path in told["generators"]:
                generators.restore(one, decoded(told["generators"][path]))
        for path, one in self._stateful().items():
            if path in told["stateful"]:
                one.load_state_dict(decoded(told["stateful"][path]))
        for name, value in told["settings"].items():
            setattr(self.trainer, name, value)
            self.settings[name] = CHANGED
        idle, frozen = set(told["eval"]), set(told["frozen"])
        for name, module in model.named_modules():
            module.training = name not in idle
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _warn_of_iterators(self) -> None:
        """Say, once of each, which iterators are half gone through: no checkpoint can hold where they are."""
        for path, one in object_graph.walk(roots(self.trainer), code=False):
            half = isinstance(one, Iterator) and object_graph.library(type(one)) and not isinstance(one, io.IOBase)
            if half and not has_state(one) and path not in self.said and self.trainer.is_global_zero:
                print(
                    f"warning: {path} is a {type(one).__name__}, and no checkpoint can hold how far it is: once it is "
                    "interrupted, this run is not exact; keep a loader with state_dict(), or an index",
                    flush=True,
                )
            self.said |= {path} if half else set()

    def lacking(self, told: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the attributes that there were and that are no plain values, and that are not there now."""
        now = self.state.objects()
        return [tuple(one) for one in told["made"] if tuple(one) not in now]

    def _data(self) -> set[str]:
        """Return the paths of the user's datasets, transforms and the like, which no hook of Lightning's makes."""
        return {
            path
            for path, one in object_graph.walk(roots(self.trainer), code=False)
            if not isinstance(one, (LightningModule, LightningDataModule, Callback))
        }

    def _settings(self) -> dict[str, Any]:
        """Return what a callback may change of the trainer."""
        plain = (int, float, bool, str, type(None))
        return {name: one for name, one in vars(self.trainer).items() if name[0] != "_" and type(one) in plain
                and name != "should_stop"}  # fmt: skip

    def _generators(self) -> dict[str, Any]:
        """Return the generators that belong to the model, callbacks and data module."""
        return generators.find({name: one for name, one in roots(self.trainer).items() if "." not in name or
                                 name.startswith("callbacks")})  # fmt: skip

    def _stateful(self) -> dict[str, Any]:
        """Return a library's objects that save and load their state, such as an optimizer of a user's own."""
        known = {id(one) for one in self.trainer.optimizers}
        known |= {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        own = (nn.Module, Callback, LightningDataModule, torch.utils.data.DataLoader, *object_graph.GENERATORS, type)
        return {
            path: one
            for path, one in object_graph.walk(roots(self.trainer), code=False)
            if not isinstance(one, own) and id(one) not in known and object_graph.library(type(one)) and has_state(one)
        }
