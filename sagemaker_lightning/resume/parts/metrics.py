"""The states of torchmetrics that the user's objects hold, those that are not persistent too."""

from collections.abc import Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricTracker

from sagemaker_lightning.compat import metrics
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume.parts.copies import copy_to_cpu
from sagemaker_lightning.resume.parts.part import Moment, Part, named_values
from sagemaker_lightning.resume.resume_point import ResumePoint


class Metrics(Part):
    """The state of each torchmetrics' Metric, and how many steps each MetricTracker has."""

    key = "metrics"
    what = "the states of torchmetrics"
    moments = (Moment.HOOKS, Moment.TRAINING)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states, on the CPU, and the lengths of trackers, by path."""
        measured = dict(self.run.reached(Metric, MetricTracker))
        states = {
            path: metrics.state_of(value)
            for path, value in measured.items()
            if isinstance(value, Metric)
        }
        steps = {
            path: len(value) for path, value in measured.items() if isinstance(value, MetricTracker)
        }
        return {"states": copy_to_cpu(states), "tracked": steps}

    @torch.no_grad()
    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the states; each step that a tracker tracks has metrics of its own."""
        for path, tracker in self.run.reached(MetricTracker):
            size = min(saved["tracked"].get(path, len(tracker)), len(saved["states"]))
            while len(tracker) < size:
                tracker.increment()
            # Added by a hook at the start of training.
            for name, _ in list(tracker.named_children())[size:]:
                delattr(tracker, name)
        of_ranks = self.resumed.of_data_ranks(self)
        start_again = []
        for path, metric in self.run.reached(Metric):
            own, everyone = (
                [each["states"][path] for each in of if path in each["states"]] for of in of_ranks
            )
            if not everyone:
                continue
            if state := metrics.taken_over(metric, own, everyone):
                metrics.restore(metric, state, metric.device)  # a callback's may be on the CPU
            else:
                start_again.append(path)
        if start_again and moment is Moment.TRAINING and self.trainer.is_global_zero:
            log.warning(
                f"{', '.join(start_again)}: {len(of_ranks[1])} ranks have saved states of "
                "this metric that cannot be added up for another number of them: it starts again"
            )

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each value of the states."""
        return named_values(self.key, saved["states"])
