"""The example's model with one layer in place of ResNet-18.

It is for tests of what does not depend on the network. A checkpoint has 0.4 MB in place of 135 MB.
"""

import torch
from pytorch_lightning import LightningModule
from torch import nn

from app.model import ResNet18


class OneLayer(ResNet18):
    """Classifies images of 3 x 32 x 32 by one layer, with ResNet18's steps and optimizer."""

    def __init__(self, num_classes: int) -> None:
        LightningModule.__init__(self)
        self.save_hyperparameters({"num_classes": num_classes, "label_smoothing": 0.0})
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
        self.layout = torch.contiguous_format
