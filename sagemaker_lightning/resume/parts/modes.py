"""Which modules evaluate, and which parameters are frozen."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.resume_point import ResumePoint


class Modes(Part):
    """The names of the modules in eval mode, and of the parameters without gradients."""

    key = "modes"
    what = "which modules are in eval mode, and which parameters are frozen"
    moments = (Moment.TRAINING,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> dict[str, list[str]]:
        """Return the names."""
        model = self.trainer.lightning_module
        return {
            "eval": [name for name, module in model.named_modules() if not module.training],
            "frozen": [
                name for name, parameter in model.named_parameters() if not parameter.requires_grad
            ],
        }

    def restore(self, saved: Any, moment: Moment) -> None:
        """Set the modes of all modules and parameters."""
        evaluating = set(saved["eval"])
        frozen = set(saved["frozen"])
        for name, module in self.trainer.lightning_module.named_modules():
            module.training = name not in evaluating
        for name, parameter in self.trainer.lightning_module.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each name."""
        return {f"{mode} {name or 'model'}": True for mode in saved for name in saved[mode]}

    def differing(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """Return the names that only one of the two has."""
        return [name for name in (*before, *now) if (name in before) is not (name in now)]
