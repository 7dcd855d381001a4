"""Which modules evaluate, and which parameters are frozen."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from sagemaker_lightning.compat.torch_modules import named_modules, named_parameters, parameters
from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint

MODES = "eval", "frozen"
BESIDE = "beside the model"


def _frozen(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters without gradients."""
    return [
        name
        for name, own in parameters(module).items()
        if own is not None and not own.requires_grad
    ]


class Modes(Part):
    """The names of the modules in eval mode, and of the parameters without gradients.

    Modules beside the model, such as a teacher that a callback has, have theirs by path.
    """

    key = "modes"
    what = "which modules are in eval mode, and which parameters are frozen"
    moments = (Moment.TRAINING,)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the names; of modules beside the model, the mode and the frozen ones by path."""
        model = self.trainer.lightning_module
        return {
            BESIDE: {
                path: [module.training, _frozen(module)] for path, module in self._beside().items()
            },
            "eval": [name for name, module in named_modules(model) if not module.training],
            "frozen": [
                name for name, parameter in named_parameters(model) if not parameter.requires_grad
            ],
        }

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the modes of all modules and parameters."""
        evaluating = set(saved["eval"])
        frozen = set(saved["frozen"])
        model = self.trainer.lightning_module
        for name, module in named_modules(model):
            module.training = name not in evaluating
        for name, parameter in named_parameters(model):
            parameter.requires_grad_(name not in frozen)
        for path, module in self._beside().items():
            if path in saved[BESIDE]:
                is_training, frozen_here = saved[BESIDE][path]
                module.training = bool(is_training)
                for name, own in parameters(module).items():
                    if own is not None and own.requires_grad is (name in frozen_here):
                        own.requires_grad_(name not in frozen_here)

    def _beside(self) -> dict[str, nn.Module]:
        """Return the modules that are not of the model, by path."""
        of_model = set(map(id, self.trainer.lightning_module.modules()))
        found = self.run.reached(nn.Module)
        return {path: module for path, module in found if id(module) not in of_model}

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each name."""
        return {f"{mode} {name or 'model'}": True for mode in MODES for name in saved[mode]}

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names that only one of the two has."""
        return [name for name in (*before, *now) if (name in before) is not (name in now)]
