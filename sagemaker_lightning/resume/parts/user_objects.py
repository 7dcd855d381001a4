"""The user's objects: their plain state, as one graph in which each object is one.

state/graph says what it holds. What the program makes again at its start is saved only if it has
changed since, or if hooks at the start have computed it from the weights.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from torch import nn

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.compat.lightning_trainer import callbacks_of, set_callbacks
from sagemaker_lightning.compat.model_parallel import mesh_of
from sagemaker_lightning.contract.errors import printable, with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts import pruned_weights, start_hooks
from sagemaker_lightning.resume.parts.given_parts import HINT
from sagemaker_lightning.resume.parts.grown_modules import GrownModules
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.reports import Reports, opens_when_used
from sagemaker_lightning.resume.parts.roots import (
    TRAINING,
    VALIDATION,
    prefix_of_replaced,
    user_objects,
)
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import module_variables, object_graph
from sagemaker_lightning.state.graph import fingerprints
from sagemaker_lightning.state.graph.atoms import SCALARS
from sagemaker_lightning.state.graph.kinds.base import refusing
from sagemaker_lightning.state.graph.kinds.objects import SPACES
from sagemaker_lightning.state.graph.nodes import CODE, LIBRARYS, scan
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in, nodes_of
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.module_variables import CACHE

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


MEMBERS = tuple(f"{space} " for space in SPACES)
"""How the names of members of modules begin in a record."""


NUMBERS = int, float, complex
"""Classes of numbers; a flag is not a number here."""


class UserObjects(Part):
    """What has changed in the user's objects since the start."""

    key = "user_objects"
    what = "what has changed in the objects of the model, the data module, callbacks and loaders"
    moments = (Moment.HOOKS, Moment.TRAINING, Moment.EPOCH)

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.owners: dict[str, Any] = {}
        """The model and the callbacks at the start, by name."""
        self.graph = GraphState(self._roots, before=run.options.trained)
        self.reports = Reports(self.trainer, self.graph)
        self.changed: set[str] = set()
        """The names of what was saved last."""
        self.hooks: start_hooks.StartHooks | None = None
        """What hooks compute while they begin the training."""
        self.computed: dict[tuple[int, str], Any] = {}
        """Values that these hooks have computed, by what their object is known and attribute."""
        self.grown = GrownModules()
        self.replaced_numbers: list[tuple[Any, str, Any]] = []
        """What the user's hooks have replaced while they loaded: owner, attribute, the number."""
        self.results: dict[Any, int] | None = None
        """Functions that keep their results, with the number of results at a resumed run's start;
        None before."""

    def hooks_begin(self) -> None:
        """Note that hooks at the start of training run next."""
        self.hooks = start_hooks.StartHooks(self.trainer)

    def hooks_ended(self) -> None:
        """Save from now on what these hooks have computed."""
        if self.hooks:
            computed = self.hooks.computed()
            self.computed |= computed
            self.graph.touch(computed, before=self.hooks.state.begin().nodes)
            self.hooks = None

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Save what a search before training changes in this context, but for its data.

        A resumed run does not search, and other data are made after the search.
        """
        self.graph.mark()
        yield
        roots = self.graph.roots
        data = TRAINING, VALIDATION
        self.graph.roots = lambda: {
            name: root for name, root in roots().items() if not name.startswith(data)
        }
        self.graph.touch_all()
        self.graph.roots = roots

    def mark_start(self) -> None:
        """Take the present state as the one at the start."""
        self._note_owners()
        self.graph.mark()
        self.reports.mark_start()
        if self.run.resumed and self.results is None:
            kept = module_variables.results_kept(user_objects(self.trainer))
            self.results = {each: each.cache_info().currsize for each in kept}

    def first_batch_ended(self) -> None:
        """Compare what it has made in variables from now on."""
        self.reports.first_batch_ended()

    def _forget_results(self) -> None:
        """Have results computed again that are of a time before the restore.

        The check before training computes some of the first values; what was restored has others.
        """
        for function, number in (self.results or {}).items():
            if function.cache_info().currsize > number:
                function.cache_clear()

    def _note_owners(self) -> None:
        """Note the model and the callbacks that the program makes at its start."""
        known = {*map(id, self.owners.values()), *self.graph.made}
        self.owners |= {
            name: owner
            for name, owner in start_hooks.objects_of_hooks(self.trainer).items()
            if id(owner) not in known and name not in self.owners
        }

    def _roots(self) -> dict[str, Any]:
        """Return the objects to start from; callbacks that training adds are in a list of these."""
        if not self.owners:
            self._note_owners()
        found = user_objects(self.trainer)
        names = {id(owner): name for name, owner in self.owners.items()}
        known = {}
        for name, value in found.items():
            if not name.startswith(start_hooks.CALLBACKS):
                known[name] = value
                continue
            callback, dot, attribute = name.removeprefix(start_hooks.CALLBACKS).partition(".")
            owner = found[f"{start_hooks.CALLBACKS}{callback}"]
            if id(owner) in names:
                known[f"{names[id(owner)]}{dot}{attribute}"] = value
        return known | self.owners

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what has changed since `mark_start`; say, once, what cannot be saved."""
        self.reports.warn_of_iterators()
        # The next epoch makes its data again, from what the objects have of these.
        ends = point is ResumePoint.EPOCH and lightning_loops.loaders_are_due(self.trainer)
        but = prefix_of_replaced(self.trainer) if ends else ""
        start = self.graph.begin()
        graph = self.graph.encode(but)
        if point and mesh_of(self.trainer) is not None:
            of_ranks = self.run.agreement.gather(list(graph.get("shared", ())))
            if self.graph.touch_shared(graph, of_ranks):
                graph = self.graph.encode(but)
        self.changed = set(names_in(graph))
        self.reports.report_unsaved({})
        self.reports.report_weights(self.changed)
        if point:
            self.reports.report_made_anew()
            self.reports.report_variables()
            self.reports.warn_of_unreadable()
        return {
            "graph": graph,
            "unsaved": {
                f"{each.path}.{each.name}".removesuffix("."): [
                    each.kind,
                    fingerprints.of_held_arrays(each.refused).hex(),
                ]
                for each in self.graph.unsaved
                # Results are computed again.
                if not isinstance(each.refused, CACHE) and not opens_when_used(each, start)
            },
            "computed": self._computed_and_unchanged(),
            "made": sorted(self._made()),
            "lost": list(dict.fromkeys([*self.lost_before, *self.reports.lost])),
        }

    @property
    def lost_before(self) -> list[str]:
        """The names of what the resumed checkpoint lacks, as lines of earlier starts have them."""
        return _names_lost(self.run.resumed.of(self)) if self.run.resumed else []

    @property
    def lost_on_ranks(self) -> list[str]:
        """The names of what the resumed checkpoint lacks of this rank, and of others."""
        own = self.lost_before
        of_ranks = self.run.resumed.of_all_ranks(self.key) if self.run.resumed else []
        found = {name: rank for rank, saved in enumerate(of_ranks) for name in _names_lost(saved)}
        return own + [f"{name} of rank {rank}" for name, rank in found.items() if name not in own]

    def explain_missing(self, name: str) -> None:
        """Print, if code of a resumed run misses an attribute, that it cannot be saved."""
        for path in self.run.resumed.of(self)["unsaved"] if self.run.resumed else ():
            kind = self._kind_unsaved(path)
            if kind and path.rpartition(".")[2] == name:
                log.error(
                    f"{printable(path)}: the interrupted run had {kind} there, which cannot be "
                    "saved; make it where each start does, such as in on_train_start(), or "
                    "where it is missing"
                )

    def _kind_unsaved(self, name: str) -> str:
        """Return of which class a value is that the checkpoint cannot hold; "" for others."""
        unsaved = self.resumed.of(self)["unsaved"].get(name)
        if type(unsaved) is not list or not unsaved:
            return ""
        return with_article(printable(str(unsaved[0]))[:200])

    def _owners_of_hooks(self) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return the objects that have hooks of the user's, each with its attributes."""
        owners = start_hooks.objects_of_hooks(self.trainer).values()
        return [(owner, object_graph.attributes(owner)) for owner in owners]

    @contextmanager
    def noting_replaced_numbers(self) -> Iterator[None]:
        """Note which numbers hooks of the user's replace while they load.

        The hooks that begin training get what was loaded, as with Lightning. A `load_state_dict`
        may move a sum from one attribute to another one, though: once these hooks have run, a
        number that training had not changed is as the program has made it.
        """
        before = self._owners_of_hooks()
        yield
        self.replaced_numbers += _numbers_replaced(before)

    @contextmanager
    def keeping_numbers(self) -> Iterator[None]:
        """Set numbers back that hooks of the user's change in the block.

        What they write, append or open stays: nobody knows what else it has changed.
        """
        before = self._owners_of_hooks()
        try:
            yield
        finally:
            for owner, name, number in _numbers_replaced(before):
                setattr(owner, name, number)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore what has changed, as far as the objects exist.

        Drawing an epoch's batches again changes what samplers and datasets hold: what they share
        with the model is one object again afterwards.
        """
        if moment is Moment.EPOCH:
            if self.run.resumes_within_epoch and self.resumed.same_ranks:
                self._restore_graph(saved)
            return
        # A dataset may create something once and set a flag that says so. Where the thing is
        # missing, the flag must not be restored.
        incomplete = {
            path for path, _ in self._missing_attributes(saved) if path in self._data_paths()
        }
        if moment is Moment.TRAINING:
            for owner, name, number in self.replaced_numbers:
                setattr(owner, name, number)
            self.replaced_numbers = []
        # What hooks have computed at the start may be each rank's own.
        own = () if self.resumed.same_ranks else tuple(map(str, saved["computed"]))
        self._restore_graph(saved, incomplete, own, is_late=moment is Moment.TRAINING)
        self._forget_results()
        self.reports.report_made_anew()

    def restore_modules(self) -> None:
        """Give modules the parts that they had got while they were trained.

        It is done before Lightning loads the weights, of which there are some for these parts.
        """
        modules = (node.value for node in self.graph.begin().nodes.values())
        self.grown = GrownModules(each for each in modules if isinstance(each, nn.Module))
        self.graph.restore(self.resumed.of(self)["graph"], parts_of_modules)

    @contextmanager
    def attributes_kept(self) -> Iterator[None]:
        """Have modules keep the objects of the start whose state a `set_extra_state` replaces.

        They get what was saved of them in place, as one object under all of their names.
        """
        before = [
            (module, dict(vars(module)))
            for module in self.trainer.lightning_module.modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state
        ]
        yield
        nodes = self.graph.begin().nodes if before else {}
        for module, attributes in before:
            for name, value in attributes.items():
                node = nodes.get(id(value))
                if node is not None and node.kind not in (CODE, LIBRARYS):
                    vars(module)[name] = value

    def removed_members(self) -> set[str]:
        """Return the paths of what modules have lost while training.

        A resumed program makes it again, and its optimizers with it. It is removed after that.
        """
        return removed_members(self.resumed.of(self)["graph"])

    def recreate(self) -> None:
        """Run again the hooks that created objects that cannot be saved.

        Within an epoch, Lightning does not run these hooks. At its end, the objects still have the
        epoch's state, which other hooks may use.
        """
        missing = self._missing_attributes(self.resumed.of(self))
        run_creating_hooks(self.trainer, missing)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each changed value, and what has changed and could not be saved.

        The latter is its class, and a hash of the arrays that it holds.

        The steps of a MetricTracker are made, and compared, with the metrics.
        """
        of_trackers = tuple(f"{path}." for path in others[Metrics.key]["tracked"])
        found = digests(saved["graph"]) | saved["unsaved"]
        return {name: each for name, each in found.items() if not name.startswith(of_trackers)}

    def why(self, name: str) -> str:
        """Return that it cannot be saved, if that is why it differs."""
        if not (kind := self._kind_unsaved(name)):
            return self.why_differs
        return f"{kind}, which cannot be saved; keep numbers, text or arrays there, or {HINT}"

    def _computed_and_unchanged(self) -> list[str]:
        """Return the names of what hooks have computed at the start and nothing has changed."""
        if not self.computed:
            return []
        changed = self.graph.changes().keys()
        paths = self.graph.begin().paths
        return sorted(
            f"{paths[key]}.{name}".removesuffix(".")
            for (key, name), value in self.computed.items()
            if key in paths
            and changed.isdisjoint([(key, name), *((part, "") for part in scan({"": value}))])
        )

    def _made(self) -> Iterator[tuple[str, str]]:
        """Yield the attributes, and their objects' paths, that were made since and are not saved.

        The program may make them again, when a hook runs.
        """
        start = self.graph.begin()
        for path, name, *_ in self.graph.unsaved:
            if (node := start.by_path.get(path)) is None or not name:
                continue
            if _is_absent(node.attributes, name):
                yield path, name

    def _restore_graph(
        self,
        saved: Mapping[str, Any],
        incomplete: Collection[str] = (),
        own: tuple[str, ...] = (),
        is_late: bool = True,
    ) -> None:
        def accept(node: list[Any]) -> list[Any] | None:
            restored = node if is_late else before_hooks(node)
            return restored and accepted(restored, incomplete, own)

        with self._own_callbacks_kept():
            self.graph.restore(saved["graph"], accept)
            if "newer graph" in saved:
                self.graph.restore(saved["newer graph"], accept)

    @contextmanager
    def _own_callbacks_kept(self) -> Iterator[None]:
        """Leave the trainer's callbacks as they are if a record does not leave those it has to.

        A record is input: without ours, and those that write checkpoints, nothing is as it was.
        """
        callbacks = callbacks_of(self.trainer)
        before = [*callbacks]
        yield
        needed = {
            id(each)
            for each in before
            if isinstance(each, Checkpoint) or object_graph.is_ours(each)
        }
        is_whole = needed <= set(map(id, callbacks))
        if not (is_whole and all(isinstance(each, Callback) for each in callbacks)):
            callbacks[:] = before
        set_callbacks(self.trainer, callbacks)

    def _missing_attributes(self, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the attributes that were saved as present and are missing now.

        Each is (path of its object, name of the attribute). They are those whose values are not
        plain.
        """
        by_path = self.graph.begin().by_path
        return [
            (path, name)
            for path, name in map(tuple, saved["made"])
            if (node := by_path.get(path)) is not None
            and _is_absent(object_graph.attributes(node.value), name)
        ]

    def _data_paths(self) -> set[str]:
        """Return the paths of the user's datasets, transforms and the like.

        No hook of Lightning's creates them.
        """
        return {
            path
            for path, value in self.graph.reached(object)
            if not isinstance(value, (LightningModule, LightningDataModule, Callback))
        }


def _numbers_replaced(
    before: Iterable[tuple[Any, Mapping[str, Any]]],
) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, attribute and value of each number in whose place there is another one now.

    Args:
        before: The objects, each with the attributes that it had.
    """
    for owner, values in before:
        present = object_graph.namespace(owner)
        for name, value in values.items():
            now = present.get(name)
            if now is not value and type(value) in NUMBERS and type(now) in NUMBERS:
                yield owner, name, value


def _names_lost(saved: Any) -> list[str]:
    """Return the names of what a checkpoint lacks of a rank, as that rank has saved them."""
    lost = saved.get("lost") if isinstance(saved, dict) else None
    return [*map(str, lost)] if isinstance(lost, list) else []


def _is_absent(attributes: Mapping[str, Any], name: str) -> bool:
    """Return whether an object has no attribute of that name, or a value in place of an object."""
    return type(attributes.get(name)) in SCALARS


def accepted(
    node: list[Any], incomplete: Collection[str], own: tuple[str, ...]
) -> list[Any] | None:
    """Return what is restored of a node of the start; None for nothing.

    Args:
        node: The node (state/graph/encoding.py).
        incomplete: The paths of objects of which no flags are restored.
        own: The names of what this rank has computed itself.
    """
    kind, path, note, references, content = node
    if own and path.startswith(own) and any(_is_within(path, name) for name in own):
        return None
    if not isinstance(note, dict) or not (path in incomplete or own):
        return node
    names = note["names"]
    kept = [
        number
        for number, name in enumerate(names)
        if f"{path}.{name}" not in own
        and (path not in incomplete or type(references[number]) is not bool)
    ]
    return [
        kind,
        path,
        note | {"names": [names[number] for number in kept]},
        [references[number] for number in kept] + references[len(names) :],
        content,
    ]


def parts_of_modules(node: list[Any]) -> list[Any] | None:
    """Return what a node of the start has of a module's modules, parameters and buffers."""
    kind, path, note, references, content = node
    if not isinstance(note, dict):
        return None
    names = note["names"]
    pruned = pruned_weights.members(names)
    kept = [
        n
        for n, name in enumerate(names)
        if name.startswith(MEMBERS) and name not in pruned and not _is_of_start(references[n])
    ]
    if not kept:
        return None
    gone = [name for name in note.get("gone", ()) if f"module {name}" in names]
    unsaved = {"unsaved": note["unsaved"]} if "unsaved" in note else {}
    note = {"names": [names[n] for n in kept], "gone": gone} | unsaved
    return [kind, path, note, [references[n] for n in kept], content]


@refusing()
def removed_members(record: Record) -> set[str]:
    """Return the paths of the modules, parameters and buffers that a record has removed."""
    removed = set()
    for _, path, note, references, _ in nodes_of(record):
        if path is None or not isinstance(note, dict):
            continue
        names = note.get("names", ())
        nothing = [name for name, part in zip(names, references, strict=False) if part is None]
        removed |= {
            f"{path}.{name.partition(' ')[2]}"
            for name in (*nothing, *note.get("gone", ()))
            if name.startswith(MEMBERS)
        }
    return removed


def _is_of_start(reference: Any) -> bool:
    """Return whether a member of a module is nothing, or a weight that is there at the start.

    Where such was put in the place of a weight, the optimizers are made before.
    """
    return reference is None or (isinstance(reference, list) and reference[:1] == ["by others"])


def before_hooks(node: list[Any]) -> list[Any] | None:
    """Return what is restored of a node of the start before the hooks at the start of training.

    They prune the weights again, and are those of the callbacks that the program makes.
    """
    return None if node[1] == "trainer.callbacks" else pruned_weights.without(node)


def _is_within(path: str, name: str) -> bool:
    """Return whether a path is that of a named value, or of a part of it."""
    return path == name or path[len(name) : len(name) + 1] in (".", "[", "{")


def run_creating_hooks(trainer: Trainer, missing_attributes: list[tuple[str, str]]) -> None:
    """Run the hooks on_train_epoch_start that create what is missing.

    Args:
        trainer: Lightning's trainer.
        missing_attributes: Each is (path of its object, name of the attribute).
    """
    owners = user_objects(trainer)
    for name, owner in owners.items():
        if not isinstance(owner, (Callback, LightningModule)):
            continue
        missing = {attribute for path, attribute in missing_attributes if path == name}
        if missing & start_hooks.names_in_hook(type(owner), "on_train_epoch_start"):
            if isinstance(owner, Callback):
                owner.on_train_epoch_start(trainer, trainer.lightning_module)
            else:
                owner.on_train_epoch_start()
