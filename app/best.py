"""The best model so far, kept also when the disk is full."""

import copy

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint


class BestModel(ModelCheckpoint):
    """Lightning's ModelCheckpoint; it remembers no file that could not be written, and keeps the one before."""

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict) -> None:
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        files = trainer.strategy.checkpoint_io
        files.lost = None
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if lost := trainer.strategy.broadcast(files.lost):
            vars(self).update(before)
            if trainer.is_global_zero:
                best = self.best_model_path or "none"
                print(f"warning: training goes on, but {lost}; the best model is still {best}", flush=True)
