"""What a part of a checkpoint is: how it is saved, when it comes back, and how it is compared."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any

from pytorch_lightning import Trainer

from sagemaker_lightning.contract import failures
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph.kinds.base import is_of_users_code

if TYPE_CHECKING:
    from sagemaker_lightning.resume.resumption import Resumption
    from sagemaker_lightning.resume.run import Run


class Place(Enum):
    """Where a checkpoint has a part."""

    LIGHTNING = "Lightning's own entry of that key"
    """Lightning saves it, and loads it; what is restored is what its hooks have changed since."""
    RUN = "once for a run"
    FIRST = "once for a run, as rank 0 has it"
    RANK = "for each rank"


class Moment(Enum):
    """When parts come back."""

    LOADING = "before Lightning loads the weights"
    OPTIMIZERS = "before Lightning loads the optimizers"
    HOOKS = "before the hooks that begin training"
    TRAINING = "after the hooks that begin training"
    EPOCH = "once the loaders have begun the epoch"
    COMPARED = "once all is compared with what was saved"


class Part:
    """One part of a checkpoint.

    Args:
        run: The run that it is of.
    """

    key = ""
    """Its name in a checkpoint; for ever, unless the format's version is raised."""
    what = ""
    """What it holds; docs/architecture.md has it."""
    place = Place.RANK
    moments: tuple[Moment, ...] = ()
    """When it is restored, if a run resumes."""
    when = ""
    """When it comes back, or what is done with it, if it has no moments."""
    why_differs = ""
    """Why it may be another one than was saved; "" if that is not known."""

    def __init__(self, run: "Run") -> None:
        self.run = run

    @property
    def trainer(self) -> Trainer:
        """Lightning's trainer."""
        return self.run.trainer

    @property
    def resumed(self) -> "Resumption":
        """The checkpoint that the run resumes from; a run that starts over has none to ask for."""
        assert self.run.resumed is not None
        return self.run.resumed

    def mark_start(self) -> None:
        """Take the present state as the one that the run starts with, if that counts."""

    def first_batch_ended(self) -> None:
        """Note what the first batch that this process trains has made."""

    def lightning_saves(self) -> AbstractContextManager[None]:
        """Return a context in which Lightning makes its own checkpoint."""
        return nullcontext()

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> Any:
        """Return what a checkpoint gets; all ranks call it.

        Args:
            point: When the checkpoint is saved; None if this is for a comparison.
            state: Lightning's checkpoint, with the same weights; None for a comparison.
        """

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore what `save` returned; of a part of Lightning's, its whole checkpoint is given.

        Args:
            saved: What a checkpoint has.
            moment: One of `moments`.
        """

    def present(self) -> Any:
        """Return what `save` would return now, without asking the user's code to save."""
        return self.save(None, None)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is compared of this part, by name; nothing if it is not compared.

        Args:
            saved: What `save` returned; of a part of Lightning's, its whole checkpoint.
            others: What the same rank has saved of other parts, by key.
        """
        return {}

    def shown(self, name: str) -> str:
        """Return how a message names what is compared by a name."""
        return name

    def why(self, name: str) -> str:
        """Return why what is compared by a name may be another one; "" if that is not known."""
        return self.why_differs

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names of what is missing or different now.

        Args:
            before: The digests of what was saved, by name.
            now: The digests of what there is.
        """
        return [name for name, digest in before.items() if now.get(name) != digest]


@contextmanager
def refusing(run: "Run", file_name: str, what: str) -> Iterator[None]:
    """Raise UserError for whatever the block raises of what a checkpoint has.

    What the user's code raises, such as a load_state_dict(), is theirs to see. So is an error whose
    cause is another one, such as a rank that has gone, or memory that is full.

    Args:
        run: The run.
        file_name: The name of the checkpoint's file.
        what: What the checkpoint has.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if is_of_users_code(error) or failures.has_known_cause(type(error).__name__, str(error)):
            raise
        raise refusal(run, file_name, what, f"{type(error).__name__}: {error}") from error


def refusal(run: "Run", file_name: str, what: str, reason: str) -> UserError:
    """Return the error for what a checkpoint has and this program would not have saved.

    Args:
        run: The run.
        file_name: The name of the checkpoint's file.
        what: What the checkpoint has.
        reason: What is wrong with it; it may quote the checkpoint.
    """
    return UserError(
        f"{run.folder.label}: {file_name}: found {what} that this program does not write "
        f"({printable(reason)[:200]}); restore the checkpoint from a copy, or move it away"
    )


def named_values(name: str, value: Any) -> dict[str, Any]:
    """Return each value that is neither a list nor a dict, by name.

    Args:
        name: The name of all.
        value: Lists and dicts within each other.
    """
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in pairs:
        found |= named_values(f"{name}.{key}", item)
    return found
