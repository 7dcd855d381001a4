"""What the ranks of a job agree on while they train.

They use a process group of their own, with gloo, so that no GPU waits for it.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
from pytorch_lightning import Trainer
from torch import distributed

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.gather import gather, own_group

Value = TypeVar("Value")


class Comparison(IntEnum):
    """How the comparison of a resumed run with the interrupted one stands.

    The greatest of several ranks counts.
    """

    IDENTICAL = 0
    """All recorded steps were repeated identically."""
    OPEN = 1
    """There are recorded steps that have not been repeated yet."""
    DIFFERENT = 2
    """Something was not identical."""


class Agreement:
    """Exchanges values between the ranks.

    All ranks must make the same calls at the same moments of their training.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.world_size = trainer.world_size
        self.is_first = trainer.is_global_zero
        self.group = own_group() if self.world_size > 1 else None
        self.signal_number = 0
        self.checkpoint_due = False
        self.copy_due = False
        self.uploading = False
        self.diverged = False
        self.comparison = Comparison.OPEN
        self.pending: tuple[torch.Tensor, Any] | None = None  # what is being sent between the ranks

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank.

        Args:
            value: The value of this rank.
        """
        return gather(value, self.group) if self.group else [value]

    def agree(
        self,
        signal_number: int,
        checkpoint_due: bool,
        diverged: bool = False,
        now: bool = False,
        comparison: Comparison = Comparison.IDENTICAL,
        uploading: bool = False,
        copy_due: bool = False,
    ) -> None:
        """Combine the flags of all ranks into the attributes of the same names.

        The attributes then have what the ranks said at the previous call, or at this one if `now`
        is set. The flags are sent while the next step is computed, so that no step waits for them.
        They are sent at every call, so that no rank depends on how long others took.

        Args:
            signal_number: Number of a signal that this rank got; 0 if none. The attribute has the
                greatest of all ranks.
            checkpoint_due: Whether a checkpoint is due. Only rank 0's value counts.
            diverged: Whether training has diverged on this rank. The attribute says whether it has
                on any rank.
            now: Whether to wait for the values of this call.
            comparison: How the comparison stands on this rank. The attribute has the greatest of
                all ranks.
            uploading: Whether the checkpoint before is on its way to S3. Only rank 0's value
                counts.
            copy_due: Whether a copy in memory is due, said once for each. Only rank 0's value
                counts. The attribute stays until `copy_taken`.
        """
        if not self.group:
            self.signal_number = signal_number
            self.checkpoint_due = checkpoint_due
            self.diverged = diverged
            self.comparison = comparison
            self.uploading = uploading
            self.copy_due |= copy_due
            return
        self.receive()
        due = checkpoint_due and self.is_first and not self.checkpoint_due
        flags = torch.tensor(
            [
                max(signal_number, self.signal_number),
                due,
                diverged or self.diverged,
                comparison,
                uploading and self.is_first,
                copy_due and self.is_first,
            ],
            dtype=torch.int64,
        )
        work = distributed.all_reduce(
            flags, op=distributed.ReduceOp.MAX, group=self.group, async_op=True
        )
        self.pending = flags, work
        if now:
            self.receive()

    def checkpoint_saved(self) -> None:
        """Note that the checkpoint that was due is saved."""
        self.checkpoint_due = False

    def copy_taken(self) -> None:
        """Note that the copy in memory that was due is taken, or a checkpoint in its place."""
        self.copy_due = False

    def receive(self) -> None:
        """Wait for the values that are being sent, and take them over."""
        if self.pending:
            flags, work = self.pending
            work.wait()
            self.signal_number, due, diverged, comparison, uploading, copy_due = flags.tolist()
            self.checkpoint_due = bool(due)
            self.diverged = bool(diverged)
            self.comparison = Comparison(comparison)
            self.uploading = bool(uploading)
            self.copy_due |= bool(copy_due)
            self.pending = None


LoadersOfRank = tuple[str, Mapping[str, int]]
"""What a rank says of its training loaders when an epoch begins.

Why it cannot be resumed within the epoch, "" if it can; and what each loader that the ranks share
draws first, as a hash, by sampler.
"""


def common_reason(answers: Sequence[LoadersOfRank]) -> str:
    """Return why any rank cannot be resumed within the epoch; "" if all can."""
    return next((why for why, _ in answers if why), "")


def refuse_other_orders(answers: Sequence[LoadersOfRank]) -> None:
    """Raise UserError if a sampler draws other samples on another rank.

    It shares them out by itself, and sharing out what each rank has would leave samples out.
    """
    for name, drawn in answers[0][1].items():
        if any(orders.get(name) != drawn for _, orders in answers):
            raise UserError(
                f"Trainer(use_distributed_sampler=...): found True, and {name.split()[1]}, "
                "which draws other samples on each rank; give use_distributed_sampler=False if "
                "it shares the samples out itself, else the same order on all ranks"
            )
