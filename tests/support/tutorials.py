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
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from strangers import interrupt
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    WeightedRandomSampler,
)

from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures

import lightning as L  # isort: skip
from lightning.pytorch import callbacks as ready  # isort: skip


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


class Swaps(Classifier):
    """Has another activation from its second epoch on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone[2] = nn.Tanh()


@dataclass(slots=True)
class Seen:
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
    """Makes its optimizers again once all weights are trained."""

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
}
"""Cases that train one model on the points, and nothing else."""


def anchored(job):
    trainer(job, callbacks=[Decays()]).fit(model := Anchored(), points())
    return [model], ""


def drawn(job):
    made = trainer(job, callbacks=[ready.EarlyStopping("val_loss", patience=5)])
    made.fit(model := Drawn())
    return [model], float(made.callback_metrics["val_loss"])


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


def one_model(job, make: type[L.LightningModule]):
    trainer(job).fit(model := make(), points())
    return [model], ""


def main() -> None:
    job = SageMakerEnvironment.read()
    with report_failures(job):
        case = sys.argv[1]
        has_copies = case in ONE_MODEL
        models, results = one_model(job, ONE_MODEL[case]) if has_copies else globals()[case](job)
        state = [each.numpy().tobytes() for one in models for each in one.state_dict().values()]
        print("WEIGHTS", hashlib.sha256(b"".join(state)).hexdigest(), flush=True)
        print("BEST", results, flush=True)


if __name__ == "__main__":
    main()
