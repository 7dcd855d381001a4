"""The best model so far, kept also when the disk is full."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.callbacks import divergence
from sagemaker_lightning.compat.lightning_checkpoints import BestCheckpoint
from sagemaker_lightning.resume import checkpoint_file


class BestModel(BestCheckpoint):
    """Lightning's ModelCheckpoint; it remembers no file that could not be written, and keeps the one before.

    A metric that is NaN or infinite makes no model the best: where there is no other, the last model is the one.
    It also knows the best model of before where a run goes on with a folder that has moved. And what was the best is
    removed only when no checkpoint to resume from tells of it any more: a run may go on from each of them.
    """

    retired: Mapping[str, int] = {}  # noqa: RUF012  never changed in place
    """What was the best, and how many checkpoints to resume from have been saved since."""

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning keeps, and what is to be removed."""
        return super().state_dict() | {"retired": dict(self.retired)}

    def age(self, trainer: Trainer, keep: int) -> None:
        """Take note of one more checkpoint; remove what was the best before the last `keep` of them, and this one."""
        older = {path: age + 1 for path, age in self.retired.items()}
        self.retired = {path: age for path, age in older.items() if age <= keep}
        for path in older.keys() - self.retired.keys():
            if path != self.best_model_path and path not in self.best_k_models:  # it may have been written again
                super().discard(trainer, path)

    def discard(self, trainer: Trainer, path: str) -> None:
        """Take note of what was the best: its file stays, for now."""
        self.retired = {**self.retired, path: 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, whose files are now in this folder; Lightning would begin anew, with a later model."""
        state = self._moved(state_dict)
        self.retired = state.get("retired", {})
        super().load_state_dict(state)

    def files(self) -> list[Path]:
        """Return the files that this callback has written and not removed."""
        names = {self.best_model_path, self.last_model_path, *self.best_k_models, *self.retired}
        return [Path(name) for name in names if name and "://" not in name]

    def lacks(self, checkpoint: Path) -> str:
        """Return which is the best model that a whole checkpoint tells of, if its file will not do; else ""."""
        states = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True).get("callbacks", {})
        known = self._moved(states.get(self.state_key, {})).get("best_model_path", "")
        problem = _problem(known)
        return f"{Path(known).name}, the best model, which {problem}" if problem else ""

    def readable(self) -> str:
        """Return the best of the models whose files are whole, "" if none is; it says which are not."""
        scores = sorted(self.best_k_models.items(), key=lambda one: float(one[1]), reverse=self.mode == "max")
        problems = []
        for name in filter(None, dict.fromkeys([self.best_model_path, *(name for name, _ in scores)])):
            if not (problem := _problem(name)):
                break
            problems.append(f"{name}, the best model, {problem}")
        else:
            name = ""
        for problem in problems:
            print(f"warning: {problem}; {name or 'the last one'} is written in its place", flush=True)
        return name

    def _moved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of which all files are in this folder."""
        before, now = str(state.get("dirpath")), str(self.dirpath)

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {moved(name): score for name, score in value.items()}
            return now + value.removeprefix(before) if isinstance(value, str) and value.startswith(before) else value

        return {name: moved(value) for name, value in state.items()} | {"dirpath": self.dirpath}

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a model is one of the best: not by a value that is NaN or infinite on any rank."""
        better = super().check_monitor_top_k(trainer, current)  # the same on all ranks
        if not better or self.save_top_k == -1:  # of all that are kept, `rank` chooses
            return better
        return trainer.strategy.reduce_boolean_decision(bool(torch.as_tensor(current).isfinite()))

    def rank(self, value: Tensor, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a model, and know which one is the best; Lightning would take infinity for a number."""
        if not torch.as_tensor(value).isfinite():
            value = torch.full_like(value, torch.inf if self.mode == "min" else -torch.inf)
        super().rank(value, trainer, candidates)
        if not self.best_model_score.isfinite():
            self.best_model_path, self.best_model_score = "", None

    def write(self, trainer: Trainer, path: str) -> None:
        """Write, unless training has diverged: then fail, and the file of before stays."""
        divergence.of(trainer).check(trainer)
        super().write(trainer, path)

    def keep_if_best(self, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a file if the newest model is one of the best; if it cannot be written, the one of before is it."""
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        files = trainer.strategy.checkpoint_io
        files.lost = None
        super().keep_if_best(trainer, candidates)
        if lost := trainer.strategy.broadcast(files.lost):
            vars(self).update(before)
            if trainer.is_global_zero:
                best = self.best_model_path or "none"
                print(f"warning: training goes on, but {lost}; the best model is still {best}", flush=True)


def _problem(model: str) -> str:
    """Return what is wrong with a model's file, "" if nothing is, or if it is nowhere where that is looked at."""
    if not model or "://" in model:
        return ""
    return checkpoint_file.damage(Path(model)) if Path(model).is_file() else "is not there"


def callbacks(trainer: Trainer) -> list[BestModel]:
    """Return the trainer's callbacks of this kind."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, BestModel)]


def age(trainer: Trainer, keep: int) -> None:
    """Have all of them take note of one more checkpoint, of which `keep` stay; of none, when all is done."""
    for callback in callbacks(trainer):
        callback.age(trainer, keep)
