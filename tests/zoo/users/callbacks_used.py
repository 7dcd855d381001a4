"""Callbacks, Lightning's with what they need, and people's own."""

import copy
import enum
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from basics import Classifier
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
    WeightAveraging,
)
from pytorch_lightning.callbacks.spike import SpikeDetection
from pytorch_lightning.utilities import grad_norm
from torch.optim.swa_utils import get_ema_avg_fn


class EMAFromLater(WeightAveraging):
    """The example of Lightning's documentation, from step 7 on."""

    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(0.8))

    def should_update(self, step_idx=None, epoch_idx=None):
        return (step_idx is not None) and (step_idx >= 7)


class SWAByEpoch(WeightAveraging):
    """An equal average of the epochs' ends, from the second on; without buffers."""

    def __init__(self):
        super().__init__(use_buffers=False)

    def should_update(self, step_idx=None, epoch_idx=None):
        return (epoch_idx is not None) and (epoch_idx >= 1)


class Unfreeze(BackboneFinetuning):
    """BackboneFinetuning with a function of the epoch."""

    def __init__(self):
        super().__init__(
            unfreeze_backbone_at_epoch=1,
            lambda_func=lambda epoch: 1.5,
            backbone_initial_ratio_lr=0.1,
            verbose=True,
        )


class HeadOnly(Classifier):
    """The optimizer gets the head alone, as BackboneFinetuning wants it."""

    def configure_optimizers(self):
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class FineTuneLearningRateFinder(LearningRateFinder):
    """Lightning's documentation: the rate is looked for again at milestones."""

    def __init__(self, milestones: tuple = (1,), num_training_steps: int = 6):
        super().__init__(num_training_steps=num_training_steps)
        self.milestones = milestones

    def on_fit_start(self, *args, **kwargs):
        return

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.milestones or trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)


class FineTuneBatchSizeFinder(BatchSizeFinder):
    """As in Lightning's documentation, without later milestones.

    After those Lightning 2.6 trains nothing.
    """

    def __init__(self, milestones: tuple = ()):
        super().__init__(max_trials=2, steps_per_trial=1)
        self.milestones = milestones

    def on_fit_start(self, *args, **kwargs):
        return

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.milestones or trainer.current_epoch == 0:
            self.scale_batch_size(trainer, pl_module)


class Prune(ModelPruning):
    """Amount by epoch, and the lottery ticket."""

    def __init__(self):
        super().__init__(
            "l1_unstructured",
            amount=lambda epoch: 0.2 if epoch < 2 else 0.1,
            parameter_names=["weight"],
        )


class Throughput(ThroughputMonitor):
    """With a window, and the size of a batch."""

    def __init__(self):
        super().__init__(batch_size_fn=lambda batch: len(batch[0]), window_size=5)


class WritesPredictions(BasePredictionWriter):
    """Nothing is predicted in a fit.

    Its files come from a prediction on validation data when training is done.
    """

    def __init__(self, output_dir: str = "predictions"):
        super().__init__("epoch")
        self.output_dir = Path(output_dir)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.output_dir.mkdir(exist_ok=True)
        torch.save(predictions, self.output_dir / "predictions.pt")


class WithLambda(Classifier):
    """A LambdaCallback whose closure counts, from configure_callbacks."""

    def configure_callbacks(self):
        seen = {"batches": 0}

        def count(trainer, pl_module, batch, batch_idx):
            seen["batches"] += 1
            pl_module.scale = 1 + seen["batches"] / 100

        stop = EarlyStopping("val_loss", patience=5, verbose=True)
        return [
            LambdaCallback(on_train_batch_start=count),
            stop,
            RichProgressBar(),
            ModelCheckpoint("lambda-ckpt"),
        ]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


class LitProgressBar(TQDMProgressBar):
    """Lightning's documentation of bars."""

    def get_metrics(self, trainer, pl_module):
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return items


