"""GANs: several optimizers under manual optimization."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import nn


class GAN(LightningModule):
    """examples/pytorch/domain_templates/generative_adversarial_net.py."""

    def __init__(self, latent_dim: int = 8, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 16), nn.BatchNorm1d(16, 0.8), nn.ReLU(), nn.Linear(16, 64)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)
        )
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        generated = self(z)
        g_loss = self.adversarial_loss(
            self.discriminator(generated), torch.ones(imgs.size(0), 1).type_as(imgs)
        )
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(
            self.discriminator(imgs), torch.ones(imgs.size(0), 1).type_as(imgs)
        )
        fake = self.adversarial_loss(
            self.discriminator(self(z).detach()), torch.zeros(imgs.size(0), 1).type_as(imgs)
        )
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []

    def on_train_epoch_end(self):
        sample_imgs = self(self.validation_z.type_as(self.generator[0].weight))
        self.logger.experiment.add_image(
            "generated", sample_imgs.view(-1, 1, 8, 8)[0].clamp(0, 1), self.current_epoch
        )


class WGAN(GAN):
    """The critic is trained three times as often, with a gradient penalty.

    Both networks have schedules stepped by hand.
    """

    def training_step(self, batch, batch_idx):
        imgs = batch[0].flatten(1)
        opt_g, opt_d = self.optimizers()
        sch_g, sch_d = self.lr_schedulers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim)
        fake = self(z)
        alpha = torch.rand(imgs.size(0), 1)
        between = (alpha * imgs + (1 - alpha) * fake.detach()).requires_grad_(True)
        gradients = torch.autograd.grad(
            self.discriminator(between).sum(), between, create_graph=True
        )[0]
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        d_loss = (
            self.discriminator(fake.detach()).mean()
            - self.discriminator(imgs).mean()
            + 10 * penalty
        )
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_d.step()
        sch_d.step()
        self.log("d_loss", d_loss)
        if (batch_idx + 1) % 3 == 0:
            g_loss = -self.discriminator(self(z)).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            sch_g.step()
            self.log("g_loss", g_loss)

    def configure_optimizers(self):
        optimizers, _ = super().configure_optimizers()
        return optimizers, [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) for optimizer in optimizers
        ]


class ImagePool:
    """CycleGAN's pool of generated images."""

    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        import random

        chosen = []
        for image in images:
            if len(self.images) < self.size:
                self.images.append(image)
                chosen.append(image)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.size - 1)
                chosen.append(self.images[i].clone())
                self.images[i] = image
            else:
                chosen.append(image)
        return torch.stack(chosen)


class PooledGAN(GAN):
    """The discriminator sees generated images from a pool of earlier ones."""

    def __init__(self):
        super().__init__()
        self.pool = ImagePool(12)

    def training_step(self, batch):
        imgs = batch[0].flatten(1)
        opt_g, opt_d = self.optimizers()
        fake = self(torch.randn(imgs.size(0), self.hparams.latent_dim))
        opt_g.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        opt_g.step()
        opt_d.zero_grad()
        old = self.pool.query(fake.detach())
        self.manual_backward(
            (F.softplus(self.discriminator(old)) + F.softplus(-self.discriminator(imgs))).mean()
        )
        opt_d.step()


class AccumulatedByHand(LightningModule):
    """Gradients accumulated over batches under manual optimization.

    As in Lightning's documentation.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(64, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        loss = F.cross_entropy(self.layer(x.flatten(1)), y) / 4
        self.manual_backward(loss)
        if (batch_idx + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
