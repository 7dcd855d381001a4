"""The parameters and buffers of one torch.nn.Module; inner state of schedulers.

`named_parameters` and `named_buffers` leave out those that are None, which are filled later, and
the second name of those that have two; and a user's module may override them. On an upgrade: see
`Module.__init__` in torch/nn/modules/module.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LAST_RATES_ATTRIBUTE = "_last_lr"
"""Attribute of a scheduler that has what `get_last_lr` returns; nothing public sets it.

On an upgrade: see torch/optim/lr_scheduler.py.
"""
NOT_SCRIPTS = {"training", "_is_full_backward_hook"}
"""Attributes of a scripted module that each module has."""
WRAPPED = "_checkpoint_wrapped_module", "_orig_mod"
"""The names that wrappers have for their module: the one for activation checkpointing
(torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py), and what torch.compile makes of a
module (`OptimizedModule` in torch/_dynamo/eval_frame.py)."""
COMPILER_MODULES = "torch._dynamo."
"""How the names of the modules begin in which the classes are of what torch.compile makes of code
(torch/_dynamo/eval_frame.py)."""
SHARDING_MODULES = "torch.distributed._composable", "torch.distributed.fsdp._fully_shard."
"""How the names of the modules begin in which the classes are of what `fully_shard` puts into
modules, new ones in each process (torch/distributed/_composable/contract.py). It makes classes of
the modules' own there, too, which are modules."""
ELEMENTWISE_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
"""The module whose hooks of gradients, without a state, treat each number by itself; to import it
takes a part of a second."""
METADATA = "_metadata"
"""Attribute of a state dict that has its modules' versions (module.py, `state_dict`)."""
INNER_SCHEDULERS = "_schedulers"
"""Attribute of a SequentialLR or ChainedScheduler that has its schedulers; nothing public does."""


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, to be read or changed."""
    return _by_name(module._parameters)


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers by name, to be read or changed."""
    return _by_name(module._buffers)


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own modules by name, to be read or changed."""
    return _by_name(module._modules)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    version: int = tensor._version
    return version


def plain_name(name: str) -> str:
    """Return the name of a weight or a module as it is without torch's wrappers.

    Each puts a name of its own between. State dicts have that of torch.compile, and not that of
    activation checkpointing.
    """
    if not any(wrapped in name for wrapped in WRAPPED):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def unwrapped(module: Any) -> Any:
    """Return the module within torch's wrappers; a module without a wrapper as it is."""
    while module is not None:
        members = children(module)
        inner = next((members[name] for name in WRAPPED if name in members), None)
        if inner is None:
            break
        module = inner
    return module


def rename_as_in(model: nn.Module, weights: dict[str, Any]) -> None:
    """Give the tensors of a state dict the names that a model has for them.

    They differ if one of both has modules that torch.compile has wrapped.

    Args:
        model: The model.
        weights: A state dict of it; it is changed in place.
    """
    names = {plain_name(name): name for name in model.state_dict()}
    renamed = {names.get(plain_name(name), name): value for name, value in weights.items()}
    if renamed.keys() == weights.keys():
        return
    weights.clear()
    weights.update(renamed)
    if metadata := getattr(weights, METADATA, None):
        versions = {plain_name(name): version for name, version in metadata.items()}
        for name, _ in model.named_modules():
            if (version := versions.get(plain_name(name))) is not None:
                metadata[name] = version


def communication_hooks(model: Any) -> list[tuple[Any, Any]]:
    """Return the hooks by which DistributedDataParallel reduces gradients, each with its state.

    On an upgrade: see `register_comm_hook` in torch/nn/parallel/distributed.py.

    Args:
        model: The model, as the strategy has it.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return list(model._comm_hooks) if is_ddp else []


def ddp_settings(model: Any) -> dict[str, Any]:
    """Return what can be set of how DistributedDataParallel adds up gradients, by its name.

    Args:
        model: The model, as the strategy has it.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return {}
    return {
        "register_comm_hook() of DDP": len(communication_hooks(model)),
        "require_backward_grad_sync of DDP": model.require_backward_grad_sync,
    }


