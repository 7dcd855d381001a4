"""Objects with attributes: a user's, modules, functions with what they have closed over."""

import enum
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from inspect import getattr_static
from itertools import count, cycle
from typing import Any, cast

from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.core.mixins import HyperparametersMixin
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from sagemaker_lightning.compat.torch_modules import (
    buffers,
    children,
    is_unreadable,
    parameters,
    scripted_attributes,
    unsaved_buffers,
    unwrapped,
)
from sagemaker_lightning.state.caches import kept
from sagemaker_lightning.state.graph import scalars
from sagemaker_lightning.state.graph.kinds.base import (
    Kind,
    NotSaved,
    class_name,
    kind_text,
    known_class,
    refusal,
)
from sagemaker_lightning.state.graph.kinds.containers import CONTAINERS
from sagemaker_lightning.state.object_graph import (
    HYPERPARAMETERS,
    LIGHTNINGS,
    attributes,
    has_namespace,
    has_place_for,
    has_variables,
    is_library_class,
    namespace,
    owner_of,
    users_members,
)

SPACES: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type]] = {
    "parameter": (parameters, nn.Parameter),
    "buffer": (buffers, Tensor),
    "module": (children, nn.Module),
}
"""Where a module has its parameters, buffers and modules, and what they are."""
ORDER = " order"
"""What stands, among the names of attributes, for their order."""
SCRIPTED = "scripted"
"""The word before the name of an attribute that a scripted module's code in C++ has."""
BASES = (OrderedDict, defaultdict, dict, list, set, deque)
"""Python's containers of which a user's class may be one."""
OWNERS = defaultdict, bytearray, array, count, cycle
"""More classes of Python's of whose objects a record may have methods."""
SCALAR_BASES = int, float, complex, str, bytes
"""Python's numbers and texts, of which a user's class may be one, with attributes."""
MADE_BY_THE_PROGRAM = (
    LightningModule,
    LightningDataModule,
    Trainer,
    Optimizer,
    LRScheduler,
    Metric,
)
"""Classes of which no object is made as one with plain attributes."""


@kept
def is_made_by_the_program(class_: type) -> bool:
    """Return whether no object of a class is made as one with plain attributes.

    What a library's callback keeps is the library's matter.
    """
    if issubclass(class_, Callback):
        return any(is_library_class(base) for base in {*class_.__mro__} - {Callback, object})
    return issubclass(class_, MADE_BY_THE_PROGRAM)


def base_of(value: Any) -> type | None:
    """Return which of Python's containers an object is; None if it is not one.

    A proxy that says that it is one, as of wrapt, has none of its content.
    """
    return next((base for base in BASES if issubclass(type(value), base)), None)


