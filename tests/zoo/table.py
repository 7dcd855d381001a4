"""The configurations: a name, and the file of flags that a job of it is given."""

from dataclasses import dataclass
from typing import Any

LIGHTNING = "pytorch_lightning.callbacks."
DEFAULTS = {
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 3,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "log_every_n_steps": 3,
    },
    "progress": {"every_n_seconds": 100},
    "checkpoint": {"monitor": None},
}


@dataclass(frozen=True)
class Configuration:
    """A configuration of user code."""

    name: str
    subject: str
    """The heading below which it stands in the table of the documentation."""
    flags: dict[str, Any]
    """The job's file of flags."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks with which it makes sense."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the names of metrics and curves that a clock decides, not the training."""
    program: str = ""
    """The user's own program, which is run in place of ours."""


def made(path: str, **arguments: Any) -> dict[str, Any]:
    """Return how a file of flags names an object: its class and its arguments."""
    return {"class_path": path, "init_args": arguments} if arguments else {"class_path": path}


def callback(path: str, **arguments: Any) -> dict[str, Any]:
    """Return the same for a callback; without a module, it is one of Lightning's."""
    return made(path if "." in path else LIGHTNING + path, **arguments)


CONFIGURATIONS: dict[str, Configuration] = {}
subject = ""


def add(
    name: str,
    model: str | dict | None = "basics.Classifier",
    data: str | dict | None = "basics.BlobsData",
    callbacks: tuple = (),
    more: dict[str, Any] | None = None,
    ranks: tuple[int, ...] = (1,),
    ignored: tuple[str, ...] = (),
    program: str = "",
    **trainer: Any,
) -> None:
    """Add a configuration.

    `trainer` are flags of Lightning's Trainer, `more` those of other sections.
    """
    flags: dict[str, Any] = {key: dict(value) for key, value in DEFAULTS.items()}
    for key, value in {"model": model, "data": data}.items():
        if value is not None:
            flags[key] = made(value) if isinstance(value, str) else value
    flags["trainer"] |= trainer
    if callbacks:
        flags["trainer"]["callbacks"] = [
            callback(one) if isinstance(one, str) else one for one in callbacks
        ]
    flags |= more or {}
    assert name not in CONFIGURATIONS, name
    CONFIGURATIONS[name] = Configuration(name, subject, flags, ranks, ignored, program)


RANKS = (1, 2, 3)
WORKERS = made("basics.BlobsData", num_workers=2)
MONITORED = {"checkpoint": {"monitor": "val_loss"}}

subject = "Lightning's examples"
add("the control", ranks=RANKS)
add("the control, with data workers and a best model", data=WORKERS, more=MONITORED, ranks=RANKS)
add("autoencoder", "vision.LitAutoEncoder", "vision.MNISTDataModule", ranks=RANKS)
add(
    "image classifier",
    "vision.ImageClassifier",
    made("vision.MNISTDataModule", num_workers=1),
    more=MONITORED,
    ranks=RANKS,
)
add(
    "fine-tuning by milestones",
    "vision.TransferLearningModel",
    "vision.MNISTDataModule",
    ("vision.MilestonesFinetuning",),
    max_epochs=4,
)
add(
    "GAN",
    "adversarial.GAN",
    "vision.MNISTDataModule",
    ranks=(1, 2),
    strategy="ddp_find_unused_parameters_true",
)
add(
    "transformer on text",
    "language.LanguageModel",
    "language.TokensData",
    gradient_clip_val=0.25,
    max_epochs=4,
)
add("deep Q-learning", "reinforcement.DQN", None)
add(
    "BoringModel",
    "pytorch_lightning.demos.boring_classes.BoringModel",
    "pytorch_lightning.demos.boring_classes.BoringDataModule",
    ranks=(1, 2),
    limit_train_batches=9,
)
add(
    "ManualOptimBoringModel",
    "pytorch_lightning.demos.boring_classes.ManualOptimBoringModel",
    "pytorch_lightning.demos.boring_classes.BoringDataModule",
    max_epochs=1,
)
add("a module with loaders of its own", "streaming.OwnLoaders", None, ranks=(1, 2))

