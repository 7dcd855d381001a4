"""The files of the user's own ModelCheckpoints: a step that is done again writes its file again, by the same name.

Lightning gives a model another name (`-v1`) where there is a file of its own already (ModelCheckpoint,
`enable_version_counter`). What an interrupted run wrote after its last checkpoint would be there twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from sagemaker_lightning.contract.shutdown import NAME


def names(trainer: Trainer) -> dict[str, list[str]]:
    """Return the names of the files in the local folder of each ModelCheckpoint, by the callback's key."""
    return {one.state_key: sorted(_models(one, folder)) for one, folder in _folders(trainer)}


def write_again(trainer: Trainer, known: Mapping[str, Sequence[str]]) -> None:
    """Have files written again that are there and not among those that were `known`; rank 0 decides."""
    for callback, folder in _folders(trainer):
        later = _models(callback, folder).difference(known.get(callback.state_key, ()))
        if later and trainer.is_global_zero:
            callback.file_exists = _Files(callback, later).exists


class _Files:
    """What a ModelCheckpoint takes for its files: those of `later` are not there until they are written again."""

    def __init__(self, callback: ModelCheckpoint, later: set[str]) -> None:
        self.lightnings, self.later = callback.file_exists, later

    def exists(self, filepath: str, trainer: Trainer) -> bool:
        """Return the same on all ranks, which all call it."""
        if (name := Path(filepath).name) not in self.later:
            return self.lightnings(filepath, trainer)
        self.later.discard(name)
        return trainer.strategy.reduce_boolean_decision(False, all=False)


def _folders(trainer: Trainer) -> list[tuple[ModelCheckpoint, Path]]:
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return [(one, Path(one.dirpath)) for one in callbacks if one.dirpath and Path(one.dirpath).is_dir()]


def _models(callback: ModelCheckpoint, folder: Path) -> set[str]:
    """Return the names of the files that a callback may have written: not those of the checkpoints to resume from."""
    found = {path.name for path in folder.iterdir() if path.suffix == callback.FILE_EXTENSION}
    return {name for name in found if not NAME.fullmatch(name)}
