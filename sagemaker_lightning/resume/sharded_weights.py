"""What may be wrong with how a model is shared out, which trains on without a word.

Each is looked for once, when training begins.
"""

from collections.abc import Iterator

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sagemaker_lightning.compat.model_parallel import mesh_of
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log

NAMED = 3
"""Number of weights that a line names."""


def check_meshes(trainer: Trainer) -> None:
    """Look whether somebody adds up the gradients of all ranks; all ranks call it.

    A weight on a mesh that the program has made may be meant: groups of ranks may train a model
    each. Such a run resumes, and is warned of.

    Args:
        trainer: Lightning's trainer; its model is sharded, or not.

    Raises:
        UserError: Nobody does for a weight that nothing shards, or only Lightning's dimension for
            tensor parallelism, whose ranks train on the same samples.
    """
    mesh = mesh_of(trainer)
    if mesh is None:
        return
    apart = list(_trained_apart(trainer.lightning_module, mesh))
    if whole := [name for name, parameter in apart if not isinstance(parameter, DTensor)]:
        raise UserError(
            f"configure_model(): found weights that nothing shards ({_first(whole)}), which each "
            "rank would train for itself; call fully_shard() on a module that has them, too, such "
            "as the whole network"
        )
    of_same_samples = set(_ranks(mesh["tensor_parallel"]))
    if wrong := [name for name, each in apart if of_same_samples.issuperset(_ranks_of(each))]:
        raise UserError(
            f"configure_model(): found weights ({_first(wrong)}) that are shared out over "
            'device_mesh["tensor_parallel"] alone, whose ranks train on the same samples: nobody '
            f"would add up the gradients of the {mesh['data_parallel'].size()} shares of the "
            'samples; call fully_shard(..., mesh=self.device_mesh["data_parallel"]), after '
            "parallelize_module() where there is tensor parallelism"
        )
    if not trainer.is_global_zero:
        return
    if apart:
        ranks = ", ".join(map(str, _ranks_of(apart[0][1])))
        log.warning(
            f"configure_model(): {_first([name for name, _ in apart])}: the ranks {ranks} alone "
            f"add up their gradients, of {mesh.size()} ranks that train on different samples: "
            "each such group trains a model of its own, and what is saved for use is rank 0's; if "
            'that is not meant, call fully_shard() with self.device_mesh["data_parallel"], or with '
            "both dimensions of a mesh of your own"
        )
    if same := list(_repeated(trainer.lightning_module, mesh)):
        log.warning(
            f"configure_model(): {_first(same)}: fully_shard() over "
            f'device_mesh["tensor_parallel"], whose {mesh["tensor_parallel"].size()} ranks train '
            "on the same samples: each does all of the work, unless your code divides it, as "
            "context parallelism does; else give the strategy "
            f"data_parallel_size={mesh.size()} and tensor_parallel_size=1"
        )


def check_optimizers(trainer: Trainer) -> None:
    """Look whether the optimizers have the model's weights, and not those that they were.

    Other tensors may be meant: an optimizer may train some of the program's own.

    Args:
        trainer: Lightning's trainer, with optimizers; its model is sharded, or not.

    Raises:
        UserError: An optimizer was made before the model was shared out.
    """
    replaced = getattr(trainer.strategy, "replaced_weights", {})
    for optimizer in trainer.optimizers:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        if names := [replaced[weight] for weight in weights if weight in replaced]:
            raise UserError(
                f"configure_optimizers(): found {type(optimizer).__name__}, which was made "
                "before fully_shard() or parallelize_module() has put others in the places of its "
                f"weights ({_first(names)}): it would train none that the model has; make it in "
                "configure_optimizers()"
            )


def _trained_apart(model: LightningModule, mesh: DeviceMesh) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained weights, with their names, that not all shares of the samples train."""
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            has_rank = torch.isin(mesh.mesh, torch.tensor(_ranks_of(parameter)))
            if not has_rank.any(dim=1).all():
                yield name, parameter


def _repeated(model: LightningModule, mesh: DeviceMesh) -> Iterator[str]:
    """Yield the names of weights that fully_shard() has put on ranks of the same samples alone."""
    if mesh["data_parallel"].size() > 1 or mesh.size() == 1:
        return
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    within = {id(parameter) for module in sharded for parameter in module.parameters()}
    for name, parameter in named_parameters(model):
        # On weights of tensor parallelism, fully_shard() adds a dimension.
        is_flat = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
        if id(parameter) in within and is_flat and len(_ranks_of(parameter)) > 1:
            yield name


def _ranks_of(parameter: nn.Parameter) -> list[int]:
    """Return the ranks that have this rank's parts of a weight in common; itself alone for none."""
    if isinstance(parameter, DTensor):
        return _ranks(parameter.device_mesh)
    return [torch.distributed.get_rank()]


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten()]


def _first(names: list[str]) -> str:
    return ", ".join(names[:NAMED])