subject = "Images"
add(
    "transforms of torchvision",
    "vision.ImageClassifier",
    made("vision.MNISTDataModule", num_workers=2, augment=True),
    ranks=(1, 2),
)
add(
    "CutMix and MixUp in collate_fn",
    "vision.ImageClassifier",
    made("vision.MNISTDataModule", num_workers=1, cutmix=True),
)
add("mixup in training_step", "vision.Mixup", "vision.MNISTDataModule", ranks=(1, 2))
add(
    "augmentation in on_after_batch_transfer",
    "vision.AugmentedOnDevice",
    made("vision.MNISTDataModule", num_workers=1),
)
add(
    "noise in on_before_batch_transfer",
    "vision.ImageClassifier",
    made("vision.NoiseFromDataModule", num_workers=1),
)
add("generators in the module", "vision.NoisyModule", "vision.MNISTDataModule", ranks=(1, 2))
add("variational autoencoder", "vision.VAE", "vision.MNISTDataModule")
add(
    "diffusion model",
    "vision.Diffusion",
    "vision.MNISTDataModule",
    strategy="ddp_find_unused_parameters_true",
)
add("distillation, the teacher in a list", "vision.Distilled", "vision.MNISTDataModule")
add("activation checkpoints and drop path", "vision.MixedPrecisionNet", "vision.MNISTDataModule")

subject = "GANs"
add("WGAN with gradient penalty", "adversarial.WGAN", "vision.MNISTDataModule")
add("a pool of generated images", "adversarial.PooledGAN", "vision.MNISTDataModule")
add("gradients accumulated by hand", "adversarial.AccumulatedByHand", "vision.MNISTDataModule")

subject = "Contrastive learning"
for kind in ("SimCLR", "MoCo", "BYOL", "DINO", "MemoryBank", "DeepCluster"):
    add(
        kind,
        f"contrastive.{kind}",
        made("contrastive.TwoViewsData", num_workers=1 if kind == "MoCo" else 0),
        ranks=(1, 2) if kind == "SimCLR" else (1,),
    )

subject = "Text"
add(
    "nanoGPT",
    "language.NanoGPT",
    made("language.NanoGPTData", num_workers=1),
    max_steps=33,
    max_epochs=-1,
    limit_train_batches=12,
)
add("padded sequences", "language.LSTMClassifier", "language.SentencesData")
add(
    "buckets with set_epoch",
    "language.LSTMClassifier",
    made("language.SentencesData", kind="bucket", num_workers=1),
)
add(
    "masking by a collator",
    "language.MaskedLM",
    made("language.SentencesData", kind="mask", num_workers=2),
)
add(
    "masking by a collator with a generator",
    "language.MaskedLM",
    made("language.SentencesData", kind="mask-numpy"),
)
add(
    "the same in a worker",
    "language.MaskedLM",
    made("language.SentencesData", kind="mask-numpy", num_workers=1),
)
add("truncated backpropagation", "language.TruncatedBPTT", "language.TokensData", max_epochs=5)
add("sparse embedding, negative samples", "language.Word2Vec", "language.TokensData", max_epochs=5)

subject = "Reinforcement learning"
add("a stream that depends on the weights", "reinforcement.OnPolicy", None)
add("prioritized replay in arrays", "reinforcement.ValueLearner")
add("a dataset that the module appends to", "reinforcement.Collector", None)

subject = "Schedules"
for kind in (
    "step",
    "multistep",
    "constant",
    "linear",
    "exponential",
    "polynomial",
    "cosine",
    "restarts",
    "lambda",
    "multiplicative",
    "cyclic",
    "cyclic-scaled",
    "onecycle",
    "sequential",
    "chained",
):
    add(f"schedule: {kind}", made("schedules.Scheduled", schedule=kind))
add(
    "schedule by the epoch",
    made("schedules.Scheduled", schedule="restarts", interval="epoch"),
    max_epochs=5,
    limit_train_batches=6,
)
add("schedule every 3 steps", made("schedules.Scheduled", schedule="exponential", frequency=3))
add("ReduceLROnPlateau", "schedules.Plateau", max_epochs=5, limit_train_batches=6)
add(
    "ReduceLROnPlateau by the step",
    made("schedules.Plateau", monitor="train_loss", interval="step"),
)
add("estimated_stepping_batches", "schedules.EstimatedOneCycle", WORKERS, ranks=(1, 2))
add("numpy's cosine after a warm-up", "schedules.NumpyCosine")
add(
    "a schedule in the manner of timm",
    "schedules.TimmScheduled",
    max_epochs=5,
    limit_train_batches=6,
)
add("Noam", "schedules.Noam")
add("warm-up in optimizer_step", "schedules.WarmedUp")
add(
    "two schedules of one optimizer",
    "schedules.TwoSchedulers",
    callbacks=(callback("LearningRateMonitor"),),
)

subject = "Optimizers, precision, layers"
for kind in ("adamax", "nadam", "radam", "asgd", "rprop", "adafactor", "fused"):
    add(f"optimizer: {kind}", made("optimizing.Optimized", optimizer=kind))
