"""Modules that remember: outputs, plain attributes, own state, frozen parts, late layers."""

import copy
import enum
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from basics import BlobsData, Classifier
from pytorch_lightning import LightningModule, seed_everything
from torch import nn


class StepOutputs(Classifier):
    """Lists of outputs, gathered at the epoch's end: Lightning's migration guide to 2.0."""

    def __init__(self):
        super().__init__()
        self.training_step_outputs = []
        self.validation_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append({"loss": loss.detach(), "size": len(batch[1])})
        return loss

    def on_train_epoch_end(self):
        losses = torch.stack([output["loss"] for output in self.training_step_outputs])
        self.log("epoch_mean", losses.mean())
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9 + 0.05 * losses.std().item()
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validation_step_outputs.append(self(batch[0]))

    def on_validation_epoch_end(self):
        self.log("spread", torch.cat(self.validation_step_outputs).std())
        self.validation_step_outputs.clear()


class Stage(enum.StrEnum):
    """A stage of the training."""

    FIRST = "first"
    SECOND = "second"


@dataclass
class State:
    """What a module carries along."""

    stage: Stage = Stage.FIRST
    steps: int = 0
    recent: deque = field(default_factory=lambda: deque(maxlen=4))
    counts: Counter = field(default_factory=Counter)
    sums: dict = field(default_factory=lambda: defaultdict(float))
    average: np.ndarray = field(default_factory=lambda: np.zeros(2))


