"""What modules have is read of scripted and traced ones, too."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from sagemaker_lightning.compat import torch_modules


class Halved(nn.Module):
    """A module with a member of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shift


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (checkpoint_wrapper, checkpoint_wrapper),
        (checkpoint_wrapper, torch.compile),
        (torch.compile, checkpoint_wrapper),
    ],
)
def test_names_are_those_without_wrappers(inner, outer):
    def hook(*_):
        return None

    plain = nn.Sequential(Halved(), nn.Sequential(nn.Linear(1, 1)))
    wrapped = nn.Sequential(outer(Halved()), plain[1])
    wrapped[1][0] = outer(inner(plain[1][0]))
    wrapped[0].register_forward_hook(hook)
    for names in (
        torch_modules.named_parameters,
        torch_modules.named_buffers,
        torch_modules.named_modules,
    ):
        assert [name for name, _ in names(wrapped)] == [name for name, _ in names(plain)]
    assert (
        torch_modules.unwrapped(wrapped[1][0]) is dict(torch_modules.named_modules(wrapped))["1.0"]
    )
    assert torch_modules.hooks_by_module(wrapped)["0"] == [hook]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_get_the_names_that_a_model_has_for_them(is_compiled):
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Sequential(), nn.Linear(1, 1))
    other = nn.Sequential(torch.compile(nn.BatchNorm1d(1)), nn.Sequential(), nn.Linear(1, 1))
    if is_compiled:
        model, other = other, model
    weights = other.state_dict()
    weights["of no module"] = 5
    torch_modules.rename_as_in(model, weights)
    assert weights.pop("of no module") == 5
    assert list(weights) == list(model.state_dict())
    name = next(name for name, module in model.named_modules() if type(module) is nn.BatchNorm1d)
    assert weights._metadata[name] == model.state_dict()._metadata[name] == {"version": 2}
    model.load_state_dict(weights)


@pytest.mark.parametrize(
    "compiled",
    [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 1))],
    ids=["scripted", "traced"],
)
def test_the_members_of_a_module_in_torchscript(compiled):
    module = compiled(Halved())
    assert list(torch_modules.parameters(module)) == ["scale"]
    assert list(torch_modules.buffers(module)) == ["shift"]
    assert list(torch_modules.children(module)) == ["layer"]
    assert torch_modules.members(module) == {"scale", "shift", "layer"}


def test_hooks_that_were_left_out_run_again_in_their_order():
    model = nn.Linear(1, 1)
    called = []
    for name in "abc":
        model.register_state_dict_post_hook(lambda *_, name=name: called.append(name))
    hooks = list(model._state_dict_hooks.values())
    with torch_modules.without_save_hooks(model, hooks[1:2].__contains__):
        model.state_dict()
    model.state_dict()
    assert called == ["b", "a", "b", "c"]


@pytest.fixture
def group() -> Iterator[None]:
    """Be the only rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("looks_for_unused", [False, True])
def test_hooks_get_other_buckets_in_the_first_step_unless_ddp_looks_for_unused(looks_for_unused):
    """What is measured here is torch's, and the reason for a line."""

    def hook(state, bucket):
        shapes.append([tuple(each.shape) for each in bucket.parameters()])
        return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(values)

    def values(future):
        return future.value()[0]

    shapes: list[list[tuple[int, ...]]] = []
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model = DistributedDataParallel(layers, find_unused_parameters=looks_for_unused)
    assert torch_modules.communication_hooks(model) == []
    assert torch_modules.communication_hooks(layers) == []
    model.register_comm_hook(shapes, hook)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    steps = [shapes[at : at + len(shapes) // 3] for at in range(0, len(shapes), len(shapes) // 3)]
    assert steps[1] == steps[2] and (steps[0] == steps[1]) is looks_for_unused
    assert torch_modules.communication_hooks(model) == [(hook, shapes)]
    assert torch_modules.orders_buckets(model) is not looks_for_unused
