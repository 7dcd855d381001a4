"""Lightning's strategy for sharded models (FSDP2, tensor parallelism), as one that resumes.

ModelParallelStrategy loads all of a checkpoint by itself, after the optimizers are made, from a
folder that pickle reads. Here it loads and saves as Lightning's other strategies do: the states
are those of the module and the optimizers, with DTensors in them, and the weights come before the
optimizers are made. Its own files are single files with the whole model, which any strategy loads.

On an upgrade: compare strategies/model_parallel.py (what `setup` calls, and when the model has
memory) and `Trainer._run` (when checkpoints are restored); in torch, `fully_shard` in
distributed/fsdp/_fully_shard/_fully_shard.py (how it makes the classes of sharded modules).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.strategies.strategy import Strategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from sagemaker_lightning.compat import dtensors
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log

NAMED = 3
"""Number of weights that a line names."""
SIZES = "data_parallel_size", "tensor_parallel_size"
KEEP_GRADIENTS = "set_requires_gradient_sync", "set_requires_all_reduce"
"""The methods of FSDPModule that may have gradients be kept without an exchange."""
SET_SUMS = (
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
)
"""The methods of FSDPModule that change what the ranks' gradients add up to."""
_sums_set: MutableMapping[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""What these methods of a module were called with last."""

Placed = tuple[DeviceMesh, tuple[Placement, ...]]
"""How a weight is shared out."""


class ResumableModelParallel(ModelParallelStrategy):
    """ModelParallelStrategy, whose states are loaded and saved as those of other strategies."""

    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True
    weights_to_load: tuple[Mapping[str, Any], bool] | None = None
    """A state dict, and whether it must have all; None once it is loaded."""
    replaced_weights: Mapping[nn.Parameter, str] = {}
    """The weights in whose places configure_model() has put others, with their names."""
    placed: Mapping[str, Placed] = {}
    """Where the parts of each weight are that `fully_shard` or tensor parallelism has, by name."""
    has_warned_of_writes = False

    optimizer_state = Strategy.optimizer_state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, each rank its parts, with what was written while they were whole."""
        self.reshard()
        return Strategy.lightning_module_state_dict(self)

    def note_places(self) -> None:
        """Note how each weight is shared out, while none is gathered."""
        assert self.lightning_module is not None
        self.placed = {
            name: (weight.device_mesh, weight.placements)
            for name, weight in named_parameters(self.lightning_module)
            if isinstance(weight, DTensor)
        }

    def reshard(self) -> None:
        """Have the model's modules hold their shards, and no whole weights, until they are used.

        After a validation, a module at the root has the whole ones in their place, and so has a
        frozen one after its forward. torch drops what the program writes into those, such as an
        average of other weights (`FSDPParam.to_sharded`). Here it is kept: no checkpoint is to
        change the training. A line says so, as not all that reshards comes through here.
        """
        assert self.lightning_module is not None
        model, placed = self.lightning_module, self.placed
        own = {
            name: own_part(weight, *placed[name]).clone()
            for name, weight in named_parameters(model)
            if name in placed and getattr(weight, "device_mesh", None) is not placed[name][0]
        }
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        written = [
            name
            for name, weight in named_parameters(model)
            if name in own and _write_part(weight, own[name])
        ]
        if written and not self.has_warned_of_writes:
            self.has_warned_of_writes = True
            log.warning(
                f"{first_names(written)}: something was written into the whole of it, which "
                "fully_shard() had gathered for a forward: checkpoints keep it, and other calls of "
                "state_dict() drop it; call reshard() of the module first"
            )

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Surround configure_model(); refuse what it leaves of tied weights.

        Raises:
            UserError: Weights were one, and are several now.
        """
        assert self.lightning_module is not None  # as in all that follows: it is set first
        with (
            super().model_sharded_context(),
            checked_ties(self.lightning_module) as self.replaced_weights,
        ):
            yield

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights as soon as the model has memory."""
        assert self.lightning_module is not None
        weights = checkpoint["state_dict"]
        if any(parameter.is_meta for parameter in self.lightning_module.parameters()):
            self.weights_to_load = weights, strict
        else:
            load_whole(self.lightning_module, weights, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states; of whole tensors, each rank takes its own parts."""
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        states = [_own_state(optimizer, state) for optimizer, state in pairs]
        Strategy.load_optimizer_state_dict(self, {"optimizer_states": states})

    def model_to_device(self) -> None:
        """Move the model to its device, and load the weights that wait for that."""
        assert self.lightning_module is not None
        super().model_to_device()
        settle_sharded_classes(self.lightning_module)
        self.note_places()
        if self.weights_to_load is not None:
            weights, strict = self.weights_to_load
            self.weights_to_load = None
            load_whole(self.lightning_module, weights, strict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write one file with the whole model, as other strategies do; all ranks call it."""
        left_out = getattr(self.checkpoint_io, "left_out", ())
        written = {name: value for name, value in checkpoint.items() if name not in left_out}
        whole = dtensors.whole(written, keeps=self.is_global_zero)
        Strategy.save_checkpoint(self, whole, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a file with the whole model.

        Raises:
            UserError: It is a folder of Lightning's sharded format.
        """
        if "://" not in str(checkpoint_path) and Path(checkpoint_path).is_dir():
            raise UserError(
                f"ckpt_path={checkpoint_path}: found a folder, as ModelParallelStrategy writes it "
                "without ExactResume; reading it may run code; expected a file with the whole "
                "model (save_distributed_checkpoint=False writes one)"
            )
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only=weights_only)


def make_resumable(strategy: ModelParallelStrategy) -> None:
    """Have a strategy load and save its states as other strategies do."""
    class_ = type(strategy)
    if not issubclass(class_, ResumableModelParallel):
        strategy.__class__ = type(class_.__name__, (ResumableModelParallel, class_), {})
    plugin: Any = strategy.precision_plugin
    for function in (clip_grad_by_norm, clip_grad_by_value):
        name = function.__name__
        if getattr(type(plugin), name) is getattr(Precision, name):
            setattr(plugin, name, partial(function, plugin))


def clip_grad_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    """Scale an optimizer's gradients down to a norm; all ranks call it.

    With tensor parallelism, some weights are on one dimension of the mesh and others on both, and
    torch's own function refuses gradients of several meshes.

    Args:
        plugin: The precision of the training.
        optimizer: The optimizer.
        clip_val: The norm of all its gradients, at most.
    """
    of_meshes = _by_mesh(plugin, optimizer)
    norms = [nn.utils.get_total_norm([each.grad for each in group]) for group in of_meshes]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(whole) if len(norms) != 1 else norms[0]
    for group in of_meshes:
        nn.utils.clip_grads_with_norm_(group, clip_val, total)


def clip_grad_by_value(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    """Bring each value of an optimizer's gradients to one of at most `clip_val`."""
    for group in _by_mesh(plugin, optimizer):
        nn.utils.clip_grad_value_(group, clip_val)


def _by_mesh(plugin: Precision, optimizer: Optimizer) -> list[list[Any]]:
    """Return the parameters that have a gradient, those of each mesh for themselves."""
    groups: dict[DeviceMesh | None, list[Any]] = {}
    for parameter in plugin.main_params(optimizer):
        if isinstance(parameter.grad, Tensor):
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def compare_sizes(strategy: ModelParallelStrategy, host: str) -> None:
    """Compare the ranks' sizes, as ranks with other meshes would wait for each other for ever.

    Args:
        strategy: The strategy; its ranks are connected. All ranks call this.
        host: The name of this host.

    Raises:
        UserError: They have different ones.
    """
    answers: list[Any] = [None] * strategy.world_size
    sizes: list[Any] = [strategy._data_parallel_size, strategy._tensor_parallel_size]
    distributed.all_gather_object(answers, (host, sizes))
    first = answers[0]
    if other := next((each for each in answers if each[1] != first[1]), None):
        found = " and ".join(
            f"{' and '.join(f'{name}={size}' for name, size in zip(SIZES, sizes, strict=True))} "
            f"on host {host}"
            for host, sizes in (first, other)
        )
        raise UserError(
            f"ModelParallelStrategy: found {found}, expected the same sizes on all hosts; start "
            "them with the same"
        )


def _own_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict, shared out as its parameters are.

    If `configure_optimizers` returns None, Lightning has one without parameters or a state.
    """
    if not state:
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own = dict(state["state"])
    for key, parameter in zip(keys, parameters, strict=False):
        if isinstance(values := own.get(key), dict):
            own[key] = {
                name: dtensors.placed_like(value, parameter) for name, value in values.items()
            }
    return {**state, "state": own}


def load_whole(model: LightningModule, weights: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict; of whole tensors, each rank takes its own parts."""
    present = model.state_dict()
    own = {name: dtensors.placed_like(value, present.get(name)) for name, value in weights.items()}
    model.load_state_dict(own, strict=strict)


def load_best(trainer: Trainer, weights: Mapping[str, Any] | None) -> None:
    """Load whole weights that only rank 0 has, one tensor after another; all ranks call it.

    Args:
        trainer: Lightning's trainer.
        weights: The state dict, on rank 0; None if there is none, and on other ranks.
    """
    model = trainer.lightning_module
    broadcast = trainer.strategy.broadcast
    names = broadcast(None if weights is None else list(weights))
    if names is None:
        return
    present = model.state_dict()
    own = {
        name: dtensors.placed_like(
            broadcast(None if weights is None else weights[name]), present.get(name)
        )
        for name in names
    }
    model.load_state_dict(own, strict=model.strict_loading)


def settle_sharded_classes(model: LightningModule) -> None:
    """Give the classes that `fully_shard` has made the names of the classes that they stand for.

    It replaces the class of each module by one of torch's, which would hide whose class it is.
    Modules of these classes refuse to keep gradients that are not exchanged, which are neither
    those of the weights' parts nor anywhere where a checkpoint could find them. They note what was
    set of how gradients add up.
    """
    for module in model.modules():
        class_ = type(module)
        if isinstance(module, FSDPModule) and FSDPModule in class_.__bases__:
            base = next(base for base in class_.__bases__ if base is not FSDPModule)
            class_.__module__ = base.__module__
            class_.__qualname__ = base.__qualname__
            class_.__name__ = base.__name__
            for name in KEEP_GRADIENTS:
                setattr(class_, name, _refusing_false(name))
            for name in SET_SUMS:
                if hasattr(FSDPModule, name):  # newer than the oldest torch, some of them
                    setattr(class_, name, _noting(name))


def _refusing_false(name: str) -> Callable[..., None]:
    """Return a method of FSDPModule that refuses False."""
    method = getattr(FSDPModule, name)

    def refusing(module: FSDPModule, value: bool, **options: Any) -> None:
        if not value:
            raise UserError(
                f"{name}(False): found gradients that the ranks do not exchange, which cannot be "
                "saved; leave it out: with accumulate_grad_batches, or without zero_grad(), "
                "gradients add up all the same"
            )
        method(module, value, **options)

    return refusing


def _noting(name: str) -> Callable[..., None]:
    """Return a method of FSDPModule whose newest arguments `fsdp_settings` returns."""
    method = getattr(FSDPModule, name)

    def noting(module: nn.Module, *values: Any, **options: Any) -> None:
        method(module, *values, **options)
        _sums_set.setdefault(module, {})[name] = (values, options)

    return noting


def fsdp_settings(model: LightningModule) -> dict[str, Any]:
    """Return what was set of how `fully_shard` adds up gradients, by its method's name."""
    return {
        f"{name}.{method}()": values
        for name, module in model.named_modules()
        for method, values in _sums_set.get(module, {}).items()
    }


@contextmanager
def checked_ties(model: LightningModule) -> Iterator[Mapping[nn.Parameter, str]]:
    """Refuse that weights which several modules have in common are shared out to each by itself.

    `fully_shard` and `parallelize_module` put weights of their own into the modules that they get,
    and know of no others.

    Yield what has, in the end, the weights whose places others have taken, with their names. It
    keeps none of them alive.

    Raises:
        UserError: They are several weights now.
    """
    # A weight is known by a number: it must not live longer because of this.
    numbers = WeakIdKeyDictionary()
    number_of: dict[tuple[nn.Module, str], int] = {}
    unused = itertools.count()

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # What shares weights out replaces them; the user's own code may have untied them.
        if parameter is not None and not isinstance(parameter, DTensor):
            number_of[module, name] = numbers.setdefault(parameter, next(unused))

    def note_all() -> None:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                note(module, name, parameter)

    note_all()
    hook = register_module_parameter_registration_hook(note)
    replaced = WeakIdKeyDictionary()
    try:
        yield replaced
    finally:
        hook.remove()
    first: dict[int, tuple[str, nn.Parameter]] = {}
    whole = {number: parameter for parameter, number in numbers.items()}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            number = number_of.get((module, name.rpartition(".")[2]))
            if number is None:
                continue
            # What is in its place still is left out: torch swaps no tensor that is kept weakly.
            if whole.get(number, parameter) is not parameter:
                replaced.setdefault(whole[number], name)
            first_name, other = first.setdefault(number, (name, parameter))
            if other is not parameter and (other.requires_grad or parameter.requires_grad):
                raise UserError(
                    f"configure_model(): found tied weights that are split ({first_name} and "
                    f"{name}), each of which would be trained by itself; leave both modules to the "
                    "fully_shard() of the whole network, or give it both: fully_shard([a, b])"
                )


def reshard(trainer: Trainer) -> None:
    """Have a sharded model's modules hold their shards, and no whole weights."""
    if isinstance(strategy := trainer.strategy, ResumableModelParallel):
        strategy.reshard()


def first_names(names: Sequence[str]) -> str:
    """Return the first few names of weights as one text."""
    return ", ".join(names[:NAMED])


def own_part(weight: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a weight that `fully_shard` has gathered.

    Args:
        weight: What it has gathered: the whole weight, or a DTensor of tensor parallelism.
        mesh: The mesh of the weight's parts; the dimensions that were gathered come first.
        placements: How the weight is shared out over it.
    """
    gathered = mesh.ndim - (weight.device_mesh.ndim if isinstance(weight, DTensor) else 0)
    part = dtensors.local_part(weight).detach()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # this rank has a part
    for dimension, placement in enumerate(placements[:gathered]):
        shared_out = getattr(placement, "dim", None)  # None for copies
        if shared_out is not None:
            parts = part.chunk(mesh.size(dimension), shared_out)
            rank = coordinate[dimension]
            part = parts[rank] if rank < len(parts) else part.narrow(shared_out, 0, 0)
    return part


@torch.no_grad()
def _write_part(weight: nn.Parameter, part: Tensor) -> bool:
    """Write this rank's part of a weight; return whether it had other values.

    Whole weights may be of another precision.
    """
    present = dtensors.local_part(weight)
    if torch.allclose(present.to(part.dtype), part, rtol=0, atol=0, equal_nan=True):
        return False
    present.copy_(part)
    return True


def mesh_of(trainer: Trainer) -> DeviceMesh | None:
    """Return the mesh of a sharded model's ranks; None with other strategies."""
    strategy = getattr(trainer, "strategy", None)
    return strategy.device_mesh if isinstance(strategy, ModelParallelStrategy) else None


def mesh_sizes(trainer: Trainer) -> list[int]:
    """Return the sizes of the mesh of a sharded model's ranks; [] with other strategies."""
    mesh = mesh_of(trainer)
    return [] if mesh is None else list(mesh.shape)


def settle_sizes(strategy: ModelParallelStrategy, world_size: int) -> str:
    """Replace sizes that are "auto"; return a line to say about it, "" for none.

    Lightning's "auto" is the number of nodes for data parallelism, and of a node's devices for
    tensor parallelism, whatever the other size is.

    Args:
        strategy: The strategy; its processes need not know each other yet.
        world_size: Number of ranks.

    Raises:
        UserError: The sizes do not make up the number of ranks.
    """
    sizes: list[Any] = [strategy._data_parallel_size, strategy._tensor_parallel_size]
    names = dict(zip(SIZES, sizes, strict=True))
    for name, size in names.items():
        if size != "auto" and (type(size) is not int or size < 1):
            raise UserError(
                f"ModelParallelStrategy({name}=...): found {size!r}, expected a whole number above "
                'zero or "auto"'
            )
    if sizes == ["auto", "auto"]:
        sizes = [strategy.num_nodes, world_size // strategy.num_nodes]
        line = (
            f"ModelParallelStrategy: data_parallel_size is {sizes[0]}, the number of nodes, and "
            f"tensor_parallel_size {sizes[1]}, the devices of each: the ranks of a node train on "
            f"the same samples; for FSDP2 alone, give data_parallel_size={world_size} and "
            "tensor_parallel_size=1"
        )
    else:
        line = ""
        known = next((size for size in reversed(sizes) if size != "auto"), 1)
        sizes = [world_size // known if size == "auto" else size for size in sizes]
    if sizes[0] * sizes[1] != world_size:
        raise UserError(
            f"ModelParallelStrategy: found data_parallel_size={names[SIZES[0]]} and "
            f"tensor_parallel_size={names[SIZES[1]]}, expected two numbers whose product is "
            f"{world_size}, the number of ranks"
        )
    strategy._data_parallel_size, strategy._tensor_parallel_size = sizes
    return line if world_size > 1 else ""


def data_rank(trainer: Trainer) -> int:
    """Return which share of each batch a rank trains on.

    Ranks that share tensors (tensor parallelism) train on the same samples.
    """
    mesh = mesh_of(trainer)
    return trainer.global_rank if mesh is None else mesh["data_parallel"].get_local_rank()


def data_ranks(trainer: Trainer) -> int:
    """Return how many shares of each batch there are."""
    mesh = mesh_of(trainer)
    return trainer.world_size if mesh is None else mesh["data_parallel"].size()