add("L-BFGS", "optimizing.WithLBFGS")
add("sharpness-aware minimization", "optimizing.SAM")
add("a head of each rank", "optimizing.OwnHead", ranks=(2,))
add("an optimizer with a counter", "optimizing.LookedAhead")
add("rates by layer, a group added later", "optimizing.LayerWise")
add(
    "optimizers that take turns",
    "optimizing.Alternating",
    ranks=(1, 2),
    strategy="ddp_find_unused_parameters_true",
)
add("spectral, weight and batch norms", "optimizing.Normalized", precision="64-true")
add("quantization-aware training", "optimizing.Quantized")
add("bf16-mixed", precision="bf16-mixed", data=WORKERS)
add("bf16-true", precision="bf16-true")
add("clipping, accumulation", gradient_clip_val=0.5, accumulate_grad_batches=3, ranks=(1, 2))
add("compiled", "vision.Compiled", "vision.MNISTDataModule")

subject = "Callbacks of Lightning"
add(
    "EarlyStopping",
    callbacks=(callback("EarlyStopping", monitor="val_loss", patience=1, min_delta=0.05),),
    max_epochs=9,
    limit_train_batches=6,
    ranks=(1, 2),
)
add(
    "several ModelCheckpoints",
    callbacks=(
        callback("ModelCheckpoint", dirpath="by-step", every_n_train_steps=4, save_top_k=-1),
        callback(
            "ModelCheckpoint",
            dirpath="top",
            monitor="val_acc",
            mode="max",
            save_top_k=2,
            save_last=True,
            filename="{epoch}-{val_acc:.2f}",
        ),
    ),
)
add(
    "LearningRateMonitor, ModelSummary",
    "schedules.EstimatedOneCycle",
    callbacks=(
        callback("LearningRateMonitor", logging_interval="step", log_momentum=True),
        callback("RichModelSummary", max_depth=2),
    ),
)
add(
    "GradientAccumulationScheduler",
    callbacks=(callback("GradientAccumulationScheduler", scheduling={"0": 1, "1": 3, "2": 2}),),
)
add(
    "StochasticWeightAveraging",
    callbacks=(callback("StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=2),),
    max_epochs=5,
    limit_train_batches=7,
)
add("EMAWeightAveraging", callbacks=(callback("EMAWeightAveraging", decay=0.8),), ranks=(1, 2))
add("WeightAveraging from a step on", callbacks=("callbacks_used.EMAFromLater",), more=MONITORED)
add(
    "WeightAveraging by the epoch",
    callbacks=("callbacks_used.SWAByEpoch",),
    max_epochs=5,
    limit_train_batches=6,
)
add("BackboneFinetuning", "callbacks_used.HeadOnly", callbacks=("callbacks_used.Unfreeze",))
add("ModelPruning", callbacks=("callbacks_used.Prune",), max_epochs=4)
add("Timer", callbacks=(callback("Timer", duration={"hours": 5}, interval="step"),))
add(
    "DeviceStatsMonitor",
    callbacks=(callback("DeviceStatsMonitor", cpu_stats=True),),
    ignored=("DeviceStats",),
)
add("ThroughputMonitor", callbacks=("callbacks_used.Throughput",), ignored=("train/", "validate/"))
add(
    "BatchSizeFinder",
    callbacks=(callback("BatchSizeFinder", max_trials=2, steps_per_trial=1, init_val=3),),
)
add("LearningRateFinder", callbacks=(callback("LearningRateFinder", num_training_steps=8),))
add("LearningRateFinder at milestones", callbacks=("callbacks_used.FineTuneLearningRateFinder",))
add(
    "BatchSizeFinder in on_train_epoch_start", callbacks=("callbacks_used.FineTuneBatchSizeFinder",)
)
add("configure_callbacks, LambdaCallback, RichProgressBar", "callbacks_used.WithLambda")
add("OnExceptionCheckpoint", callbacks=(callback("OnExceptionCheckpoint", dirpath="exceptions"),))
add(
    "progress bars",
    callbacks=("callbacks_used.LitProgressBar", callback("ModelSummary", max_depth=-1)),
)
add("a prediction writer", callbacks=("callbacks_used.WritesPredictions",))
add("SpikeDetection", callbacks=("callbacks_used.Spikes",))

subject = "Own callbacks"
add(
    "stateful callbacks of the documentation",
    callbacks=tuple(
        callback("callbacks_used.Counter", what=what) for what in ("epochs", "batches")
    ),
)
add(
    "Enum, dataclass, arrays in a callback",
    callbacks=("callbacks_used.PhaseController",),
    ranks=(1, 2),
)
add("dropout by the epoch", callbacks=("callbacks_used.DropoutSchedule",))
add("an average that is not saved", callbacks=("callbacks_used.ModelEma",))
add("an average in on_save_checkpoint", callbacks=("callbacks_used.SavedEma",), more=MONITORED)
add(
    "a curriculum through the loader",
    data=WORKERS,
    callbacks=("callbacks_used.Curriculum",),
    ranks=(1, 2),
)
add(
    "hard examples through the sampler",
    data=made("sampling.SampledData", kind="weighted"),
    callbacks=("callbacks_used.HardExamples",),
)
add(
    "negative samples by the epoch",
    data=made("sampling.SampledData", kind="negatives"),
    callbacks=("callbacks_used.Resampling",),
)
add(
    "samples shuffled in place",
    data="sampling.InPlaceData",
    callbacks=("callbacks_used.ShuffleInPlace",),
)
add(
    "should_stop by a criterion",
    callbacks=("callbacks_used.StopOnPlateau",),
    max_epochs=12,
    limit_train_batches=5,
)
add("should_stop within an epoch", callbacks=("callbacks_used.StopInTheMiddle",), max_epochs=4)
add("the rest of an epoch skipped", callbacks=("callbacks_used.SkipEpochsRest",))
add("gradients' norms and histograms", callbacks=("callbacks_used.GradientNorms",))
add("samples kept from the start on", callbacks=("callbacks_used.ImagePredictionLogger",))
add(
    "batches that grow",
    callbacks=("callbacks_used.GrowingBatches",),
    reload_dataloaders_every_n_epochs=1,
)
add("max_epochs that grows", callbacks=("callbacks_used.MoreEpochs",))
add("snapshots of weights in a list", callbacks=("callbacks_used.Snapshots",))
add("own files of weights", callbacks=("callbacks_used.OwnCheckpoint",))
add("clipping by the percentile of a list", callbacks=("callbacks_used.AdaptiveClipping",))
add("pretraining in on_fit_start: fit called twice", callbacks=("callbacks_used.Pretraining",))

subject = "Arguments of DataLoader, samplers of torch, map-style datasets"
KINDS = (
    "shuffle",
    "sequential",
    "random",
    "replacement",
    "random-generator",
    "weighted",
    "weighted-generator",
    "subset-random",
    "batch-sampler",
    "distributed",
    "set-epoch",
    "balanced",
    "infinite",
    "generator",
    "generator-alone",
    "seed-worker",
    "persistent",
    "prefetch",
    "drop-last",
    "forkserver",
    "out-of-order",
    "one-by-one",
    "batches-inside",
    "list",
    "tensors",
    "concat",
    "stack",
    "split",
    "numpy",
    "numpy-workers",
    "transforms",
    "torch-shared",
    "lazy-generator",
    "lazy-generator-workers",
    "counting",
    "counting-workers",
    "cached",
    "cached-workers",
    "database",
    "database-init",
    "memmap",
    "collate",
)
for kind in KINDS:
    limits = {"limit_train_batches": 10} if kind == "infinite" else {}
    ranks = (
        (1, 2)
        if kind in ("weighted", "set-epoch", "numpy-workers", "persistent", "batch-sampler")
        else (1,)
    )
    add(f"loader: {kind}", data=made("sampling.SampledData", kind=kind), ranks=ranks, **limits)
add("loader: one-batch", data=made("sampling.SampledData", kind="one-batch"), max_epochs=30)
add(
    "an own DistributedSampler",
    data="sampling.OwnDistributedData",
    ranks=(2,),
    use_distributed_sampler=False,
)
add("a pool that grows", data="sampling.GrowingData", reload_dataloaders_every_n_epochs=1)
add("state_dict of a data module", data="sampling.StatefulData")
add("a fold of k", data=made("sampling.FoldData", fold=1), more=MONITORED)

subject = "Iterable datasets, loaders of other classes, several loaders"
for kind in (
    "ordered",
    "measured",
    "sharded",
    "sharded-persistent",
    "shuffled",
    "shuffled-own",
    "chain",
    "endless",
    "stream-one-by-one",
    "stateful",
    "stateful-workers",
    "stateful-stream",
    "subclass",
    "iterable",
    "own-iterator",
):
    limits = {"limit_train_batches": 10} if kind == "endless" else {}
    add(f"stream: {kind}", data=made("streaming.StreamData", kind=kind), **limits)
for kind in ("dict", "list", "min_size", "max_size", "max_size_cycle"):
    add(
        f"several loaders: {kind}",
        "streaming.SemiSupervised",
        made("streaming.SeveralData", mode=kind, num_workers=1 if kind == "dict" else 0),
        ranks=(1, 2) if kind == "dict" else (1,),
    )
add("an iterator of the module's own", "streaming.OwnIterator")
add("itertools.cycle in the module", "streaming.OwnCycle")

subject = "Modules that remember"
for kind, name in {
    "StepOutputs": "lists of outputs",
    "Baggage": "Enum, dataclass, deque, Counter in a module",
    "RunningNormalized": "statistics in an object",
    "Uncertainty": "weights of losses",
    "MeanTeacher": "a teacher in a tuple",
    "RegisteredTeacher": "a teacher made in on_fit_start",
    "RateAtStart": "rate and weights set in on_train_start",
    "Prototypes": "class means of the validation",
    "SelfPaced": "a percentile of losses, seeds by the epoch",
    "Seeded": "seed_everything in the constructor",
    "FrozenBatchNorm": "train() overridden",
    "EvalAtStart": "eval() at an epoch's start",
    "Gradual": "requires_grad by the epoch",
    "LazyNet": "lazy layers and buffers",
    "Configured": "configure_model",
    "LoRA": "LoRA: strict_loading=False",
    "DeletesBackbone": "weights deleted in on_save_checkpoint",
    "FromPretrained": "weights from a file",
    "OddHyperparameters": "hyperparameters of any kind",
    "Sparse": "sparse, complex and passing buffers",
    "UsesData": "a pass over the data at the start",
    "Curricular": "a curriculum by the module",
    "MonteCarlo": "dropout in the validation",
    "StochasticDepth": "stochastic depth, shared weights",
    "AccumulatesInModule": "accumulation set by the module",
    "Switches": "a scripted counter, an Event, an enum",
    "Searched": "other layers of torch's, and functions kept",
}.items():
    add(name, f"remembering.{kind}", ranks=(1, 2) if kind in ("Baggage", "LoRA") else (1,))

subject = "Metrics"
add("MetricCollection, AUROC, confusion matrix", "measuring.Collected", ranks=(1, 2))
add("MinMax, Running, aggregations", "measuring.Wrapped", ranks=(1, 2))
add("BootStrapper, ClasswiseWrapper", "measuring.Bootstrapped")
add("MetricTracker", "measuring.Tracked")
add("metrics by validation loader", "measuring.ByDataset", made("streaming.SeveralData"))

subject = "Loggers"
CSV = made("pytorch_lightning.loggers.CSVLogger", save_dir="csv", flush_logs_every_n_steps=4)
BOARD = made("pytorch_lightning.loggers.TensorBoardLogger", save_dir="board", name="mine")
add("CSVLogger", logger=CSV)
add("an own TensorBoardLogger", logger=BOARD)
add("two loggers", logger=[BOARD, CSV], log_every_n_steps=1)
add("no logger", logger=False)

subject = "Flags of the Trainer"
add("max_steps within an epoch", max_steps=23, max_epochs=-1)
add("max_time", max_time="00:01:00:00")
add("min_epochs, min_steps", min_epochs=2, min_steps=25, max_epochs=3)
add("limit_train_batches as a share", limit_train_batches=0.55, limit_val_batches=0.5)
add("overfit_batches", overfit_batches=4, max_epochs=6)
add(
    "val_check_interval as a share",
    val_check_interval=0.3,
    callbacks=(callback("EarlyStopping", monitor="val_loss", patience=20),),
)
add("val_check_interval beyond epochs", val_check_interval=7, check_val_every_n_epoch=None)
add("check_val_every_n_epoch", check_val_every_n_epoch=2, max_epochs=4)
add("a sanity check of all", num_sanity_val_steps=-1, more=MONITORED)
add(
    "detect_anomaly, deterministic, profiler",
    detect_anomaly=True,
    deterministic=True,
    profiler="simple",
)
add("no validation", limit_val_batches=0, ranks=(1, 2))
add(
    "no logger, bar and sanity check",
    logger=False,
    enable_progress_bar=False,
    num_sanity_val_steps=0,
)
DDP = made(
    "pytorch_lightning.strategies.DDPStrategy", gradient_as_bucket_view=True, static_graph=True
)
# Without accumulate_grad_batches: torch fails with both, in plain Lightning, too (reducer.cpp,
# expect_autograd_hooks_).
add("DDP: a static graph, gradients as views", ranks=(2, 3), strategy=DDP)

subject = "Own programs"
add("k-fold cross-validation", data="sampling.FoldData", program="kfold.py", max_epochs=2)
add("fit called twice", "remembering.Initialized", program="two_stages.py", max_epochs=2)
add("Tuner before the training", program="tuned.py")
