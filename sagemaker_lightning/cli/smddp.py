"""AWS's SMDDP library as a Lightning strategy, for images that have the library.

This repository's image does not have it: AWS has published no build since PyTorch 2.5. The setup is
that of AWS's guide (sagemaker/latest/dg, data-parallel-modify-sdp-pt-lightning): the import
registers the backend, and world size and rank come from the launcher.
"""

import os

from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from sagemaker_lightning.contract.errors import UserError


def strategy() -> DDPStrategy:
    """Return DDP over SMDDP; UserError if the package is not installed."""
    try:
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend
    except ModuleNotFoundError:
        raise UserError(
            "--trainer.strategy=smddp: the package smdistributed is not in this image (AWS has "
            "published none since PyTorch 2.5); use --trainer.strategy=ddp, which runs over NCCL"
        ) from None
    environment = LightningEnvironment()
    environment.world_size = lambda: int(os.environ["WORLD_SIZE"])
    environment.global_rank = lambda: int(os.environ["RANK"])
    return DDPStrategy(cluster_environment=environment, process_group_backend="smddp")
