"""Ranks that train with what makes them consistent, and one rank of several in this process."""

from types import SimpleNamespace

import ranks
import torch

from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.train import APPLICATION


def fit_by_flags(flags: dict[int, list[str]], *for_all: str) -> int:
    """Train as the program does, with flags that differ by node; return the steps."""
    here = flags.get(int(ranks.os.environ["GROUP_RANK"]), [])
    command_line = CommandLine(SageMakerEnvironment.read(), [*for_all, *here], APPLICATION)
    command_line.trainer.fit(command_line.model, command_line.datamodule)
    return command_line.trainer.global_step


SHORT = [
    "--model=one_layer.OneLayer",
    "--data.batch_size=8",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.accelerator=cpu",
]


def rank_of(world: int, rates: list[dict], loader: object = None, **options) -> SimpleNamespace:
    """Return what the callbacks ask a trainer for.

    Its optimizers have groups with the keys of `rates`.
    """
    weight = torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], 1.0) for _ in rates]
    for optimizer, keys in zip(optimizers, rates, strict=True):
        optimizer.param_groups[0] = keys
    settings = {"world_size": world, "global_rank": 1, "is_global_zero": True, "current_epoch": 2}
    settings |= {"optimizers": optimizers, "lr_scheduler_configs": [], "train_dataloader": loader}
    settings |= {"datamodule": None, "num_training_batches": 3, "accumulate_grad_batches": 1}
    fit_loop = SimpleNamespace(batch_idx=5)
    return SimpleNamespace(**settings | {"fit_loop": fit_loop, "callbacks": []} | options)