class ObjectKind(Kind):
    """An object with attributes, which may be a container besides.

    Its note has the names of its attributes. Those of a module's parameters, buffers and modules
    have a word before them. A record of an object of the start has what has changed alone.
    """

    name = "object"

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the names and values of the attributes, and what the container holds."""
        object_ = owner_of(value)
        base = base_of(object_)
        members = {} if base and is_library_class(type(object_)) else attributes(value)
        # Lightning makes an empty one when it is asked for.
        if isinstance(object_, HyperparametersMixin) and namespace(object_).get(HYPERPARAMETERS):
            members[HYPERPARAMETERS] = namespace(object_)[HYPERPARAMETERS]
        names = list(members)
        parts = list(members.values())
        if isinstance(object_, nn.Module) and value is object_:
            for space, (members_of, _) in SPACES.items():
                members = members_of(object_)
                names += [f"{space} {name}" for name in members]
                parts += map(unwrapped, members.values()) if space == "module" else members.values()
            scripted = scripted_attributes(object_)
            names += [f"{SCRIPTED} {name}" for name in scripted]
            parts += scripted.values()
        if base:
            parts += CONTAINERS[base].take(object_)[1]
        return names, parts

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the name of an attribute or an element."""
        if index < len(note):
            return f".{note[index].rpartition(' ')[2]}"
        return f"[{index - len(note)}]"

    def difference(
        self,
        start: Any,
        node: Any,
        is_same: Callable[[Any, Any], bool],
        touched: Collection[str] = (),
    ) -> tuple[dict[str, Any], list[Any]] | None:
        """Return what a record has of an object of the start; None if nothing has changed.

        Args:
            start: The object's node at the start.
            node: Its node now.
            is_same: Returns whether two parts are the same.
            touched: The names of attributes that are written even if they have not changed, or
                are gone; "" for what the container holds, ORDER for the attributes' order.
        """
        before, now = start.attributes, node.attributes
        absent = object()
        changed = [
            name
            for name in now
            if name in touched or not is_same(before.get(name, absent), now[name])
        ]
        content = node.parts[len(node.note) :]
        content_before = start.parts[len(start.note) :]
        note: dict[str, Any] = {"names": changed}
        if any(name.startswith("buffer ") for name in changed):
            note["unsaved"] = sorted(unsaved_buffers(node.value))
        parts = [now[name] for name in changed]
        # A variable that has got a function, say, is left out of a record, but is there.
        there = () if owner_of(node.value) is node.value else namespace(owner_of(node.value))
        gone = [
            name
            for name in dict.fromkeys((*before, *touched))
            if name and name != ORDER and name not in now and name not in there
        ]
        if gone or ORDER in touched or list(before) != list(now):
            note["order"] = list(now)
            note["gone"] = gone
        is_changed = len(content) != len(content_before) or "" in touched
        if is_changed or not all(map(is_same, content_before, content)):
            note["elements"] = len(content)
            parts += content
        return (note, parts) if changed or len(note) > 1 else None

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the class and the names of the attributes."""
        class_ = type(value)
        if is_made_by_the_program(class_) or owner_of(value) is not value:
            raise NotSaved(kind_text(value))
        made: dict[str, Any] = {"class": class_name(class_), "names": note}
        if scalar_class := scalar_base(class_):
            made["scalar"] = _scalar_of(value, scalar_class)
        if isinstance(value, deque):
            made["maxlen"] = value.maxlen
        if not hasattr(class_, "__del__"):  # the end of an object may count
            try:
                empty(class_, made.get("scalar"))
            except TypeError:
                raise NotSaved(kind_text(value)) from None
        if isinstance(value, nn.Module):
            made["training"] = value.training
            made["unsaved"] = sorted(unsaved_buffers(value))
        return made

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return an object without attributes; the code of its class does not run."""
        class_ = known_class(classes, note["class"])
        if is_made_by_the_program(class_) or issubclass(class_, (enum.Enum, Tensor)):
            raise refusal(note["class"])
        made = empty(class_, scalars.scalar(note.get("scalar")))
        if isinstance(made, deque):
            deque.__init__(made, (), note["maxlen"])
        if isinstance(made, nn.Module):
            nn.Module.__init__(made)
            made.training = note["training"] is True
        return made

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Set attributes, and replace what the container holds."""
        object_ = owner_of(value)
        names = note["names"]
        if "gone" in note:
            remove(value, note["gone"])
        for name, part in zip(names, parts, strict=False):
            set_member(value, name, part)
        if "order" in note:
            bring_in_order(value, note["order"])
        if "unsaved" in note and isinstance(object_, nn.Module):
            unsaved_buffers(object_).update(set(note["unsaved"]) & buffers(object_).keys())
        base = base_of(object_)
        if base and ("elements" in note or "class" in note):
            elements = parts[len(names) :]
            CONTAINERS[base].fill(object_, None, elements, None)


OWN_STATE = "__getstate__", "__setstate__"
"""The methods by which an object says what it holds, and takes it again."""


@kept
def says_its_state(class_: type) -> bool:
    """Return whether a user's class has both methods by which its objects say their own state."""
    others = (*MADE_BY_THE_PROGRAM, Callback, *BASES, *SCALAR_BASES, tuple, nn.Module, Tensor)
    return not issubclass(class_, others) and all(
        any(
            isinstance(vars(base).get(name), types.FunctionType) and not is_library_class(base)
            for base in class_.__mro__
        )
        for name in OWN_STATE
    )


def scalar_base(class_: type) -> type | None:
    """Return which of Python's numbers and texts the objects of a class are; None for others."""
    return next((base for base in SCALAR_BASES if issubclass(class_, base)), None)


def _scalar_of(value: Any, base: Any) -> Any:
    """Return the number or the text that an object is, whatever its class makes of it."""
    return base.__getitem__(value, slice(None)) if base in (str, bytes) else base.__pos__(value)


def empty(class_: type, scalar: Any = None) -> Any:
    """Return an object of a class without running the class's code.

    Args:
        class_: The class.
        scalar: The number or the text that the object is, if it is one.
    """
    if (scalar_class := scalar_base(class_)) is not None:
        if type(scalar) is not scalar_class:
            raise refusal(class_name(class_))
        return scalar_class.__new__(class_, scalar)
    # Python lets each of these make the objects of its own classes alone.
    bases = (*BASES, types.SimpleNamespace)
    base: type[object] = next((base for base in bases if issubclass(class_, base)), object)
    return base.__new__(class_)


