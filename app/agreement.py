"""What the ranks of a job agree on while they train, on a group of its own: gloo, so that no GPU waits for it."""

from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import distributed


class Agreement:
    """All ranks call everything here alike, at the same moments of their training."""

    def __init__(self, trainer: Trainer) -> None:
        self.world_size = trainer.world_size
        self.is_first = trainer.is_global_zero
        self.group = distributed.new_group(backend="gloo") if self.world_size > 1 else None
        self.asked, self.due = 0, False
        self.told: tuple[torch.Tensor, Any] | None = None  # what is on its way between the ranks

    def gather(self, told: Any) -> list:
        """Return what each rank tells, by rank."""
        everyone = [told]
        if self.group:
            everyone = [None] * self.world_size
            distributed.all_gather_object(everyone, told, group=self.group)
        return everyone

    def agree(self, asked: int, due: bool, now: bool = False) -> None:
        """Set `asked`, the number of a signal that any rank was sent, and `due`, whether the first rank's is true.

        What the ranks said the last time, or say now. It is sent while the next step is computed, so that no step waits
        for it, and at every call, so that none depends on how long others took.
        """
        if not self.group:
            self.asked, self.due = asked, due
            return
        self.settle()
        flags = torch.tensor([max(asked, self.asked), due and self.is_first and not self.due], dtype=torch.int64)
        work = distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)
        self.told = flags, work
        if now:
            self.settle()

    def settle(self) -> None:
        """Learn what is on its way."""
        if self.told:
            flags, work = self.told
            work.wait()
            self.asked, due = flags.tolist()
            self.due, self.told = bool(due), None
