"""What has to be made again before a state can be given back: late buffers, a search's result, what a hook has made."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch import Tensor, nn
from torch.nn.utils import prune

from sagemaker_lightning.compat import lightning_callbacks
from sagemaker_lightning.compat.torch_modules import buffers, parameters
from sagemaker_lightning.resume.epoch_state import has_values
from sagemaker_lightning.resume.user_state import roots
from sagemaker_lightning.state import object_graph
from sagemaker_lightning.state.encoding import decoded, encoded

NAMES = "lr", "learning_rate"


def adapt(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the model the buffers that came to be, or another shape, while it was trained, to load their values into."""
    present = model.state_dict()
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        now = present.get(name)
        if not isinstance(value, Tensor) or (now is not None and (not has_values(now) or now.shape == value.shape)):
            continue
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue
        if last in buffers(owner):
            buffers(owner)[last] = value.to(getattr(now, "device", "cpu"), copy=True)
        elif (parameter := parameters(owner).get(last)) is not None:
            parameter.data = value.to(parameter.device, copy=True)
        elif now is None and not hasattr(owner, last):
            owner.register_buffer(last, value.clone())


def to_come(trainer: Trainer) -> set[str]:
    """Return the names that hooks before training may give to parts of the model."""
    owners = [one for one in (trainer.lightning_module, *trainer.callbacks) if not object_graph.library(type(one))]
    hooks = [getattr(type(one), name) for one in owners for name in ("on_fit_start", "on_train_start")]
    return {name for hook in hooks for name in getattr(getattr(hook, "__code__", None), "co_names", ())}


def take_out(state: dict[str, Any], model: nn.Module, names: set[str]) -> dict[str, Any]:
    """Take what is of the parts `names` out of a state that a model without them is to load, and return it.

    So it does with what torch.nn.utils.prune makes of a weight; `prune_again` does the same, once the optimizers have
    their parameters.
    """
    present = model.state_dict()
    later = [name for name in state if name not in present and name.partition(".")[0] in names]
    pruned = [name.removesuffix("_mask") for name in _masks(state) if name not in present]
    taken = {name: state.pop(name) for name in (*later, *(f"{one}_mask" for one in pruned))}
    for name in pruned:
        taken[f"{name}_orig"] = state[name] = state.pop(f"{name}_orig")
    return taken


def prune_again(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Have the weights pruned of which `state` has the masks."""
    present = model.state_dict()
    for name in _masks(state):
        if name not in present:
            path, _, last = name.removesuffix("_mask").rpartition(".")
            owner = model.get_submodule(path)
            prune.custom_from_mask(owner, last, state[name].to(getattr(owner, last).device))


def _masks(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the masks of pruned weights."""
    return [name for name in state if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in state]


def tickets(trainer: Trainer, shared: Collection[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return which of the first weights that ModelPruning keeps, and resets to, are by now those that are trained.

    Lightning 2.6 does not copy them, where both are on one device. Those that are `shared` are made so again.
    """
    found = []
    for number, callback in enumerate(trainer.callbacks):
        for place, layer, kept, name in lightning_callbacks.pruned(callback):
            trained, first = getattr(layer, f"{name}_orig", None), getattr(kept, name)
            if isinstance(trained, Tensor) and (number, place) in shared:
                first.data = trained.data
            if isinstance(trained, Tensor) and first.data_ptr() == trained.data_ptr():
                found.append((number, place))
    return found


def searched(trainer: Trainer) -> dict[str, Any]:
    """Return what was found by a search before training."""
    found = {}
    for callback in trainer.callbacks:
        if lightning_callbacks.searches(callback):
            given = lightning_callbacks.searched_attribute(callback)
            for name in [given] if given else NAMES:
                if lightning_hasattr(trainer.lightning_module, name):
                    found[name] = encoded(lightning_getattr(trainer.lightning_module, name))
                    break
    return found


def settle_searches(trainer: Trainer, found: Mapping[str, Any]) -> None:
    """Have nothing searched for again."""
    for callback in trainer.callbacks:
        if lightning_callbacks.searches(callback):
            callback.on_fit_start = lambda *_: None
    for name, value in found.items():
        lightning_setattr(trainer.lightning_module, name, decoded(value))


def make_again(trainer: Trainer, lacking: list[tuple[str, str]]) -> None:
    """Run on_train_epoch_start of those whose hook makes what is lacking: (path of an object, attribute)."""
    owners = roots(trainer)
    for name, owner in owners.items():
        if not isinstance(owner, (Callback, LightningModule)):
            continue
        wanted = {attribute for path, attribute in lacking if path == name}
        hook = type(owner).on_train_epoch_start
        if wanted & set(hook.__code__.co_names):
            if isinstance(owner, Callback):
                owner.on_train_epoch_start(trainer, trainer.lightning_module)
            else:
                owner.on_train_epoch_start()


def limits(trainer: Trainer) -> list[int]:
    """Return how long is to be trained, which a callback may change: epochs and steps; -1 for no limit."""
    epochs = trainer.fit_loop.max_epochs
    return [-1 if epochs is None else epochs, trainer.fit_loop.epoch_loop.max_steps]


def add_to_limits(trainer: Trainer, added: Sequence[int]) -> None:
    """Train so many epochs and steps more, or fewer, as a callback had decided."""
    loop = trainer.fit_loop
    if added[0]:
        loop.max_epochs += added[0]
    if added[1]:
        loop.epoch_loop.max_steps += added[1]


def groups(trainer: Trainer) -> list[list[list[str]]]:
    """Return, for each optimizer with several groups of parameters, the names of each group's parameters."""
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    return [
        [[names.get(id(one), "") for one in group["params"]] for group in optimizer.param_groups]
        if len(optimizer.param_groups) > 1
        else []
        for optimizer in trainer.optimizers
    ]


def add_groups(trainer: Trainer, saved: list[list[list[str]]]) -> None:
    """Add the groups of parameters that a hook had added to an optimizer, so that their state can be loaded."""
    parameters = dict(trainer.lightning_module.named_parameters())
    for optimizer, known in zip(trainer.optimizers, saved, strict=False):
        for group in known[len(optimizer.param_groups) :]:
            if parameters.keys() >= set(group):
                optimizer.add_param_group({"params": [parameters[name] for name in group]})


def go_on_averaging(trainer: Trainer, groups: list[list[dict]], kind: str) -> bool:
    """Have StochasticWeightAveraging go on; it makes its schedule in a hook that a run within an epoch has behind it.

    A new schedule sets learning rates, which `groups`, as saved, bring back.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        model = trainer.lightning_module
        lightning_callbacks.accumulate_as(callback, trainer.accumulate_grad_batches)
        if not lightning_callbacks.averages(callback):
            continue
        if kind != "epoch" and trainer.current_epoch == callback.swa_end + 1:  # it only gathers batch norm's statistics
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            callback.on_train_epoch_start(trainer, model)
            model.load_state_dict(weights)
        elif callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            with lightning_callbacks.average_counts(callback, trainer.current_epoch):
                callback.on_train_epoch_start(trainer, model)
            restore_groups(trainer, groups)
    return True


def restore_groups(trainer: Trainer, groups: list[list[dict]]) -> None:
    """Give the optimizers' groups of parameters their learning rates and the like back."""
    for optimizer, saved in zip(trainer.optimizers, groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=False):
            group.update(values)