class Counter(Callback):
    """Lightning's documentation of stateful callbacks.

    It has a state_key, state_dict and load_state_dict.
    """

    def __init__(self, what: str = "epochs", verbose: bool = True):
        self.what = what
        self.verbose = verbose
        self.state = {"epochs": 0, "batches": 0}

    @property
    def state_key(self):
        return f"Counter[what={self.what}]"

    def on_train_epoch_end(self, *args, **kwargs):
        if self.what == "epochs":
            self.state["epochs"] += 1

    def on_train_batch_end(self, trainer, pl_module, *args, **kwargs):
        if self.what == "batches":
            self.state["batches"] += 1
            pl_module.head.bias.data += 1e-4 * self.state["batches"]

    def load_state_dict(self, state_dict):
        self.state.update(state_dict)

    def state_dict(self):
        return self.state.copy()


class Phase(enum.Enum):
    """A phase of the training."""

    WARM_UP = "warm-up"
    MAIN = "main"
    COOL_DOWN = 3


@dataclass
class Record:
    """What is remembered of an epoch."""

    losses: list = field(default_factory=list)
    best: float = float("inf")
    phase: Phase = Phase.WARM_UP


class PhaseController(Callback):
    """State in an Enum, a dataclass, a defaultdict, numpy arrays and deques.

    None of it is saved by itself.
    """

    def __init__(self):
        self.phase = Phase.WARM_UP
        self.record = Record()
        self.history = defaultdict(list)
        self.average = np.zeros(3)
        self.at = Path()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = float(outputs["loss"])
        self.record.losses.append(loss)
        self.record.best = min(self.record.best, loss)
        self.average = 0.9 * self.average + 0.1 * np.array([loss, loss**2, 1.0])
        self.history[self.phase.name].append(batch_idx)
        if len(self.record.losses) > 12:
            self.phase = self.record.phase = Phase.MAIN
        if len(self.history["MAIN"]) > 8:
            self.phase = Phase.COOL_DOWN
        rate = {Phase.WARM_UP: 0.005, Phase.MAIN: 0.02, Phase.COOL_DOWN: 0.001}[self.phase]
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate * (1 + float(self.average[1])) + 1e-4 * self.record.best


class DropoutSchedule(Callback):
    """Sets p of each dropout, and the weight of a loss, by the epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        for module in pl_module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1 * (trainer.current_epoch + 1)


class ModelEma(Callback):
    """An average of the weights that is a copy of the module, in the manner of timm.

    It saves nothing by itself.
    """

    def __init__(self, decay: float = 0.9):
        self.decay = decay

    def on_fit_start(self, trainer, pl_module):
        self.ema = copy.deepcopy(pl_module.state_dict())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.ema[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.ema)


class SavedEma(ModelEma):
    """The same; it saves its average in on_save_checkpoint, and swaps it in for the validation."""

    def on_validation_start(self, trainer, pl_module):
        self.kept = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.ema)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["ema"] = self.ema

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded = checkpoint["ema"]

    def on_train_start(self, trainer, pl_module):
        if hasattr(self, "loaded"):
            self.ema = self.loaded


class Curriculum(Callback):
    """Makes the dataset harder by the epoch, through the loader."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.noise = 0.2 * (trainer.current_epoch + 1)


class HardExamples(Callback):
    """Changes the sampler's weights at an epoch's end, by losses that are kept by sample."""

    def __init__(self):
        self.losses = torch.ones(40)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[(batch_idx * 4) % 40 :][:4] = float(outputs["loss"])

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.train_dataloader.sampler.weights = (self.losses + 0.1).double()


class Resampling(Callback):
    """Calls the dataset's own method at an epoch's start."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.resample()


class ShuffleInPlace(Callback):
    """Shuffles the list of samples in place, with the global generator."""

    def on_train_epoch_start(self, trainer, pl_module):
        random.shuffle(trainer.datamodule.samples)


class StopOnPlateau(Callback):
    """Sets should_stop by a criterion of its own."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        self.values.append(trainer.callback_metrics["val_loss"].item())
        if len(self.values) > 3 and self.values[-1] > min(self.values):
            trainer.should_stop = True


