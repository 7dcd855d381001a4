"""drill/drilled_run.py and drill/hook.py: what a drilled run adds to a training."""

import functools
import importlib.metadata
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import MLFlowLogger, WandbLogger
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sagemaker_lightning.contract.environment import DRILL_VARIABLE, SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.drill import drilled_run, hook
from sagemaker_lightning.resume.callback import ExactResume


@pytest.mark.parametrize(("workers_before", "workers_after"), [(0, 2), (2, 0), (1, 2)])
def test_a_loader_gets_another_number_of_workers(workers_before, workers_after):
    settings = (
        {"persistent_workers": True, "timeout": 5, "prefetch_factor": 3} if workers_before else {}
    )
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, num_workers=workers_before, **settings)
    drilled_run._set_workers(loader, workers_after)
    fresh = DataLoader(
        TensorDataset(torch.arange(8)),
        2,
        num_workers=workers_after,
        **(settings if workers_after and workers_before else {}),
    )
    names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
    assert [getattr(loader, name) for name in names] == [getattr(fresh, name) for name in names]
    assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(8))


# What a drilled run adds --------------------------------------------------------------------------


def drilled(folder: Path, **asked) -> drilled_run.Drilled:
    settings = {"folder": folder, "reached": folder / "reached", "epochs": 2, "steps": 3}
    return drilled_run.Drilled(settings | {"moment": None, "workers": None} | asked)


STEPPED = SimpleNamespace(
    automatic_optimization=SimpleNamespace(optim_progress=SimpleNamespace(optimizer_steps=5)),
    manual_optimization=SimpleNamespace(
        optim_step_progress=SimpleNamespace(total=SimpleNamespace(completed=0))
    ),
    batch_progress=SimpleNamespace(current=SimpleNamespace(ready=4)),
    val_loop=SimpleNamespace(),
)
"""The loop over an epoch's batches, after five steps."""


def trainer_of(**values) -> SimpleNamespace:
    """Return what a drilled run asks of a trainer."""
    known = {
        "loggers": [],
        "callbacks": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "strategy": None,
        "lightning_module": LightningModule(),
        "datamodule": None,
        "train_dataloader": None,
        "val_dataloaders": None,
        "fit_loop": SimpleNamespace(max_epochs=9, min_epochs=None, epoch_loop=STEPPED),
        "accumulate_grad_batches": 1,
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "limit_test_batches": 1.0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 50,
        "global_rank": 0,
        "is_global_zero": True,
        "current_epoch": 1,
        "sanity_checking": False,
        "state": SimpleNamespace(fn="fit"),
        "_data_connector": SimpleNamespace(_prepare_dataloader=lambda loader, *_: loader),
    }
    return SimpleNamespace(**known | values)


@pytest.fixture
def untrained(monkeypatch):
    """This process has begun no training."""
    monkeypatch.setattr(drilled_run, "_has_trained", [])


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        ({}, 3, {"limit_train_batches": 3, "limit_val_batches": 3, "limit_test_batches": 3}),
        ({"accumulate_grad_batches": 4}, 3, {"limit_train_batches": 12, "limit_val_batches": 3}),
        (
            {"limit_train_batches": 2, "limit_val_batches": 0, "limit_test_batches": 7},
            3,
            {"limit_train_batches": 2, "limit_val_batches": 0, "limit_test_batches": 3},
        ),
        ({"limit_val_batches": 0.0}, 3, {"limit_val_batches": 0.0}),
        ({"val_check_interval": 0.5}, 6, {"val_check_interval": 0.5}),
        ({"val_check_interval": 10}, 6, {"val_check_interval": 3}),
        ({"val_check_interval": 2}, 6, {"val_check_interval": 2}),
        ({"val_check_interval": 10}, 1, {"val_check_interval": 1}),
        ({"check_val_every_n_epoch": 5}, 3, {"check_val_every_n_epoch": 1}),
        ({"check_val_every_n_epoch": None}, 3, {"check_val_every_n_epoch": None}),
        ({}, 3, {"log_every_n_steps": 1}),
    ],
)
def test_a_drilled_run_is_short(tmp_path: Path, untrained, given, steps, expected):
    trainer = trainer_of(**given)
    drilled(tmp_path, steps=steps).setup(trainer, None, "fit")
    assert {name: getattr(trainer, name) for name in expected} == expected


