"""Scripts as Lightning's tutorials have them, with `import lightning as L`.

    python tutorials.py CASE

Each is a way to write something down that is exact or not: callbacks with state and no state_dict,
data that are drawn where they are made, a curriculum. A script prints the digest of all weights at
its end. At STOP_AT and KILL_AT, as EPOCH:BATCH, it sends its own process a signal.
"""

import copy
import hashlib
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch
from strangers import interrupt
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryConfusionMatrix

from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures

import lightning as L  # isort: skip
from lightning.pytorch import callbacks as ready  # isort: skip
from lightning.pytorch.utilities import CombinedLoader  # isort: skip


class Points(Dataset):
    """Points with noise whose level can be changed."""

    def __init__(self, size: int = 40, level: float = 0.1) -> None:
        self.size = size
        self.level = level

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        point = torch.tensor([index / self.size, 1.0]) + self.level * torch.randn(2)
        return point, torch.tensor([index % 2.0])


class Classifier(L.LightningModule):
    """A classifier of points."""

    def __init__(self, dropout: float = 0.2, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.backbone = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def loss(self, batch):
        inputs, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(self(inputs), labels)

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(
            filter(lambda weight: weight.requires_grad, self.parameters()), self.hparams.lr
        )


class GAN(L.LightningModule):
    """The tutorial's: alternating optimizers with schedulers, samples of a fixed noise."""

    def __init__(self, latent_dim: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.validation_z = torch.randn(4, latent_dim)
        self.sampled = []

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        real, _ = batch
        loss = nn.functional.binary_cross_entropy_with_logits
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(real), self.hparams.latent_dim)
        self.toggle_optimizer(optimizer_g)
        self.generated = self.generator(noise)
        answer = self.discriminator(self.generated)
        g_loss = loss(answer, torch.ones_like(answer))
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(optimizer_d)
            on_real = self.discriminator(real)
            on_fake = self.discriminator(self.generator(noise).detach())
            d_loss = loss(on_real, torch.ones_like(on_real))
            d_loss = (d_loss + loss(on_fake, torch.zeros_like(on_fake))) / 2
            self.manual_backward(d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def on_train_epoch_end(self):
        self.sampled.append(self.generator(self.validation_z).mean().item())

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(part.parameters(), 0.01, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in optimizers]
        return optimizers, schedulers


class Translator(L.LightningModule):
    """A transformer with a warm-up by steps, as many as the trainer says."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(12, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.output = nn.Linear(8, 12)

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        (tokens,) = batch
        answer = self.output(self.encoder(self.embedding(tokens[:, :-1])))
        loss = nn.functional.cross_entropy(answer.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        total = self.trainer.estimated_stepping_batches
        warm_up = int(0.3 * total)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return max(0.0, (total - step) / (total - warm_up))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Measured(Classifier):
    """Has metrics as attributes, logged as objects and computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        metrics = MetricCollection([BinaryAccuracy(), BinaryConfusionMatrix()])
        self.val_metrics = metrics.clone(prefix="val_")
        self.train_accuracy = BinaryAccuracy()
        self.outputs = []
        self.best = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.train_accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.outputs.append(loss.detach())
        return loss * (1.5 - self.best)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)
        self.val_metrics.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        values = self.val_metrics.compute()
        self.best = max(self.best, float(values["val_BinaryAccuracy"]))
        self.val_metrics.reset()

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


@dataclass
class Memory:
    """What a callback remembers."""

    losses: deque = field(default_factory=lambda: deque(maxlen=5))
    seen: Counter = field(default_factory=Counter)
    hard: set = field(default_factory=set)


class Adapts(L.Callback):
    """Has state and no state_dict: it sets dropout by the losses that it remembers."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.means = {}
        self.array = np.zeros(3)
        self.random = np.random.default_rng(4)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"]
        self.memory.losses.append(loss.detach())
        self.memory.seen[batch_idx % 3] += 1
        if loss > 0.7:
            self.memory.hard.add(trainer.global_step)
        self.means[trainer.current_epoch] = torch.stack(list(self.memory.losses)).mean()
        self.array[batch_idx % 3] += float(loss)
        mean = float(self.array.mean()) + self.random.random()
        pl_module.head[0].p = min(0.5, 0.01 * (len(self.memory.hard) + mean))


class Average(L.Callback):
    """An average of the weights in a copy of the model, validated in its place."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay

    def on_fit_start(self, trainer, pl_module):
        self.shadow = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, 1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        self.kept = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.shadow)


