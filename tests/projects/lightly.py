# /// script
# dependencies = ["lightly==1.6.0"]
# ///
"""BYOL, as in lightly's examples: two views of each image, a momentum network, data workers."""

import copy

import lightning.pytorch as pl
import numpy as np
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import SimCLRTransform
from lightly.utils.scheduler import cosine_schedule
from PIL import Image
from torch import nn

from sagemaker_lightning import ExactResume


class Images(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.pixels = np.random.default_rng(0).integers(0, 255, (64, 24, 24, 3), dtype=np.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pixels[index])), 0


class BYOL(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projection_head = BYOLProjectionHead(32, 32, 16)
        self.prediction_head = BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 4, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1), _ = batch
        p0, z0, p1, z1 = (
            self.forward(x0),
            self.forward_momentum(x0),
            self.forward(x1),
            self.forward_momentum(x1),
        )
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("train_loss_ssl", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


resume = ExactResume("checkpoints", seed=42, every_n_steps=5)
dataset = Images(SimCLRTransform(input_size=24))
loader = torch.utils.data.DataLoader(
    dataset, batch_size=8, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True
)
model = BYOL()
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", devices=1, callbacks=[resume], enable_progress_bar=False
)
trainer.fit(model, loader)
torch.save(model.state_dict(), "weights.pt")
