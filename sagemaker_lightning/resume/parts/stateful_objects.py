"""Objects of libraries that save and load their own state, and optimizers that Lightning misses."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.files.acceptance import saved_part
from sagemaker_lightning.resume.parts.optimizers import check, holders_of_groups, sharing_groups
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import NotSaved, kind_text
from sagemaker_lightning.state.graph.kinds.optimizers import OPTIMIZERS
from sagemaker_lightning.state.graph.nodes import Node, key_of


class StatefulObjects(Part):
    """The states of objects that have `state_dict` and `load_state_dict`."""

    key = "stateful_objects"
    what = "libraries' objects with `state_dict`, and optimizers within others"
    moments = (Moment.TRAINING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states, as records, by path; say, once, which cannot be saved."""
        states, unsaved = self._encode_stateful()
        self.run.part(UserObjects).reports.report_unsaved(unsaved)
        return states

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let the objects load their states."""
        objects = {path: node.value for path, node in self._stateful().items()}
        with sharing_groups(holders_of_groups(self.run)):
            for path, object_ in objects.items():
                if path in saved:
                    state = values.decode(saved[path])
                    is_schedule = isinstance(getattr(object_, "optimizer", None), Optimizer)
                    object_.load_state_dict(saved_part(object_, state) if is_schedule else state)
        for object_ in objects.values():
            if isinstance(object_, Optimizer) and hasattr(object_, "param_groups"):
                check(object_)  # also those that the user's objects have got with their states

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each state."""
        return {f"stateful {path}": values.digest(state) for path, state in saved.items()}

    def why(self, name: str) -> str:
        """Return that it was made while training, if this program has not made it."""
        is_there = name.removeprefix("stateful ") in self._stateful()
        return "" if is_there else "an object made while training, which cannot be saved"

    def _encode_stateful(self) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
        """Return records of the states of `_stateful`, and why others have none.

        An optimizer that was made since the start is one of the user's objects, with its state.
        """
        states = {}
        unsaved = {}
        graph = self.run.part(UserObjects).graph
        start = graph.begin()
        for path, node in self._stateful().items():
            object_ = node.value
            is_new = key_of(object_) not in start.paths
            if is_new and isinstance(object_, OPTIMIZERS) and key_of(object_) in graph.recorded:
                continue
            place = graph.place_of(node)
            if is_new and not isinstance(object_, LightningOptimizer):
                unsaved[place] = (
                    f"has {with_article(kind_text(object_))} that was made while training"
                )
            try:
                states[path] = values.encode(object_.state_dict())
            except NotSaved as error:
                unsaved[place] = f"holds {with_article(error.kind)}"
            except Exception as error:  # whatever a library's object raises
                unsaved[place] = f"has a state_dict() that raises {type(error).__name__}"
        return states, unsaved

    def _stateful(self) -> dict[str, Node]:
        """Return the nodes of libraries' objects that save their state, and of optimizers.

        These are optimizers that Lightning does not know, such as one within another one.
        """
        # Begun again, with what is in them, and their batches are drawn again: they would be ahead.
        streams = (IterableDataset,)
        saved_elsewhere = {id(value) for value in self.trainer.optimizers}
        saved_elsewhere |= {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        excluded = (
            nn.Module,
            Callback,
            LightningDataModule,
            torch.utils.data.DataLoader,
            *streams,
            *object_graph.GENERATORS,
            type,
        )
        return {
            path: node
            for path, node in self.run.part(UserObjects).graph.nodes_of(object, skip=streams)
            if not isinstance(value := node.value, excluded)
            and id(value) not in saved_elsewhere
            and (object_graph.is_library_class(type(value)) or isinstance(value, Optimizer))
            and has_state(value)
        }