def set_member(owner: Any, name: Any, value: Any) -> None:
    """Set an attribute, if encoding would have saved it at that place.

    Args:
        owner: The object, or what stands for what was added to it.
        name: The attribute's name, with a word before it for a module's own members.
        value: The value.
    """
    object_ = owner_of(owner)
    space, _, member = name.rpartition(" ")
    if space in SPACES and isinstance(object_, nn.Module):
        members_of, class_ = SPACES[space]
        members = members_of(object_)
        is_new = member not in members and getattr_static(object_, member, None) is not None
        if space == "module" and value is not None and unwrapped(members.get(member)) is value:
            return  # the wrapper stays
        if "." not in member and not is_new and (value is None or isinstance(value, class_)):
            members[member] = value
        return
    if space == SCRIPTED and isinstance(object_, nn.Module):
        if member in scripted_attributes(object_):
            setattr(object_, member, value)  # of another type than the code's, torch refuses it
        return
    if not has_place_for(owner, name, value):
        return
    slot = getattr_static(type(object_), name, None)
    if isinstance(object_, type):
        type.__setattr__(object_, name, value)
    elif isinstance(slot, types.MemberDescriptorType):
        object.__setattr__(object_, name, value)  # even if its class is frozen
    elif has_namespace(object_):
        object_.__dict__[name] = value


def remove(owner: Any, gone: list[Any]) -> None:
    """Remove attributes, of those that encoding would save."""
    object_ = owner_of(owner)
    names, _ = ObjectKind().take(owner)
    for name in set(names) & set(gone):
        space, _, member = name.rpartition(" ")
        if space in SPACES:
            SPACES[space][0](object_).pop(member, None)
        elif isinstance(object_, type):
            type.__delattr__(object_, name)
        elif name in namespace(object_):
            del object_.__dict__[name]
        elif hasattr(object_, name):
            object.__delattr__(object_, name)


def bring_in_order(owner: Any, order: list[Any]) -> None:
    """Bring the attributes that encoding would save in an order; variables have none."""
    object_ = owner_of(owner)
    if has_variables(object_):
        return
    places = {"": cast(dict[str, Any], namespace(object_))}  # a dict if a name is in it
    if isinstance(object_, nn.Module):
        places |= {space: members_of(object_) for space, (members_of, _) in SPACES.items()}
    names = set(ObjectKind().take(owner)[0])
    for name in order:
        space, _, member = name.partition(" ")
        if not space or space not in places:
            space, member = "", name
        members = places[space]
        if name in names and member in members:
            members[member] = members.pop(member)


class FunctionKind(ObjectKind):
    """A function of a user's: the cells that it has closed over, its defaults, its attributes."""

    name = "function"

    def take(self, value: types.FunctionType) -> tuple[Any, list[Any]]:
        """Return the attributes; then cells and defaults, which are the function's for good."""
        names = list(vars(value))
        parts = list(vars(value).values())
        fixed = [
            *zip(value.__code__.co_freevars, value.__closure__ or (), strict=True),
            *((f"defaults{n}", part) for n, part in enumerate(value.__defaults__ or ())),
            *(value.__kwdefaults__ or {}).items(),
        ]
        return [*names, *(f"fixed {name}" for name, _ in fixed)], [*parts, *(p for _, p in fixed)]

    def difference(
        self,
        start: Any,
        node: Any,
        is_same: Callable[[Any, Any], bool],
        touched: Collection[str] = (),
    ) -> tuple[dict[str, Any], list[Any]] | None:
        """Return the attributes that have changed."""
        changes = super().difference(start, node, is_same, touched)
        if changes is None:
            return None
        note, parts = changes
        kept = [n for n, name in enumerate(note["names"]) if not name.startswith("fixed ")]
        if not kept and "order" not in note:
            return None
        return note | {"names": [note["names"][n] for n in kept]}, [parts[n] for n in kept]

    def note_of_new(self, value: types.FunctionType, note: Any) -> Any:
        """Refuse: a function made while training is of the program."""
        raise NotSaved(kind_text(value))

    def fill(self, value: types.FunctionType, note: Any, parts: list[Any], content: Any) -> None:
        """Set attributes."""
        variables = vars(value)
        for name in note.get("gone", ()):
            variables.pop(name, None)
        for name, part in zip(note["names"], parts, strict=True):
            if isinstance(name, str) and not name.startswith(("__", "fixed ")):
                variables[name] = part


