"""State of the user's objects that no Lightning checkpoint has.

This is plain state, random generators, train or eval mode of modules, and optimizers that Lightning
does not know.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.compat.lightning_loops import combined_loader, fetcher
from sagemaker_lightning.compat.torch_modules import hooks, parameters, step_hooks
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume import start_hooks
from sagemaker_lightning.resume.acceptance import saved_part
from sagemaker_lightning.resume.parts import HINT, parts_of
from sagemaker_lightning.resume.restore_check import LOADER_ATTRIBUTES
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import generators, module_variables, object_graph
from sagemaker_lightning.state.encoding import NotPlain, decode, encode
from sagemaker_lightning.state.object_graph import added_to, owner_of
from sagemaker_lightning.state.object_state import PlainState, is_table
from sagemaker_lightning.state.package_variables import PackageVariables

SAMPLERS = "sampler", "batch_sampler"
PARTS = "dataset", "collate_fn", *SAMPLERS
"""Parts of a DataLoader that may have state."""
LOADER = "loader"
"""Name of a loader, of which a user may have made the class, or have added something to it."""
TRAINING = "train."
VALIDATION = "val."
CODE_ROOTS = "model", "callbacks."
"""How the names of what the loaders have begin, by stage."""
SETTING_TYPES = int, float, bool, str, type(None)
# Stands for the start value of a setting that the interrupted run changed.
CHANGED_BEFORE = object()


@object_graph.roots_at_one_moment
def user_objects(trainer: Trainer) -> dict[str, Any]:
    """Return the user's objects that may have state, by name.

    Args:
        trainer: Lightning's trainer.
    """
    objects: dict[str, Any] = {"model": trainer.lightning_module, "datamodule": trainer.datamodule}
    objects |= parts_of(trainer).marks()
    objects |= start_hooks.objects_of_hooks(trainer)
    # state_dict() has the state of a library's optimizer. It lacks the plain attributes of a class
    # of the user's, and what a user has added.
    objects |= {
        f"optimizers.{position}": (
            added_to(optimizer) if object_graph.is_library_class(type(optimizer)) else optimizer
        )
        for position, optimizer in enumerate(trainer.optimizers)
    }
    # Those that keep what they log in memory; libraries' loggers write files.
    objects |= {
        f"loggers.{position} {type(object_).__name__}": object_
        for position, object_ in enumerate(trainer.loggers)
        if not object_graph.is_library_class(type(object_))
    }
    modules = dict(trainer.lightning_module.named_modules()) if trainer.lightning_module else {}
    owners = [(f"model.{name}", hooks(module)) for name, module in modules.items()]
    owners += [
        (f"optimizers.{position}", step_hooks(optimizer))
        for position, optimizer in enumerate(trainer.optimizers)
    ]
    objects |= {
        f"hooks.{name}.{position}": hook
        for name, hooks_of_owner in owners
        for position, hook in enumerate(hooks_of_owner)
        if module_variables.is_own(hook)
    }
    for stage, loaders in (("train", trainer.train_dataloader), ("val", trainer.val_dataloaders)):
        for number, loader in enumerate(flattened(loaders)):
            if not has_state(loader):
                parts = {name: getattr(loader, name, None) for name in PARTS}
                if isinstance(loader, DataLoader):
                    parts[LOADER] = added_to(loader, but=("collate_fn",))
                elif not object_graph.is_library_class(type(loader)):
                    parts[LOADER] = loader
                objects |= {
                    f"{stage}.{number}.{name}": part
                    for name, part in parts.items()
                    if name not in SAMPLERS or not has_state(part)
                }
    return objects | _additions(trainer)


def _additions(trainer: Trainer) -> dict[str, Any]:
    """Return what may have been added to objects of Lightning's and torch's, by name."""
    objects: dict[str, Any] = {"trainer": added_to(trainer)}
    if (model := trainer.lightning_module) is None:
        return objects
    wrappers = model.optimizers() if trainer.optimizers else []
    objects |= {
        f"lightning_optimizers.{position}": added_to(wrapper)
        for position, wrapper in enumerate(wrappers if isinstance(wrappers, list) else [wrappers])
    }
    objects |= {
        f"parameters.{name}": added_to(parameter) for name, parameter in model.named_parameters()
    }
    return objects


class UserState:
    """The state of the user's objects.

    It consists of plain values, generators of random numbers, metrics, modules and optimizers.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state = PlainState(partial(user_objects, trainer))
        self.attributes_at_start: set = set()  # attributes at the start that are no plain values
        self.trainer_settings: dict[str, Any] = {}  # the trainer's settings at the start
        # Containers at the start that hold something that is not plain: their lengths and contents.
        self.containers_at_start: dict[tuple[str, str], list] = {}
        self.variables_at_start: dict[str, bytes] = {}  # digests of variables by name
        self.packages = PackageVariables()  # variables of installed packages
        self.package_searches = 0  # how often they were asked for since the start
        self.reported: set = set()  # what a message was printed for
        self.hooks: start_hooks.StartHooks | None = None  # while hooks begin the training
        self.computed: set[tuple[str, str]] = set()  # values that these hooks have computed

    def objects_of_module(self) -> dict[str, Any]:
        """Return the objects that the module has, by name."""
        model = {"model": self.trainer.lightning_module}
        return dict(object_graph.walk(model, code=False))

    def name_in_module(self, value: Any) -> str:
        """Return the name of an object that the module has; "" if it has not got it."""
        objects = self.objects_of_module().items()
        return next((name for name, object_ in objects if object_ is value), "")

    def hooks_begin(self) -> None:
        """Note that hooks at the start of training run next."""
        self.hooks = start_hooks.StartHooks(self.trainer)

    def hooks_ended(self) -> None:
        """Save from now on what these hooks have computed."""
        if self.hooks:
            self.computed |= self.hooks.computed()
            self.state.touch(self.computed)
            self.hooks = None

    @object_graph.at_one_moment()
    def mark_start(self) -> None:
        """Take the present state as the one at the start."""
        self.hooks_ended()
        self.state.mark()
        self.attributes_at_start = self.state.opaque_attributes()
        self.containers_at_start = {
            key: description for key, (_, *description) in self.state.opaque_containers().items()
        }
        self.trainer_settings = self._trainer_settings()
        self.package_searches = 0
        self.variables_at_start = self._variables(self.packages.values())
        self.packages.note(anew=True)

    def first_batch_ended(self) -> None:
        """Note what packages have made for the first batch; it is trained from then on."""
        self._variables_of_packages()
        self.packages.note(anew=False)

    def encode_changes(self, point: ResumePoint | None = None) -> dict[str, Any]:
        """Return what has changed since `mark_start`, encoded; print, once, what cannot be saved.

        Args:
            point: When it is called, for the state of the data loaders. None to leave them out:
                then this can be called before they begin.
        """
        self._warn_of_iterators()
        model = self.trainer.lightning_module
        trainer = self.trainer
        settings = {
            name: value
            for name, value in self._trainer_settings().items()
            if self.trainer_settings.get(name, value) != value
        }
        plain = self.state.encode_changes()
        stateful, unsaved = self._encode_stateful()
        self._report_unsaved(unsaved)
        if point:
            self._report_variables()
        return {
            "plain": plain,
            "data": self._data_identity(plain),
            "modules": self._modules(),
            "computed": sorted(self.computed & self.state.unchanged),
            "made": sorted(self.state.opaque_attributes() - self.attributes_at_start),
            "generators": {
                path: encode(generators.state_of(object_))
                for path, object_ in self._generators().items()
            },
            "stateful": stateful,
            "settings": settings,
            "eval": [name for name, module in model.named_modules() if not module.training],
            "frozen": [
                name for name, parameter in model.named_parameters() if not parameter.requires_grad
            ],
            "loaders": combined_loader(trainer).states(
                fetcher(trainer), within=point is not ResumePoint.EPOCH
            )
            if point
            else None,
        }

    def _data_identity(self, changed: Collection[tuple[str, str]]) -> dict[str, Any]:
        """Return what tells the training and validation data from others, by name.

        These are lengths, and the numbers that the datasets hold, or the model and the callbacks in
        arrays, such as directions drawn once: of those that the program has made and nothing has
        changed since. A text may rightly be another one, such as a folder.

        Args:
            changed: The plain values that are others than at the start; they are saved themselves.
        """
        # If loaders are made anew while training, a resumed run makes the training data as of the
        # interrupted run's epoch, but the validation data as of its own first one.
        reloads = self.trainer.reload_dataloaders_every_n_epochs
        stages = (TRAINING,) if reloads else (TRAINING, VALIDATION)
        datasets = {
            path: object_
            for path, object_ in user_objects(self.trainer).items()
            # Asking a stream for its length may change it, as of litdata's.
            if path.startswith(stages) and not isinstance(object_, IterableDataset)
        }
        lengths = {
            f"the length of {path}": sized_len(dataset)
            for path, dataset in datasets.items()
            if isinstance(dataset, Dataset)
        }
        numbers = {
            f"the numbers in {'.'.join(key)}": mark
            for key, mark in self.state.numbers().items()
            if key not in changed
            and (
                key[0].startswith(stages)
                # A list in the code is compared with other numbers of the code.
                or (key[0].startswith(CODE_ROOTS) and key in self.state.arrays_at_start)
            )
        }
        return lengths | numbers | self._batches(stages)

    def _batches(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Return what decides the batches of the DataLoaders of some stages, by name."""
        loaders = {
            TRAINING: flattened(self.trainer.train_dataloader),
            VALIDATION: flattened(self.trainer.val_dataloaders),
        }
        return {
            f"the {name} of {stage}{number}": (
                type(value).__qualname__ if name == "sampler" else str(value)
            )
            for stage in stages
            for number, loader in enumerate(loaders[stage])
            if isinstance(loader, DataLoader)
            for name in LOADER_ATTRIBUTES
            if (value := getattr(loader, name, None)) is not None
        }

    def state_before_data(self) -> dict[str, Any]:
        """Return, encoded, the state that the data created next may depend on."""
        return {
            "plain": self.state.encode_changes(),
            "generators": {
                path: encode(generators.state_of(generator))
                for path, generator in self._generators().items()
            },
        }

    def restore_state_before_data(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_before_data` returned."""
        self.state.restore(saved["plain"])
        for path, generator in self._generators().items():
            if path in saved["generators"]:
                generators.restore(generator, decode(saved["generators"][path]))

    def _modules(self) -> dict[str, str]:
        """Return the class of each of the model's modules, and how many hooks it has, by name.

        A module that was replaced while training, or that has got a hook, is in no checkpoint. Nor
        is a hook of an optimizer.
        """
        return {
            f"the class or the hooks of model.{name}".removesuffix("."): (
                # A lazy module gets its final class with the first batch.
                f"{type(module).__name__.removeprefix('Lazy')} {len(hooks(module))}"
            )
            for name, module in self.trainer.lightning_module.named_modules()
        } | {
            f"the hooks of optimizers.{position}": str(len(step_hooks(optimizer)))
            for position, optimizer in enumerate(self.trainer.optimizers)
        }

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
            for _, object_ in object_graph.walk(user_objects(self.trainer), code=False)
            if isinstance(object_, nn.Module)
            for parameter in parameters(object_).values()
            if parameter is not None
        )
        return self.packages.find(start_hooks.objects_of_hooks(self.trainer).values(), known)

    def _report_variables(self) -> None:
        """Print, once for each, which variables of modules and classes have changed."""
        self._report_changed(
            module_variables.changed_variables(
                self.variables_at_start, self._variables(self._variables_of_packages())
            )
        )

    def report_packages(self, saved: Any) -> None:
        """Print, once for each, which variables of packages have changed.

        Args:
            saved: What a checkpoint has of them: tensors in dicts and lists.
        """
        if changed := self.packages.changed(saved):
            held = object_graph.walk(user_objects(self.trainer), code=False)
            ids = {id(object_) for _, object_ in held}
            self._report_changed(name for name, value in changed.items() if id(value) not in ids)

    def _report_changed(self, names: Iterable[str]) -> None:
        """Print, once for each, that a variable has changed."""
        for name in names:
            if name not in self.reported and self.trainer.is_global_zero:
                print(
                    f"{name} changes while training, and no checkpoint has it: a resumed run "
                    f"starts with its first value; keep it in an attribute of the model, or {HINT}",
                    flush=True,
                )
            self.reported.add(name)

    def _report_unsaved(self, others: Mapping[tuple[str, str], str]) -> None:
        """Print, once, which changed containers hold something that cannot be saved.

        Args:
            others: What else cannot be saved, and why, by path of its owner and attribute.
        """
        unsaved = {
            key: reason
            for key, reason in (self.state.unsaved | others).items()
            if key not in self.reported
        }
        for key, (value, *description) in self.state.opaque_containers().items():
            if key not in self.reported and self.containers_at_start.get(key) != description:
                try:
                    encode(value)
                except NotPlain as error:
                    is_libraries = error.kind.partition(".")[0] in object_graph.LIBRARIES
                    if is_table(value):
                        if not key[0].startswith((TRAINING, VALIDATION, "datamodule")):
                            unsaved[key] = f"is a {error.kind}"
                    elif not is_libraries or key[0].startswith("loggers."):
                        unsaved[key] = f"holds a {error.kind}"
        self.reported |= unsaved.keys()
        owners = (
            dict(object_graph.walk(user_objects(self.trainer), code=False))
            if unsaved and self.trainer.is_global_zero
            else {}
        )
        named = {
            object_graph.users_name(owners, *key): reason
            for key, reason in unsaved.items()
            if key[0] in owners
        }
        for (path, name), reason in named.items():
            if (path, name) in unsaved or (path, name) not in self.reported:
                self.reported.add((path, name))
                owner_class = type(owner_of(owners[path]))
                print(
                    f"{owner_class.__module__}.{owner_class.__qualname__}.{name} {reason}, which "
                    "no checkpoint can hold: a resumed run starts without it; keep numbers, text, "
                    f"arrays, tensors, tuples and dataclasses there, or {HINT}",
                    flush=True,
                )

    def _report_reordered(self) -> None:
        """Print, once for each, which sets have got their elements in another order."""
        for path, name in sorted(self.state.reordered - self.reported):
            if self.trainer.is_global_zero:
                print(
                    f"{path}.{name} is a set, and its elements come in another order than before "
                    "the interruption: if training depends on it, sort them first",
                    flush=True,
                )
        self.reported |= self.state.reordered

    def restore(
        self, saved: Mapping[str, Any], only_plain: bool = False, same_ranks: bool = True
    ) -> None:
        """Restore what `encode_changes` returned, as far as the objects exist.

        Args:
            saved: What `encode_changes` returned.
            only_plain: Whether to restore only plain values.
            same_ranks: Whether this rank has saved it. If not, what hooks have computed at the
                start is left as they have: it may be this rank's own.
        """
        model = self.trainer.lightning_module
        # A dataset may create something once and set a flag that says so. Where the thing is
        # missing, the flag must not be restored.
        incomplete = {
            path for path, _ in self.missing_attributes(saved) if path in self._data_paths()
        }
        own = set() if same_ranks else set(map(tuple, saved["computed"]))
        plain = {
            key: value
            for key, value in saved["plain"].items()
            if key not in own and (key[0] not in incomplete or type(value) is not bool)
        }
        self.state.restore(plain)
        self._report_reordered()
        if only_plain:
            return
        for path, object_ in self._generators().items():
            if path in saved["generators"]:
                generators.restore(object_, decode(saved["generators"][path]))
        with _sharing_groups(self._stateful().values()):
            for path, object_ in self._stateful().items():
                if path in saved["stateful"]:
                    state = decode(saved["stateful"][path])
                    is_schedule = isinstance(getattr(object_, "optimizer", None), Optimizer)
                    object_.load_state_dict(saved_part(object_, state) if is_schedule else state)
        for name in saved["settings"].keys() & self._trainer_settings().keys():
            if type(saved["settings"][name]) in SETTING_TYPES:
                setattr(self.trainer, name, saved["settings"][name])
                self.trainer_settings[name] = CHANGED_BEFORE
        evaluating = set(saved["eval"])
        frozen = set(saved["frozen"])
        for name, module in model.named_modules():
            module.training = name not in evaluating
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def restore_samplers(self, saved: Mapping[str, Any]) -> None:
        """Restore what has changed in the training samplers since they have drawn this epoch.

        The loaders restore the state from which they have drawn it, and draw it again. What a
        sampler shares with the model or a callback belongs to it, too; and so does what the loader
        holds besides.

        Args:
            saved: What `encode_changes` returned.
        """
        parts = {
            path: object_
            for path, object_ in user_objects(self.trainer).items()
            if path.startswith(TRAINING)
        }
        samplers = {path: parts[path] for path in parts if path.endswith(SAMPLERS)}
        loaders = {path: parts[path] for path in parts if path.endswith(LOADER)}
        ids = {id(object_) for _, object_ in object_graph.walk(samplers, skip=(Dataset,))}
        ids |= {id(owner_of(object_)) for _, object_ in object_graph.walk(loaders)}
        self.state.restore(saved["plain"], ids=ids)
        for path, generator in self._generators().items():
            if id(generator) in ids and path in saved["generators"]:
                generators.restore(generator, decode(saved["generators"][path]))

    def _warn_of_iterators(self) -> None:
        """Warn, once for each, of iterators whose position no checkpoint can hold.

        These are a library's iterators other than files.
        """
        for path, value in object_graph.walk(user_objects(self.trainer), code=False):
            is_half_done = object_graph.is_library_iterator(value)
            if (
                is_half_done
                and not has_state(value)
                and path not in self.reported
                and self.trainer.is_global_zero
            ):
                print(
                    f"warning: {path} is a {type(value).__name__}, and no checkpoint can hold its "
                    "position: after an interruption this run is not exact; keep a loader with "
                    "state_dict(), or an index",
                    flush=True,
                )
            self.reported |= {path} if is_half_done else set()

    def missing_attributes(self, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the attributes that were saved as present and are missing now.

        Each is (path of its object, name of the attribute). They are those whose values are not
        plain.
        """
        present = self.state.opaque_attributes()
        return [tuple(entry) for entry in saved["made"] if tuple(entry) not in present]

    def _data_paths(self) -> set[str]:
        """Return the paths of the user's datasets, transforms and the like.

        No hook of Lightning's creates them.
        """
        return {
            path
            for path, value in object_graph.walk(user_objects(self.trainer), code=False)
            if not isinstance(value, (LightningModule, LightningDataModule, Callback))
        }

    def _trainer_settings(self) -> dict[str, Any]:
        """Return the trainer's settings that a callback may change."""
        added = object_graph.attributes(added_to(self.trainer))
        return {
            name: value
            for name, value in vars(self.trainer).items()
            if name not in added
            and name[0] != "_"
            and type(value) in SETTING_TYPES
            and name != "should_stop"
        }

    def _generators(self) -> dict[str, Any]:
        """Return the generators of the model, the callbacks and the data module."""
        return generators.find(
            {
                name: value
                for name, value in user_objects(self.trainer).items()
                if "." not in name or name.startswith(("callbacks", "hooks", "parts"))
            }
        )

    def _encode_stateful(self) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
        """Return the encoded states of `_stateful`, and why others have none."""
        states = {}
        unsaved = {}
        for path, object_ in self._stateful().items():
            owner, _, name = path.rpartition(".")
            try:
                states[path] = encode(object_.state_dict())
            except NotPlain as error:
                unsaved[owner, name] = f"holds a {error.kind}"
            except Exception as error:  # whatever a library's object raises
                unsaved[owner, name] = f"has a state_dict() that raises {type(error).__name__}"
        return states, unsaved

    def _stateful(self) -> dict[str, Any]:
        """Return a library's objects that save and load their state, and optimizers of any class.

        These are optimizers that Lightning does not know, such as one within another one.
        """
        # Begun anew, with what is in them, and their batches are drawn again: they would be ahead.
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
            path: value
            for path, value in object_graph.walk(user_objects(self.trainer), streams, code=False)
            if not isinstance(value, excluded)
            and id(value) not in saved_elsewhere
            and (object_graph.is_library_class(type(value)) or isinstance(value, Optimizer))
            and has_state(value)
        }


@contextmanager
def _sharing_groups(objects: Iterable[Any]) -> Iterator[None]:
    """Let optimizers that load their states in the block keep their groups and states.

    `load_state_dict` makes new ones. An optimizer within another one, as SAM has it, shares them:
    a schedule sets the rates of the one, and the other one steps.
    """
    kept = [
        (object_, object_.param_groups, object_.state)
        for object_ in objects
        if isinstance(object_, Optimizer) and vars(object_).keys() >= {"param_groups", "state"}
    ]
    yield
    for optimizer, groups, state in kept:
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update({**loaded, "params": group["params"]})
        if optimizer.state is not state:
            state.clear()
            state.update(optimizer.state)
        optimizer.param_groups = groups
        optimizer.state = state
