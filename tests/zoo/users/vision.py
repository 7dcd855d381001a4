"""Images: Lightning's README and image examples, and what people add to them."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn, optim
from torch.optim.lr_scheduler import MultiStepLR, StepLR
from torch.utils.data import DataLoader, Dataset, default_collate, random_split
from torchmetrics import Accuracy
from torchvision.transforms import v2


class FakeDigits(Dataset):
    """Random images of 8 x 8 pixels in four classes."""

    def __init__(self, size=60, transform=None):
        rng = np.random.RandomState(0)
        self.labels = np.arange(size) % 4
        self.images = (rng.rand(size, 1, 8, 8) * 0.5 + self.labels[:, None, None, None] / 8).astype(
            np.float32
        )
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i])
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[i])


AUGMENT = v2.Compose(
    [
        v2.RandomResizedCrop(8, scale=(0.6, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.GaussianBlur(3)], p=0.3),
        v2.Normalize([0.5], [0.5]),
        v2.RandomErasing(),
    ]
)


class MNISTDataModule(LightningDataModule):
    """The data module of Lightning's documentation."""

    def __init__(
        self, batch_size: int = 4, num_workers: int = 0, augment: bool = False, cutmix: bool = False
    ):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
        self.transform = AUGMENT if augment else None
        self.cutmix = (
            v2.RandomChoice([v2.CutMix(num_classes=4), v2.MixUp(num_classes=4)]) if cutmix else None
        )

    def setup(self, stage: str):
        if stage == "fit":
            full = FakeDigits(60, self.transform)
            self.train_set, self.val_set = random_split(
                full, [48, 12], generator=torch.Generator().manual_seed(42)
            )
        if stage == "test":
            self.test_set = FakeDigits(12)

    def collate_fn(self, batch):
        return self.cutmix(*default_collate(batch)) if self.cutmix else default_collate(batch)

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, self.batch_size)


class LitAutoEncoder(LightningModule):
    """README of Lightning."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


class ImageClassifier(LightningModule):
    """Lightning's backbone_image_classifier.py and image_classifier_5_lightning_datamodule.py."""

    def __init__(self, lr: float = 1.0, gamma: float = 0.7):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(36, 4),
        )
        self.train_acc = Accuracy("multiclass", num_classes=4)
        self.val_acc = Accuracy("multiclass", num_classes=4)
        self.test_acc = Accuracy("multiclass", num_classes=4)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if y.ndim == 1:
            self.train_acc(logits, y)
            self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self(x), y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)
        self.log("test_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = optim.Adadelta(self.model.parameters(), lr=self.hparams.lr)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)]


class MilestonesFinetuning(BaseFinetuning):
    """examples/pytorch/domain_templates/computer_vision_fine_tuning.py."""

    def __init__(self, milestones: tuple = (1, 2), train_bn: bool = False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-3:],
                optimizer=optimizer,
                train_bn=self.train_bn,
            )
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[:-3],
                optimizer=optimizer,
                train_bn=self.train_bn,
            )


