"""What a program makes again at each start: the objects by path, and what they held then."""

import contextlib
import copy
import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from sagemaker_lightning.state.graph import fingerprints, scalars
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.classes import Classes, imported_modules
from sagemaker_lightning.state.graph.kinds.base import Kind, NotSaved
from sagemaker_lightning.state.graph.kinds.objects import SPACES, ObjectKind
from sagemaker_lightning.state.graph.nodes import (
    GENERATOR,
    LIBRARYS,
    Node,
    key_of,
    kind_of,
    scan,
)
from sagemaker_lightning.state.object_graph import (
    LIGHTNINGS,
    has_variables,
    owner_of,
)

MAX_KEPT = 1 << 20
"""Elements, at most, of an array or a tensor whose content a start keeps."""
STEP = re.compile(r"[.(\[{]")
"""How a step of a path begins."""
MAX_STEPS = 1 << 5
"""Steps, at most, that are looked for from the end of a path, which is input."""
MAX_PARTS = 1 << 10
"""Parts of an object, at most, among which a step is looked for."""
MAX_KEPT_BYTES = 1 << 26
"""Bytes, at most, of all contents that a start keeps: a dataset is not held in memory twice."""


@contextlib.contextmanager
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
        generators: Whether the states of generators of random numbers count as content.
        is_kept: Whether `reset` is possible: the content is kept, but for large arrays'.
        made: Objects, by what they are known, that a program does not make again at its start.
    """

    is_bounded = True
    """Whether what is very large is not saved: reflection may enter data."""
    refused_kinds: tuple[Kind, ...] = ()
    """Kinds of which nothing new is saved."""

    def __init__(
        self,
        roots: Mapping[str, Any],
        skip: tuple[type, ...] = (),
        generators: bool = True,
        is_kept: bool = False,
        made: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self.skip = skip
        self.made = made
        self.generators = generators
        self.is_kept = is_kept
        self.kept_bytes = 0
        self.nodes: dict[int, Node] = {}
        self.paths: dict[int, str] = {}
        self.roots: dict[str, int] = {}
        """By what each root is known, which may have been reached by another path first."""
        self.tensors: dict[str, tuple[nn.Module, str, str]] = {}
        """Where the parameters and buffers of modules are: module, space and name."""
        self.of_modules: dict[int, list[str]] = {}
        """The names, in `tensors`, of each parameter and buffer of the start, by its id."""
        self.optimizers: dict[str, Optimizer] = {}
        self.modules = imported_modules(len(sys.modules))
        """The names of the modules that the program has imported."""
        self.left_out: Mapping[int, Node] = {}
        """What `without` has left out."""
        self.made_by_hooks: dict[int, Any] = {}
        """What hooks at the start have made, by what it is known: in another start of the program,
        they may make something else in its place."""
        self.is_over = False
        """Whether the program has done all that it does at its start, and trains."""
        self.content: Mapping[int, Any] = {}
        """What is not taken in with new roots: see `include_anew`."""
        self.include(roots)

    def include(self, roots: Mapping[str, Any]) -> None:
        """Take in roots that were made since, such as loaders, as their program makes them again.

        Args:
            roots: The objects by name; those that are known stay as they are, and so does what the
                others lead to.
        """
        known_roots = self.nodes.keys() | self.content.keys()
        # What has no identity, such as the data module that a program lacks, is never known.
        new_roots = {
            name: root
            for name, root in roots.items()
            if kind_of(root) is not None and key_of(root) not in known_roots
        }
        if new_roots and self.is_over:
            # What known objects have got while training is content, though these lead to it.
            known = {**self.nodes, **self.made, **self.content}
            self._add(scan(new_roots, self.skip, but=known), known)
        elif new_roots and not self.nodes:
            self._add(scan(new_roots, self.skip), self.made)
        elif new_roots:
            new_nodes = scan(new_roots, self.skip)
            # A known object may have got one of these since: where all is taken in at once, as
            # `mark_again` does, it is known by that path.
            taken: dict[int, Node] = {}
            for key, node in scan(roots, self.skip).items():
                is_reached = node.parent is None or key_of(node.parent.value) in taken
                if key in self.nodes or (key in new_nodes and is_reached):
                    taken[key] = node
            rest = {key: node for key, node in new_nodes.items() if key not in taken}
            self._add(taken | rest, {**self.nodes, **self.made})
        for name, root in roots.items():
            self.roots[name] = key_of(root)
            optimizer = owner_of(root)
            # What a program loads into Lightning's wrapper of one is the wrapper's own.
            if isinstance(optimizer, Optimizer) and not isinstance(optimizer, LightningOptimizer):
                self.optimizers[name] = optimizer

    def include_anew(self, roots: Mapping[str, Any], content: Mapping[int, Any]) -> None:
        """Take in roots that were made just now.

        Args:
            roots: The objects by name.
            content: What known objects had got while training, before these roots were made, by
                what it is known. It is not taken in, though new roots lead to it.
        """
        unseen = {name: root for name, root in roots.items() if key_of(root) not in self.nodes}
        self.content = content
        self.include(roots)
        reached = scan(unseen, self.skip) if content else {}
        self.content = {key: each for key, each in content.items() if key in reached}

    def mark_again(self, roots: Mapping[str, Any]) -> None:
        """Take the present content as that at the start, and take in what was made since.

        An object keeps the path by which it was known first.

        Args:
            roots: The objects to start from, by name.
        """
        self.optimizers.clear()
        self.kept_bytes = 0
        self._add(scan(roots, self.skip), self.made)
        self.include(roots)

    def _add(self, nodes: dict[int, Node], made: Mapping[int, Any]) -> None:
        """Take in nodes, also known ones, and mark their content; but for those that are `made`."""
        holders = {path: key for key, path in self.paths.items()}
        first_seen = nodes.keys() - self.paths.keys() - made.keys()
        paths: dict[int, str] = {}
        for key, node in nodes.items():
            if key not in self.paths:
                path = node.index
                if (parent := node.parent) is not None:
                    step = parent.kind.step(parent.note, parent.parts, node.index)
                    path = paths[key_of(parent.value)] + step
            paths[key] = self.paths.get(key) or path
            if key in made:
                continue
            if key not in self.paths:
                while (holder := holders.get(path)) is not None and holder in nodes:
                    path += "'"
                if holder is not None:
                    del self.nodes[holder], self.paths[holder]
                holders[path] = key
                self.paths[key] = paths[key] = path
            self.nodes[key] = node
        self.__dict__.pop("by_path", None)
        self.__dict__.pop("classes", None)
        for key, node in nodes.items():
            object_ = owner_of(node.value)
            # What a module gets later is content: another start of the program has not got it.
            if key in first_seen and isinstance(object_, nn.Module) and node.value is object_:
                path = self.paths[key]
                for space in ("parameter", "buffer"):
                    for name, tensor in SPACES[space][0](object_).items():
                        if tensor is not None:
                            self.tensors[f"{path}.{name}"] = object_, space, name
                            self.of_modules.setdefault(id(tensor), []).append(f"{path}.{name}")
        saved_by_others = set(map(id, self.saved_by_others().values()))
        for key, node in nodes.items():
            if key not in saved_by_others and key not in made:
                self._note_content(node)

    def _note_content(self, node: Node) -> None:
        node.mark = node.mark or self.mark(node)
        is_within = size_of(node) <= MAX_KEPT and self.kept_bytes < MAX_KEPT_BYTES
        if self.is_kept and node.mark and is_within:
            with contextlib.suppress(NotSaved):
                node.content = node.kind.content(node.value)
                self.kept_bytes += size_of(node) * getattr(node.value, "itemsize", 0)

    def without(self, root: str) -> "Start":
        """Return the start as it is without the objects whose paths begin like this."""
        rest = copy.copy(self)
        rest.__dict__.pop("by_path", None)
        rest.__dict__.pop("classes", None)
        rest.paths = {key: path for key, path in self.paths.items() if not path.startswith(root)}
        rest.nodes = {key: node for key, node in self.nodes.items() if key in rest.paths}
        rest.left_out = {key: self.nodes[key] for key in self.nodes.keys() - rest.nodes.keys()}
        return rest

    def reset(self, stays: Callable[[Any], bool] = lambda value: False) -> None:
        """Give all objects the content that they had at the start.

        It is for a start that has kept it. Elements of long containers stay as they are.

        Args:
            stays: Returns whether an object stays as it is.
        """
        now = {key: Node(node.value, node.kind, None, "") for key, node in self.nodes.items()}
        # An object that nothing sets back, such as an itertools.count, gives way to another one.
        fresh = {
            key: node.kind.build(node.note, node.parts, self.classes)
            for key, node in self.nodes.items()
            if not node.kind.fills and node.note != now[key].note
        }
        for key, node in self.nodes.items():
            if (self.skip and isinstance(owner_of(node.value), self.skip)) or stays(node.value):
                continue
            parts = [fresh.get(id(part), part) for part in node.parts]
            present = now[key]
            if isinstance(node.kind, ObjectKind):
                before = copy.copy(node)
                before.parts = parts
                if changes := node.kind.difference(present, before, _is_same):
                    node.kind.fill(node.value, *changes, None)
                continue
            is_same = (
                node.note == present.note
                and len(parts) == len(present.parts)
                and all(map(_is_same, parts, present.parts))
            )
            has_content = node.mark and node.content is not None
            if has_content and self.mark(present) != node.mark:
                node.kind.fill(node.value, node.note, parts, node.content)
            elif node.kind.fills and not is_same:
                node.kind.fill(node.value, node.note, parts, None)

    def mark(self, node: Node) -> bytes:
        """Return bytes that tell whether the content of an object has changed."""
        if node.kind is GENERATOR and not self.generators:
            return b""
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
        A program ties again what training has untied: then one of these has the names, the first
        one, and the others are new.
        """
        found = {
            name: tensor
            for name, (module, space, own_name) in self.tensors.items()
            if isinstance(tensor := SPACES[space][0](module).get(own_name), Tensor)
        }
        for key, names in self.of_modules.items():
            if len(names) > 1 and (tied := [name for name in names if name in found]):
                kept = next((each for each in tied if id(found[each]) == key), tied[0])
                for name in tied:
                    if found[name] is not found[kept]:
                        del found[name]
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
        for key, node in self.nodes.items():
            found[self.paths[key]] = node
        return found

    def node_at(self, path: str) -> Node | None:
        """Return the node of a path; None if there is none.

        An object of several names is known by the one by which it was reached first. That may be
        another one in the run that saved the path, such as one that has checked the validation
        before it made the training data: then it is known by that one from now on.
        """
        if (node := self.by_path.get(path)) is not None:
            return node
        if path in self.roots:
            return self._known_by(path, self.nodes.get(self.roots[path]))
        ends = [match.start() for match in STEP.finditer(path)]
        for end in ends[: -MAX_STEPS - 1 : -1]:
            if (holder := self.by_path.get(path[:end])) is not None:
                key = _key_at(holder.value, path[end:])
                return self._known_by(path, self.nodes.get(key) if key is not None else None)
        return None

    def _known_by(self, path: str, node: Node | None) -> Node | None:
        """Return a node, which is known by a path from now on."""
        if node is not None:
            self.paths[key_of(node.value)] = path
            self.by_path[path] = node
        return node

    @cached_property
    def classes(self) -> Mapping[str, type]:
        """The classes of which a record may have new objects, by name."""
        nodes = self.nodes.values()
        of_objects = {node.class_ for node in nodes if not has_variables(owner_of(node.value))}
        return Classes(of_objects, self.modules)


def _key_at(value: Any, steps: str) -> int | None:
    """Return the key of the object at the end of some steps; None if there is none.

    Args:
        value: The object from which the steps lead.
        steps: The text of the steps, as the end of a path has it.
    """
    kind = kind_of(value)
    if kind is None:
        return None
    note, parts = kind.take(value)
    for index, part in enumerate(parts[:MAX_PARTS]):
        step = kind.step(note, parts, index)
        if steps == step:
            return key_of(part)
        if steps.startswith(step) and (key := _key_at(part, steps[len(step) :])) is not None:
            return key
    return None


def size_of(node: Node) -> int:
    """Return the number of elements of a tensor or an array; 0 of other objects."""
    if isinstance(node.value, Tensor):
        return node.value.numel()
    return node.value.size if isinstance(node.value, np.ndarray) else 0


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two parts are one object or equal scalars."""
    return before is now or (
        type(before) in SCALARS
        and type(before) is type(now)
        and scalars.text(before) == scalars.text(now)
    )
