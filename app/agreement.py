"""What the ranks of a job agree on while they train, on a group of its own: gloo, so that no GPU waits for it."""

import time
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import distributed

EVERY = 1.0  # seconds between two agreements; each takes half a millisecond of a step (benchmarks/interruptions.py)


class Agreement:
    """All ranks call everything here alike, at the same moments of their training."""

    def __init__(self, trainer: Trainer) -> None:
        self.world_size = trainer.world_size
        self.is_first = trainer.is_global_zero
        self.group = distributed.new_group(backend="gloo") if self.world_size > 1 else None
        self.calls, self.next, self.began = 0, 1, time.monotonic()
        self.asked, self.due, self.diverged = 0, False, False

    def gather(self, told: Any) -> list:
        """Return what each rank tells, by rank."""
        everyone = [told]
        if self.group:
            everyone = [None] * self.world_size
            distributed.all_gather_object(everyone, told, group=self.group)
        return everyone

    def agree(self, asked: int, due: bool, diverged: bool = False, now: bool = False) -> None:
        """Set `asked`, the number of a signal that any rank was sent, `due`, whether the first rank's is true, and
        `diverged`, whether any rank's is.

        About once a second, or now: the rank that would call the most often in a second says after how many calls.
        """
        if not self.group:
            self.asked, self.due, self.diverged = asked, due, diverged
            return
        self.calls += 1
        if not now and self.calls < self.next:
            return
        seconds = (time.monotonic() - self.began) / self.calls
        wait = max(1, min(1000, int(EVERY / max(seconds, 1e-3))))
        flags = torch.tensor([asked, due and self.is_first, diverged, wait])
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self.group)
        self.asked, due, diverged, self.next = flags.tolist()
        self.due, self.diverged, self.calls, self.began = bool(due), bool(diverged), 0, time.monotonic()
