"""Says, once for each, what changes while training and no checkpoint has."""

import functools
import io
import mmap
import re
import sqlite3
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from torch import nn
from torch.utils.data import IterableDataset
from torchmetrics import MetricTracker

from sagemaker_lightning.compat.model_parallel import fsdp_settings
from sagemaker_lightning.compat.torch_modules import (
    ELEMENTWISE_HOOKS,
    communication_hooks,
    ddp_settings,
    orders_buckets,
    parameters,
)
from sagemaker_lightning.contract.errors import printable, with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.parts import start_hooks
from sagemaker_lightning.resume.parts.given_parts import HINT
from sagemaker_lightning.resume.parts.roots import (
    TRAINING,
    VALIDATION,
    places_of_code,
    user_objects,
)
from sagemaker_lightning.state import (
    library_settings,
    module_variables,
    object_graph,
    replaced_code,
)
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.encoding import Unsaved, owner_with_own_state
from sagemaker_lightning.state.graph.kinds.base import class_name, kind_text
from sagemaker_lightning.state.graph.kinds.objects import BASES, SPACES
from sagemaker_lightning.state.graph.kinds.states import is_read
from sagemaker_lightning.state.graph.nodes import (
    LIBRARYS,
    OBJECT,
    Node,
    has_position,
    is_made_of_attributes,
)
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import GraphState, is_table
from sagemaker_lightning.state.module_variables import CACHE
from sagemaker_lightning.state.object_graph import is_library_class, owner_of
from sagemaker_lightning.state.outside_process import OutsideState, hears_a_process
from sagemaker_lightning.state.package_variables import PackageVariables

NUMBER = re.compile(r"\d+")
OF_A_LOADER = re.compile(rf"({re.escape(TRAINING)}|{re.escape(VALIDATION)})\d+\.dataset")
"""The name of the dataset of a DataLoader."""
CALLED = *object_graph.CODE, functools.partial
MAKING = "on_train_epoch_start", "on_validation_start", "on_validation_epoch_start"
"""Hooks that make what an epoch or a validation needs: a resumed run calls them, too."""
NO_CHECKPOINT = ", which cannot be saved: a resumed run starts"
INSTEAD = f"; keep numbers, text, arrays, tensors, tuples and dataclasses there, or {HINT}"
UNSAVED = f"{NO_CHECKPOINT} with the program's initial value{INSTEAD}"
"""What is said of a value that is not saved."""
RESULTS_KEPT = (
    "keeps results, and no checkpoint has them: a resumed run computes them again; if they depend "
    "on more than the arguments, save them"
)
UNSAVED_IN_FILE = f"{NO_CHECKPOINT} with what is in its file then{INSTEAD}"
"""What is said of a value whose numbers are in a file, or in a database."""
IN_FILES = np.memmap, mmap.mmap, sqlite3.Connection
"""The classes of such values."""
FILE_APPENDED = (
    "is appended to while training: after an interruption, it may have the rows of some steps "
    "twice; write the step into each row, and count the last row of each"
)
FILE_CHANGED = (
    "is written and read again while training, and no checkpoint has it: a resumed run finds it as "
    "the interrupted run left it, or not at all; keep what it holds in an attribute of the model, "
    f"or {HINT}"
)
FOLDER_TEMPORARY = (
    "is a temporary folder in which training writes files, and no checkpoint has them: a resumed "
    "run begins with an empty one; take a folder that stays, or keep what they hold in an "
    f"attribute of the model, or {HINT}"
)
FILE_EMPTIED = (
    'is a file that opening empties (mode "w"), and training writes to it: a resumed run starts '
    'with an empty one; open it with "a", or keep what it holds'
)
FILE_READ = (
    "a file that training reads, and no checkpoint has the place: a resumed run reads it from the "
    "place at its start; open it at the start, call readline() in place of taking lines in a loop, "
    "or keep what it holds"
)
FUNCTION_MADE = (
    "was set to a function or a class that the model did not have at its start, and these cannot "
    "be saved: a resumed run starts with the program's initial value; keep all that it may be in "
    "an attribute from the start, such as in a dict"
)


