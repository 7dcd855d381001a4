"""Contrastive and self-supervised learning: queues, momentum encoders, prototypes, memory banks."""

import copy
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    """Two random crops of a signal, by numpy and by Python's random."""

    def __init__(self, size=48):
        self.signals = np.sin(np.arange(size)[:, None] * np.linspace(0.1, 1, 24)).astype(np.float32)

    def __len__(self):
        return len(self.signals)

    def crop(self, signal):
        start = np.random.randint(0, 9)
        piece = signal[start : start + 16] * random.uniform(0.8, 1.2)
        return torch.from_numpy(piece.astype(np.float32)) + 0.05 * torch.randn(16)

    def __getitem__(self, index):
        return self.crop(self.signals[index]), self.crop(self.signals[index]), index


class TwoViewsData(LightningDataModule):
    """Shuffled; the last, smaller batch is dropped, as a queue needs it."""

    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self):
        return DataLoader(TwoViews(), 4, shuffle=True, drop_last=True, num_workers=self.num_workers)


def encoder():
    """Return a small encoder."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


class SimCLR(LightningModule):
    """InfoNCE over a batch; warm-up and cosine by LambdaLR, each step."""

    def __init__(self, temperature: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.net = encoder()

    def training_step(self, batch, batch_idx):
        feats = self.net(torch.cat(batch[:2]))
        sim = F.cosine_similarity(feats[:, None], feats[None], dim=-1) / self.hparams.temperature
        self_mask = torch.eye(sim.size(0), dtype=torch.bool, device=sim.device)
        sim = sim.masked_fill(self_mask, -9e15)
        loss = (-sim[self_mask.roll(sim.size(0) // 2, 0)] + sim.logsumexp(-1)).mean()
        self.log("nll_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * step / 60)),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MoCo(LightningModule):
    """A momentum encoder, and a queue of keys in buffers."""

    def __init__(self, K: int = 16, m: float = 0.9):
        super().__init__()
        self.K, self.m = K, m
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def training_step(self, batch, batch_idx):
        q = F.normalize(self.encoder_q(batch[0]), dim=1)
        with torch.no_grad():
            self.momentum_update()
            shuffle = torch.randperm(len(batch[1]))
            k = F.normalize(self.encoder_k(batch[1][shuffle]), dim=1)[torch.argsort(shuffle)]
        logits = (
            torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.2
        )
        self.dequeue_and_enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder_q.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)


class BYOL(LightningModule):
    """The target's momentum rises over the run.

    It is a callback's state in a module's plain attribute.
    """

    def __init__(self):
        super().__init__()
        self.online, self.predictor = encoder(), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.current_tau = self.initial_tau = 0.9

    def training_step(self, batch, batch_idx):
        a, b = batch[:2]
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        loss = -F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        max_steps = len(self.trainer.train_dataloader) * self.trainer.max_epochs
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = self.current_tau * target.data + (1 - self.current_tau) * online.data
        self.current_tau = (
            1
            - (1 - self.initial_tau)
            * (math.cos(math.pi * self.trainer.global_step / max_steps) + 1)
            / 2
        )

    def configure_optimizers(self):
        return torch.optim.Adam([*self.online.parameters(), *self.predictor.parameters()], lr=1e-2)


class DINO(BYOL):
    """Centring and sharpening.

    The last layer is frozen for the first epoch, by cancelling its gradients.
    """

    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(1, 8)
        self.temperatures = np.concatenate([np.linspace(0.04, 0.07, 2), np.full(10, 0.07)])

    def training_step(self, batch, batch_idx):
        student = self.predictor(self.online(batch[0])) / 0.1
        with torch.no_grad():
            output = self.target(batch[1])
            teacher = F.softmax(
                (output - self.centre) / self.temperatures[self.current_epoch], dim=-1
            )
            self.centre = self.centre * 0.9 + output.mean(0, keepdim=True) * 0.1
        return torch.sum(-teacher * F.log_softmax(student, dim=-1), dim=-1).mean()

    def on_after_backward(self):
        if self.current_epoch < 1:
            for p in self.predictor.parameters():
                p.grad = None


class MemoryBank(SimCLR):
    """Instance discrimination with a bank that is a plain tensor.

    And a dict from a sample to its hardest negative.
    """

    def __init__(self):
        super().__init__()
        self.bank = F.normalize(torch.randn(48, 8), dim=1)
        self.hardest = {}

    def training_step(self, batch, batch_idx):
        x, _, index = batch
        z = F.normalize(self.net(x), dim=1)
        logits = z @ self.bank.clone().T / 0.2
        for i, row in zip(index.tolist(), logits.detach().clone(), strict=True):
            row[i] = -1e9
            self.hardest[i] = int(row.argmax())
        extra = sum(0.01 * logits[k, self.hardest[i]] for k, i in enumerate(index.tolist()))
        with torch.no_grad():
            self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * z, dim=1)
        return F.cross_entropy(logits, index) + extra


class DeepCluster(LightningModule):
    """Pseudo-labels from k-means at each epoch's start, by a pass over the training set."""

    def __init__(self, clusters: int = 3):
        super().__init__()
        self.net, self.head, self.clusters = encoder(), nn.Linear(8, clusters), clusters

    def on_train_epoch_start(self):
        self.eval()
        with torch.no_grad():
            features, indices = [], []
            for a, _, index in self.trainer.train_dataloader:
                features.append(self.net(a.to(self.device)))
                indices.append(index)
        self.train()
        features = torch.cat(features)[torch.cat(indices).argsort()]
        centres = features[torch.randperm(len(features))[: self.clusters]]
        for _ in range(3):
            labels = torch.cdist(features, centres).argmin(1)
            centres = torch.stack(
                [
                    features[labels == k].mean(0) if (labels == k).any() else centres[k]
                    for k in range(self.clusters)
                ]
            )
        self.labels = labels

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.net(batch[0])), self.labels[batch[2]])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
