"""The files of the user's own ModelCheckpoints in a resumed run.

Lightning gives a model another name (`-v1`) if there is a file of its own already (ModelCheckpoint,
`enable_version_counter`). Without this module, what an interrupted run wrote after its last
checkpoint would be there twice.

A ModelCheckpoint removes the files that its state names, and a checkpoint with that state is input.
So the state of a resumed run names no files outside of its folder, and of those that it names, only
files with a name that the callback gives are removed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from sagemaker_lightning.compat.lightning_checkpoints import (
    BestCheckpoint,
    NewestSaved,
    keep_files,
    newest_saved,
    set_newest_saved,
)
from sagemaker_lightning.contract.checkpoint_home import CHECKPOINT_NAME

PATHS = "best_model_path", "kth_best_model_path", "last_model_path"
PATHS_WITH_VALUES = "best_k_models", "retired"
"""What names files in the state of a ModelCheckpoint, and of a BestModel."""
OF_NUMBERS = re.compile(r"[-+ \d.,_%]")
DIGITS = re.compile(r"\d")
POWER = re.compile(r"[eE][-+]?\d")
NO_DIGITS = re.compile("nan|inf|True|False")
"""What the name of a model may have in place of a metric: such characters, and one of the ends."""


def file_names(trainer: Trainer) -> dict[str, list[str]]:
    """Return the file names in the local folder of each ModelCheckpoint.

    The keys are the callbacks' state keys. Files that an earlier start wrote, and this run is still
    to write again, are left out.
    """
    return {
        callback.state_key: sorted(_model_names(callback, folder) - _to_rewrite(callback))
        for callback, folder in _callbacks_with_folders(trainer)
    }


def overwrite_later_files(trainer: Trainer, saved_names: Mapping[str, Sequence[str]]) -> None:
    """Let ModelCheckpoints overwrite the files that are newer than the checkpoint.

    Rank 0 decides.

    Args:
        trainer: Lightning's trainer.
        saved_names: What `file_names` returned when the checkpoint was saved.
    """
    for callback, folder in _callbacks_with_folders(trainer):
        later = _model_names(callback, folder).difference(saved_names.get(callback.state_key, ()))
        if later and trainer.is_global_zero:
            exists = _FilesToRewrite(callback, later).exists
            callback.file_exists = exists  # type: ignore[method-assign]  # of this callback alone


def last_saved(trainer: Trainer) -> dict[str, tuple[int, str, bool]]:
    """Return step and file name of what each ModelCheckpoint has saved last, by its state key.

    The name is "" if it is not below the callback's folder. With them comes whether a save waits
    for the validation. Our own callback for the best model is left out.
    """
    return {
        callback.state_key: (step, _name_below(path, callback.dirpath), waits)
        for callback in _users_callbacks(trainer)
        for step, path, waits in [newest_saved(callback)]
    }


def set_last_saved(trainer: Trainer, saved: Mapping[str, Any], step: int) -> None:
    """Give each ModelCheckpoint what `last_saved` has returned.

    Args:
        trainer: Lightning's trainer.
        saved: It; a checkpoint has it, which is input.
        step: The optimizer step of the checkpoint: none was saved after it.
    """
    for callback in _users_callbacks(trainer):
        at, name, waits = saved.get(callback.state_key, (0, "", False))
        path = _joined(callback.dirpath, str(name)) if name else ""
        is_own = bool(_name_below(path, callback.dirpath)) and _is_named_by(callback, path)
        if type(at) is int and 0 <= at <= step:
            set_newest_saved(callback, NewestSaved(at, path if is_own else "", waits is True))


def _users_callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the ModelCheckpoints, but for our own."""
    return [each for each in _model_checkpoints(trainer) if not isinstance(each, BestCheckpoint)]


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


class _FilesToRewrite:
    """Tells a ModelCheckpoint which files exist, for `file_exists`.

    Those in `later` do not exist for it until it has written them again.
    """

    def __init__(self, callback: ModelCheckpoint, later: set[str]) -> None:
        self.lightnings = callback.file_exists
        self.later = later

    def exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Return whether a file exists; the same on all ranks, which all call it."""
        if (name := Path(filepath).name) not in self.later:
            return self.lightnings(filepath, trainer)
        self.later.discard(name)
        return trainer.strategy.reduce_boolean_decision(False)  # on all ranks


def _to_rewrite(callback: ModelCheckpoint) -> set[str]:
    """Return the names of the files that a callback is still to write again."""
    asked = getattr(callback.file_exists, "__self__", None)
    return asked.later if isinstance(asked, _FilesToRewrite) else set()


def _callbacks_with_folders(trainer: Trainer) -> list[tuple[ModelCheckpoint, Path]]:
    """Return each ModelCheckpoint that has a local folder, and the folder."""
    return [
        (callback, Path(callback.dirpath))
        for callback in _model_checkpoints(trainer)
        if callback.dirpath and Path(callback.dirpath).is_dir()
    ]


def _model_names(callback: ModelCheckpoint, folder: Path) -> set[str]:
    """Return the names of the files that a callback may have written.

    Those of the checkpoints to resume from are left out.
    """
    files = {path.name for path in folder.iterdir() if path.suffix == callback.FILE_EXTENSION}
    return {name for name in files if not CHECKPOINT_NAME.fullmatch(name)}


def own_states(trainer: Trainer, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the callbacks' saved states; ModelCheckpoints remove no other files because of them.

    Args:
        trainer: Lightning's trainer.
        states: The states in a checkpoint, by the callbacks' state keys.
    """
    own = {}
    for callback in _model_checkpoints(trainer):
        if callback.state_key in states:
            state = states[callback.state_key]
            own_state = own[callback.state_key] = with_own_files(callback, state)
            if not isinstance(callback, BestCheckpoint):
                # Lightning's own callback forgets the best models if its folder is another one.
                own_state["dirpath"] = state.get("dirpath")
                keep_files(callback, foreign_files(callback, own_state).__contains__)
    return {**states, **own}


