"""compat/torch_modules.py: the hooks of modules and optimizers."""

import torch

from sagemaker_lightning.compat import torch_modules


def test_the_hooks_of_a_module_and_of_its_optimizer():
    module = torch.nn.Linear(1, 1, bias=False)
    module.register_parameter("later", None)
    assert torch_modules.hooks(module) == [] == torch_modules.hooks(torch.nn.LazyLinear(1))
    hooks = [(lambda *_, number=number: None) for number in range(6)]
    module.register_forward_hook(hooks[0])
    module.register_forward_pre_hook(hooks[1])
    module.register_full_backward_hook(hooks[2])
    module.register_full_backward_pre_hook(hooks[3])
    module.weight.register_hook(hooks[4])
    module.weight.register_post_accumulate_grad_hook(hooks[5])
    assert torch_modules.hooks(module) == hooks
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(hooks[0])
    optimizer.register_step_post_hook(hooks[1])
    assert torch_modules.step_hooks(optimizer) == hooks[:2]
    copied = module.state_dict().copy()
    state = type(copied)(copied.items())
    torch_modules.keep_metadata(state, module.state_dict())
    assert state._metadata == module.state_dict()._metadata
    torch_modules.keep_metadata(plain := {}, {})
    assert not hasattr(plain, "_metadata")
