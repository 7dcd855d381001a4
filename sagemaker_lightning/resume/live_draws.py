"""Notice data that follow the training, and cannot be drawn again: a run resumes at epochs' ends.

They are those of samplers that read what training changes while they draw, and those that are made
of the weights for each epoch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import Trainer
from torch.utils.data import IterableDataset

from sagemaker_lightning.compat import lightning_loops
from sagemaker_lightning.compat.lightning_loaders import flattened
from sagemaker_lightning.contract.errors import printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.loaders.redrawn import WeightReads
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.resume.agreement import Agreement
from sagemaker_lightning.resume.parts.roots import SAMPLERS
from sagemaker_lightning.state import followed_draws

BATCHES_WATCHED = 2
"""Batches at the beginning of each epoch of which is seen what a step changes."""
MADE_OF_WEIGHTS = "train_dataloader() uses the current weights to make each epoch's data"


class LiveDraws:
    """Learns whether the data of a training follow what it changes.

    Args:
        trainer: Lightning's trainer.
        agreement: What the ranks agree by.
    """

    def __init__(self, trainer: Trainer, agreement: Agreement) -> None:
        self.trainer = trainer
        self.agreement = agreement
        self.why = ""
        """Why no run can be resumed within an epoch, as far as this rank knows."""
        self.before: dict[tuple[int, str], bytes] | None = None
        """What was read before a step, as digests; None where no step is watched."""
        self.said: set[str] = set()

    @contextmanager
    def data_made(self) -> Iterator[None]:
        """Learn whether the training data that the block makes, in place of others, are of weights.

        The first ones are of the first weights, which a resumed run has, too.
        """
        model = self.trainer.lightning_module
        with WeightReads({*map(id, model.parameters())}) as reads:
            yield
        if reads.found:
            self.why = MADE_OF_WEIGHTS

    def batch_begins(self, number: int, is_known: bool) -> None:
        """Note what samplers and streams read while they draw, before a step changes it.

        Args:
            number: The number of the batch in the epoch, from 0.
            is_known: Whether it is known on all ranks that no run can be resumed in this epoch.
        """
        self.before = None
        if number >= BATCHES_WATCHED or is_known:
            return
        # What a sampler changes itself, as a step draws, is not a change by training.
        if not lightning_loops.steps_draw_batches(lightning_loops.fetcher(self.trainer)):
            self.before = followed_draws.values_followed(self._drawers())

    def batch_ended(self) -> bool:
        """Return whether a step has shown, on any rank, that no run can resume within epochs."""
        if self.before is None:
            return False
        changed = followed_draws.changed(self._drawers(), self.before)
        self.before = None
        own = "; ".join(
            f"{drawer} draws by {', '.join(names)}, which training changes within an epoch"
            for drawer, names in changed.items()
        )
        why = next(filter(None, self.agreement.gather(printable(own))), "")
        if why and math.isinf(self.trainer.num_training_batches):
            # Without an end of an epoch there would be no checkpoint at all.
            if self.trainer.is_global_zero and why not in self.said:
                log.warning(f"{why}: a resumed run may have other batches")
            self.said.add(why)
            return False
        self.why = why or self.why
        return bool(why)

    def _drawers(self) -> list[Any]:
        """Return the samplers and streams that draw an epoch's batches in this process."""
        found: list[Any] = []
        for loader in flattened(self.trainer.train_dataloader):
            if has_state(loader):
                continue
            parts = [getattr(loader, name, None) for name in SAMPLERS]
            stream = getattr(loader, "dataset", None)
            if isinstance(stream, IterableDataset) and not getattr(loader, "num_workers", 0):
                parts.append(stream)
            found += [part for part in parts if not has_state(part)]
        return found