class Baggage(Classifier):
    """A dataclass with an Enum, a deque, a Counter, a defaultdict and an array.

    And other plain attributes.
    """

    def __init__(self):
        super().__init__()
        self.progress = State()
        self.ordered = OrderedDict(a=1, b=(2, 3))
        self.started, self.budget, self.where = (
            datetime(2026, 1, 1),
            timedelta(seconds=30),
            Path("x"),
        )
        self.seen = set()
        self.nested = {"level": [{"count": 0}, {"value": np.float64(1.0)}]}
        self.maximum = torch.tensor(-1.0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        state, value = self.progress, float(loss.detach())
        state.steps += 1
        state.recent.append(value)
        state.counts.update(batch[1].tolist())
        state.sums[state.stage.value] += value
        state.average = 0.8 * state.average + 0.2 * np.array([value, state.steps])
        self.seen.add(round(value, 1))
        self.nested["level"][0]["count"] += len(self.seen)
        self.nested["level"][1]["value"] *= 1.001
        self.maximum = torch.maximum(self.maximum, loss.detach())
        if state.steps > 14:
            state.stage = Stage.SECOND
        weight = 1 + 0.01 * (sum(state.recent) + state.counts[0] / 50 + state.sums["first"] / 50)
        weight += (
            0.01 * float(state.average.sum()) / 20 + 1e-3 * self.nested["level"][0]["count"] / 100
        )
        return loss * (weight * self.nested["level"][1]["value"] + 0.01 * self.maximum)


class Normalizer:
    """Running mean and variance of what it sees: an object of one's own."""

    def __init__(self, dim):
        self.n, self.mean, self.squares = 0, torch.zeros(dim), torch.zeros(dim)

    def __call__(self, x):
        self.n += len(x)
        self.mean = self.mean + (x - self.mean).sum(0) / self.n
        self.squares = self.squares + (x**2).sum(0)
        return (x - self.mean) / (self.squares / self.n + 1e-3).sqrt()


class RunningNormalized(Classifier):
    """Normalizes its input by statistics that are in no buffer."""

    def __init__(self):
        super().__init__()
        self.normalizer = Normalizer(2)

    def training_step(self, batch, batch_idx):
        return super().training_step((self.normalizer(batch[0]), batch[1]), batch_idx)


class Uncertainty(Classifier):
    """Weights of losses: learned ones, and adaptive ones in a plain list.

    And a table of losses by sample.
    """

    def __init__(self):
        super().__init__()
        self.log_vars = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
        self.initial_losses, self.task_weights = None, [1.0, 1.0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        losses = [F.cross_entropy(logits, y), logits.square().mean()]
        if self.initial_losses is None:
            self.initial_losses = [loss.item() for loss in losses]
        ratios = [
            loss.item() / first for loss, first in zip(losses, self.initial_losses, strict=True)
        ]
        self.task_weights = [
            0.9 * w + 0.1 * r for w, r in zip(self.task_weights, ratios, strict=True)
        ]
        parts = zip(losses, self.log_vars, self.task_weights, strict=True)
        return sum(w * torch.exp(-s) * loss + s for loss, s, w in parts)


class MeanTeacher(Classifier):
    """The teacher is made in on_fit_start, hidden from the checkpoint in a tuple."""

    def on_fit_start(self):
        self.teacher = (copy.deepcopy(self.backbone).requires_grad_(False),)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        consistency = F.mse_loss(self.backbone(batch[0]), self.teacher[0](batch[0]))
        return loss + consistency * min(1.0, self.global_step / 10)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mine, theirs in zip(
            self.teacher[0].parameters(), self.backbone.parameters(), strict=True
        ):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class RegisteredTeacher(MeanTeacher):
    """The teacher is a part of the module, made in on_fit_start from the weights of that moment."""

    def on_fit_start(self):
        self.copied = copy.deepcopy(self.backbone).requires_grad_(False)

    @property
    def teacher(self):
        return (self.copied,)


class RateAtStart(Classifier):
    """Sets the learning rate and momentum in on_train_start, and adds noise to the weights.

    A schedule changes the rate.
    """

    def on_train_start(self):
        for group in self.optimizers().param_groups:
            group["lr"], group["weight_decay"] = 0.05, 0.01
        with torch.no_grad():
            self.head.weight += 0.1 * torch.randn_like(self.head.weight)

    def on_train_epoch_end(self):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class Prototypes(Classifier):
    """Class means that are gathered in each validation, and used in the next epoch."""

    def __init__(self):
        super().__init__()
        self.prototypes = None

    def on_validation_epoch_start(self):
        self.features = defaultdict(list)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        for feature, label in zip(self.backbone(batch[0]), batch[1].tolist(), strict=True):
            self.features[label].append(feature)

    def on_validation_epoch_end(self):
        self.prototypes = {
            label: torch.stack(rows).mean(0) for label, rows in self.features.items()
        }

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.prototypes:
            wanted = torch.stack([self.prototypes[label] for label in batch[1].tolist()])
            loss = loss + 0.1 * F.mse_loss(self.backbone(batch[0]), wanted)
        return loss


class SelfPaced(Classifier):
    """A threshold that is a percentile of the last losses; samples above it are left out.

    A hook seeds by the epoch.
    """

    def __init__(self):
        super().__init__()
        self.history = np.zeros(0)
        self.threshold = None

    def on_train_epoch_start(self):
        torch.manual_seed(self.current_epoch)
        if len(self.history):
            self.threshold = np.percentile(self.history, 80)
        self.history = self.history[:0]

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.history = np.append(self.history, losses.detach().numpy())
        keep = (
            losses <= float(self.threshold)
            if self.threshold is not None
            else torch.ones_like(losses)
        )
        return (losses * keep).sum() / max(1.0, float(keep.sum()))


class Seeded(Classifier):
    """seed_everything in the constructor, and random weights that are drawn in on_fit_start."""

    def __init__(self):
        seed_everything(123, workers=True)
        super().__init__()

    def on_fit_start(self):
        self.directions = [torch.randn(2) for _ in range(3)]

    def training_step(self, batch, batch_idx):
        noise = self.directions[batch_idx % 3] * torch.rand(()) * 0.1
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


class FrozenBatchNorm(Classifier):
    """train() is overridden: batch norm and its running statistics are frozen after an epoch."""

    def train(self, mode=True):
        super().train(mode)
        if mode and getattr(self, "frozen", False):
            self.backbone[1].eval()
        return self

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.frozen = True
            self.backbone[1].eval()
            self.backbone[1].requires_grad_(False)


class EvalAtStart(Classifier):
    """The backbone is set to eval at each epoch's start."""

    def on_train_epoch_start(self):
        self.backbone.eval()


class Gradual(Classifier):
    """Layers are unfrozen one after the other, through requires_grad, by the epoch."""

    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self):
        for number, layer in enumerate(reversed(self.backbone)):
            layer.requires_grad_(number < self.current_epoch * 2)


class LazyNet(LightningModule):
    """Lazy layers, buffers made with the first batch, and a layer added in the second epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)
        )
        self.register_buffer("mean", None)
        self.register_buffer("memory", torch.zeros(0, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.mean is None:
            self.mean = x.mean(0)
        self.memory = torch.cat([self.memory, x])[-50:]
        return F.cross_entropy(self.net(x - 0.5 * self.mean - 0.5 * self.memory.mean(0)), y)

    def configure_optimizers(self):
        self.net(torch.zeros(2, 2))
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(Classifier):
    """Layers are made in configure_model, as for large models."""

    def __init__(self):
        super().__init__()
        del self.backbone
        self.backbone = None

    def configure_model(self):
        if self.backbone is None:
            self.backbone = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh())


class LoRALinear(nn.Module):
    """A frozen layer, and a trained one of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.lora_a), self.lora_b)


