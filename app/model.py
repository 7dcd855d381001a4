"""The example model."""

import shutil
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchvision.models import resnet18

from sagemaker_lightning import UserError


class ResNet18(LightningModule):
    """torchvision's ResNet-18 (arXiv:1512.03385) as a classifier.

    Args:
        num_classes: Number of classes; taken from the data module.
        stem: How the network begins. imagenet: as in torchvision, for images of 224 pixels. small:
            for 32 pixels, a 3x3 convolution that keeps the size, and no pooling (as in the paper
            for CIFAR-10, 4.2); better and 15 times the work.
        label_smoothing: Share of a label's weight that is spread over all classes
            (arXiv:1512.00567, 7).
        channels_last: Whether images and weights are laid out with the channels last, as
            convolutions need them on a GPU with half precision, and on a CPU.
        compile: Whether torch.compile makes the network faster; it needs a C++ compiler, which the
            image has only if it is built with one.
    """

    def __init__(
        self,
        num_classes: int,
        stem: Literal["imagenet", "small"] = "imagenet",
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(
                f"--model.label_smoothing: found {label_smoothing}, expected 0 to less than 1"
            )
        self.save_hyperparameters()
        self.network = resnet18(num_classes=num_classes)
        if stem == "small":
            self.network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            # As in torchvision.
            nn.init.kaiming_normal_(self.network.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.network.maxpool = nn.Identity()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.network.to(memory_format=self.layout)
        if compile:
            if not any(map(shutil.which, ("g++", "clang++"))):
                raise UserError(
                    "--model.compile: found no C++ compiler (g++) here, which torch.compile takes; "
                    "build the image with COMPILER=1, or leave the flag out"
                )
            self.network.compile()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, float32 [n, num_classes], of images, float32 [n, 3, H, W]."""
        return self.network(images.contiguous(memory_format=self.layout))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch (images, labels) to minimise."""
        loss, accuracy = self._step(batch, self.hparams.label_smoothing)
        self.log_dict({"train_loss": loss, "train_acc": accuracy}, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log val_loss and val_acc over the epoch."""
        loss, accuracy = self._step(batch)
        self.log_dict(
            {"val_loss": loss, "val_acc": accuracy}, sync_dist=True, batch_size=len(batch[1])
        )

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log test_loss and test_acc over the epoch."""
        loss, accuracy = self._step(batch)
        self.log_dict(
            {"test_loss": loss, "test_acc": accuracy}, sync_dist=True, batch_size=len(batch[1])
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that is used unless --optimizer names another."""
        # fused saves a fifth of a step on a CPU. It is not used on a GPU: Lightning refuses it
        # there with fp16 and gradient clipping. False instead of None would also keep torch from
        # updating all parameters at once (foreach): a third of a step on a GPU.
        fused = True if self.device.type == "cpu" else None
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=fused)

    def _step(
        self, batch: tuple[Tensor, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        # torchmetrics is not used: the accuracy of one batch is a mean, and Lightning weights it by
        # the batch's size. torchmetrics' accuracy takes ten times as long in a step, and a quarter
        # of a second in the first one.
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return nn.functional.cross_entropy(
            logits, labels, label_smoothing=label_smoothing
        ), accuracy
