"""The files of a trainer's loggers at a start: they begin, or continue those of the one before."""

from pytorch_lightning import Trainer

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.compat import lightning_loggers
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.files import first_start, user_checkpoints
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.first_start import FirstStart


def prepare(
    trainer: Trainer, folder: CheckpointDir | None, trains: bool, is_first: bool
) -> FirstStart | None:
    """Have the loggers continue their files; return what a start found that was killed early.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the training's checkpoints; None if it saves none.
        trains: Whether a training begins.
        is_first: Whether it is the first one with this folder.
    """
    if folder is None:
        loggers.prepare_files(trainer.loggers, (), None, trains)
        return None
    states, _ = folder.newest_loggers()
    lightning_loggers.forget_unused_versions(trainer)
    loggers.prepare_files(trainer.loggers, states, folder.path, trains)
    if folder.with_copies():
        loggers.write_config_again(trainer)
        return None
    if not trains or not is_first:
        return None
    start_before = first_start.read(folder.path)
    if start_before:
        loggers.write_config_again(trainer)
    elif trainer.is_global_zero:
        # Their folders are made before any callback's hook.
        first_start.write(folder.path, FirstStart(loggers.chosen(trainer.loggers), None))
    return start_before


def begin(trainer: Trainer, folder: CheckpointDir | None, start: FirstStart | None) -> None:
    """Begin the files of the loggers, or write those of the start before again.

    Args:
        trainer: Lightning's trainer, whose training begins from its first step.
        folder: The folder that notes what it has found; None if it notes nothing.
        start: What the start before found, if it was killed before its first checkpoint.
    """
    if not start:
        loggers.begin_files(trainer.loggers if trainer.is_global_zero else ())
    elif trainer.local_rank == 0:
        before = -1  # all steps were logged after it
        loggers.continue_files(trainer.loggers, start.loggers, before, trainer.is_global_zero)
    if folder is None or not trainer.is_global_zero:
        return
    if start:
        log.info(
            "this run starts from the beginning: the start before it was interrupted before "
            "its first checkpoint, and its logs and models are written again"
        )
    if not start or start.model_files is None:
        names = user_checkpoints.file_names(trainer)
        first_start.write(folder.path, FirstStart(loggers.states(trainer.loggers), names))