class StopInTheMiddle(Callback):
    """Stops within an epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 27:
            trainer.should_stop = True


class SkipEpochsRest(Callback):
    """Returns -1 from on_train_batch_start, which skips the rest of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        return -1 if trainer.current_epoch == 1 and batch_idx == 6 else None


class GradientNorms(Callback):
    """Logs the norm of each gradient, and histograms."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = grad_norm(pl_module, norm_type=2)
        pl_module.log_dict({key: value for key, value in norms.items() if "total" in key})
        if trainer.global_step % 5 == 0 and trainer.logger:
            trainer.logger.experiment.add_histogram(
                "weights", pl_module.head.weight, trainer.global_step
            )


class ImagePredictionLogger(Callback):
    """Takes samples of a loader at the start of training, and logs predictions of them.

    It draws on the way.
    """

    def on_train_start(self, trainer, pl_module):
        self.x, self.y = next(iter(trainer.train_dataloader))

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            with torch.no_grad():
                loss = F.cross_entropy(pl_module(self.x), self.y)
            pl_module.log("sample_loss", loss)
            chosen = random.sample(range(4), 2)
            trainer.logger.experiment.add_text("chosen", str(chosen), trainer.global_step)


class OwnCheckpoint(Callback):
    """Writes weights into a folder each epoch, and loads the best ones when the training ends."""

    def __init__(self):
        self.best, self.path = float("inf"), Path("own/best.pt")

    def on_validation_end(self, trainer, pl_module):
        loss = float(trainer.callback_metrics["val_loss"])
        if not trainer.sanity_checking and loss < self.best and trainer.is_global_zero:
            self.best = loss
            self.path.parent.mkdir(exist_ok=True)
            torch.save(pl_module.state_dict(), self.path)

    def on_train_end(self, trainer, pl_module):
        trainer.strategy.barrier()
        pl_module.load_state_dict(torch.load(self.path))


class Spikes(SpikeDetection):
    """Lightning's detection of losses that spike."""

    def __init__(self):
        super().__init__(window=5, warmup=3, atol=1000.0)


class AdaptiveClipping(Callback):
    """Clips gradients at a percentile of the norms so far: a list that grows."""

    def __init__(self, percentile: float = 50.0):
        self.percentile, self.norms = percentile, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norm = torch.norm(
            torch.stack([p.grad.norm() for p in pl_module.parameters() if p.grad is not None])
        )
        self.norms.append(norm.item())
        torch.nn.utils.clip_grad_norm_(
            pl_module.parameters(), float(np.percentile(self.norms, self.percentile))
        )


class Pretraining(Callback):
    """Fits another module with another Trainer before the training begins: fit called twice."""

    def on_fit_start(self, trainer, pl_module):
        from basics import BlobsData

        first = Classifier(hidden=16, lr=0.05)
        Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(first, BlobsData(size=12))
        pl_module.backbone.load_state_dict(first.backbone.state_dict())


class GrowingBatches(Callback):
    """Doubles the data module's batch size by the epoch.

    Used with reload_dataloaders_every_n_epochs=1.
    """

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.datamodule.hparams.batch_size = min(16, trainer.datamodule.hparams.batch_size * 2)


class MoreEpochs(Callback):
    """Trains longer while the loss falls, by the trainer's own max_epochs."""

    def on_train_epoch_end(self, trainer, pl_module):
        falls = trainer.callback_metrics["train_loss_epoch"] < 2.0
        if trainer.current_epoch == trainer.max_epochs - 1 and falls and trainer.max_epochs < 5:
            trainer.fit_loop.max_epochs += 1


class Snapshots(Callback):
    """Keeps the weights of each epoch in a list, and begins the next one with their mean."""

    def __init__(self):
        self.weights = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.weights.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        mean = {
            name: torch.stack([one[name] for one in self.weights]).float().mean(0).to(value.dtype)
            for name, value in self.weights[-1].items()
        }
        pl_module.load_state_dict(mean)
