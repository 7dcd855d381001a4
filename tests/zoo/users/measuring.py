"""Metrics: torchmetrics' classes and wrappers, in ways in which they decide something."""

import torch
import torch.nn.functional as F
from basics import Classifier
from torch import nn
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MeanMetric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    RunningMean,
    SumMetric,
)
from torchmetrics.aggregation import MaxMetric, MinMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import BootStrapper, Running


class Collected(Classifier):
    """MetricCollection with clone and prefix, updated without log in training.

    Its states are lists.
    """

    def __init__(self):
        super().__init__()
        metrics = MetricCollection(
            [MulticlassAccuracy(3), MulticlassPrecision(3), MulticlassF1Score(3)],
            compute_groups=True,
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.valid_metrics = metrics.clone(prefix="val_")
        self.auroc = MulticlassAUROC(3)
        self.confusion = MulticlassConfusionMatrix(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.train_metrics.update(logits, y)
        self.auroc.update(logits.softmax(1), y)
        self.confusion.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.log("train_auroc", self.auroc.compute())
        wrong = 1 - self.confusion.compute().diag().sum() / self.confusion.compute().sum()
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * (0.5 + float(wrong))
        for metric in (self.train_metrics, self.auroc, self.confusion):
            metric.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log_dict(self.valid_metrics(self(batch[0]), batch[1]))


class Wrapped(Classifier):
    """MinMaxMetric, RunningMean, Running, aggregations.

    The metrics live over epochs and scale the loss.
    """

    def __init__(self):
        super().__init__()
        self.range = MinMaxMetric(MeanMetric())
        self.recent = RunningMean(window=4)
        self.running = Running(SumMetric(), window=3)
        self.lowest, self.highest, self.all = MinMetric(), MaxMetric(), CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metric in (self.range, self.recent, self.running, self.lowest, self.highest, self.all):
            metric.update(loss.detach())
        found = self.range.compute()
        known = [found["min"], found["max"], self.recent.compute(), self.running.compute()]
        known += [
            self.lowest.compute(),
            self.highest.compute(),
            self.all.compute().reshape(-1)[:1].mean(),
        ]
        self.log("recent", self.recent)
        return loss * (1 + 0.05 * torch.tanh(sum(known)))


class Bootstrapped(Classifier):
    """BootStrapper draws; ClasswiseWrapper names."""

    def __init__(self):
        super().__init__()
        self.bootstrap = BootStrapper(MulticlassAccuracy(3, average="micro"), num_bootstraps=4)
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(3, average=None))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.bootstrap.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        found = self.bootstrap.compute()
        self.log_dict({"boot_mean": found["mean"], "boot_std": found["std"]})
        self.head.bias.data += found["std"] * 0.01
        self.bootstrap.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.classwise.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict({name: value for name, value in self.classwise.compute().items()})
        self.classwise.reset()


class Tracked(Classifier):
    """MetricTracker: a step for each epoch; the best one so far sets the rate."""

    def __init__(self):
        super().__init__()
        self.tracker = MetricTracker(
            MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        )

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.tracker.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        best, step = self.tracker.best_metric(return_step=True)
        accuracy = best["MulticlassAccuracy"]
        self.log("best_accuracy", accuracy)
        for group in self.optimizers().param_groups:
            group["lr"] = 0.02 * (1.1 - accuracy) + 1e-3 * step["MulticlassAccuracy"]


class ByDataset(Classifier):
    """Metrics in a ModuleDict and ModuleList, for each of several validation loaders.

    And everything that log can do.
    """

    def __init__(self):
        super().__init__()
        self.metrics = nn.ModuleDict(
            {"val": nn.ModuleList([MulticlassAccuracy(3) for _ in range(2)])}
        )

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"]
        loss = F.cross_entropy(self(x), y)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=len(y))
        self.log("maximum", loss, on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log_dict(
            {"a/b": loss, "c": torch.tensor(batch_idx)}, on_step=True, on_epoch=True, logger=True
        )
        if batch_idx % 3 == 1:
            self.log("sometimes", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        metric = self.metrics["val"][dataloader_idx]
        metric(self(x), y)
        self.log("acc", metric)
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)
