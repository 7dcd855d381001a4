"""StochasticWeightAveraging: its schedule is made again.

It makes its schedule in on_train_epoch_start, at an epoch in which it averages. That does not run
when a run resumes within an epoch, and there is none to come when all of them are done.
"""

from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.resume.parts.optimizers import Optimizers, restore_group_values
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class AveragingState(Part):
    """What a callback that averages weights saves: Lightning saves and loads it.

    Lightning's WeightAveraging has its average as state_dict, and the model's own weights as
    current_model_state; parts/weights.py loads those.
    """

    key = "averaging_state"
    what = "the state of an average of weights"
    place = Place.LIGHTNING
    moments = (Moment.HOOKS,)

    def restore(self, saved: Any, moment: Moment) -> None:
        """Let StochasticWeightAveraging continue."""
        groups = self.run.part(Optimizers).saved_groups
        continue_averaging(self.trainer, groups, self.resumed.saved_at)


def continue_averaging(
    trainer: Trainer, saved_groups: list[list[dict[str, Any]]], point: ResumePoint
) -> None:
    """Let StochasticWeightAveraging continue.

    A new schedule sets learning rates, so the saved ones are restored.

    Args:
        trainer: Lightning's trainer.
        saved_groups: The saved values of each optimizer's parameter groups.
        point: When the checkpoint was saved.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        model = trainer.lightning_module
        lightning_callbacks.set_accumulation(callback, trainer.accumulate_grad_batches)
        if not lightning_callbacks.resumes_averaging(callback):
            continue
        epoch = trainer.current_epoch
        progress = trainer.fit_loop.epoch_progress.current
        progress.completed = min(epoch, callback.swa_end)
        with lightning_callbacks.weights_averaged_in(callback, trainer.current_epoch):
            callback.on_train_epoch_start(trainer, model)
        progress.completed = epoch
        restore_group_values(trainer, saved_groups)
        # This epoch only gathers the statistics of batch norm.
        if point is not ResumePoint.EPOCH and epoch == callback.swa_end + 1:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            batches_of_step = trainer.accumulate_grad_batches
            callback.on_train_epoch_start(trainer, model)
            # Hooks that begin training find it as they did, and TrainerSettings sets it after them.
            trainer.accumulate_grad_batches = batches_of_step
            model.load_state_dict(weights)
