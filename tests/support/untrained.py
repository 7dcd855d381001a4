"""A Run that trains nothing, as parts of a checkpoint see it, and trainers for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY
from sagemaker_lightning.resume.parts import PARTS
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.resumption import Resumption
from sagemaker_lightning.resume.run import Run
from sagemaker_lightning.resume.same_run.same_run import SameRun
from sagemaker_lightning.state.graph.state import NOTHING_TRAINED

SAME_RUN = {"flags": "{}", "sizes": [], "workers": [], "ranks": 1, "numbers": None}


def alone(value: Any) -> list:
    """Return what one rank says."""
    return [value]


def alike(value: Any) -> list:
    """Return what two ranks say that have the same."""
    return [value, value]


def trainer_of(model: LightningModule, *callbacks: Callback) -> Trainer:
    settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **settings)
    trainer.strategy.connect(model)
    model.trainer = trainer
    return trainer


def in_epoch_5(**values) -> SimpleNamespace:
    """Return what parts ask of a trainer, in epoch 5."""
    progress = SimpleNamespace(processed=5, completed=5)
    batches = SimpleNamespace(ready=1, started=1, processed=1, completed=1)
    loop = SimpleNamespace(
        max_epochs=9,
        epoch_progress=SimpleNamespace(current=progress),
        loaders=None,
        _should_reload_train_dl=False,
        _data_source=SimpleNamespace(is_module=lambda: True),
        _data_fetcher=None,
        epoch_loop=SimpleNamespace(
            global_step=9,
            max_steps=-1,
            _is_training_done=False,
            batch_progress=SimpleNamespace(current=batches),
            val_loop=SimpleNamespace(_seen_batches_per_dataloader={0: 1}),
            automatic_optimization=SimpleNamespace(),
            manual_optimization=SimpleNamespace(),
        ),
    )
    known = {
        "fit_loop": loop,
        "current_epoch": 5,
        "should_stop": False,
        "reload_dataloaders_every_n_epochs": 0,
        "world_size": 1,
        "strategy": None,
        "global_rank": 0,
        "local_rank": 0,
        "is_global_zero": True,
        "callbacks": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "loggers": [],
        "lightning_module": nn.Linear(1, 1),
        "train_dataloader": None,
        "val_dataloaders": None,
        "datamodule": None,
    }
    return SimpleNamespace(**known | values)


def run_of(
    trainer: Any,
    folder: Path = Path("folder"),
    gather: Callable[[Any], list] = alone,
    setting: str = "--resume.dirpath",
    other_settings: bool = False,
) -> Run:
    """Return a run that starts over, and has not begun."""
    run = object.__new__(Run)
    run.trainer = trainer
    run.folder = CheckpointDir(CheckpointHome(folder), 3, setting)
    run.seeding = SimpleNamespace(seed=7)
    run.options = SimpleNamespace(trained=NOTHING_TRAINED, saves=False, later=None, fit=1)
    run.agreement = SimpleNamespace(gather=gather)
    run.same_run = SameRun(trainer, run.folder, {}, other_settings, run.agreement.gather)
    run.resumed = None
    run.parts = [part(run) for part in PARTS]
    return run


def resumed(
    run: Run,
    point: ResumePoint | None = ResumePoint.BATCH,
    world_size: int | None = None,
    ranks: list[Mapping[str, Any]] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    same_run: Mapping[str, Any] = SAME_RUN,
    **parts: Any,
) -> Run:
    """Return a run that has read a checkpoint of step 12, and restored nothing.

    Args:
        run: The run; it is changed.
        point: When it was saved; None if training continues already.
        world_size: How many ranks have saved it; None for as many as there are.
        ranks: What each has saved; None if each has saved `parts`.
        checkpoint: What Lightning loads.
        same_run: What it says of its run.
        parts: What it has of parts, by key.
    """
    own = {"rank_overrides": {"entries": {}, "exact_values": {}}}
    size = world_size or run.trainer.world_size
    entries = {
        "step": 12,
        "number": 3,
        "resume_point": (point or ResumePoint.BATCH).value,
        "world_size": size,
        "seed": 7,
        "run": same_run,
        "exact_values": {},
        "parts": parts,
        "ranks": [own | dict(each) for each in (ranks or [parts] * size)],
    }
    content = {ENTRIES_KEY: entries} | dict(checkpoint or {})
    name = "step-000000012.ckpt"
    run.resumed = Resumption(name, content, run.trainer.global_rank, run.trainer.world_size)
    if point is None:
        run.resumed.training_continues()
    run.same_run.before = same_run
    run.same_run.file_name = name
    run.same_run.same_ranks = run.resumed.same_ranks
    return run
