"""The optimizers' parameter groups: hooks may have added some, or made the optimizers again."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from torch import nn

from sagemaker_lightning.compat.model_parallel import mesh_of
from sagemaker_lightning.compat.torch_modules import named_parameters
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts import pruned_weights
from sagemaker_lightning.resume.parts.part import Moment, Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class ParameterGroups(Part):
    """The names of the parameters in each optimizer's parameter groups."""

    key = "parameter_groups"
    what = "which parameters each optimizer trains"
    place = Place.RUN
    moments = (Moment.OPTIMIZERS,)
    made: Sequence[Sequence[int]] = ()
    """Number of weights of each optimizer's groups, as the program makes it."""
    has_reported = False

    def save(
        self, point: ResumePoint | None, state: Mapping[str, Any] | None
    ) -> list[list[list[str]]]:
        """Return the names, by optimizer and group; "" for what the model does not have."""
        model = self.trainer.lightning_module
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        saved = [
            [
                [names.get(id(member), "") for member in group["params"]]
                for group in optimizer.param_groups
            ]
            for optimizer in self.trainer.optimizers
        ]
        self._report_unknown(saved)
        return saved

    def hooks_begin(self) -> None:
        """Note how many weights the program gives each group, before hooks may add others."""
        self.made = [
            [len(group["params"]) for group in optimizer.param_groups]
            for optimizer in self.trainer.optimizers
        ]

    def _report_unknown(self, saved: list[list[list[str]]]) -> None:
        """Print, once, which optimizer has got weights that the model does not have."""
        if self.has_reported or not self.trainer.is_global_zero:
            return
        for number, (groups, made) in enumerate(zip(saved, self.made, strict=False)):
            # In the place of one that the program makes, it makes one again.
            sizes = chain(made, repeat(0))
            if any("" in names[size:] for names, size in zip(groups, sizes, strict=False)):
                self.has_reported = True
                whole = (
                    ": after a validation, parameters() of a sharded model has whole ones, which "
                    "get no gradients; take them before it"
                    if mesh_of(self.trainer) is not None
                    else "; add weights of the model"
                )
                log.warning(
                    f"a parameter group of optimizer {number} has got weights that the model does "
                    f"not have, and no run can be resumed with them{whole}"
                )

    def restore(self, saved: Any, moment: Moment) -> None:
        """Give the optimizers these groups, so that their states can be loaded.

        A hook may have added groups, or made the optimizers again with what it has unfrozen.
        """
        of_model = dict(named_parameters(self.trainer.lightning_module))
        # What training has pruned is pruned again once everything is loaded.
        pruned = {f"{name}{pruned_weights.ORIGINAL}": each for name, each in of_model.items()}
        parameters = pruned | of_model
        for optimizer, saved_groups in zip(self.trainer.optimizers, saved, strict=False):
            named = {id(parameters.get(name)) for names in saved_groups for name in names}
            for number, names in enumerate(saved_groups):
                is_new = number >= len(optimizer.param_groups)
                present = [] if is_new else optimizer.param_groups[number]["params"]
                if not all(
                    name in parameters or (not name and index < len(present))
                    for index, name in enumerate(names)
                ):
                    continue
                members = [
                    parameters[name] if name else _stand_in(present[index], named)
                    for index, name in enumerate(names)
                ]
                if is_new:
                    optimizer.add_param_group({"params": members})
                else:
                    present[:] = members  # LBFGS keeps this list


def _stand_in(parameter: nn.Parameter, named: set[int]) -> nn.Parameter:
    """Return what a group has at the place of a weight that the model does not have any more.

    A program may have given the model another weight in its place. If that one has a name in the
    saved groups, it is at its own place, and a copy is here.

    Args:
        parameter: What the program makes at this place.
        named: The ids of the weights that have a name in the saved groups.
    """
    if id(parameter) not in named:
        return parameter
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
