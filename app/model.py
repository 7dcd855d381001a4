"""The example model."""

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet18


class ResNet18(LightningModule):
    """torchvision's ResNet-18 (arXiv:1512.03385) as a classifier.

    Args:
        num_classes: Number of classes; taken from the data module.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = resnet18(num_classes=num_classes)
        # One each: a metric that two stages share would mix their counts.
        self.train_acc, self.val_acc, self.test_acc = (
            # "micro": the share of images, not of classes; checking the labels again in every step costs time.
            MulticlassAccuracy(num_classes, average="micro", validate_args=False)
            for _ in range(3)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, float32 [n, num_classes], of images, float32 [n, 3, H, W]."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch (images, labels) to minimise."""
        loss = self._step(batch, self.train_acc)
        self.log_dict({"train_loss": loss, "train_acc": self.train_acc})
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log val_loss and val_acc over the epoch."""
        loss = self._step(batch, self.val_acc)
        self.log_dict({"val_loss": loss, "val_acc": self.val_acc}, sync_dist=True, batch_size=len(batch[1]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log test_loss and test_acc over the epoch."""
        loss = self._step(batch, self.test_acc)
        self.log_dict({"test_loss": loss, "test_acc": self.test_acc}, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that is used unless --optimizer names another."""
        # fused: a fifth of a CPU step saved. Not on a GPU, where Lightning refuses it with fp16 and gradient clipping.
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=self.device.type == "cpu")

    def _step(self, batch: tuple[Tensor, Tensor], accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        return nn.functional.cross_entropy(logits, labels)
