"""A model with its own data whose training goes wrong at a step that a test chooses."""

import os
import sys

import torch
from foreign import Data, Model


class Diverging(Model):
    """Trains on the samples of `foreign.Data`, 8 steps an epoch.

    Args:
        step: The step that goes wrong.
        how: "loss", "dict" (the loss is in one), "gradient" (that of a finite loss), "none" (the
            batch is skipped), "rate" (the loss is infinite if the learning rate is above 0.05),
            "exit", "_exit", or "" for all well.
        returns: Whether training_step returns its loss.
        manual: Whether the model takes its steps by itself.
        rank: The rank on which it happens; None for all.
    """

    def __init__(
        self,
        step: int = 5,
        how: str = "loss",
        returns: bool = True,
        manual: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.step = step
        self.how = how
        self.returns = returns
        self.rank = rank
        self.automatic_optimization = not manual

    def train_dataloader(self):
        return Data().train_dataloader()

    def val_dataloader(self):
        return Data().train_dataloader()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step + 1 == self.step and self.rank in (None, self.global_rank):
            loss = self._goes_wrong(loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss} if self.how == "dict" else loss if self.returns else None

    def _goes_wrong(self, loss: torch.Tensor) -> torch.Tensor | None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        print(f"at step {self.step} the learning rate is {rate}", flush=True)
        if self.how == "none":
            return None
        if self.how == "exit":
            sys.exit()
        if self.how == "_exit":
            os._exit(0)
        if self.how == "gradient":
            loss.register_hook(lambda gradient: gradient * float("nan"))
        elif self.how in ("loss", "dict") or (self.how == "rate" and rate > 0.05):
            loss = loss * float("inf")
        return loss
