"""Writes the best model so far: a ModelCheckpoint that survives a full disk."""

import copy
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from sagemaker_lightning.callbacks import divergence
from sagemaker_lightning.compat.lightning_checkpoints import BestCheckpoint
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.files import checkpoint_file, user_checkpoints


class BestModel(BestCheckpoint):
    """Lightning's ModelCheckpoint, made safe for full disks and interruptions.

    A metric that is NaN or infinite makes no model the best: if there is no other, the last model
    is the best. With an ExactResume in the same Trainer, it remembers no file that could not be
    written, and keeps the previous one instead; it finds the previous best model again if a resumed
    run's folder has moved; its files have no states of optimizers, which the checkpoints to resume
    from have; and a file that is not the best any more is removed only when no checkpoint to resume
    from refers to it: a run may resume from each of them. Without ExactResume, such a file is
    removed at once.
    """

    keeps_retired = False
    """Whether checkpoints to resume from may refer to a file that was the best."""
    has_warned_of_name = False
    """Whether a warning said that the file's name has a metric that is not logged."""
    retired: Mapping[str, int] = {}  # noqa: RUF012  never changed in place
    """Files that were the best, and how many checkpoints to resume from were saved since."""
    foreign: frozenset[str] = frozenset()
    """Files that a checkpoint has named and this callback may not have written."""

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints, for ever, whatever the class is called."""
        return f"sagemaker_lightning.best_model monitor={self.monitor} mode={self.mode}"

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state and the files that are still to be removed."""
        return super().state_dict() | {"retired": dict(self.retired)}

    def format_checkpoint_name(self, metrics: dict[str, Tensor], *args: Any, **kwargs: Any) -> str:
        """Return a file's name, as Lightning does; warn, once, if the name has what is not logged.

        Lightning puts 0 there, and all models may get one name.
        """
        unknown = sorted(metrics_in(self.filename) - metrics.keys())
        if unknown and not self.has_warned_of_name:
            self.has_warned_of_name = True
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
                log.warning(
                    f"the best model's filename {self.filename}: {unknown[0]} is not logged: 0 is "
                    f"used; logged metrics: {', '.join(sorted(metrics))[:300]}"
                )
        return super().format_checkpoint_name(metrics, *args, **kwargs)

    def keep_retired(self, keeps: bool) -> None:
        """Set whether files that were the best are kept until `remove_outdated` removes them."""
        self.keeps_retired = keeps

    def remove_outdated(self, trainer: Trainer, keep: int) -> None:
        """Count one more checkpoint, and remove files that no checkpoint refers to.

        Args:
            trainer: Lightning's trainer.
            keep: How many checkpoints before the newest one are kept.
        """
        older = {path: age + 1 for path, age in self.retired.items()}
        self.retired = {path: age for path, age in older.items() if age <= keep}
        for path in older.keys() - self.retired.keys():
            # It may be one of the best again.
            if path != self.best_model_path and path not in self.best_k_models:
                self._remove(trainer, path)

    def discard(self, trainer: Trainer, path: str) -> None:
        """Mark a file that is not the best any more, or remove it if no checkpoint may need it."""
        if self.keeps_retired:
            self.retired = {**self.retired, path: 0}
        else:
            self._remove(trainer, path)

    def _remove(self, trainer: Trainer, path: str) -> None:
        if path not in self.foreign:
            super().discard(trainer, path)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state whose files are now in this folder.

        Lightning would forget the best model, and start again with a later one.
        """
        state = user_checkpoints.with_own_files(self, state_dict)
        self.retired = state["retired"]
        self.foreign = user_checkpoints.foreign_files(self, state)
        super().load_state_dict(state)

    def files(self) -> list[Path]:
        """Return the files that this callback has written and not removed."""
        names = {self.best_model_path, self.last_model_path, *self.best_k_models, *self.retired}
        return [Path(name) for name in names - self.foreign if name and "://" not in name]

    def missing_file(self, checkpoint: Path) -> str:
        """Return what is wrong with the best model that a checkpoint refers to.

        The result names its file; it is "" if nothing is wrong.

        Args:
            checkpoint: Path of an intact checkpoint.
        """
        states = checkpoint_file.read(checkpoint, mmap=True).get("callbacks", {})
        state = user_checkpoints.with_own_files(self, states.get(self.state_key, {}))
        best = state["best_model_path"]
        problem = _file_problem(best)
        return f"{Path(best).name}, the best model, which {problem}" if problem else ""

    def choose_intact(self) -> str:
        """Return the best model whose file is intact; "" if no file is.

        It prints which files are not intact.
        """
        scores = sorted(
            self.best_k_models.items(),
            key=lambda path_and_score: float(path_and_score[1]),
            reverse=self.mode == "max",
        )
        problems = []
        for name in filter(
            None, dict.fromkeys([self.best_model_path, *(name for name, _ in scores)])
        ):
            if not (problem := _file_problem(name)):
                break
            problems.append(f"{name}, the best model, {problem}")
        else:
            name = ""
        for problem in problems:
            log.warning(f"{problem}; {name or 'the last one'} is written in its place")
        return name

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a model is one of the best.

        It is not if the value is NaN or infinite on any rank.
        """
        better = super().check_monitor_top_k(trainer, current)  # the same on all ranks
        if not better or self.save_top_k == -1:  # all are kept, and `write_ranked` chooses the best
            return better
        return trainer.strategy.reduce_boolean_decision(bool(torch.as_tensor(current).isfinite()))

    def write_ranked(self, value: Tensor, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a model and update which one is the best.

        Lightning would accept infinity as a best value.
        """
        if not torch.as_tensor(value).isfinite():
            value = torch.full_like(value, torch.inf if self.mode == "min" else -torch.inf)
        super().write_ranked(value, trainer, candidates)
        if self.best_model_score is not None and not self.best_model_score.isfinite():
            self.best_model_path = ""
            self.best_model_score = None

    def write(self, trainer: Trainer, path: str) -> None:
        """Write a model's file, unless training has diverged.

        Then this fails, and the previous file stays.
        """
        divergence.divergence_of(trainer).check(trainer)
        with ExitStack() as stack:
            files = trainer.strategy.checkpoint_io
            if self.keeps_retired and isinstance(files, checkpoint_file.CheckedIO):
                # Twice as large as the weights, and every checkpoint to resume from has them.
                stack.enter_context(files.leaving_out("optimizer_states"))
            super().write(trainer, path)

    def keep_if_best(self, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a file if the newest model is one of the best.

        If it cannot be written, the previous best model remains the best.
        """
        attributes_before = {name: copy.copy(value) for name, value in vars(self).items()}
        files = trainer.strategy.checkpoint_io
        checked = files if isinstance(files, checkpoint_file.CheckedIO) else None
        if checked:
            checked.forget_problem()
        super().keep_if_best(trainer, candidates)
        if problem := trainer.strategy.broadcast(checked.problem if checked else ""):
            vars(self).update(attributes_before)
            if trainer.is_global_zero:
                best = self.best_model_path or "none"
                log.warning(f"training continues, but {problem}; the best model is still {best}")


def _file_problem(model: str) -> str:
    """Return what is wrong with a model's file; "" if nothing is.

    A file at a URL is not checked.
    """
    if not model or "://" in model:
        return ""
    return checkpoint_file.damage(Path(model)) if Path(model).is_file() else "is missing"


def metrics_in(filename: str | None) -> set[str]:
    """Return the metrics that a ModelCheckpoint's `filename` has in braces; {} without one."""
    return set(re.findall(r"\{([^{}:!]+)", filename or "")) - {"epoch", "step"}


def callbacks(trainer: Trainer) -> list[BestModel]:
    """Return the trainer's BestModel callbacks."""
    return [
        callback for callback in trainer.checkpoint_callbacks if isinstance(callback, BestModel)
    ]


def files_in(trainer: Trainer, folder: Path) -> list[Path]:
    """Return the files of the best models that belong to a checkpoint in a folder.

    Rank 0 alone writes them.
    """
    if not trainer.is_global_zero:
        return []
    names = filter(None, (callback.best_model_path for callback in callbacks(trainer)))
    return [path for path in map(Path, names) if path.parent.resolve() == folder.resolve()]


def keep_retired(trainer: Trainer, keeps: bool) -> None:
    """Let all BestModel callbacks keep files that were the best for checkpoints, or not."""
    for callback in callbacks(trainer):
        callback.keep_retired(keeps)


def remove_outdated(trainer: Trainer, keep: int) -> None:
    """Let all BestModel callbacks count one more checkpoint.

    Args:
        trainer: Lightning's trainer.
        keep: How many checkpoints before the newest one are kept; 0 when training is done.
    """
    for callback in callbacks(trainer):
        callback.remove_outdated(trainer, keep)