class Anchored(Classifier):
    """Stays near the weights that a training begins with."""

    def on_fit_start(self):
        self.anchor = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def training_step(self, batch, batch_idx):
        drift = [
            (each - self.anchor[name]).square().sum() for name, each in self.named_parameters()
        ]
        return super().training_step(batch, batch_idx) + 0.1 * sum(drift)


class Decays(L.Callback):
    """Lowers each learning rate from the one that the optimizer begins with."""

    def on_train_start(self, trainer, pl_module):
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.first_step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        steps = trainer.global_step - self.first_step
        for group, rate in zip(trainer.optimizers[0].param_groups, self.rates, strict=True):
            group["lr"] = rate / (1 + 0.2 * steps)


class Copied(L.Callback):
    """A momentum copy of the whole model, made when training starts."""

    def on_train_start(self, trainer, pl_module):
        self.teacher = copy.deepcopy(pl_module.backbone).requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for mine, other in zip(
            self.teacher.parameters(), pl_module.backbone.parameters(), strict=True
        ):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.backbone.load_state_dict(self.teacher.state_dict())


class Shuffled(IterableDataset):
    """A stream with a buffer that shuffles, shared out among the workers."""

    def __init__(self, buffer_size: int = 7) -> None:
        self.buffer_size = buffer_size

    def __iter__(self):
        worker = get_worker_info()
        buffer = []
        for index in range(worker.id, 44, worker.num_workers):
            buffer.append(torch.tensor([index / 44, 1.0]) + 0.1 * torch.randn(2))
            if len(buffer) >= self.buffer_size:
                point = buffer.pop(torch.randint(len(buffer), ()).item())
                yield point, point[:1].round()
        random.shuffle(buffer)
        yield from ((point, point[:1].round()) for point in buffer)


class Curriculum(L.Callback):
    """Changes the dataset at the beginning of each epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.level = 0.1 * (trainer.current_epoch + 1)


class Growing(L.LightningDataModule):
    """Has more samples in each epoch, and draws them when it makes the loader."""

    def train_dataloader(self):
        size = 12 + 8 * self.trainer.current_epoch
        inputs = torch.randn(size, 2)
        return DataLoader(TensorDataset(inputs, inputs[:, :1].round()), 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(8 + self.trainer.current_epoch), 4)


class Drawn(Classifier):
    """Draws its data where it makes the loaders."""

    def train_dataloader(self):
        inputs = torch.randn(40, 2)
        labels = (inputs.sum(1, keepdim=True) + 0.1 * np.random.randn() > 0).float()
        weights = torch.rand(40)
        return DataLoader(
            TensorDataset(inputs, labels), 4, sampler=WeightedRandomSampler(weights, 40)
        )

    def val_dataloader(self):
        inputs = torch.randn(12, 2)
        return DataLoader(TensorDataset(inputs, torch.rand(12, 1).round()), 4)


class Contrast(Classifier):
    """MoCo: a momentum encoder and a queue of keys with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum_encoder = copy.deepcopy(self.backbone).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 16))
        self.pointer = 0

    def training_step(self, batch, batch_idx):
        interrupt(f"{self.current_epoch}:{batch_idx}")
        with torch.no_grad():
            for key, query in zip(
                self.momentum_encoder.parameters(), self.backbone.parameters(), strict=True
            ):
                key.mul_(0.9).add_(query, alpha=0.1)
            keys = self.momentum_encoder(batch[0] + 0.1 * torch.randn_like(batch[0]))
        loss = (self.backbone(batch[0]) @ self.queue.clone()).logsumexp(1).mean() + self.loss(batch)
        for key in keys:
            self.queue[:, self.pointer] = key
            self.pointer = (self.pointer + 1) % 16
        return loss


class Newton(Classifier):
    """LBFGS evaluates the closure several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3, history_size=4)


class Cycled(Classifier):
    """OneCycleLR by steps; brings its own callbacks."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            [{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.2}],
            0.1,
            momentum=0.9,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.1, 0.2], total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_callbacks(self):
        return [ready.EarlyStopping("val_loss", patience=6)]


class Mines(L.Callback):
    """Draws hard samples more often, by weights that it changes in the sampler."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        sampler = trainer.train_dataloader.sampler
        sampler.weights[batch_idx % len(sampler.weights)] += outputs["loss"].detach()


class Labels(L.Callback):
    """Replaces labels in the dataset by what the model says at the end of an epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        inputs, labels = trainer.train_dataloader.dataset.tensors
        with torch.no_grad():
            labels[::3] = torch.sigmoid(pl_module(inputs[::3]))


