"""What of a Lightning checkpoint is loaded: what would have been saved at that place.

A checkpoint is input. Lightning, and torch's schedulers, set each attribute that it names, and
their callbacks write to the files that it names, or remove them.
"""

from collections.abc import Mapping
from inspect import getattr_static
from typing import Any

from pytorch_lightning import Trainer

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import with_article
from sagemaker_lightning.resume.files import user_checkpoints
from sagemaker_lightning.state.object_graph import has_namespace, is_library_class, namespace

FORMS = (str, bytes), (dict,), (list, tuple), (bool, int, float)
"""Classes of values of which one may take another one's place."""
LOOPS = "fit_loop", "validate_loop", "test_loop", "predict_loop"


def accept(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Remove from a checkpoint, before Lightning loads it, what no callback or loop has saved.

    Args:
        trainer: Lightning's trainer.
        checkpoint: What Lightning will load; it is changed in place.
    """
    states = user_checkpoints.own_states(trainer, checkpoint.get("callbacks", {}))
    for callback in callbacks_of(trainer):
        if isinstance(state := states.get(callback.state_key), dict):
            states[callback.state_key] = lightning_callbacks.accepted_state(callback, state)
    checkpoint["callbacks"] = states
    loops = checkpoint.get("loops", {})
    for name in LOOPS:
        if name in loops:
            present = getattr(trainer, name).state_dict()
            loops[name] = {
                key: value if key.endswith("state_dict") else _counts(present.get(key), value)
                for key, value in loops[name].items()
            }


def _counts(present: Any, saved: Any) -> Any:
    """Return saved counters as far as there are such counters at present."""
    if not isinstance(present, dict) or not isinstance(saved, Mapping):
        return saved if present is None or type(saved) is type(present) else present
    return {name: _counts(value, saved.get(name, value)) for name, value in present.items()}


def accept_schedulers(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Remove from the schedulers' states in a checkpoint what the schedulers do not save.

    Args:
        trainer: Lightning's trainer, whose schedulers are made.
        checkpoint: What Lightning will load; it is changed in place. Empty if there is nothing.
    """
    if "lr_schedulers" in checkpoint:
        pairs = zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False)
        states = [saved_part(config.scheduler, state) for config, state in pairs]
        checkpoint["lr_schedulers"] = states


def saved_part(owner: Any, state: Any) -> Any:
    """Return what an object, such as a scheduler, would save of a state.

    A library's `load_state_dict` sets each attribute that the state names, and those of the objects
    that it is made of: schedulers, or a user's object that computes a rate. A name that the object
    has, and does not save, is left out: such as its optimizer, or a method. A name that it does not
    have at all may be that of an attribute that a step has made.

    Args:
        owner: The object.
        state: What its `state_dict` returned; another class's state is returned as it is.

    Raises:
        TypeError: It is a list, which `dict.update` would take for names and values, or has
            a text, or the like, in place of a number, or the like.
    """
    load = getattr(type(owner), "load_state_dict", None)
    if load is not None and not is_library_class(load):
        return state
    if isinstance(state, (list, tuple)):
        raise TypeError(f"found {with_article(type(state).__name__)}, expected a dict")
    if not isinstance(state, dict):
        return state
    saved = namespace(owner) if load is None else owner.state_dict()
    if is_library_class(type(owner)):  # which keeps a fraction as one
        state = {name: _of_the_same_form(saved.get(name), value) for name, value in state.items()}
    return {
        name: _saved_parts(namespace(owner).get(name), value)
        for name, value in state.items()
        if name in saved or (name not in namespace(owner) and not _is_of_class(owner, name))
    }


def _of_the_same_form(present: Any, value: Any) -> Any:
    """Return a value, a whole number as a fraction where there is one at present.

    Python calculates 3 to the power of 10**18 without an end, and 3.0 to that power at once.

    Raises:
        TypeError: The value is of other FORMS than the present one.
    """
    forms = [_form(each) for each in (value, present)]
    if None not in forms and forms[0] != forms[1]:
        found, expected = (with_article(type(each).__name__) for each in (value, present))
        raise TypeError(f"found {found}, expected {expected}")
    return float(value) if type(present) is float and type(value) is int else value


def _form(value: Any) -> tuple[type, ...] | None:
    """Return which of FORMS a value is of; None if it is of none."""
    return next((classes for classes in FORMS if isinstance(value, classes)), None)


def _saved_parts(member: Any, value: Any) -> Any:
    """Return what an attribute, an object or a list of objects, would save of a value."""
    if isinstance(member, list) and isinstance(value, list) and any(map(_has_attributes, member)):
        return [
            saved_part(each, state) if _has_attributes(each) else state
            for each, state in zip(member, value, strict=False)
        ]
    is_state = _has_attributes(member) and isinstance(value, dict)
    return saved_part(member, value) if is_state else value


def _has_attributes(value: Any) -> bool:
    return has_namespace(value) and not isinstance(value, dict)


def _is_of_class(owner: Any, name: Any) -> bool:
    return not isinstance(name, str) or getattr_static(type(owner), name, owner) is not owner