def orders_buckets(model: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether hooks get other buckets in the first step of a process than later.

    DistributedDataParallel orders its buckets as the gradients of the first step arrive, unless it
    looks for unused parameters. On an upgrade: see `_rebuild_buckets` there.
    """
    return bool(model.static_graph or not model.find_unused_parameters)


def named_parameters(model: nn.Module, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters with their plain names."""
    for name, parameter in model.named_parameters(**options):
        yield plain_name(name), parameter


def named_buffers(model: nn.Module, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's buffers with their plain names."""
    for name, buffer in model.named_buffers(**options):
        yield plain_name(name), buffer


def named_modules(model: nn.Module, **options: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules with their plain names, without the wrappers."""
    for name, module in model.named_modules(**options):
        if unwrapped(module) is module:
            yield plain_name(name), module


def scripted_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a scripted module that its code in C++ reads and sets, by name.

    Parameters, buffers and modules are not among them. A list, a dict and a tuple are copies.
    `setattr` sets one. On an upgrade: see RecursiveScriptModule in torch/jit/_script.py.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return {}
    names = module._concrete_type.get_attributes().keys() - members(module) - NOT_SCRIPTS
    return {name: getattr(module, name) for name in sorted(names)}


def _by_name(members: Any) -> dict[str, Any]:
    """Return members as they are, or those of a scripted or traced module, for reading only.

    Such a module has a view of C++ that cannot be iterated over, and takes and loses no members
    (torch/jit/_script.py, `OrderedDictWrapper`).
    """
    return members if isinstance(members, dict) else dict(members.items())


def is_lazy(tensor: object) -> bool:
    """Return whether a tensor is a lazy module's, and has no values yet."""
    class_ = nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # no stub has it
    return isinstance(tensor, class_)


def is_unreadable(tensor: Tensor) -> bool:
    """Return whether a tensor has no values that could be read.

    It is nested, on the meta device, a lazy module's, or one whose memory FSDP2 has freed: to read
    that ends the process (`free_storage` in torch/distributed/fsdp/_fully_shard/_fsdp_common.py).
    """
    if tensor.is_nested or tensor.is_meta or is_lazy(tensor):
        return True
    if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return False  # others hold the values, as of a DTensor
    try:
        return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a library's class that wraps other tensors
        return False


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out, to be changed."""
    return module._non_persistent_buffers_set


def members(module: nn.Module) -> set[str]:
    """Return the names of a module's own parameters, buffers and modules."""
    return {*parameters(module), *buffers(module), *children(module)}


def hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks for its forward and backward pass of a module and of its parameters.

    A lazy module's own one, which it has until the first batch, is left out
    (torch/nn/modules/lazy.py).
    """
    hooks_by_kind: list[Mapping[int, Any] | None] = [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]
    for parameter in parameters(module).values():
        if parameter is not None:
            hooks_by_kind += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    return [
        hook
        for hooks_of_kind in hooks_by_kind
        for hook in (hooks_of_kind or {}).values()
        if getattr(hook, "__func__", None) is not nn.modules.lazy.LazyModuleMixin._infer_parameters
    ]


def hooks_of_all_modules() -> list[Callable[..., Any]]:
    """Return the hooks that run with every module (`register_module_forward_hook` and its like)."""
    by_kind: list[Mapping[int, Any]] = [
        nn.modules.module._global_forward_hooks,
        nn.modules.module._global_forward_pre_hooks,
        nn.modules.module._global_backward_hooks,
        nn.modules.module._global_backward_pre_hooks,
    ]
    return [hook for hooks_of_kind in by_kind for hook in hooks_of_kind.values()]


def hooks_by_module(model: nn.Module) -> dict[str, list[Callable[..., Any]]]:
    """Return the hooks of a model's modules, with those of their wrappers, by plain names."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for name, module in model.named_modules():
        found.setdefault(plain_name(name), []).extend(hooks(module))
    return found


@contextmanager
def without_save_hooks(model: nn.Module, are_kept: Callable[[Any], bool]) -> Iterator[None]:
    """Let no hook change what a model's `state_dict()` returns while the block lasts.

    On an upgrade: see `_register_state_dict_hook` in torch/nn/modules/module.py.

    Args:
        model: The model.
        are_kept: Returns whether a hook runs even so.
    """
    removed = []
    for module in model.modules():
        hooks = module._state_dict_hooks
        removed.append((hooks, dict(hooks)))
        for number in [number for number, hook in hooks.items() if not are_kept(hook)]:
            del hooks[number]
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()  # they run in the order in which they were registered
            hooks.update(before)


def load_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that may change a state dict before a module loads it.

    A lazy module's own is left out.
    """
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return []
    hooks = module._load_state_dict_pre_hooks.values()
    return [getattr(hook, "hook", hook) for hook in hooks]


def changes_state_dict(model: nn.Module) -> bool:
    """Return whether a module, or one in it, decides itself which weights its state dict has.

    One without weights, such as a metric of torchmetrics', decides nothing of the kind.
    """
    return any(
        (
            type(module).state_dict is not nn.Module.state_dict
            or type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
            or bool(module._state_dict_hooks)
        )
        and next(module.parameters(), None) is not None
        for module in model.modules()
    )


def has_users_state_dict(model: nn.Module) -> bool:
    """Return whether to ask a model for its state dict runs code that is not torch's."""
    return any(
        not (function.__module__ or "").startswith("torch.")
        for module in model.modules()
        for function in (
            type(module).state_dict,
            type(module)._save_to_state_dict,
            *module._state_dict_hooks.values(),
            *module._state_dict_pre_hooks.values(),
        )
    )


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor consists of: of a sparse one, its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks for the steps of an optimizer."""
    kinds = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return [hook for kind in kinds for hook in getattr(optimizer, kind, {}).values()]


def keep_metadata(copied: dict[str, Any], original: Any) -> None:
    """Give a copy of a state dict its modules' versions, if the original has them.

    `load_state_dict` recognises older states by them. `state_dict()` sets them as an attribute
    (module.py, `state_dict`), which a copy of the items alone lacks.
    """
    if isinstance(metadata := getattr(original, "_metadata", None), dict):
        copied._metadata = metadata  # type: ignore[attr-defined]  # an OrderedDict takes any


def inner_schedulers(scheduler: object) -> list[object]:
    """Return the schedulers in a SequentialLR or ChainedScheduler; [] for others."""
    return getattr(scheduler, INNER_SCHEDULERS, [])
