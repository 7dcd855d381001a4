"""What a kind of object is: how it is taken apart, made and filled."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sagemaker_lightning.contract.errors import UserError, printable, with_article
from sagemaker_lightning.state.object_graph import is_own_module, owner_of


class NotSaved(Exception):
    """Raised for an object that a record cannot hold.

    Args:
        kind: What it is.
        path: Where it is in a value; "" if that is not known.
    """

    def __init__(self, kind: str, path: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.path = path


class Kind:
    """A kind of object that is a node of the graph: it has an identity.

    A node has a note (plain values), parts (the objects that it refers to) and, for some kinds,
    content (plain values and tensors) with a mark, which tells whether the content has changed.
    """

    name = ""
    """The name in a record."""
    fills = True
    """Whether an object that is there can get its content in place.

    If not, a new object takes its place under each of its names.
    """

    def take(self, value: Any) -> tuple[Any, list[Any]]:
        """Return the note and the parts of an object."""
        return None, []

    def step(self, note: Any, parts: list[Any], index: int) -> str:
        """Return the name of a part, which is the same in each process."""
        return f"[{index}]"

    def mark(self, value: Any) -> bytes:
        """Return bytes that tell whether the content of an object has changed."""
        return b""

    def content(self, value: Any) -> Any:
        """Return the content of an object: numbers, text, tensors, lists, dicts with text keys.

        Raises:
            NotSaved: A record cannot hold it.
        """
        return None

    def note_of_new(self, value: Any, note: Any) -> Any:
        """Return the note with which a new object is made.

        Raises:
            NotSaved: It cannot be made.
        """
        return note

    def make(self, note: Any, content: Any, classes: Mapping[str, type]) -> Any:
        """Return a new object, to be filled.

        Args:
            note: What `note_of_new` returned.
            content: What `content` returned.
            classes: The classes that the program has, by name.
        """
        raise refusal(self.name)

    def build(self, note: Any, parts: list[Any], classes: Mapping[str, type]) -> Any:
        """Return a new object of its parts, for kinds that are not filled."""
        raise refusal(self.name)

    def fill(self, value: Any, note: Any, parts: list[Any], content: Any) -> None:
        """Give an object its content."""


def refusal(what: Any) -> UserError:
    """Return the error for a part of a record that encoding would not have written."""
    return UserError(
        f"a checkpoint holds something noted as {printable(repr(what))[:200]}, which is damaged or "
        "forged; restore the checkpoint from a copy, or move it away"
    )


@contextmanager
def refusing(runs_users_code: bool = False) -> Iterator[None]:
    """Raise UserError for whatever Python, numpy and torch say of what is read in the block.

    Args:
        runs_users_code: Whether the block runs code of the user's, such as a load_state_dict():
            what that raises is theirs to see.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if runs_users_code and is_of_users_code(error):
            raise
        raise refusal(type(error).__name__) from error


def is_of_users_code(error: Exception) -> bool:
    """Return whether code of the user's has raised an error, or has called what raised it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(is_own_module(frame.f_globals.get("__name__", "")) for frame in frames)


def class_name(class_: type) -> str:
    """Return the name by which a record knows a class."""
    return f"{class_.__module__}.{class_.__qualname__}"


def known_class(classes: Mapping[str, type], name: Any) -> type:
    """Return the class of that name.

    Raises:
        UserError: The program does not have it.
    """
    class_ = classes.get(name) if isinstance(name, str) else None
    if class_ is None:
        raise UserError(
            f"a checkpoint holds {with_article(printable(str(name))[:200])}, which this program "
            "does not have"
        )
    return class_


def kind_text(value: Any) -> str:
    """Return what an object is, for a message."""
    return class_name(type(owner_of(value)))