class Reports:
    """What was said of state that no checkpoint has, and what has to be said.

    Args:
        trainer: Lightning's trainer.
        graph: The state of the user's objects.
    """

    def __init__(self, trainer: Trainer, graph: GraphState) -> None:
        self.trainer = trainer
        self.state = graph
        self.variables_at_start: dict[str, bytes] = {}
        """Digests of variables of modules and classes, by name."""
        self.code_at_start: dict[str, replaced_code.Place] = {}
        """Where code of the user's finds code, by name, with what was there at the start."""
        self.settings_at_start: dict[str, object] = {}
        """Settings of libraries, and of how ranks add up gradients, by name."""
        self.first_loggers: dict[str, tuple[int, int]] = {}
        """How each of Python's loggers was set first."""
        self.packages = PackageVariables()
        self.outside = OutsideState()
        self.package_searches = 0
        """How often variables of packages were asked for since the start."""
        self.reported: set[Any] = set()
        """What a message was printed for."""
        self.lost: list[str] = []
        """The names that messages have of what no checkpoint has."""
        self.lines: list[str] = []
        """What this rank has to say; rank 0 has printed its own."""
        self.lines_taken = 0
        """How many of them a checkpoint has taken along for rank 0 to print."""
        self.has_looked = False
        """Whether the objects of the start were asked for what nobody can tell of them."""
        self.waits = False
        """Whether variables are compared at the next checkpoint, and not now."""

    def _say(self, text: str, lost: str = "") -> None:
        """Print a warning; that of another rank than 0 is printed with the next checkpoint.

        Args:
            text: The warning.
            lost: The name that it has of what no checkpoint has.
        """
        self.lost += [lost] if lost else []
        self.lines.append(text)
        if self.trainer.is_global_zero:
            log.warning(text)

    def take_lines(self) -> list[str]:
        """Return what this rank has to say since this was called before."""
        lines = self.lines[self.lines_taken :]
        self.lines_taken = len(self.lines)
        return lines

    def say_of_ranks(self, lines_of_ranks: Iterable[list[str]]) -> None:
        """Print, on rank 0, what other ranks have to say and it has not said itself.

        Lines that differ in numbers alone, such as in a file's name, are one.

        Args:
            lines_of_ranks: What `take_lines` has returned on each rank, by rank.
        """
        if not self.trainer.is_global_zero:
            return
        said = {NUMBER.sub("", line) for line in self.lines}
        for rank, lines in enumerate(lines_of_ranks):
            for line in lines:
                if (without_numbers := NUMBER.sub("", line)) not in said:
                    said.add(without_numbers)
                    self.lines.append(line)
                    log.warning(f"rank {rank}: {line}")
        self.lines_taken = len(self.lines)

    def mark_start(self) -> None:
        """Take the present variables as those at the start."""
        self.package_searches = 0
        self.variables_at_start = self._variables(self.packages.values())
        self.code_at_start = dict(places_of_code(self.trainer))
        self.settings_at_start = self._settings()
        self.first_loggers = library_settings.logger_settings()
        self.packages.note(forget=True)

    def first_batch_ended(self) -> None:
        """Note what the first batch has made in variables; it changes from then on."""
        self._note_new(self._variables(self._variables_of_packages()))
        self.packages.note(forget=False)
        self.outside.note_variables()
        self._report_hooks_of_buckets()

    def _report_hooks_of_buckets(self) -> None:
        """Print which hook of DDP's may see that a resumed run's first step has other buckets."""
        model: Any = self.trainer.strategy.model
        for hook, state in communication_hooks(model):
            keeps = state is not None and not isinstance(state, torch.distributed.ProcessGroup)
            is_by_element = getattr(hook, "__module__", "") == ELEMENTWISE_HOOKS and not keeps
            if orders_buckets(model) and not is_by_element and self.trainer.is_global_zero:
                name = getattr(hook, "__qualname__", class_name(type(hook)))
                log.warning(
                    f"{printable(name)} gets the gradients of DDP in other buckets in the first "
                    "step of each start: this run is not exact after an interruption, unless the "
                    "hook treats each number, or each weight, by itself and keeps nothing of a "
                    "bucket; with find_unused_parameters=True the buckets stay"
                )

    def _settings(self) -> dict[str, object]:
        """Return settings that a checkpoint lacks, by how they are named in a line."""
        return {
            **library_settings.present(),
            **fsdp_settings(self.trainer.lightning_module),
            **ddp_settings(self.trainer.strategy.model),
        }

    def _note_new(self, variables: dict[str, bytes]) -> None:
        """Have variables that were not there before compared from now on.

        What is made when it is needed, such as the one object of a class, is made again by a
        resumed run. What it holds then may be other values.
        """
        self.variables_at_start = variables | self.variables_at_start

    def _variables(self, of_packages: Mapping[str, object_graph.Elsewhere]) -> dict[str, bytes]:
        """Return digests of the variables of the user's modules and classes, by name."""
        objects = user_objects(self.trainer)
        return module_variables.variable_digests({**of_packages, **objects}, objects)

    def _variables_of_packages(self) -> dict[str, object_graph.Elsewhere]:
        """Return the values of the variables of packages that lead to trained tensors.

        To search large packages takes tens of milliseconds. So they are searched after the first
        batch, for which they make what is trained, and when twice as many checkpoints have been
        taken as at the time before; what was found is compared at each.
        """
        self.package_searches += 1
        if self.package_searches & (self.package_searches - 1):
            return self.packages.values()
        known = (
            parameter
            for _, object_ in self.state.reached(nn.Module)
            for parameter in parameters(object_).values()
            if parameter is not None
        )
        return self.packages.find(start_hooks.objects_of_hooks(self.trainer).values(), known)

    @contextmanager
    def wait_for_checkpoint(self) -> Iterator[None]:
        """Compare no variables while the block lasts, which would be half of what it takes."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def report_variables(self) -> None:
        """Print, once for each, which variables of modules and classes have changed."""
        if self.waits:
            return
        variables = self._variables(self._variables_of_packages())
        self._report_changed(module_variables.changed_variables(self.variables_at_start, variables))
        self._note_new(variables)
        self._report_changed(replaced_code.replaced(self.code_at_start))
        self.code_at_start = {**places_of_code(self.trainer), **self.code_at_start}
        at_start = self.settings_at_start
        self._report_changed(
            name for name, value in self._settings().items() if at_start.get(name) != value
        )
        self._report_changed(library_settings.changed_loggers(self.first_loggers))
        self._report_changed(
            f"the environment variable {name}" for name in self.outside.changed_variables()
        )
        self.outside.note_variables()
        self._report_files()

    def report_packages(self, saved: Any) -> None:
        """Print, once for each, which variables of packages have changed.

        Args:
            saved: What a checkpoint has of them: tensors in dicts and lists.
        """
        if changed := self.packages.changed(saved):
            ids = {id(node.value) for node in self.state.nodes().values()}
            self._report_changed(name for name, value in changed.items() if id(value) not in ids)

    def _report_changed(self, names: Iterable[str]) -> None:
        """Print, once for each, that a variable has changed."""
        for name in names:
            if name not in self.reported:
                text = (
                    f"{name} {RESULTS_KEPT}"
                    if name.endswith(module_variables.IS_CACHE)
                    else f"{name} changes while training, and no checkpoint has it: a resumed run "
                    "starts with its first value; keep it"
                )
                self._say(f"{text} in an attribute of the model, or {HINT}", name)
            self.reported.add(name)

    def _report_files(self) -> None:
        """Print, once for each, which files hold state of the training, or rows of its steps."""
        for _, file in self.state.reached(io.TextIOWrapper, io.BufferedWriter, io.FileIO):
            self.outside.note_open_file(file)
        self.outside.note_files_written_since()
        folders = [
            path
            for path, folder in self.state.reached(tempfile.TemporaryDirectory)
            if self.outside.is_written(folder.name)
        ]
        texts = dict.fromkeys(self.outside.appended_files, FILE_APPENDED)
        texts |= dict.fromkeys(self.outside.changed_files, FILE_CHANGED)
        texts |= dict.fromkeys(folders, FOLDER_TEMPORARY)
        for path, text in sorted(texts.items()):
            if path not in self.reported:
                self._say(f"{printable(path)} {text}", "" if text is FILE_APPENDED else path)
            self.reported.add(path)

    def report_unsaved(self, others: Mapping[tuple[str, str], str]) -> None:
        """Print, once, what has changed and cannot be saved.

        Args:
            others: What else cannot be saved, and why, by path of its owner and attribute.
        """
        start = self.state.begin()
        self._report_modules()
        unsaved = {
            (each.path, each.name): self._why_unsaved(each)
            for each in self.state.unsaved
            if _is_said(each, start.by_path.get(each.path))
            and not self._is_made_again(each)
            and not opens_when_used(each, start)
        } | {key: f"{reason}{UNSAVED}" for key, reason in others.items()}
        for (path, name), reason in unsaved.items():
            if (path, name) in self.reported:
                continue
            self.reported.add((path, name))
            node = start.by_path.get(path)
            if node is None:
                continue
            owner_name, name_of_users = users_name(node, name)
            if (owner_name, name_of_users) in self.reported:
                continue
            self.reported.add((owner_name, name_of_users))
            named = ".".join(filter(None, (owner_name, name_of_users)))
            self._say(f"{named} {reason}", named)

    def _why_unsaved(self, unsaved: Unsaved) -> str:
        """Return what is said of a value that no checkpoint has."""
        refused = unsaved.refused
        if isinstance(unsaved.value, CALLED):
            return FUNCTION_MADE
        if isinstance(refused, CACHE):
            return f"{RESULTS_KEPT} in an attribute, or {HINT}"
        is_file = isinstance(refused, io.IOBase) and not isinstance(refused, fingerprints.STREAMS)
        if is_read(refused):
            return f"{self._verb(unsaved)} {FILE_READ} in an attribute, or {HINT}"
        if is_file and not unsaved.is_part:
            return f"{FILE_EMPTIED} in an attribute, or {HINT}"
        what = f"{self._verb(unsaved)} {with_article(unsaved.kind)}"
        if isinstance(refused, IN_FILES):
            return f"{what}{UNSAVED_IN_FILE}"
        return f"{what}{UNSAVED}"

    def _verb(self, unsaved: Unsaved) -> str:
        """Return "is" if the attribute that is named is what cannot be saved, else "holds"."""
        within = _is_librarys_value(self.state.begin().by_path.get(unsaved.path))
        return "holds" if unsaved.is_part or within or not unsaved.name else "is"

    def warn_of_unreadable(self) -> None:
        """Warn, once, of objects that no checkpoint holds and whose changes nobody can tell.

        They are those that a user's object has at the start of training.
        """
        if self.has_looked:
            return
        self.has_looked = True
        for node in self.state.begin().nodes.values():
            parent = node.parent
            if node.kind is not LIBRARYS or parent is None or not _is_users(holder_of(node)):
                continue
            if hears_a_process(node.value):
                what = "reads from another process, whose state cannot be saved"
            elif fingerprints.hides_state(node.value) and not owner_with_own_state(node):
                what = "has hidden state that cannot be saved"
            else:
                continue
            step = parent.kind.step(parent.note, parent.parts, node.index)
            name = ".".join(filter(None, users_name(parent, step.lstrip("."))))
            self._say(
                f"{name} is {with_article(kind_text(node.value))}, which {what}: "
                "a resumed run has the one that the program makes at its start; if training "
                f"depends on it, {HINT}",
                name,
            )

    def _report_modules(self) -> None:
        """Print, once for each, which modules were made while training and cannot be saved."""
        if not self.state.unsaved:
            return
        of_model = set(map(id, self.trainer.lightning_module.modules()))
        for each in self.state.unsaved:
            made = each.refused if isinstance(each.refused, nn.Module) else each.value
            place = each.path, each.name
            if (
                _has_weights(made)
                and id(made) in of_model
                and (*place, "module") not in self.reported
            ):
                self.reported |= {place, (*place, "module")}
                verb = "holds" if each.is_part else "is"
                outcome = (
                    "and a resumed run loads its weights into what the program makes there at its "
                    "start: unless a hook makes it again, this run is not exact after an "
                    "interruption"
                    if self._has_like_weights_at_start(f"{each.path}.{each.name}", made)
                    else "and a resumed run cannot make it to load its weights: after an "
                    "interruption this run cannot continue"
                )
                self._say(
                    f"{each.path}.{each.name} {verb} {with_article(each.kind)} that was made while "
                    f"training, {outcome}; make it in __init__() or configure_model()"
                )

    def _has_like_weights_at_start(self, path: str, made: nn.Module) -> bool:
        """Return whether the start has weights of the same names and shapes at a module's place."""
        before = {
            name.removeprefix(f"{path}."): SPACES[space][0](module).get(own_name)
            for name, (module, space, own_name) in self.state.begin().tensors.items()
            if name.startswith(f"{path}.")
        }
        now = dict([*made.named_parameters(), *made.named_buffers()])
        return before.keys() == now.keys() and all(
            tensor is not None and tensor.shape == now[name].shape
            for name, tensor in before.items()
        )

    def report_weights(self, changed: Iterable[str]) -> None:
        """Print, once for each, which weights have taken the place of what was computed.

        `prune.remove` and `remove_parametrizations` do that: a checkpoint has a weight of that name
        then, and a resumed run's model has no place for it.

        Args:
            changed: The names of what the newest record has.
        """
        start = self.state.begin()
        for path, name in filter(None, map(_weight_named, changed)):
            node = start.by_path.get(path)
            weight = f"{path}.{name}"
            if (
                node is not None
                and weight not in start.tensors
                and (name in node.note or type(node.value) is not node.class_)
                and weight not in self.reported
            ):
                self.reported.add(weight)
                self._say(
                    f"{weight} was computed at the start and became a weight while training, and "
                    "a resumed run will not make it a weight: after an interruption this run "
                    "cannot continue; do this after training, or in __init__() or "
                    "configure_model()"
                )

    def _is_made_again(self, unsaved: Unsaved) -> bool:
        """Return whether a hook makes an object for each epoch, such as a metric or an iterator.

        The steps of a MetricTracker are made again, too. What a hook adds to a list of the start is
        what earlier epochs have left.
        """
        holder = self.state.begin().by_path.get(unsaved.path)
        if holder is not None and isinstance(holder.value, MetricTracker):
            return True
        if holder is not None and holder.kind is OBJECT and unsaved.is_part:
            before = holder.attributes.get(unsaved.name)
            now = object_graph.namespace(holder.value).get(unsaved.name)
            if before is not None and before is now:
                return False
        owner = start_hooks.objects_of_hooks(self.trainer).get(unsaved.path)
        is_module = any(isinstance(each, nn.Module) for each in (unsaved.value, unsaved.refused))
        is_object = is_module or unsaved.loses
        return (
            is_object
            and owner is not None
            and any(unsaved.name in start_hooks.names_in_hook(type(owner), hook) for hook in MAKING)
        )

    def report_made_anew(self) -> None:
        """Print, once for each, what has another order, or other memory, after an interruption."""
        reordered = {path.partition("[")[0] for path in self.state.reordered}
        for path in sorted(reordered - self.reported):
            which = "this set" if path in self.state.reordered else "a set in it"
            self._say(
                f"{path}: after an interruption the elements of {which} may come in another "
                "order: if training depends on it, sort them first, or keep a list or a dict"
            )
        for path in sorted(self.state.parted - self.reported):
            self._say(
                f"{path} now shares memory with weights, or with other tensors: after an "
                "interruption each has memory of its own, with the same values; if training "
                "changes the one through the other, have them share it from the start"
            )
        self.reported |= reordered | self.state.parted

    def warn_of_iterators(self) -> None:
        """Warn, once for each, of iterators whose position cannot be saved.

        These are a library's iterators other than files. The nodes of a validation begin again with
        each one, and a DataLoader's dataset with each of its iterations.
        """
        for path, value in self.state.reached(object):
            is_half_done = object_graph.is_library_iterator(value) and not has_position(value)
            if is_half_done and any(path.startswith(f"{within}.") for within in self.reported):
                continue
            if path.startswith(VALIDATION) and object_graph.is_of_pipeline(type(value)):
                continue
            if isinstance(value, IterableDataset) and OF_A_LOADER.fullmatch(path):
                continue
            if is_half_done and not has_state(value) and path not in self.reported:
                kind = class_name(type(value)).removeprefix("builtins.")
                self._say(
                    f"{path} is {with_article(kind)}, and its position cannot be saved: "
                    "after an interruption this run is not exact; keep an index, or a loader with "
                    "state_dict()",
                    path,
                )
            self.reported |= {path} if is_half_done else set()


