"""What a program draws before its training begins, such as the first weights of its model."""

import gc
import weakref

import torch
from pytorch_lightning import LightningModule

from sagemaker_lightning.data.seeded_indices import seed_all

MAX_SEED = 2**32
"""torch's own first seed, which is random, is larger; a program's is not: numpy's is smaller."""
_unseeded: "weakref.WeakSet[LightningModule]" = weakref.WeakSet()
"""The models of this process that were made by draws that no seed decides."""
_our_seeds: set[int] = set()
"""What torch has as its seed once a callback with a seed is made, or has trained to the end."""


def seed_what_follows(seed: int) -> None:
    """Decide all draws from now on; note which models are made already, by other draws."""
    if torch.initial_seed() > MAX_SEED and torch.initial_seed() not in _our_seeds:
        _unseeded.update(
            each for each in gc.get_objects() if issubclass(type(each), LightningModule)
        )
    _our_seeds.add(seed_all("made", seed))


def note_seed() -> None:
    """Note that a training, which may have failed, has set what torch has as its seed now."""
    _our_seeds.add(torch.initial_seed())


def are_random(model: LightningModule) -> bool:
    """Return whether a model was made by draws that no seed decides."""
    return model in _unseeded
