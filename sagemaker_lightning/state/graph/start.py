"""What a program makes again at each start: the objects by path, and what they held then."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.kinds.base import class_name
from sagemaker_lightning.state.graph.kinds.objects import SPACES, classes_of_module
from sagemaker_lightning.state.graph.nodes import LIBRARYS, Node, key_of, scan
from sagemaker_lightning.state.object_graph import LIGHTNINGS, is_own_module, owner_of


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which else looks at each of 100,000 new lists twice."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Start:
    """The objects that are reached from roots at the start of training, and their content.

    A resumed program makes them again, each under the same path. A record refers to them by their
    paths, and has content only of those that have changed since.

    Args:
        roots: The objects to start from, by name.
        skip: Classes whose objects are not entered.
    """

    def __init__(self, roots: Mapping[str, Any], skip: tuple = ()) -> None:
        self.skip = skip
        self.nodes: dict[int, Node] = {}
        self.tensors: dict[str, tuple[nn.Module, str, str]] = {}
        """Where the parameters and buffers of modules are: module, space and name."""
        self.optimizers: dict[str, Optimizer] = {}
        self.include(roots)

    def include(self, roots: Mapping[str, Any]) -> None:
        """Take in roots that were made since, such as loaders, as their program makes them again.

        Args:
            roots: The objects by name; those that are known stay as they are.
        """
        new_roots = {name: root for name, root in roots.items() if key_of(root) not in self.nodes}
        added = {
            key: node for key, node in scan(new_roots, self.skip).items() if key not in self.nodes
        }
        self.nodes |= added
        if added:
            self.__dict__.pop("by_path", None)
            self.__dict__.pop("classes", None)
        for node in added.values():
            object_ = owner_of(node.value)
            if isinstance(object_, nn.Module) and node.value is object_:
                path = node.path
                for space in ("parameter", "buffer"):
                    for name, tensor in SPACES[space][0](object_).items():
                        if tensor is not None:
                            self.tensors[f"{path}.{name}"] = object_, space, name
        for name, root in roots.items():
            if isinstance(optimizer := owner_of(root), Optimizer):
                self.optimizers[name] = optimizer
        saved_by_others = set(map(id, self.saved_by_others().values()))
        for key, node in added.items():
            if key not in saved_by_others:
                node.mark = node.mark or self.mark(node)

    def mark(self, node: Node) -> bytes:
        """Return bytes that tell whether the content of an object has changed."""
        if node.kind is not LIBRARYS:
            return node.kind.mark(node.value)
        class_ = type(node.value)
        has_state = hasattr(class_, "state_dict") and hasattr(class_, "load_state_dict")
        if has_state or class_.__module__.startswith(LIGHTNINGS):  # saved elsewhere
            return b""
        return fingerprints.of_object(node.value, self.nodes)

    def saved_by_others(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint has besides, by name.

        They are the parameters and buffers of the modules of the start, and what optimizers keep.
        """
        found = {
            name: tensor
            for name, (module, space, own_name) in self.tensors.items()
            if isinstance(tensor := SPACES[space][0](module).get(own_name), Tensor)
        }
        for name, optimizer in self.optimizers.items():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                state = optimizer.state.get(parameter, {})
                for entry, tensor in state.items() if isinstance(state, dict) else ():
                    if isinstance(tensor, Tensor):
                        found[f"{name}.state.{index}.{entry}"] = tensor
        return found

    @cached_property
    def by_path(self) -> dict[str, Node]:
        """The nodes by path."""
        found: dict[str, Node] = {}
        for node in self.nodes.values():
            found.setdefault(node.path, node)
        return found

    @cached_property
    def classes(self) -> dict[str, type]:
        """The classes of which a record may have new objects, by name.

        They are those of the objects of the start, and those that the user's own modules have in
        which these are defined.
        """
        found: dict[str, type] = {}
        modules: set[str] = set()
        for class_ in {type(owner_of(node.value)) for node in self.nodes.values()}:
            found[class_name(class_)] = class_
            modules |= {
                base.__module__ for base in class_.__mro__ if is_own_module(base.__module__)
            }
        for name in sorted(modules):
            if (module := sys.modules.get(name)) is not None:
                found = classes_of_module(vars(module)) | found
        return found
