"""What the ranks of a job agree on while they train.

They use a process group of their own, with gloo, so that no GPU waits for it.
"""

from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import distributed

from sagemaker_lightning.data.gather import gather

# How the comparison of a resumed run with the interrupted one stands.
SAME = 0  # all recorded steps were repeated identically
UNSURE = 1  # there are recorded steps that have not been repeated yet
OTHER = 2  # something was not identical


class Agreement:
    """Exchanges values between the ranks.

    All ranks must make the same calls at the same moments of their training.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.world_size = trainer.world_size
        self.is_first = trainer.is_global_zero
        self.group = distributed.new_group(backend="gloo") if self.world_size > 1 else None
        self.asked = 0
        self.due = False
        self.diverged = False
        self.doubt = UNSURE
        self.told: tuple[torch.Tensor, Any] | None = None  # what is being sent between the ranks

    def gather(self, told: Any) -> list:
        """Return the values of all ranks, by rank.

        Args:
            told: The value of this rank.
        """
        return gather(told, self.group) if self.group else [told]

    def agree(
        self, asked: int, due: bool, diverged: bool = False, now: bool = False, doubt: int = 0
    ) -> None:
        """Combine the flags of all ranks into `asked`, `due`, `diverged` and `doubt`.

        The attributes then have what the ranks said at the previous call, or at this one if `now`
        is set. The flags are sent while the next step is computed, so that no step waits for them.
        They are sent at every call, so that no rank depends on how long others took.

        Args:
            asked: Number of a signal that this rank got; 0 if none. The attribute has the greatest
                of all ranks.
            due: Whether a checkpoint is due. Only rank 0's value counts.
            diverged: Whether training has diverged on this rank. The attribute says whether it has
                on any rank.
            now: Whether to wait for the values of this call.
            doubt: SAME, UNSURE or OTHER. The attribute has the greatest of all ranks.
        """
        if not self.group:
            self.asked = asked
            self.due = due
            self.diverged = diverged
            self.doubt = doubt
            return
        self.settle()
        due = due and self.is_first and not self.due
        flags = torch.tensor(
            [max(asked, self.asked), due, diverged or self.diverged, doubt], dtype=torch.int64
        )
        work = distributed.all_reduce(
            flags, op=distributed.ReduceOp.MAX, group=self.group, async_op=True
        )
        self.told = flags, work
        if now:
            self.settle()

    def settle(self) -> None:
        """Wait for the values that are being sent, and take them over."""
        if self.told:
            flags, work = self.told
            work.wait()
            self.asked, due, diverged, self.doubt = flags.tolist()
            self.due = bool(due)
            self.diverged = bool(diverged)
            self.told = None
