"""AWS's SMDDP library as a Lightning strategy, for images that have the library.

This repository's image does not have it: AWS has published no build since PyTorch 2.5. The setup is
that of AWS's guide (sagemaker/latest/dg, data-parallel-modify-sdp-pt-lightning): the import
registers the backend, and world size and rank come from the launcher.
"""

import os

from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from sagemaker_lightning.contract.errors import UserError


class _Launched(LightningEnvironment):
    """World size and rank as the launcher says them."""

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])


def strategy() -> DDPStrategy:
    """Return DDP over SMDDP; UserError if the package is not installed."""
    try:
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend
    except ModuleNotFoundError:
        raise UserError(
            "--trainer.strategy=smddp: the package smdistributed is not in this image (AWS has "
            "published none since PyTorch 2.5); use --trainer.strategy=ddp, which runs over NCCL"
        ) from None
    return DDPStrategy(cluster_environment=_Launched(), process_group_backend="smddp")