def holder_of(node: Node) -> Node | None:
    """Return the object with attributes that leads to another object; None if there is none."""
    parent = node.parent
    while parent is not None and parent.kind is not OBJECT:
        parent = parent.parent
    return parent


def _is_users(holder: Node | None) -> bool:
    """Return whether an object is of a user's class, or has the variables of a user's code."""
    if holder is None:
        return False
    owner = owner_of(holder.value)
    return object_graph.has_variables(owner) or not is_library_class(type(owner))


def users_name(node: Node | None, name: str) -> tuple[str, str]:
    """Return the class of the user's object that holds an object's attribute, and in which of its.

    A variable is held by its module, its class or its function.

    What an installed package calls its own attributes says nothing to the user.

    Args:
        node: The object.
        name: The name of the attribute.
    """
    holder = _name_of_holder(node.value) if node else "object"
    attribute = name
    while node is not None:
        owner = owner_of(node.value)
        is_own = object_graph.is_own_module(type(node.value).__module__)
        if node.kind is OBJECT and (is_own or object_graph.has_variables(owner)):
            return _name_of_holder(node.value), attribute
        if (parent := node.parent) is not None:
            attribute = parent.kind.step(parent.note, parent.parts, node.index).lstrip(".")
        elif node.index.startswith(module_variables.VARIABLES):
            function, _, variable = node.index.rpartition(".")
            return function.removeprefix(module_variables.VARIABLES), variable
        node = parent
    return holder, name