class LoRA(Classifier):
    """strict_loading=False and a state_dict of what is trained.

    As in Lightning's documentation of saving parts.
    """

    def __init__(self):
        super().__init__()
        seed_everything(0)
        self.head = LoRALinear(nn.Linear(16, 3))
        self.backbone.requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args, **kwargs):
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {
            name: value
            for name, value in super().state_dict(*args, **kwargs).items()
            if name in names
        }

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class DeletesBackbone(Classifier):
    """Deletes frozen weights of the checkpoint in on_save_checkpoint.

    And loads with strict_loading=False.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.pretrained = nn.Linear(2, 2).requires_grad_(False)
        self.strict_loading = False

    def forward(self, x):
        return super().forward(self.pretrained(x))

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("pretrained.")]:
            del checkpoint["state_dict"][name]
        checkpoint["lowest"] = np.min([0.5, 1.5])


class FromPretrained(Classifier):
    """Fine-tunes weights of a file that setup() reads; the file is written by whoever is first."""

    def setup(self, stage):
        path = Path("pretrained.ckpt")
        if not path.exists():
            torch.manual_seed(5)
            weights = nn.Linear(2, 16).state_dict()
            torch.save(
                {"state_dict": {f"backbone.0.{name}": value for name, value in weights.items()}},
                path,
            )
        self.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=False)


class OddHyperparameters(Classifier):
    """Saves hyperparameters of any kind."""

    def __init__(self, criterion: str = "CrossEntropyLoss"):
        super().__init__()
        self.save_hyperparameters(
            {
                "criterion": getattr(nn, criterion)(),
                "kind": type(self),
                "when": datetime(2026, 11, 1),
            }
        )


class Sparse(Classifier):
    """A sparse buffer, a complex one, one of 8 bits, and one that is not persistent and counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", torch.eye(16).to_sparse())
        self.register_buffer("phases", torch.exp(1j * torch.arange(16) / 3.0))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("updates", torch.zeros(()), persistent=False)

    def forward(self, x):
        features = torch.sparse.mm(self.adjacency, self.backbone(x).T).T
        return self.head(features * self.phases.real)

    def training_step(self, batch, batch_idx):
        self.counts[batch[1]] += 1
        self.updates += 1
        self.phases = self.phases * torch.exp(torch.tensor(0.01j))
        return (
            super().training_step(batch, batch_idx) * (1 + self.updates / 100)
            + 1e-3 * self.counts.float().mean()
        )


