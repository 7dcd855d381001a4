"""What modules have is read of scripted and traced ones, too."""

import pytest
import torch
from torch import nn

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