def _name_of_holder(value: Any) -> str:
    """Return the name of what has variables, or of an object's class."""
    owner = owner_of(value)
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return class_name(owner if object_graph.has_variables(owner) else type(owner))


def _has_weights(value: Any) -> bool:
    """Return whether a value is a module of which a checkpoint has weights or buffers."""
    return isinstance(value, nn.Module) and bool(value.state_dict())


def _has_arrays(value: Any) -> bool:
    """Return whether an object has arrays or tensors in its attributes, or in its C code."""
    held = object_graph.namespace(value).values()
    return any(isinstance(each, (torch.Tensor, np.ndarray)) for each in held) or bool(
        fingerprints.held_arrays(value)
    )


def _is_another(before: Any, now: Any) -> bool:
    """Return whether two objects are of one class and hold different things."""
    if type(before) is not type(now):
        return False
    held, holds = (fingerprints.of_object(value, {}) for value in (before, now))
    return bool(held) and bool(holds) and held != holds


def _weight_named(changed: str) -> tuple[str, str] | None:
    """Return module and weight, or buffer, that the name of a change is of; None for others."""
    for space in ("parameter", "buffer"):
        path, found, name = changed.rpartition(f".{space} ")
        if found:
            return path, name
    return None


def _is_librarys_value(node: Node | None) -> bool:
    """Return whether an object of the start is a library's that is its attributes alone."""
    return node is not None and node.kind is OBJECT and is_made_of_attributes(node.value)