def test_a_drilled_run_saves_every_other_step_in_the_folder_of_the_drill(tmp_path: Path):
    environment = replace(
        SageMakerEnvironment.read(), drill={"steps": 3}, checkpoint_dir=tmp_path / "a"
    )
    resume = ExactResume("mine", every_n_minutes=5, every_n_steps=50, environment=environment)
    assert resume.folder.path == tmp_path / "a"
    run = drilled(tmp_path)
    trainer = trainer_of(callbacks=[run, resume, other := Callback()])
    run.run_begins(trainer)
    assert trainer.callbacks == [resume, other, run]
    assert (resume.intervals.steps, resume.intervals.minutes) == (2, 0)


def test_a_trainer_without_our_callback_is_not_drilled(tmp_path: Path):
    run = drilled(tmp_path)
    trainer = trainer_of(callbacks=[run, other := Callback()])
    run.run_begins(trainer)
    assert trainer.callbacks == [other]


def test_a_trainer_of_a_drilled_program_gets_the_drills_callback(tmp_path: Path, monkeypatch):
    """By Lightning's entry points; in a program that is not drilled, there is nothing."""

    def added() -> list[Callback]:
        trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        return [each for each in trainer.callbacks if isinstance(each, drilled_run.Drilled)]

    asked = {"folder": "x", "reached": "y", "epochs": 1, "steps": 2, "moment": None, "workers": 3}
    monkeypatch.setenv(DRILL_VARIABLE, json.dumps(asked))
    assert added() == []
    hook.register(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (callback,) = added()
    assert (callback.folder, callback.workers) == (Path("x"), 3)
    monkeypatch.delenv(DRILL_VARIABLE)
    assert added() == []
    monkeypatch.setenv(DRILL_VARIABLE, json.dumps(asked))
    monkeypatch.delitem(sys.modules, "sagemaker_lightning.resume.callback")
    assert added() == []


def test_both_distributions_of_lightning_find_the_drill(tmp_path: Path):
    hook.register(tmp_path)
    found = importlib.metadata.distributions(path=[str(tmp_path)])
    points = [point for each in found for point in each.entry_points]
    assert [point.group for point in points] == [
        "pytorch_lightning.callbacks_factory",
        "lightning.pytorch.callbacks_factory",
    ]
    assert all(point.load() is hook.callbacks for point in points)


@pytest.mark.parametrize(
    ("max_epochs", "min_epochs", "expected"),
    [
        (9, None, (2, 0)),
        (1, None, (1, 0)),
        (None, 1, (2, 1)),
        (-1, 5, (2, 2)),
        (0, 0, (2, 0)),
    ],
)
def test_a_drilled_run_has_few_epochs(tmp_path, untrained, max_epochs, min_epochs, expected):
    trainer = trainer_of(fit_loop=SimpleNamespace(max_epochs=max_epochs, min_epochs=min_epochs))
    drilled(tmp_path).setup(trainer, None, "fit")
    assert (trainer.fit_loop.max_epochs, trainer.fit_loop.min_epochs) == expected


def test_a_drilled_program_trains_once(tmp_path: Path, untrained):
    for stage in ("validate", "fit", "test"):
        drilled(tmp_path).setup(trainer_of(), None, stage)
    with pytest.raises(UserError, match="a drill compares one training: found a second one"):
        drilled(tmp_path).setup(trainer_of(), None, "fit")


class Writing(Callback):
    """Writes to a folder."""

    def __init__(self, dirpath) -> None:
        self.dirpath = dirpath


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [("{}/logs", False), ("", False), ("logs", False), ("/elsewhere", True), ("s3://x/y", True)],
)
@pytest.mark.parametrize("role", ["callbacks", "loggers"])
def test_a_drilled_run_writes_in_its_folder_alone(
    tmp_path: Path, monkeypatch, untrained, role, path, is_refused
):
    monkeypatch.chdir(tmp_path)
    path = path.format(tmp_path)
    owner = Writing(path) if role == "callbacks" else SimpleNamespace(save_dir=path)
    trainer = trainer_of(**{role: [owner]})
    if not is_refused:
        drilled(tmp_path).setup(trainer, None, "fit")
        return
    says = (
        rf"^{type(owner).__name__}: found {'dirpath' if role == 'callbacks' else 'save_dir'}={path}"
    )
    with pytest.raises(UserError, match=says):
        drilled(tmp_path).setup(trainer, None, "fit")
    assert not drilled_run._has_trained and trainer.limit_train_batches == 1.0