class UsesData(Classifier):
    """Looks at the loaders: class weights by a pass over the training data.

    And a batch at each epoch's start.
    """

    def on_fit_start(self):
        self.trainer.fit_loop.setup_data()
        labels = torch.cat([y for _, y in self.trainer.train_dataloader])
        self.class_weights = 1.0 / torch.bincount(labels, minlength=3)

    def on_train_epoch_start(self):
        self.reference, _ = next(iter(self.trainer.datamodule.train_dataloader()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (
            F.cross_entropy(self(x), y, weight=self.class_weights)
            + self(self.reference).square().mean() * 0.01
        )


class Curricular(Classifier):
    """The module changes the data module's dataset, by its own average of the loss."""

    def __init__(self):
        super().__init__()
        self.average = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        loss = float(outputs["loss"])
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss

    def on_train_epoch_end(self):
        self.trainer.datamodule.train_set.noise = 0.2 + 0.1 * self.average


class HarderData(BlobsData):
    """Its dataset's noise is changed from outside."""


class AccumulatesInModule(Classifier):
    """Changes the trainer's accumulate_grad_batches and log frequency by the epoch."""

    def on_train_epoch_start(self):
        self.trainer.accumulate_grad_batches = 1 + self.current_epoch % 2


class Gate(nn.Module):
    """Opens with its calls; for torch.jit.script."""

    calls: int

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.line = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs + self.line(inputs) * min(1.0, self.calls / 25)


class Switches(Classifier):
    """Has a scripted gate that counts, an Event, and members of an enum that count."""

    class Task(enum.Enum):
        """A task, of which the batches are counted."""

        EVEN = 0
        ODD = 1

        def __init__(self, number):
            self.seen = 0

    def __init__(self):
        super().__init__()
        self.gate = torch.jit.script(Gate())
        self.warm = threading.Event()

    def forward(self, inputs):
        return super().forward(self.gate(inputs))

    def training_step(self, batch, batch_idx):
        task = self.Task(batch_idx % 2)
        task.seen += 1
        if self.gate.calls > 12:
            self.warm.set()
        loss = super().training_step(batch, batch_idx)
        return loss / (task.seen if self.warm.is_set() else 1)


class Searched(Classifier):
    """Tries other layers of torch's, and functions that it has from the start, and counts them."""

    def __init__(self):
        super().__init__()
        self.acts = (F.relu, F.gelu, torch.tanh, F.silu)
        self.act = F.relu
        self.extra = nn.Identity()
        self.plan = {"act": torch.tanh, "tried": 0}

    def forward(self, inputs):
        return super().forward(self.act(self.extra(inputs)))

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx % 3 == 1:
            self.act = random.choice(self.acts)
            self.plan = {"act": self.act, "tried": self.plan["tried"] + 1}
        if self.current_epoch == 1 and batch_idx == 0:
            self.extra = nn.Sequential(nn.LayerNorm(2), nn.Hardswish())
            self.optimizers().add_param_group({"params": list(self.extra.parameters())})


class Initialized(Classifier):
    """Begins with the weights of a file that the constructor is given."""

    def __init__(self, init_from: str = "", lr: float = 1e-2):
        super().__init__(lr=lr)
        if init_from:
            self.load_state_dict(torch.load(init_from, weights_only=True))


class MonteCarlo(Classifier):
    """Dropout in the validation, too: several passes that draw.

    Their spread sets the rate of the next epoch.
    """

    def __init__(self):
        super().__init__()
        self.spreads, self.temperature = [], 1.0

    def training_step(self, batch, batch_idx):
        self.temperature *= 0.98
        logits = F.gumbel_softmax(self(batch[0]), tau=self.temperature)
        return F.nll_loss((logits + 1e-6).log(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.backbone[3].train()
        passes = torch.stack([self(batch[0]).softmax(1) for _ in range(4)])
        self.backbone[3].eval()
        self.spreads.append(passes.std(0).mean().item())
        self.log("val_loss", F.nll_loss(passes.mean(0).log(), batch[1]))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.01 * (1 + sum(self.spreads) / len(self.spreads))
        self.spreads.clear()


class StochasticDepth(Classifier):
    """Blocks are skipped by Python's random, more of them with each step.

    Blocks share their weights.
    """

    def forward(self, x):
        x = self.backbone(x)
        block = nn.functional.linear
        for depth in range(3):
            if not self.training or random.random() > 0.1 * depth + self.global_step / 200:
                x = x + 0.1 * torch.tanh(block(x, self.shared.weight))
        return self.head(x)

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.alias = self.shared
