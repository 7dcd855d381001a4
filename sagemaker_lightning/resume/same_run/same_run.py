"""Whether a checkpoint is of this run: what is refused, and what is said."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import BatchSizeFinder

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.entries import OptimizerArguments, RunDescription
from sagemaker_lightning.resume.same_run import code_numbers, optimizer_arguments, run_settings
from sagemaker_lightning.resume.same_run.differences import first_of


class SameRun:
    """Compares what identifies a run with what a checkpoint says of its run.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        settings: The settings that identify the run, by name.
        other_settings: Whether the run may have another learning rate, gradient clipping or
            precision than the run that saved the checkpoint.
        gather: Returns the values of all ranks, by rank; all ranks call it.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: CheckpointDir,
        settings: Mapping[str, object],
        other_settings: bool,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.settings = settings
        self.other_settings = other_settings
        self.gather = gather
        self.before: RunDescription | None = None
        """What the checkpoint says of its run; None without one."""
        self.file_name = ""
        self.same_ranks = True
        self.optimizer_arguments: OptimizerArguments
        """What configure_optimizers has made, before hooks and the checkpoint change it."""
        self.code_numbers: Mapping[str, str] | None = None
        """The numbers that the code gives; None if they are not known."""
        self.shapes: dict[str, list[int] | None] = {}
        """The shapes of the weights and buffers that the program has made."""
        self.has_trained_before = False
        """Whether this program has trained the model: it may have changed its arrays since."""

    @property
    def has_same_rates(self) -> bool:
        """Whether the learning rates are those of the checkpoint's run."""
        scaling = "--lr_scaling"
        before = json.loads(self.before["flags"]).get(scaling) if self.before else None
        same_scaling = before == self.settings.get(scaling)
        return self.same_ranks and same_scaling and not self.other_settings

    def note_program(self) -> None:
        """Note the numbers that the code gives and the model's shapes.

        That is before anything is loaded, and before hooks make or replace parts of the model.
        """
        self.code_numbers = code_numbers.describe(self.trainer)
        self.shapes = run_settings.shapes_of(self.trainer.lightning_module)

    def compare(
        self,
        before: RunDescription,
        file_name: str,
        same_ranks: bool,
        other_parts: list[str],
    ) -> None:
        """Refuse a checkpoint of another run, before anything of it is loaded.

        Args:
            before: What the checkpoint says of its run.
            file_name: The name of its file.
            same_ranks: Whether as many ranks have saved it.
            other_parts: A phrase for each part that only one of the runs has been given.

        Raises:
            UserError: It is of another run.
        """
        self.before = before
        self.file_name = file_name
        self.same_ranks = same_ranks
        self._refuse(
            run_settings.differences(self.trainer, self.settings, before, self.other_settings)
            + run_settings.other_shapes(before["shapes"], self.shapes)
        )
        self._refuse(other_parts)

    def compare_numbers(self) -> None:
        """Say which numbers in the code are others; `compare` comes before."""
        assert self.before is not None
        numbers = self.before["numbers"]
        self.has_trained_before = self.code_numbers is None
        if self.has_trained_before:
            self.code_numbers = numbers
        if self.same_ranks and not self.other_settings:
            self._warn(code_numbers.differences(numbers or {}, self.code_numbers or {}))

    def compare_loaders(self) -> None:
        """Refuse other loaders, as soon as the trainer has them.

        Raises:
            UserError: The loaders differ from those of the checkpoint's run.
        """
        if self.before:
            self._refuse(run_settings.loader_differences(self.trainer, self.settings, self.before))

    def compare_optimizers(self, same_limits: bool) -> None:
        """Compare what `configure_optimizers` has made with that of the checkpoint's run.

        Lightning would load what the checkpoint has, and the arguments in the code would have no
        effect. Call it before any hook changes the optimizers. Rank 0's count: another rank may
        have rates of its own.

        Args:
            same_limits: Whether the training has the limits that it had.

        Raises:
            UserError: An argument is another one, or a class, whose state would be misread.
        """
        self.optimizer_arguments = self.gather(optimizer_arguments.describe(self.trainer))[0]
        if not self.before:
            return
        before = self.before["optimizers"]
        self._refuse(optimizer_arguments.other_classes(before, self.optimizer_arguments))
        searches = list(filter(lightning_callbacks.is_search, callbacks_of(self.trainer)))
        # A schedule may be made for a number of steps, which these change.
        other_length = (
            self.other_settings
            or not self.same_ranks
            or not same_limits
            or any(isinstance(search, BatchSizeFinder) for search in searches)
        )
        other_rates = self.other_settings or not self.same_ranks or bool(searches)
        arguments, schedule = optimizer_arguments.differences(
            before, self.optimizer_arguments, other_rates
        )
        self._refuse(arguments + ([] if other_length else schedule))
        self._warn(schedule)

    def describe(self) -> RunDescription:
        """Return what a checkpoint of this run says of it, in plain values.

        What the run was allowed to change is compared with from now on.
        """
        settings = self.before or run_settings.describe(self.trainer, self.settings)
        return {
            "flags": settings["flags"],
            "data": settings["data"],
            "ranks": settings["ranks"],
            "sizes": settings["sizes"],
            "workers": settings["workers"],
            "shapes": self.before["shapes"] if self.before else self.shapes,
            "optimizers": self.optimizer_arguments,
            "numbers": self.code_numbers,
        }

    def _refuse(self, differences: list[str]) -> None:
        """Raise UserError if anything differs between this run and the checkpoint's run."""
        if not differences:
            return
        allows = (
            "--resume.other_settings=true"
            if self.folder.setting.startswith("--")
            else "ExactResume(other_settings=True)"
        )
        raise UserError(
            f"{self.folder.label}: {self.file_name} is of another run: {first_of(differences)}; "
            "continue with the same settings, or give another folder, or move the checkpoints away "
            f"to start over; {allows} allows another learning rate, gradient clipping or precision"
        )

    def _warn(self, differences: list[str]) -> None:
        """Warn that the code gives other values, which do not identify the run, than before."""
        if differences and self.trainer.is_global_zero:
            log.warning(
                f"{first_of(differences)}: this run continues from its checkpoint, and "
                "may end with other weights than a run that begins with these settings"
            )