class Counts(Classifier):
    """Counts its steps in a variable of the class."""

    steps = 0

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        return super().training_step(batch, batch_idx) / (1 + 0.1 * Counts.steps)


class Lists(Classifier):
    """Collects an epoch's losses in a list of the class, which its end clears."""

    outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Swaps(Classifier):
    """Has another activation from its second epoch on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone[2] = nn.Tanh()


@dataclass(slots=True)
class Seen:
    """A sample that was seen."""

    inputs: list
    labels: list


class Recipe(Classifier):
    """Warms up by a count of its own, changes its loss, replays samples, and draws from a pool."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.distances = {"squared": nn.functional.mse_loss, "absolute": nn.functional.l1_loss}
        self.distance = self.distances["squared"]
        self.memory = deque(maxlen=9)
        self.pool = {37 * number for number in range(50)}
        self.scales = {layer: Scale() for layer in self.modules() if isinstance(layer, nn.Linear)}

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.distance = self.distances["absolute"]

    def training_step(self, batch, batch_idx):
        self.step += 1
        self.memory.append(Seen(*(part.tolist() for part in batch)))
        replayed = random.choice(self.memory)
        chosen = random.choice(list(self.pool))
        self.pool.remove(chosen)
        for layer, scale in self.scales.items():
            scale.update(layer.weight)
        outputs = self(torch.tensor(replayed.inputs)) * sum(s.mean for s in self.scales.values())
        distance = self.distance(outputs, torch.tensor(replayed.labels) + chosen / 1000)
        return super().training_step(batch, batch_idx) + min(1.0, self.step / 20) * distance


class Scale:
    """The mean of a layer's weights, of all steps."""

    def __init__(self):
        self.mean = 1.0

    def update(self, weight):
        self.mean = 0.9 * self.mean + 0.1 * weight.detach().abs().mean().item()


class Tempered:
    """Averages the loss, for the model to use; its method is a hook."""

    def __init__(self):
        self.average = 1.0

    def update(self, trainer, model, outputs, batch, batch_idx):
        self.average = 0.9 * self.average + 0.1 * outputs["loss"].item()
        model.head[0].p = min(0.5, 0.2 * self.average)


class Pending(Classifier):
    """Adds each second loss to the next one, in one backward pass."""

    pending = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.pending = loss
            return None
        return loss if self.pending is None else loss + self.pending


class Hooked(Classifier):
    """Adds noise to its features from its second epoch on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone.register_forward_hook(lambda _, args, out: out + torch.randn_like(out))


class Slowed(Classifier):
    """Trains a layer more slowly from its second epoch on, by a hook of its weight."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone[0].weight.register_hook(lambda gradient: 0.1 * gradient)


class Centering:
    """Subtracts the running mean of what a layer returns."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, module, arguments, output):
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean()
        return output - self.mean


class Shrinking:
    """Shrinks the weights after each step, less and less."""

    def __init__(self) -> None:
        self.steps = 0

    @torch.no_grad()
    def __call__(self, optimizer, arguments, options):
        self.steps += 1
        for weight in optimizer.param_groups[0]["params"]:
            weight *= 1 - 0.1 / self.steps


class Centered(Classifier):
    """Has hooks with states that nothing else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[0].register_forward_hook(Centering())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(Shrinking())
        return optimizer


class Thaws(Classifier):
    """Makes its optimizers anew once all weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.backbone.requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)


class Clipped(Classifier):
    """Clips by the norm of all gradients, and trains the head alone: the others' add up."""

    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.5)