def opens_when_used(unsaved: Unsaved, start: Start) -> bool:
    """Return whether data have opened what is read there, and do it again in a resumed run.

    Nothing else was there before the first sample, which the check before training may draw. A file
    of Python's own has a position, too.

    Args:
        unsaved: What cannot be saved.
        start: The graph at the start.
    """
    holder = start.by_path.get(unsaved.path)
    is_datas = unsaved.path.startswith((TRAINING, VALIDATION))
    if holder is None or not is_datas or unsaved.loses:
        return False
    before = holder.attributes.get(unsaved.name)
    container = start.nodes.get(id(before)) if unsaved.is_part else None
    others = container.parts if container else [before]
    if not all(type(other) in (type(unsaved.refused), *SCALARS) for other in others):
        return False
    if isinstance(unsaved.refused, np.memmap):
        return not unsaved.refused.flags.writeable
    closes = callable(getattr(type(unsaved.refused), "close", None))
    return closes and not isinstance(unsaved.refused, io.IOBase)


def _is_said(unsaved: Unsaved, owner: Node | None) -> bool:
    """Return whether a line says that a checkpoint cannot hold something.

    An object that an attribute has got, such as a writer, is made again by the code that made it;
    but what was counted beside it is lost, and so is what another object of its class held in its
    place. Data may read a table when they need it, in the place of nothing.

    Args:
        unsaved: What it is.
        owner: The object that has it, as it was at the start.
    """
    if isinstance(unsaved.refused, nn.Module):  # its weights are lost
        is_models = not unsaved.is_part and unsaved.path == "model"
        return not (is_models and _has_weights(unsaved.value))  # else see `_report_modules`
    if is_read(unsaved.refused):  # data are read again from their start, or place by place
        return not unsaved.path.startswith((TRAINING, VALIDATION, "datamodule"))
    if unsaved.loses or unsaved.is_first:
        return True
    if _is_librarys_value(owner):
        return True  # such an object cannot be used without one of its parts
    before = owner.attributes if owner is not None and owner.kind is OBJECT else {}
    if is_table(unsaved.value):
        is_datas = unsaved.path.startswith((TRAINING, VALIDATION, "datamodule"))
        return unsaved.changes or not is_datas or is_table(before.get(unsaved.name))
    if not unsaved.is_part:
        if isinstance(unsaved.value, (tuple, *BASES)):
            return True  # a library's container of values
        is_array = isinstance(unsaved.value, (torch.Tensor, np.ndarray))
        is_changed = unsaved.changes or _is_another(before.get(unsaved.name), unsaved.value)
        is_changed = is_changed or fingerprints.hides_state(unsaved.value)
        is_new = type(before.get(unsaved.name)) is not type(unsaved.value)
        is_lost = is_new and (is_made_of_attributes(unsaved.value) or _has_arrays(unsaved.value))
        return is_array or is_changed or is_lost or isinstance(unsaved.value, CALLED)
    is_librarys = unsaved.kind.partition(".")[0] in object_graph.LIBRARIES
    # The callback that has added one does not add it again.
    is_callback = (unsaved.path, unsaved.name) == ("trainer", "callbacks")
    # An attribute that holds it is gone, too, if a step has set it first. Files are opened again.
    is_gone = bool(before) and unsaved.name not in before
    is_gone = is_gone and not isinstance(unsaved.refused, io.IOBase)
    return not is_librarys or is_callback or is_gone or unsaved.path.startswith("loggers.")
