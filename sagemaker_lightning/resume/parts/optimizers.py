"""The optimizers' states: Lightning loads them; hooks at the start may change the groups again."""

from collections.abc import Sequence
from typing import Any

from pytorch_lightning import Trainer

from sagemaker_lightning.resume.parts.part import Moment, Part, Place, named_values


class Optimizers(Part):
    """The states of the optimizers, and the values of their parameter groups."""

    key = "optimizer_states"
    what = "the optimizers' states and learning rates"
    place = Place.LIGHTNING
    moments = (Moment.LOADING, Moment.TRAINING)

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.saved_groups: list[list[dict[str, Any]]] = []
        """The saved values of each optimizer's parameter groups, as `on_load_checkpoint` got."""

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the values of the groups, which hooks at the start of training may change."""
        if moment is Moment.LOADING:
            self.saved_groups = [
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in state.get("param_groups", ())  # without an optimizer, it is empty
                ]
                for state in saved[self.key]
            ]
        elif self.run.same_run.has_same_rates:
            restore_group_values(self.trainer, self.saved_groups)

    def present(self) -> dict[str, Any]:
        """Return the optimizers' states now."""
        strategy = self.trainer.strategy
        states = [strategy.optimizer_state(optimizer) for optimizer in self.trainer.optimizers]
        return {self.key: states}

    def digest(self, saved: Any, others: Any) -> dict[str, Any]:
        """Return each value of the states."""
        return named_values(self.key, saved[self.key])


class Schedulers(Part):
    """The states of the learning-rate schedulers."""

    key = "lr_schedulers"
    what = "the schedulers' states"
    when = "Lightning loads it"
    place = Place.LIGHTNING

    def present(self) -> dict[str, Any]:
        """Return the schedulers' states now."""
        configs = self.trainer.lr_scheduler_configs
        return {self.key: [config.scheduler.state_dict() for config in configs]}

    def digest(self, saved: Any, others: Any) -> dict[str, Any]:
        """Return each value of the states."""
        return named_values(self.key, saved[self.key])


def restore_group_values(trainer: Trainer, saved_groups: Sequence[Sequence[dict]]) -> None:
    """Restore learning rates and other values of the optimizers' parameter groups.

    Args:
        trainer: Lightning's trainer.
        saved_groups: The saved values of each optimizer's parameter groups.
    """
    for optimizer, saved in zip(trainer.optimizers, saved_groups, strict=False):
        for group, values in zip(optimizer.param_groups, saved, strict=False):
            group.update(values)
