"""State of the user's own: objects that a checkpoint has because they are given by name.

    ExactResume("checkpoints", parts={"env": env})

Each has `state_dict` and `load_state_dict`, as torch's own have. Each rank's checkpoint has the
state of that rank's object. Nothing else of such an object is saved or restored.

A state is restored once, before the first batch is drawn: after the weights, the optimizers and all
other state, and after the hooks that begin a training (`on_fit_start`, `on_train_start`), which may
reset the object. Then it is asked for again, and compared with what was saved.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pytorch_lightning import Trainer

from sagemaker_lightning.compat.lightning_trainer import callbacks_of, data_module_of
from sagemaker_lightning.contract.errors import UserError, with_article
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import NotSaved, class_name
from sagemaker_lightning.state.object_graph import Elsewhere

METHODS = "state_dict", "load_state_dict"
ARGUMENT = "ExactResume(parts=...)"
HINT = "give it as a part: ExactResume(parts={...})"


class Parts:
    """The user's objects whose states are saved because they are given by name.

    Args:
        objects: The objects by name.

    Raises:
        UserError: It is not a dict of names, or an object lacks one of the methods.
    """

    def __init__(self, objects: Mapping[str, Any] = MappingProxyType({})) -> None:
        allowed = f"expected a dict of objects with {METHODS[0]}() and {METHODS[1]}()"
        if not isinstance(objects, Mapping):
            raise UserError(f"{ARGUMENT}: found {objects!r}, {allowed}, such as {{'env': env}}")
        for name, object_ in objects.items():
            if not isinstance(name, str) or not name:
                raise UserError(f"{ARGUMENT}: found the name {name!r}, expected a text")
            # A class has the methods, too, but not those of an object.
            lacking = [each for each in METHODS if not callable(getattr(object_, each, None))]
            if lacking or isinstance(object_, type):
                found = f"the class {object_.__name__}" if isinstance(object_, type) else None
                found = found or f"a {class_name(type(object_))} without {lacking[0]}()"
                raise UserError(f"{ARGUMENT}: found {name!r}: {found}, {allowed}")
        self.objects = dict(objects)

    def marks(self) -> dict[str, Elsewhere]:
        """Return what keeps a walk over the user's objects from the parts, by name."""
        return {f"parts.{name}": Elsewhere(object_) for name, object_ in self.objects.items()}

    def refuse_saved(self, trainer: Trainer) -> None:
        """Raise UserError if each checkpoint has an object already.

        Args:
            trainer: Lightning's trainer, with a model.
        """
        owners = {id(module): "of the model" for module in trainer.lightning_module.modules()}
        owners |= {id(callback): "in the trainer's callbacks" for callback in callbacks_of(trainer)}
        owners[id(data_module_of(trainer))] = "the trainer's data module"
        for name, object_ in self.objects.items():
            if owner := owners.get(id(object_)):
                raise UserError(
                    f"{ARGUMENT}: found {name!r}: {with_article(class_name(type(object_)))} "
                    f"{owner}, which each checkpoint has; leave it out"
                )

    def states(self) -> dict[str, Any]:
        """Return a record of the state of each object, by name.

        Raises:
            UserError: No checkpoint can hold a state.
        """
        states = {}
        for name, object_ in self.objects.items():
            if (state := object_.state_dict()) is None:
                raise UserError(
                    f"{ARGUMENT}: state_dict() of {name!r} returned None, expected what "
                    "load_state_dict() gets after an interruption; return it"
                )
            try:
                states[name] = values.encode(state)
            except NotSaved as error:
                where = f" at {error.path}" if error.path else ""
                raise UserError(
                    f"{ARGUMENT}: state_dict() of {name!r} has {with_article(error.kind)}{where}, "
                    "which cannot be saved; keep numbers, text, tensors, arrays, lists and "
                    "dicts there"
                ) from None
        return states

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a phrase for each part that only the checkpoint or only this run has.

        Args:
            saved: What `states` returned when the checkpoint was saved.
        """
        return [
            f"the part {name!r} is not given ({ARGUMENT}), and was"
            for name in sorted(saved.keys() - self.objects.keys())
        ] + [
            f"the part {name!r} is given ({ARGUMENT}), and was not"
            for name in sorted(self.objects.keys() - saved.keys())
        ]

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `states` returned."""
        for name, object_ in self.objects.items():
            try:
                object_.load_state_dict(values.decode(saved[name]))
            except Exception:
                log.error(f"{ARGUMENT}: load_state_dict() of {name!r} failed, as below")
                raise  # it is the user's to see


class GivenParts(Part):
    """The states of the objects that are given by name."""

    key = "given_parts"
    what = "what is given by `ExactResume(parts={...})`"
    moments = (Moment.TRAINING,)
    why_differs = "a load_state_dict() that does not restore all of state_dict()"

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a record of the state of each object, by name."""
        return parts_of(self.trainer).states()

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let each object load its state."""
        parts_of(self.trainer).restore(saved)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return a digest of each value of each state, by name."""
        return {
            f"part.{name}{path}": digest
            for name, state in saved.items()
            for path, digest in values.digests(state).items()
        }


def parts_of(trainer: Trainer) -> Parts:
    """Return the parts that the trainer's ExactResume has been given; none without it."""
    found = (vars(callback).get("parts") for callback in callbacks_of(trainer))
    return next((parts for parts in found if isinstance(parts, Parts)), Parts())