def with_own_files(callback: ModelCheckpoint, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a callback's saved state, with its files in its present folder and no other paths.

    Args:
        callback: The callback.
        state: What its `state_dict` returned, in this or in another folder.
    """

    def moved(path: Any) -> str:
        name = _name_below(path, state.get("dirpath") or callback.dirpath)
        is_own = name.endswith(callback.FILE_EXTENSION) and not CHECKPOINT_NAME.fullmatch(name)
        return _joined(callback.dirpath, name) if is_own else ""

    files: dict[str, Any] = {name: moved(state.get(name)) for name in PATHS}
    for name in PATHS_WITH_VALUES:
        values = state.get(name)
        paths = values.items() if isinstance(values, Mapping) else ()
        files[name] = {moved(path): value for path, value in paths if moved(path)}
    if files["kth_best_model_path"] not in files["best_k_models"]:
        files["kth_best_model_path"] = next(iter(files["best_k_models"]), "")
    return {**state, **files, "dirpath": callback.dirpath}


def foreign_files(callback: ModelCheckpoint, state: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths in a state that have no name that the callback gives.

    They may be files of others, or of this run when it gave other names. They are not removed.
    """
    paths = {state[name] for name in PATHS}.union(*(state[name] for name in PATHS_WITH_VALUES))
    return frozenset(path for path in paths if not _is_named_by(callback, path))


def _is_named_by(callback: ModelCheckpoint, path: str) -> bool:
    """Return whether a path is one that a callback gives to a model, but for the numbers."""
    templates = [callback.filename or f"{{epoch}}{callback.CHECKPOINT_JOIN_CHAR}{{step}}"]
    templates += [callback.CHECKPOINT_NAME_LAST] if callback.save_last else []
    name = _name_below(path, callback.dirpath)
    join = re.escape(callback.CHECKPOINT_JOIN_CHAR)
    ending = re.compile(rf"(?:{join}v\d+)?{re.escape(callback.FILE_EXTENSION)}")
    return any(
        ending.fullmatch(name, place)
        for template in templates
        for place in _places_after(callback, template, name)
    )


def _places_after(callback: ModelCheckpoint, template: str, name: str) -> set[int]:
    """Return how long the beginnings of a name are that a callback gives by a template.

    `ModelCheckpoint.format_checkpoint_name` gives them: it puts numbers in place of metrics. A
    regular expression would try, for each number, how long all numbers before it may be.
    """
    places = {0}
    for text, metric, *_ in Formatter().parse(template):
        inserted = f"{metric}{callback.CHECKPOINT_EQUALS_CHAR}"
        text += inserted if metric is not None and callback.auto_insert_metric_name else ""
        places = {place + len(text) for place in places if name.startswith(text, place)}
        if metric is not None:
            places = _after_number(name, places)
    return places


def _after_number(name: str, starts: set[int]) -> set[int]:
    """Return where a number may end in a name that begins at one of some places."""
    ends = _after_run(OF_NUMBERS, name, starts)
    of_words = {match.end() for end in ends if (match := NO_DIGITS.match(name, end))}
    of_powers = {match.end() for end in ends if (match := POWER.match(name, end))}
    return ends | of_words | _after_run(DIGITS, name, of_powers)


def _after_run(characters: re.Pattern[str], name: str, starts: set[int]) -> set[int]:
    """Return where a run of such characters may end that begins at one of some places."""
    ends = set(starts)
    for place in range(len(name)):
        if place in ends and characters.match(name, place):
            ends.add(place + 1)
    return ends


def _name_below(path: Any, folder: Any) -> str:
    """Return what follows a folder in the path of a file below it; "" for any other path."""
    beginning = _joined(folder, "")
    if not isinstance(path, str) or not path.startswith(beginning):
        return ""
    name = path.removeprefix(beginning)
    return name if {"", ".", ".."}.isdisjoint(name.split("/")) else ""


def _joined(folder: Any, name: str) -> str:
    """Return the path or the URL of a file in a folder."""
    return f"{str(folder).rstrip('/')}/{name}"
