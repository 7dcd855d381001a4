"""What modules have is read of scripted and traced ones, too."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


def test_names_are_those_without_activation_checkpointing():
    def hook(*_):
        return None

    plain = nn.Sequential(Halved(), nn.Sequential(nn.Linear(1, 1)))
    wrapped = nn.Sequential(checkpoint_wrapper(Halved()), plain[1])
    wrapped[1][0] = checkpoint_wrapper(checkpoint_wrapper(plain[1][0]))
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