class InTurns(Classifier):
    """Trains two heads in turns; momentum moves a weight whose gradient is zero, not missing."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([self.head, copy.deepcopy(self.head)])

    def training_step(self, batch, batch_idx):
        self.head = self.heads[batch_idx // 2 % 2]
        return super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Sharp(torch.optim.SGD):
    """As SAM: steps by an optimizer within it, which shares the groups that a schedule changes."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Signed(torch.optim.Optimizer):
    """As lion-pytorch: moves weights by the sign of the mean of their gradients."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight -= group["lr"] * mean.lerp_(weight.grad, 0.1).sign()


class Inner(Classifier):
    """Has an optimizer that Lightning does not know, and one within Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.head_optimizer = Signed(self.head.parameters(), 0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.head_optimizer.step()
        self.head_optimizer.zero_grad()

    def configure_optimizers(self):
        optimizer = Sharp(self.backbone.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Directed(Classifier):
    """Sees its features in directions that are drawn once."""

    def __init__(self, directions: torch.Tensor) -> None:
        super().__init__()
        self.directions = directions

    def forward(self, inputs):
        return self.head(self.backbone(inputs) @ self.directions)


class Tracker:
    """What is counted in an epoch."""

    def __init__(self) -> None:
        self.losses = []


class Tracked(Classifier):
    """Makes a part before training and an object for each epoch, by methods of its own."""

    def make_scale(self):
        self.scale = nn.Linear(1, 1)
        self.trainer.optimizers[0].add_param_group({"params": self.scale.parameters()})

    def begin_epoch(self):
        self.tracker = Tracker()

    def on_fit_start(self):
        self.make_scale()

    @torch.no_grad()
    def on_train_epoch_start(self):
        self.begin_epoch()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.tracker.losses.append(loss.item())
        return self.scale(loss.view(1)).squeeze() * (1 + sum(self.tracker.losses))


class Skips(Classifier):
    """Skips batches, and the rest of an epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 1 and batch_idx == 7 else None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Resumable(L.LightningDataModule):
    """Saves what it knows, as the documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.served = 0

    def train_dataloader(self):
        return points()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.served += 1
        return batch[0] + 0.001 * self.served, batch[1]

    def state_dict(self):
        return {"served": self.served}

    def load_state_dict(self, state_dict):
        self.served = state_dict["served"]


class Draws(Classifier):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def trainer(job, folder: str = "", callbacks=(), seed: int | None = 42, **options) -> L.Trainer:
    """Return a Trainer with the lines of docs/your-own-trainer.md."""
    resume = ExactResume(job.checkpoint_dir / folder, seed=seed, every_n_minutes=0)
    settings = {"max_epochs": 4, "accelerator": "cpu", "devices": 1, "logger": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**settings | {"callbacks": [*callbacks, resume]} | options)


def points(**options) -> DataLoader:
    return DataLoader(Points(), 4, shuffle=True, **options)


def val() -> DataLoader:
    return DataLoader(Points(16), 4)


ONE_MODEL = {
    "newton": Newton,
    "lists": Lists,
    "swaps": Swaps,
    "pending": Pending,
    "hooked": Hooked,
    "slowed": Slowed,
    "centered": Centered,
    "thaws": Thaws,
    "clipped": Clipped,
    "in_turns": InTurns,
    "inner": Inner,
    "tracked": Tracked,
    "draws": Draws,
}
"""Cases that train one model on the points, and nothing else."""


def gan(job):
    made = trainer(job)
    made.fit(model := GAN(), points())
    return [model], model.sampled


def finetuning(job):
    unfreezes = ready.BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
    made = trainer(job, callbacks=[unfreezes])
    made.fit(model := Classifier(), points(), val())
    return [model], ""


def transformer(job):
    made = trainer(job, accumulate_grad_batches=3, gradient_clip_val=0.5)
    tokens = torch.randint(12, (40, 6))
    made.fit(model := Translator(), DataLoader(TensorDataset(tokens), 4, shuffle=True))
    return [model], ""


def k_fold(job):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    models, scores = [], []
    for fold in range(3):
        held_out = order[fold::3]
        rest = [index for index in order if index not in held_out]
        train = DataLoader(Subset(Points(), rest), 4, shuffle=True)
        made = trainer(job, f"fold-{fold}", max_epochs=2)
        models.append(Classifier())
        made.fit(models[-1], train)
        scores += made.validate(
            models[-1], DataLoader(Subset(Points(), held_out), 4), verbose=False
        )
    return models, scores


def streamed(job):
    made = trainer(job)
    made.fit(model := Classifier(), DataLoader(Shuffled(), 4, num_workers=2), val())
    return [model], ""


def measured(job):
    made = trainer(job, val_check_interval=0.5)
    made.fit(model := Measured(), points(), val())
    return [model], [model.best, {k: float(v) for k, v in made.callback_metrics.items()}]


def adapting(job):
    adapts = Adapts()
    trainer(job, callbacks=[adapts]).fit(model := Classifier(), points())
    memory = adapts.memory
    return [model], [memory.seen, sorted(memory.hard), adapts.array, adapts.means]


def averaged(job):
    trainer(job, callbacks=[Average()]).fit(model := Classifier(), points(), val())
    return [model], ""


def anchored(job):
    trainer(job, callbacks=[Decays()]).fit(model := Anchored(), points())
    return [model], ""


def copied(job):
    trainer(job, callbacks=[Copied()]).fit(model := Classifier(), points(), val())
    return [model], ""


def stopped_early(job):
    best = ready.ModelCheckpoint("own", "{epoch}-{val_loss:.4f}", "val_loss", save_top_k=3)
    stops = ready.EarlyStopping("val_loss", patience=2, min_delta=0.01)
    made = trainer(job, callbacks=[stops, best], max_epochs=9)
    made.fit(model := Classifier(), points(), val())
    kept = {path.split("/")[-1]: float(score) for path, score in best.best_k_models.items()}
    return [model], [sorted(kept.items()), stops.stopped_epoch, made.current_epoch]


def combined(job):
    class Both(Classifier):
        def training_step(self, batch, batch_idx, dataloader_idx=0):
            return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])

    both = CombinedLoader(
        {"a": points(), "b": DataLoader(Points(25), 5, shuffle=True)}, "max_size_cycle"
    )
    trainer(job).fit(model := Both(), both, [val(), val()])
    return [model], ""


