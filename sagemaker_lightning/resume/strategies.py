"""Strategies of Lightning's: runs with which can be resumed, and what they are asked for."""

from pytorch_lightning import Trainer
from pytorch_lightning.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from pytorch_lightning.utilities.model_helpers import is_overridden

from sagemaker_lightning.compat import model_parallel
from sagemaker_lightning.compat.lightning_trainer import copies_this_process
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.state.graph.kinds.base import class_name

SHARDED = (
    "; for a model that does not fit one device, use ModelParallelStrategy, which is FSDP2, and "
    "call fully_shard() in configure_model()"
)
"""What to do with a model for which somebody has chosen a strategy such as FSDP1."""


def is_supported(strategy: Strategy) -> bool:
    """Return whether a run with a strategy can be resumed where it was.

    A strategy that loads checkpoints after its setup has states of its own kind, such as
    DeepSpeed's, which is a DDPStrategy, too.
    """
    return isinstance(strategy, ModelParallelStrategy) or (
        isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
        and not copies_this_process(strategy)
        and not strategy.restore_checkpoint_after_setup
    )


def unsupported(strategy: Strategy, has_flag: bool) -> UserError:
    """Return the error for a Trainer's strategy whose runs cannot be resumed.

    Args:
        strategy: The strategy.
        has_flag: Whether the command line has a flag for it.
    """
    name = type(strategy).__name__
    copies = copies_this_process(strategy)
    sharded = "" if copies else SHARDED  # nobody chooses one that copies for a large model
    if has_flag:
        return unsupported_flag(name, sharded)
    return UserError(
        f"Trainer(strategy=...): found {name}{', which copies this process' if copies else ''},"
        " whose runs cannot be resumed; expected one device, or ddp and its variants in a "
        f"program of its own{sharded}"
    )


def unsupported_flag(name: str, sharded: str = SHARDED) -> UserError:
    """Return the error for --trainer.strategy with a strategy whose runs cannot be resumed.

    Args:
        name: What was found.
        sharded: What to do with a large model, if that may be why it was chosen.
    """
    return UserError(
        f"--trainer.strategy: found {name}, whose runs cannot be resumed; expected ddp and its "
        f"variants, or --resume.exact=false: it trains and saves as Lightning does{sharded}"
    )


def settle_mesh(trainer: Trainer) -> None:
    """Say, before the ranks connect, what a strategy for sharded models will refuse or assume.

    Raises:
        UserError: The model shards nothing, or the mesh does not have as many ranks.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return
    if not is_overridden("configure_model", trainer.lightning_module):
        raise UserError(
            f"{class_name(type(trainer.lightning_module))}: found no configure_model(), "
            f"expected one that shards the model, as {type(strategy).__name__} needs it: "
            'fully_shard(self.network, mesh=self.device_mesh["data_parallel"])'
        )
    line = model_parallel.settle_sizes(strategy, trainer.num_devices * trainer.num_nodes)
    if line and trainer.is_global_zero:
        log.info(line)


def prepare(strategy: Strategy, host: str) -> None:
    """Have a strategy for sharded models save and load what a resumed run needs.

    Args:
        strategy: The trainer's.
        host: The name of this host, for messages.

    Raises:
        UserError: The hosts have other sizes of the mesh.
    """
    if isinstance(strategy, ModelParallelStrategy):
        model_parallel.compare_sizes(strategy, host)
        model_parallel.make_resumable(strategy)