class CellKind(Kind):
    """A variable that functions have closed over."""

    name = "cell"

    def take(self, value: types.CellType) -> tuple[Any, list[Any]]:
        """Return the variable's value, if it has one."""
        return None, [] if value == types.CellType() else [value.cell_contents]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return nothing: a cell has the name of its variable."""
        return "()"

    def note_of_new(self, value: types.CellType, note: Any) -> Any:
        """Refuse: a function made while training is of the program."""
        raise NotSaved(kind_text(value))

    def fill(self, value: types.CellType, note: Any, parts: list[Any], content: Any) -> None:
        """Set the variable."""
        if parts:
            (value.cell_contents,) = parts
        else:
            del value.cell_contents


class MethodKind(Kind):
    """A bound method: its object and its function; its note is its name."""

    name = "method"
    fills = False

    def take(self, value: types.MethodType) -> tuple[Any, list[Any]]:
        """Return the object and the function."""
        return value.__func__.__name__ if hasattr(value.__func__, "__name__") else "", [
            value.__self__,
            value.__func__,
        ]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the attribute's name."""
        return (".__self__", ".__func__")[index]

    def note_of_new(self, value: types.MethodType, note: Any) -> Any:
        """Return the name, by which the class of the object has the function."""
        static = getattr_static(type(value.__self__), note, None)
        is_own = isinstance(static, types.FunctionType) and static is value.__func__
        if not is_own or note.startswith("__"):
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> types.MethodType:
        """Return the method of that name of the object."""
        (owner,) = parts
        static = getattr_static(type(owner), note, None) if isinstance(note, str) else None
        if not isinstance(static, types.FunctionType) or note.startswith("__"):
            raise refusal(note)
        return types.MethodType(static, owner)


class MethodOfCKind(Kind):
    """A bound method of code in C, such as `[].append`: its part is its object, its note its name.

    A record makes those of Python's containers and iterators.
    """

    name = "method of C"
    fills = False

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the name and the object."""
        return value.__name__, [value.__self__]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the attribute's name."""
        return ".__self__"

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the name."""
        if not _is_method_of_c(value.__self__, note):
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return the method of that name of the object."""
        (owner,) = parts
        if not _is_method_of_c(owner, note):
            raise refusal(note)
        return getattr(owner, note)


def _is_method_of_c(owner: Any, name: Any) -> bool:
    """Return whether one of Python's containers or iterators has a method of that name."""
    is_plain = isinstance(name, str) and (name == "__next__" or not name.startswith("__"))
    is_known = type(owner) in (*BASES, *OWNERS)
    return is_plain and is_known and callable(getattr_static(type(owner), name, None))


class WeakReferenceKind(Kind):
    """A weak reference or a proxy; its part is what it refers to, or None.

    Args:
        name: The kind's name.
        refer: Makes one to an object.
    """

    fills = False

    def __init__(self, name: str, refer: Callable[[Any], Any]) -> None:
        self.name = name
        self.refer = refer

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return what it refers to."""
        return None, [_referent(value)]

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return how it is asked."""
        return "()"

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return no note."""
        is_reference = type(value) is weakref.ReferenceType
        has_callback = is_reference and value.__callback__ is not None
        if has_callback or (_referent(value) is None and not is_reference):
            raise NotSaved(kind_text(value))
        return note

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return a reference."""
        (owner,) = parts
        try:
            return self.refer(_Gone() if owner is None else owner)
        except TypeError:
            raise refusal(self.name) from None


class _Gone:
    """What a weak reference has referred to that is gone."""


def _referent(value: Any) -> Any:
    """Return what a weak reference or a proxy refers to; None if it is gone."""
    if issubclass(type(value), weakref.ReferenceType):
        referent = value()
        # Such as the whole weights of an RNN that FSDP2 shards, which nobody but FSDP2 holds.
        is_freed = isinstance(referent, Tensor) and is_unreadable(referent)
        return None if is_freed else referent
    try:
        # A proxy's attributes are those of its object, and so are its methods.
        return getattr(value.__repr__, "__self__", None)
    except ReferenceError:
        return None


class ReferenceKind(Kind):
    """What is of the program itself and only referred to: a class, a library's object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return what is the user's in a library's object."""
        if self.name == "class" or type(value).__module__.startswith(LIGHTNINGS):
            return [], []
        found = dict(users_members(value))
        return [f".{name}" for name in found], list(found.values())

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the attribute's name."""
        name: str = note[index]
        return name

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Refuse: what was made while training is not there again."""
        raise NotSaved(kind_text(value))
