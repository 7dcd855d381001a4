"""Lets a resumed run write the files of the user's own ModelCheckpoints again.

Lightning gives a model another name (`-v1`) if there is a file of its own already (ModelCheckpoint,
`enable_version_counter`). Without this module, what an interrupted run wrote after its last
checkpoint would be there twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from sagemaker_lightning.contract.checkpoint_home import CHECKPOINT_NAME


def file_names(trainer: Trainer) -> dict[str, list[str]]:
    """Return the file names in the local folder of each ModelCheckpoint.

    The keys are the callbacks' state keys.
    """
    return {
        callback.state_key: sorted(_model_names(callback, folder))
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
            callback.file_exists = _FilesToRewrite(callback, later).exists


class _FilesToRewrite:
    """Tells a ModelCheckpoint which files exist, for `file_exists`.

    Those in `later` do not exist for it until it has written them again.
    """

    def __init__(self, callback: ModelCheckpoint, later: set[str]) -> None:
        self.lightnings = callback.file_exists
        self.later = later

    def exists(self, filepath: str, trainer: Trainer) -> bool:
        """Return whether a file exists; the same on all ranks, which all call it."""
        if (name := Path(filepath).name) not in self.later:
            return self.lightnings(filepath, trainer)
        self.later.discard(name)
        return trainer.strategy.reduce_boolean_decision(False)  # on all ranks


def _callbacks_with_folders(trainer: Trainer) -> list[tuple[ModelCheckpoint, Path]]:
    """Return each ModelCheckpoint that has a local folder, and the folder."""
    callbacks = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    return [
        (callback, Path(callback.dirpath))
        for callback in callbacks
        if callback.dirpath and Path(callback.dirpath).is_dir()
    ]


def _model_names(callback: ModelCheckpoint, folder: Path) -> set[str]:
    """Return the names of the files that a callback may have written.

    Those of the checkpoints to resume from are left out.
    """
    files = {path.name for path in folder.iterdir() if path.suffix == callback.FILE_EXTENSION}
    return {name for name in files if not CHECKPOINT_NAME.fullmatch(name)}