@pytest.mark.parametrize("logger_class", [MLFlowLogger, WandbLogger])
def test_a_drilled_run_logs_to_no_server(tmp_path: Path, untrained, logger_class):
    trainer = trainer_of(loggers=[object.__new__(logger_class)])
    says = f"^{logger_class.__name__}: a drill would log to its server, too"
    with pytest.raises(UserError, match=says):
        drilled(tmp_path).setup(trainer, None, "fit")
    assert not drilled_run._has_trained and trainer.limit_train_batches == 1.0


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Saving(DataLoader):
    """A loader that saves its state itself."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "mode", "workers", "expected", "found"),
    [
        (DataLoader(range(8)), RunningStage.TRAINING, 2, 2, 2),
        (DataLoader(range(8)), RunningStage.TRAINING, None, 0, 0),
        (DataLoader(range(8), num_workers=1), RunningStage.TRAINING, 0, 0, 0),
        (DataLoader(range(8)), RunningStage.VALIDATING, 2, 2, None),
        (DataLoader(range(8)), RunningStage.TESTING, 2, 0, None),
        (DataLoader(Numbers()), RunningStage.TRAINING, 2, 0, None),
        (Saving(range(8)), RunningStage.TRAINING, 2, 0, None),
    ],
)
def test_loaders_get_the_workers_of_the_drill(
    tmp_path: Path, untrained, loader, mode, workers, expected, found
):
    prepared = []

    def prepare(*arguments):
        prepared.append(arguments)
        return "prepared"

    trainer = trainer_of(_data_connector=SimpleNamespace(_prepare_dataloader=prepare))
    run = drilled(tmp_path, workers=workers)
    run.setup(trainer, None, "fit")
    assert trainer._data_connector._prepare_dataloader(loader, True, mode) == "prepared"
    assert prepared == [(loader, True, mode)] and loader.num_workers == expected
    assert run.found_workers == found


def recorded(folder: Path, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in drilled_run.records(folder, rank).read_text().splitlines()]


def test_a_drilled_run_records_its_steps(tmp_path: Path):
    run = drilled(tmp_path)
    groups = [[{"lr": 0.5}, {"lr": torch.tensor(0.25)}], [{"lr": 1.0}]]
    optimizers = [SimpleNamespace(param_groups=each) for each in groups]
    trainer = trainer_of(optimizers=optimizers, global_rank=1)
    losses = [torch.tensor(0.5), {"loss": torch.tensor([0.5])}, torch.ones(2), None, {"x": 1}]
    for number, loss in enumerate(losses):
        run.on_train_batch_start(trainer, None, torch.ones(2), number)
        run.on_train_batch_end(trainer, None, loss, None, number)
    run.on_validation_batch_end(trainer, None, None, None, 2)
    run.on_train_epoch_end(trainer, None)
    trainer.sanity_checking = True
    run.on_validation_batch_end(trainer, None, None, None, 2)
    trainer.sanity_checking, trainer.state.fn = False, "validate"
    run.on_validation_batch_end(trainer, None, None, None, 2)
    *steps, validation, epoch = recorded(tmp_path, 1)
    assert [step["at"] for step in steps] == [["batch", 1, number] for number in range(5)]
    assert [step["loss"] for step in steps] == [(0.5).hex()] * 2 + [None] * 3
    rates = [rate.hex() for rate in (0.5, 0.25, 1.0)]
    assert all(step["learning rate"] == rates and step["step"] == 5 for step in steps)
    assert len({step["batch"] for step in steps}) == 1
    assert validation == {"at": ["validation", 1, 4, 2]} and epoch == {"at": ["epoch", 1]}
    run.on_train_batch_start(trainer, None, torch.zeros(2), 5)
    run.on_train_batch_end(trainer, None, None, None, 5)
    assert recorded(tmp_path, 1)[-1]["batch"] != steps[0]["batch"]


STEPS = RATES = WORKERS = SAMPLES = itertools.repeat(0, 2)  # no checkpoint has where it is


class Counts(LightningModule):
    def training_step(self, batch, batch_idx):
        return STEPS


@pytest.mark.parametrize("name", ["STEPS", "RATES", "WORKERS", "SAMPLES"])
def test_variables_that_change_while_training_are_recorded(tmp_path: Path, monkeypatch, name):
    """Those of the model's code, of a schedule and of a loader."""
    schedule = SimpleNamespace(lr_lambdas=[lambda step: RATES])
    loader = DataLoader(
        range(8), worker_init_fn=lambda worker: WORKERS, collate_fn=lambda samples: SAMPLES
    )
    known = vars(
        trainer_of(
            lightning_module=Counts(), lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)]
        )
    )
    del known["train_dataloader"]  # a Trainer has no attribute of its own for it
    trainer = type("Loads", (SimpleNamespace,), {"train_dataloader": loader})(**known)
    run = drilled(tmp_path)
    run.found_workers = 4
    run.on_train_start(trainer, None)
    run.on_train_end(trainer, None)
    run.on_train_start(trainer, None)
    monkeypatch.setattr(sys.modules[__name__], name, itertools.repeat(0, 1))
    run.on_train_end(trainer, None)
    start = {"at": ["start", 1], "step": 5, "workers": 4}
    ends = [{"at": ["end", 1], "changed": changed} for changed in ([], [f"{__name__}.{name}"])]
    assert recorded(tmp_path) == [start, ends[0], start, ends[1]]


