"""How Lightning makes and loads checkpoints, and its callback for the best model.

`trainer.save_checkpoint` and `fit(ckpt_path=...)` are public and not enough: the first writes on
one rank only, and the state of every rank is needed; the second wants a path before the ranks can
agree on one, and reads a file that has been read and checked by then.

On an upgrade: compare trainer/connectors/checkpoint_connector.py (what `resume_start` leaves for
those that restore, and when it is called) and callbacks/model_checkpoint.py (who calls the four
methods below, and with what).
"""

import inspect
from collections.abc import Callable
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what `trainer.save_checkpoint` would write; all ranks may call it."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def load_first(trainer: Trainer, load: Callable[[], bool]) -> None:
    """Have `load` called when Lightning loads a checkpoint, before the model is restored.

    Where it returns False, Lightning loads the file that it was told of, such as one that a search
    for a learning rate has saved, without running code in it (`weights_only`, which Lightning has
    since 2.6).
    """
    connector = trainer._checkpoint_connector
    lightnings = connector.resume_start
    safe = (
        {"weights_only": True} if "weights_only" in inspect.signature(lightnings).parameters else {}
    )

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if not load():
            lightnings(checkpoint_path, **safe)

    connector.resume_start = resume_start


def give(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> None:
    """Give Lightning a checkpoint as if it had read it from `path`; for `load_first`'s `load`."""
    trainer._checkpoint_connector._ckpt_path = path
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, of which four steps can be overridden.

    Its public hooks are the trainer's, and decide nothing: a file that could not be written, a
    metric that is no number and a file that is still needed have to be dealt with between the
    choice of a model and the removal of another one.
    """

    def keep_if_best(self, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a file if the newest model is one of the best, by the metrics `candidates`."""
        super()._save_topk_checkpoint(trainer, candidates)

    def rank(self, value: Tensor, trainer: Trainer, candidates: dict[str, Tensor]) -> None:
        """Write a model whose metric is `value`, and discard the one that it replaces."""
        super()._update_best_and_save(value, trainer, candidates)

    def write(self, trainer: Trainer, path: str) -> None:
        """Write a file; all ranks call it."""
        super()._save_checkpoint(trainer, path)

    def discard(self, trainer: Trainer, path: str) -> None:
        """Remove a file that is not needed any more; all ranks call it."""
        trainer.strategy.remove_checkpoint(path)

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self.keep_if_best(trainer, monitor_candidates)

    def _update_best_and_save(
        self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self.rank(current, trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.write(trainer, filepath)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.discard(trainer, filepath)