class TransferLearningModel(LightningModule):
    """The module of the same example."""

    def __init__(
        self, milestones: tuple = (1, 2), lr: float = 1e-2, lr_scheduler_gamma: float = 1e-1
    ):
        super().__init__()
        self.lr, self.lr_scheduler_gamma, self.milestones = lr, lr_scheduler_gamma, milestones
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.AvgPool2d(4),
        )
        self.fc = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.train_acc = Accuracy("multiclass", num_classes=4)

    def forward(self, x):
        return self.fc(self.feature_extractor(x).squeeze(-1).squeeze(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("train_acc", self.train_acc(logits, y), prog_bar=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        trainable_parameters = list(filter(lambda p: p.requires_grad, self.parameters()))
        optimizer = optim.Adam(trainable_parameters, lr=self.lr)
        scheduler = MultiStepLR(
            optimizer, milestones=self.milestones, gamma=self.lr_scheduler_gamma
        )
        return [optimizer], [scheduler]


class VAE(LightningModule):
    """A variational autoencoder, whose weight of the divergence is annealed by the step."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, 6)
        self.decoder = nn.Linear(3, 64)

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        mu, log_var = self.encoder(x).chunk(2, dim=1)
        std = torch.exp(log_var / 2)
        q = torch.distributions.Normal(mu, std)
        z = q.rsample()
        kl = (q.log_prob(z) - torch.distributions.Normal(0.0, 1.0).log_prob(z)).sum(1).mean()
        beta = min(1.0, self.global_step / 20)
        loss = F.mse_loss(self.decoder(z), x) + beta * kl
        self.log_dict({"loss": loss, "kl": kl, "beta": beta})
        return loss

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), lr=1e-2)


class Diffusion(LightningModule):
    """A diffusion model with an average of its weights that it keeps itself."""

    def __init__(self, timesteps: int = 20):
        super().__init__()
        self.timesteps = timesteps
        self.model = nn.Sequential(nn.Linear(65, 32), nn.SiLU(), nn.Linear(32, 64))
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        alphas = 1 - torch.linspace(1e-4, 0.02, timesteps)
        self.register_buffer("alpha_bar", torch.cumprod(alphas, 0), persistent=False)

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        t = torch.randint(0, self.timesteps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        a = self.alpha_bar[t][:, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(torch.cat([noisy, t[:, None] / self.timesteps], 1)), noise)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        decay = min(0.99, (1 + self.global_step) / (10 + self.global_step))
        with torch.no_grad():
            for ours, theirs in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                ours.lerp_(theirs, 1 - decay)

    def configure_optimizers(self):
        return optim.AdamW(self.model.parameters(), lr=1e-2)


class Distilled(LightningModule):
    """A student of a teacher that is not part of the checkpoint.

    The teacher is in a list, with random weights from a seed.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.student = nn.Linear(64, 4)
        teacher = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        self.teacher = [teacher.requires_grad_(False)]

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        return F.kl_div(
            self.student(x).log_softmax(1), self.teacher[0](x).softmax(1), reduction="batchmean"
        )

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Mixup(ImageClassifier):
    """Mixup in the training step, with numpy's beta distribution."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        lam = np.random.beta(0.4, 0.4)
        index = torch.randperm(x.size(0))
        logits = self(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[index])
        self.log("lam", lam)
        return loss


class DataAugmentation(nn.Module):
    """Augmentation on the device, in the manner of Kornia's."""

    def __init__(self):
        super().__init__()
        self.jitter = v2.ColorJitter(0.5, 0.5)

    @torch.no_grad()
    def forward(self, x):
        if torch.rand(1) < 0.5:
            x = x.flip(-1)
        return x + 0.1 * torch.randn_like(x) * torch.rand(x.size(0), 1, 1, 1)


class AugmentedOnDevice(ImageClassifier):
    """The idiom of Lightning's and Kornia's documentation."""

    def __init__(self):
        super().__init__()
        self.transform = DataAugmentation()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            x = self.transform(x)
        return x, y


class NoiseFromDataModule(MNISTDataModule):
    """A data module that adds noise before the transfer, from a generator of its own."""

    def __init__(self, num_workers: int = 0):
        super().__init__(num_workers=num_workers)
        self.generator = torch.Generator().manual_seed(12)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + 0.1 * torch.randn(x.shape, generator=self.generator), y


class NoisyModule(ImageClassifier):
    """A module with noise of its own generators: torch's, numpy's new and old, Python's."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.rng = {"pcg": np.random.default_rng(4), "old": np.random.RandomState(5)}
        self.philox = np.random.Generator(np.random.Philox(6))

    def training_step(self, batch, batch_idx):
        x, y = batch
        scale = self.rng["pcg"].normal() + self.rng["old"].rand() + self.philox.random()
        return super().training_step(
            (x + 0.1 * float(scale) * torch.randn(x.shape, generator=self.generator), y), 0
        )


class MixedPrecisionNet(ImageClassifier):
    """Channels last, activation checkpoints, and a drop path of its own."""

    def forward(self, x):
        x = x.to(memory_format=torch.channels_last)
        x = torch.utils.checkpoint.checkpoint(self.model[:4], x, use_reentrant=False)
        if self.training:
            keep = torch.rand(x.size(0), 1, 1, 1, device=x.device) > 0.1
            x = x * keep / 0.9
        return self.model[4:](x)


class Compiled(ImageClassifier):
    """The network is compiled."""

    def __init__(self):
        super().__init__()
        self.model.compile()