class Clock:
    """A clock that moves on while a run sleeps, and calls what is due."""

    def __init__(self, events: dict) -> None:
        self.now = 1000.0
        self.events = {1000.0 + seconds: event for seconds, event in events.items()}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [due for due in self.events if due <= self.now]:
            self.events.pop(due)()


@pytest.mark.parametrize(
    ("sent_at", "heard_at", "seconds"),
    [
        (None, None, 60.0),
        (10.0, 10.5, 10.5),
        (10.0, None, 15.0),
        (58.0, None, 60.0),
    ],
)
def test_a_run_waits_for_its_signal(tmp_path: Path, monkeypatch, sent_at, heard_at, seconds):
    """After all checkpoints are written; and for a handler, once it is sent."""
    reached = tmp_path / "reached"
    stop = SimpleNamespace(signal_number=0)
    written = []
    writer = SimpleNamespace(wait=lambda: written.append(reached.exists()))
    events = {sent_at: reached.unlink} if sent_at else {}
    if heard_at:
        events[heard_at] = functools.partial(setattr, stop, "signal_number", 15)
    clock = Clock(events)
    monkeypatch.setattr(drilled_run, "time", clock)
    resume = SimpleNamespace(run=SimpleNamespace(writer=writer), stop=stop)
    monkeypatch.setattr(drilled_run, "_exact_resume", lambda trainer: resume)
    run = drilled(tmp_path, moment=["epoch", 1])
    trainer = trainer_of(current_epoch=0)
    run.on_train_epoch_end(trainer, None)
    trainer.current_epoch, trainer.is_global_zero = 1, False
    run.on_train_epoch_end(trainer, None)
    assert written == [] and clock.now == 1000.0
    trainer.is_global_zero = True
    run.on_train_epoch_end(trainer, None)
    assert written == [False] and clock.now - 1000.0 == pytest.approx(seconds, abs=0.05)
    assert reached.exists() is (sent_at is None)
    run.on_train_epoch_end(trainer, None)  # once
    assert len(written) == 1
