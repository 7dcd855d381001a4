"""compat/metrics.py: the states of a metric."""

import torch
from torchmetrics import MeanMetric

from sagemaker_lightning.compat import metrics


def test_a_metrics_saved_state_is_a_copy():
    """A metric may add in place to what it has."""
    metric = MeanMetric()
    metric.update(3.0)
    saved = metrics.state_of(metric)
    values = {name: value.clone() for name, value in saved["states"].items()}
    restored = MeanMetric()
    metrics.restore(restored, saved, torch.device("cpu"))
    assert restored.compute() == 3 and restored.update_count == 1
    for name in saved["states"]:
        getattr(restored, name).add_(1)
    assert saved["states"] == values
