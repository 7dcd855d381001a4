"""What may be wrong with how a model is shared out, which trains on without a word.

Each is looked for once, when training begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sagemaker_lightning.compat import dtensors
from sagemaker_lightning.compat.model_parallel import first_names, mesh_of
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.snapshot import sums_of_bits


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
            f"configure_model(): found weights that nothing shards ({first_names(whole)}), which "
            "each rank would train for itself; call fully_shard() on a module that has them, too, "
            "such as the whole network"
        )
    of_same_samples = set(_ranks(mesh["tensor_parallel"]))
    if wrong := [name for name, each in apart if of_same_samples.issuperset(_ranks_of(each))]:
        raise UserError(
            f"configure_model(): found weights ({first_names(wrong)}) that are shared out over "
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
            f"configure_model(): {first_names([name for name, _ in apart])}: the ranks {ranks} "
            f"alone add up their gradients, of {mesh.size()} ranks that train on different "
            "samples: each such group trains a model of its own, and what is saved for use is rank "
            "0's; if that is not meant, call fully_shard() with "
            'self.device_mesh["data_parallel"], or with '
            "both dimensions of a mesh of your own"
        )
    if same := list(_repeated(trainer.lightning_module, mesh)):
        log.warning(
            f"configure_model(): {first_names(same)}: fully_shard() over "
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
                f"weights ({first_names(names)}): it would train none that the model has; make it "
                "in configure_optimizers()"
            )


def check_replicas(trainer: Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Compare what several ranks have of the same weights; all ranks call it.

    DDP gives all ranks those of rank 0. `fully_shard` exchanges gradients only, and what nothing
    shards is as each rank's draws have made it.

    Args:
        trainer: Lightning's trainer; its model is sharded, or not.
        gather: Returns the values of all ranks, by rank.

    Raises:
        UserError: Two ranks have other values. All ranks raise it.
    """
    mesh = mesh_of(trainer)
    if mesh is None:
        return
    compare_parts(gather(parts_of(trainer.lightning_module)), mesh.mesh.tolist())


Part = tuple[list[int], Any, int]
"""Which ranks have a weight in common, which part of it one has, and a sum of the part's bits."""


def parts_of(model: LightningModule) -> dict[str, Part]:
    """Return which part of each weight this rank has, by name."""
    weights = {name: parameter.detach() for name, parameter in named_parameters(model)}
    sums = sums_of_bits({name: dtensors.local_part(each) for name, each in weights.items()})
    parts: dict[str, Part] = {}
    for name, number in sums.items():
        weight = weights[name]
        if isinstance(weight, DTensor):
            parts[name] = _ranks(weight.device_mesh), dtensors.chunk_of(weight), number
        else:
            parts[name] = [], None, number
    return parts


def compare_parts(answers: Sequence[Mapping[str, Part]], shares: Sequence[Sequence[int]]) -> None:
    """Compare what ranks have of the same parts of weights.

    Ranks of the same samples may have weights of their own, such as experts, which only the ranks
    of other samples have in common with them.

    Args:
        answers: What `parts_of` has returned on each rank, by rank.
        shares: The ranks that train on each share of the samples.

    Raises:
        UserError: A weight has other values on two of the ranks that have it in common.
    """
    remedy = (
        "give all ranks one seed before the model is made, such as ExactResume(seed=...), or have "
        "them load the same weights"
    )
    if found := _differing(answers, lambda ranks: ranks):
        raise UserError(
            f"configure_model(): found {found}, which have the same part of it and would train it "
            f"apart; expected the same values on both: {remedy}"
        )
    share_of = {rank: share for share, ranks in enumerate(shares) for rank in ranks}
    found = _differing(answers, lambda ranks: sorted({share_of[rank] for rank in ranks}))
    if found and torch.distributed.get_rank() == 0:
        log.warning(
            f"configure_model(): {found}, which train on the same samples: if each is not meant to "
            f"have weights of its own, {remedy}"
        )


def _differing(
    answers: Sequence[Mapping[str, Part]], place: Callable[[list[int]], list[int]]
) -> str:
    """Return of which weight two ranks have other values of a part, and which ranks; "" for none.

    Args:
        answers: What `parts_of` has returned on each rank, by rank.
        place: Returns what two ranks have alike that are compared, given the ranks of a weight.
    """
    known: dict[tuple[str, str], tuple[int, int]] = {}
    for rank, parts in enumerate(answers):
        for name, (ranks, chunk, number) in parts.items():
            key = name, repr((place(ranks), chunk))
            other, first = known.setdefault(key, (rank, number))
            if number != first:
                return f"other values of {name} on rank {rank} than on rank {other}"
    return ""


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