def curriculum(job):
    trainer(job, callbacks=[Curriculum()]).fit(model := Classifier(), points(num_workers=1), val())
    return [model], ""


def growing(job):
    made = trainer(job, reload_dataloaders_every_n_epochs=1)
    made.fit(model := Classifier(), datamodule=Growing())
    return [model], ""


def drawn(job):
    made = trainer(job, callbacks=[ready.EarlyStopping("val_loss", patience=5)])
    made.fit(model := Drawn())
    return [model], float(made.callback_metrics["val_loss"])


def contrast(job):
    trainer(job).fit(model := Contrast(), points())
    return [model], model.pointer


def cycled(job):
    steps = ready.GradientAccumulationScheduler({0: 1, 2: 2})
    made = trainer(job, callbacks=[steps], check_val_every_n_epoch=2)
    made.fit(model := Cycled(), points(), val())
    return [model], ""


def seeded(job):
    """Seed everything, as the documentation says, and give ExactResume none."""
    L.seed_everything(7, workers=True)
    made = trainer(job, seed=None)
    made.fit(model := Classifier(), points(num_workers=1), val())
    return [model], ""


def mining(job):
    weighted = WeightedRandomSampler(torch.ones(40), 40)
    made = trainer(job, callbacks=[Mines()])
    made.fit(model := Classifier(), DataLoader(Points(), 4, sampler=weighted))
    return [model], weighted.weights.sum().item()


def labels(job):
    made = trainer(job, callbacks=[Labels()])
    inputs = torch.randn(40, 2)
    data = TensorDataset(inputs, inputs[:, :1].sigmoid().round())
    made.fit(model := Classifier(), DataLoader(data, 4, shuffle=True))
    return [model], data.tensors[1].sum().item()


def counts(job):
    trainer(job).fit(model := Counts(), points())
    return [model], Counts.steps


def recipe(job):
    callback = ready.LambdaCallback(on_train_batch_end=Tempered().update)
    trainer(job, callbacks=[callback]).fit(model := Recipe(), points())
    return [model], [model.step, sorted(model.pool)]


def stages(job):
    made = trainer(job, "first", max_epochs=1, limit_train_batches=5)
    made.fit(first := Classifier(), points())
    model = Directed(torch.randn(8, 8))
    model.backbone = first.backbone
    made = trainer(job, "second", max_epochs=2)
    made.fit(model, points())
    return [model], ""


def unseeded(job):
    model = Directed(torch.from_numpy(np.random.default_rng().normal(size=(8, 8))).float())
    trainer(job).fit(model, points())
    return [model], ""


def skips(job):
    trainer(job).fit(model := Skips(), points(), val())
    return [model], ""


def resumable(job):
    data = Resumable()
    trainer(job).fit(model := Classifier(), datamodule=data)
    return [model], data.served


def ranks(job):
    made = trainer(job, devices=2, strategy="ddp", max_epochs=2)
    made.fit(model := Cycled(), points(), val())
    return [model], ""


def one_model(job, make: type[L.LightningModule]):
    trainer(job).fit(model := make(), points())
    return [model], ""


def main() -> None:
    job = SageMakerEnvironment.read()
    with report_failures(job):
        case = sys.argv[1]
        is_one_model = case in ONE_MODEL
        models, results = one_model(job, ONE_MODEL[case]) if is_one_model else globals()[case](job)
        state = [each.numpy().tobytes() for one in models for each in one.state_dict().values()]
        print("WEIGHTS", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)
        print("BEST", results, flush=True)


if __name__ == "__main__":
    main()
