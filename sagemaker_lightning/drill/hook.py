"""Adds drilled_run.py to the Trainers of a program that is drilled, from outside.

Lightning asks the entry points of the group `callbacks_factory` for callbacks when a Trainer is
made. drill/command.py registers this one for the processes that it starts, and for no others: by
the metadata of a distribution in a folder of the drill's, which PYTHONPATH names. So it works
whether this package is installed, or is a checkout, and with either distribution of Lightning.
"""

import sys
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract.environment import SageMakerEnvironment

GROUPS = "pytorch_lightning.callbacks_factory", "lightning.pytorch.callbacks_factory"
"""The group's name in pytorch-lightning, and in lightning."""
NAME = "sagemaker_lightning_drill"


def callbacks() -> list[Any]:
    """Return what the drill adds to a Trainer: nothing in a program without our callback."""
    if "sagemaker_lightning.resume.callback" not in sys.modules:
        return []
    from sagemaker_lightning.drill.drilled_run import Drilled

    asked = SageMakerEnvironment.read().drill
    return [Drilled(asked)] if asked else []


def register(folder: Path) -> None:
    """Write the metadata by which Lightning finds `callbacks`, if `folder` is on PYTHONPATH.

    Args:
        folder: The folder; it is made if it does not exist.
    """
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    lines = (f"[{group}]\n{NAME} = {__name__}:{callbacks.__name__}\n" for group in GROUPS)
    (info / "entry_points.txt").write_text("\n".join(lines))
