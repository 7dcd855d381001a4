"""What the ranks of a job agree on while they train, on a group of its own: gloo, so that no GPU waits for it."""

import io
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import distributed

SAME, UNSURE, OTHER = 0, 1, 2
"""Of a run that goes on: all that is known was done again alike, there is more to come, something was not alike."""


class Agreement:
    """All ranks call everything here alike, at the same moments of their training."""

    def __init__(self, trainer: Trainer) -> None:
        self.world_size = trainer.world_size
        self.is_first = trainer.is_global_zero
        self.group = distributed.new_group(backend="gloo") if self.world_size > 1 else None
        self.asked, self.due, self.diverged = 0, False, False
        self.doubt = UNSURE
        self.told: tuple[torch.Tensor, Any] | None = None  # what is on its way between the ranks

    def gather(self, told: Any) -> list:
        """Return what each rank tells, by rank."""
        everyone = [told]
        if self.group:
            # As torch.save writes it: pickle alone cannot be read back where a tensor is of uint16, uint32 or uint64.
            buffer, everyone = io.BytesIO(), [b""] * self.world_size
            torch.save(told, buffer)
            distributed.all_gather_object(everyone, buffer.getvalue(), group=self.group)
            everyone = [torch.load(io.BytesIO(one), weights_only=False) for one in everyone]
        return everyone

    def agree(self, asked: int, due: bool, diverged: bool = False, now: bool = False, doubt: int = 0) -> None:
        """Set `asked`, the number of a signal that any rank was sent, `due`, whether the first rank's is true,
        `diverged`, whether any rank's is, and `doubt`, the greatest.

        What the ranks said the last time, or say now. It is sent while the next step is computed, so that no step waits
        for it, and at every call, so that none depends on how long others took.
        """
        if not self.group:
            self.asked, self.due, self.diverged, self.doubt = asked, due, diverged, doubt
            return
        self.settle()
        due = due and self.is_first and not self.due
        flags = torch.tensor([max(asked, self.asked), due, diverged or self.diverged, doubt], dtype=torch.int64)
        work = distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)
        self.told = flags, work
        if now:
            self.settle()

    def settle(self) -> None:
        """Learn what is on its way."""
        if self.told:
            flags, work = self.told
            work.wait()
            self.asked, due, diverged, self.doubt = flags.tolist()
            self.due, self.diverged, self.told = bool(due), bool(diverged), None
