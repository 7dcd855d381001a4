"""Runs interruptible.py with one mechanism of the exact resume switched off.

The variable BREAK names the mechanism. Many places together make a resumed run exact; a mistake in
one of them would look like this. In each test, only the resumed run has the mistake.
"""

import contextlib
import os
from collections.abc import Callable

import interruptible
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector

from sagemaker_lightning.data.deterministic import Batches
from sagemaker_lightning.data.loaders.positioned import Positioned
from sagemaker_lightning.data.loaders.several import TrainingLoaders
from sagemaker_lightning.data.seeding import Seeding
from sagemaker_lightning.resume.check import journal
from sagemaker_lightning.resume.parts import user_objects
from sagemaker_lightning.resume.parts.epoch_sums import EpochSums
from sagemaker_lightning.resume.parts.lightning_callbacks import weight_averaging
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.parts.rank_buffers import RankBuffers
from sagemaker_lightning.resume.run import Run
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.graph.state import GraphState

begin = TrainingLoaders.begin
next_batch = TrainingLoaders.__next__
order = Batches._order


def nothing(*_, **__) -> None:
    """Do nothing."""


def from_the_first(self, fetcher, epoch, done, states=None, proves=False) -> int:
    """Let an epoch begin at its first batch."""
    begin(self, fetcher, epoch, 0, states)
    return done


def without_states(self, fetcher, epoch, done, states=None, proves=False) -> int:
    """Let an epoch begin as if loaders and samplers had no state."""
    return begin(self, fetcher, epoch, done)


def as_it_was(self) -> object:
    """Return the next batch, and put torch's generator back to its state before."""
    state = torch.get_rng_state()
    batch = next_batch(self)
    torch.set_rng_state(state)
    return batch


def not_skipped(self, done) -> None:
    """Begin without skipping the samples that were seen."""
    self.begin(0, 0)


def another_order(self, epoch, turn) -> list:
    return order(self, epoch + 1, turn)


MISTAKES: dict[str, Callable[[], None]] = {
    "the loaders begin at the first batch": lambda: setattr(
        TrainingLoaders, "begin", from_the_first
    ),
    "the order is that of another epoch": lambda: setattr(Batches, "_order", another_order),
    "generators are not seeded": lambda: setattr(generators, "reseed", nothing),
    "generators are not restored": lambda: setattr(generators, "restore", nothing),
    "what is drawn on the way is not seeded": lambda: setattr(
        TrainingLoaders, "__next__", as_it_was
    ),
    "a step is not seeded": lambda: setattr(Seeding, "on_train_batch_start", nothing),
    "what objects hold is not restored": lambda: setattr(GraphState, "restore", nothing),
    "what samplers hold is not restored": lambda: setattr(TrainingLoaders, "begin", without_states),
    "modes are not restored": lambda: setattr(Modes, "restore", nothing),
    "schedulers are not restored": lambda: setattr(
        _CheckpointConnector, "restore_lr_schedulers", nothing
    ),
    "optimizers are not restored": lambda: setattr(
        _CheckpointConnector, "restore_optimizers", nothing
    ),
    "weights are not restored": lambda: setattr(_CheckpointConnector, "restore_model", nothing),
    "buffers and metrics are not restored": lambda: [
        setattr(part, "restore", nothing) for part in (RankBuffers, Metrics, EpochSums)
    ],
    "an average is not restored": lambda: setattr(
        StochasticWeightAveraging, "_load_average_model_state", nothing
    ),
    "an average does not continue": lambda: setattr(
        weight_averaging, "continue_averaging", nothing
    ),
    "hooks are not run again": lambda: setattr(user_objects, "run_creating_hooks", nothing),
    "what was seen is not skipped": lambda: setattr(Positioned, "go_to", not_skipped),
}


def main() -> None:
    """Train with the mistake."""
    journal.MAX_WAITING_SHARE = float("inf")  # the tests' steps are short
    with contextlib.suppress(KeyError):
        MISTAKES[os.environ["BREAK"]]()
    if os.environ.get("BLIND"):
        Run._differing = lambda run: {}
    interruptible.main()


if __name__ == "__main__":
    main()
