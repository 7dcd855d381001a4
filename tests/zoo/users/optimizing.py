"""Optimizers, precision, and layers whose weights are computed."""

import torch
import torch.nn.functional as F
from basics import Classifier
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

MADE = {
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Optimized(Classifier):
    """One of torch's optimizers."""

    def __init__(self, optimizer: str):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        return MADE[self.hparams.optimizer](self.parameters())


class WithLBFGS(Classifier):
    """An optimizer that calls the closure several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


class OwnHead(Classifier):
    """Each rank trains a head of its own, which DDP leaves out."""

    def __init__(self):
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["head.weight", "head.bias"]


class SAM(Classifier):
    """Sharpness-aware minimization by hand: two backward passes a step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in self.parameters()]
            for p, step in zip(self.parameters(), steps, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        with torch.no_grad():
            for p, step in zip(self.parameters(), steps, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        self.log("train_loss", loss)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Lookahead(torch.optim.SGD):
    """An optimizer of one's own, with slow weights in its state."""

    def __init__(self, params, lr=0.1, k=3, alpha=0.5):
        super().__init__(params, lr=lr, momentum=0.9)
        self.k, self.alpha, self.steps = k, alpha, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.steps % self.k == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
        return loss


class LookedAhead(Classifier):
    """The optimizer's counter is a plain attribute."""

    def configure_optimizers(self):
        return Lookahead(self.parameters())


class LayerWise(Classifier):
    """Rates by layer, gradients clipped by hand, and noise on gradients.

    And a group that is added in the second epoch.
    """

    def configure_optimizers(self):
        groups = [{"params": list(self.head.parameters()), "lr": 0.1}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().optimizer.add_param_group(
                {"params": list(self.backbone.parameters()), "lr": 0.02}
            )

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


class Normalized(Classifier):
    """Spectral and weight norm, old and new, orthogonal weights, batch norms of each kind."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            spectral_norm(nn.Linear(2, 8)),
            nn.BatchNorm1d(8, momentum=None),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.Unflatten(1, (4, 2)),
            nn.InstanceNorm1d(4, track_running_stats=True),
            nn.Flatten(),
            parametrizations.weight_norm(nn.Linear(8, 8)),
            nn.GroupNorm(2, 8),
            parametrizations.orthogonal(nn.Linear(8, 16)),
            nn.SyncBatchNorm(16) if torch.cuda.is_available() else nn.BatchNorm1d(16),
            nn.RReLU(),
            nn.AlphaDropout(0.1),
        )


class Quantized(Classifier):
    """Quantization-aware training: observers count in buffers, and stop after the first epoch."""

    def __init__(self):
        super().__init__()
        self.fake = torch.ao.quantization.FakeQuantize.with_args(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver
        )()

    def forward(self, x):
        return self.head(self.fake(self.backbone(x)))

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.fake.disable_observer()


class Alternating(LightningModule):
    """Two optimizers take turns by the batch, each with its schedule."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(opt)
        loss = F.cross_entropy(self.b(torch.tanh(self.a(x))), y)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.untoggle_optimizer(opt)
        self.lr_schedulers()[batch_idx % 2].step()
        self.log("loss", loss, on_epoch=True)

    def configure_optimizers(self):
        first, second = (
            torch.optim.Adam(self.a.parameters(), 1e-2),
            torch.optim.SGD(self.b.parameters(), 1e-1),
        )
        return (
            {
                "optimizer": first,
                "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(first, 10),
            },
            {"optimizer": second, "lr_scheduler": torch.optim.lr_scheduler.StepLR(second, 4, 0.8)},
        )
