"""Stands for the package `lightning` where only pytorch-lightning is installed.

It has the names that lightning's own __init__.py has. The packages are imported under the names
that they really have, so that no two threads wait for each other's import.
"""

import lightning_fabric as fabric  # noqa: F401  (L.fabric)
import pytorch_lightning as pytorch  # noqa: F401  (L.pytorch)
from lightning_fabric import Fabric, seed_everything
from pytorch_lightning import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    __version__,
)

__all__ = [
    "Trainer",
    "LightningDataModule",
    "LightningModule",
    "Callback",
    "seed_everything",
    "Fabric",
    "__version__",
]
