"""The optimizers' parameter groups: hooks may have added some, or made the optimizers anew."""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class ParameterGroups(Part):
    """The names of the parameters in each optimizer's parameter groups."""

    key = "parameter_groups"
    what = "which parameters each optimizer trains"
    place = Place.RUN
    moments = (Moment.OPTIMIZERS,)

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[list[list[str]]]:
        """Return the names, by optimizer and group; "" for what the model does not have."""
        model = self.trainer.lightning_module
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        return [
            [
                [names.get(id(member), "") for member in group["params"]]
                for group in optimizer.param_groups
            ]
            for optimizer in self.trainer.optimizers
        ]

    def restore(self, saved: Any, moment: Moment) -> None:
        """Give the optimizers these groups, so that their states can be loaded.

        A hook may have added groups, or made the optimizers anew with what it has unfrozen.
        """
        parameters = dict(named_parameters(self.trainer.lightning_module))
        for optimizer, saved_groups in zip(self.trainer.optimizers, saved, strict=False):
            for number, names in enumerate(saved_groups):
                if not parameters.keys() >= set(names):
                    continue
                members = [parameters[name] for name in names]
                if number >= len(optimizer.param_groups):
                    optimizer.add_param_group({"params": members})
                else:
                    optimizer.param_groups[number]["params"][:] = members  # LBFGS keeps this list
