"""The parts of drill/command.py that need no run.

They are the list of interruptions, the working folder, and the comparison.
"""

import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.drill import command, comparison
from sagemaker_lightning.resume import checkpoint_file, drilled_run
from sagemaker_lightning.resume.callback import ExactResume
from sagemaker_lightning.state import module_variables


def run_of(folder: Path, **changes) -> Path:
    """Write the files of a run, and return their folder.

    `changes` may change a step's loss, a weight, a metric, a curve's value or a row.
    """
    values = {
        "loss": 0.5,
        "weight": 1.0,
        "metric": 0.25,
        "curve": 2.0,
        "row": "3",
        "moment": 1,
        "steps": 2,
    } | changes
    model = folder / "ml/model"
    logs = folder / "ml/checkpoints/tensorboard"
    model.mkdir(parents=True)
    (folder / "work").mkdir()
    state = {"w": torch.tensor([0.0, values["weight"]])}
    own_state = {
        "number": values["moment"],
        "saved_at": values["moment"] / 2,
        "made": 0,
        "step": 2,
    }
    checkpoint = {
        "state_dict": state,
        "callbacks": {"Timer": {"time_elapsed": values["moment"]}},
        checkpoint_file.ENTRIES_KEY: own_state,
    }
    checkpoint_file.write(
        folder / "ml/checkpoints/step-000000002.ckpt", checkpoint, 2, values["moment"]
    )
    torch.save(state, model / "model.pt")
    (model / "model.json").write_text(json.dumps({"metrics": {"val_loss": values["metric"]}}))
    (folder / "work/rows.csv").write_text(f"step,value\n1,{values['row']}\n")
    with SummaryWriter(str(logs / "version_0")) as writer:
        writer.add_scalar("loss", values["curve"], 1)
    with SummaryWriter(str(logs / "version_0/system/localhost")) as writer:
        writer.add_scalar("system/cpu", values["moment"], 1)
    step = {"batch": "aa", "learning rate": [(0.1).hex()]}
    steps = [
        {"at": ["batch", 0, k], "step": k + 1, **step, "loss": (0.5).hex()}
        for k in range(values["steps"])
    ]
    steps[-1]["loss"] = values["loss"].hex()
    lines = [json.dumps(entry) for entry in ({"at": ["start", 0], "step": 0, "workers": 0}, *steps)]
    # The run was killed while it wrote.
    (folder / "steps-0.jsonl").write_text("\n".join(lines) + '\n{"at": ["bat')
    return folder


CHANGES = {
    "loss": (
        0.75,
        "loss",
        "the loss of step 2 (epoch 0, batch 1): 0.5 left alone, 0.75 interrupted",
    ),
    "steps": (3, "steps", "step 3 (epoch 0, batch 2) was not done by the run left alone"),
    "weight": (3.0, "state", "state_dict.w in the last checkpoint: 1 of 2 values"),
    "metric": (0.5, "metrics", "metrics.val_loss in model.json: 0.25 left alone, 0.5 interrupted"),
    "curve": (
        4.0,
        "curve",
        "ml/checkpoints/tensorboard/version_0: loss, row 1: (1, 2.0) left alone, "
        "(1, 4.0) interrupted",
    ),
    "row": ("4", "curve", "work/rows.csv, row 2: ['1', '3'] left alone, ['1', '4'] interrupted"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_each_difference_is_found_first(tmp_path: Path, changed: str):
    value, difference_kind, expected_words = CHANGES[changed]
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other", **{changed: value})
    assert comparison.differences(alone, other_run)[0] == comparison.Difference(
        difference_kind, expected_words
    )


def test_moments_and_the_machines_load_are_no_difference(tmp_path: Path):
    assert not comparison.differences(
        run_of(tmp_path / "alone"), run_of(tmp_path / "other", moment=2)
    )


def test_a_file_too_few_or_too_many_is_named(tmp_path: Path):
    alone = run_of(tmp_path / "alone")
    other_run = run_of(tmp_path / "other")
    (alone / "ml/model/first").write_text("1")
    (other_run / "ml/model/second").write_text("2")
    (alone / "ml/model/third").write_text("3")
    (other_run / "ml/model/third").write_text("4")
    differences_found = [
        difference.words for difference in comparison.differences(alone, other_run)
    ]
    assert differences_found == [
        "first in the model folder: the interrupted run has none",
        "second in the model folder: the run left alone has none",
        "third in the model folder: its bytes",
    ]


def run_positions(epochs: int, batches: int, validations: int, workers: int | None) -> list[dict]:
    """Return the lines that a run writes."""
    positions = [{"at": ["start", 0], "step": 0, "workers": workers}]
    for epoch in range(epochs):
        positions += [{"at": ["batch", epoch, batch]} for batch in range(batches)]
        positions += [{"at": ["validation", epoch, batches, batch]} for batch in range(validations)]
        positions += [{"at": ["epoch", epoch]}]
    return positions


def test_the_moments_lie_in_the_middle_of_the_run():
    interruptions, lacking = command.planned(run_positions(3, 4, 3, workers=0))
    assert {interruption.name: interruption.moment for interruption in interruptions} == {
        "kill-in-epoch": ("batch", 1, 2),
        "stop-in-epoch": ("batch", 1, 1),
        "kill-at-epoch-end": ("epoch", 0),
        "stop-at-epoch-end": ("epoch", 0),
        "kill-in-validation": ("validation", 1, 4, 1),
        "stop-in-validation": ("validation", 1, 4, 0),
        "workers": ("batch", 1, 1),
    }
    assert (
        not lacking
        and [interruption.name for interruption in interruptions] == command.INTERRUPTION_NAMES
    )
    assert [
        interruption.workers for interruption in interruptions if interruption.workers is not None
    ] == [2]


def test_what_a_run_has_no_moment_for_is_said():
    interruptions, lacking = command.planned(run_positions(1, 4, 0, workers=None))
    assert [interruption.name for interruption in interruptions] == [
        "kill-in-epoch",
        "stop-in-epoch",
    ] and len(lacking) == 3


def test_what_a_run_says_of_itself():
    output = (
        "resuming from step 4: x\nresumed at step 4: the next step is that of before\nerror: no\n"
        "error: a [host b]\n"
    )
    result = command.RunResult(1, True, f"{output}last\n")
    assert (
        result.verdict == "resumed at step 4: the next step is that of before"
        and result.error == "error: a [host b]"
    )
    result = command.RunResult(
        1,
        True,
        f"warning: {output[24:]}Traceback (most recent call last):\n  File x\nKeyError: 'x'\n",
    )
    assert result.verdict.startswith("warning: resumed at step 4: the next")
    assert (
        command.RunResult(
            1, True, "Traceback (most recent call last):\n  File x\nKeyError: 'x'\n"
        ).error
        == "KeyError: 'x'"
    )
    assert command.RunResult(0, True, "").verdict == ""


def test_the_working_folder_is_mirrored_and_not_written_to(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command, "MAX_COPIED_BYTES", (10, 12))
    monkeypatch.setattr(command, "MAX_ENTRIES", 12)
    home, data, large_folder, drill_folder = (
        tmp_path / "home" / name for name in ("", "data", "many", "drill-1")
    )
    for folder in (data, large_folder, drill_folder, home / ".git"):
        folder.mkdir(parents=True)
    (data / "small").write_text("small")
    (data / "large").write_text("larger than ten bytes")
    (data / "tenth").write_text("10 letters")
    (home / "data/link").symlink_to("small")
    for number in range(12):
        (large_folder / str(number)).touch()
    command.mirror(home, tmp_path / "copy", drill_folder)
    copy = tmp_path / "copy"
    assert (copy / "data/small").read_text() == "small" and not (copy / "data/small").is_symlink()
    assert (copy / "data/large").is_symlink() and (
        copy / "data/large"
    ).read_text() == "larger than ten bytes"
    assert (copy / "data/tenth").is_symlink(), "all of them together are too large"
    assert (copy / "data/link").read_text() == "small"
    assert (
        (copy / "many").is_symlink()
        and (copy / ".git").is_symlink()
        and not (copy / "drill-1").exists()
    )
    (copy / "data/small").write_text("other")
    (copy / "data/new").touch()
    assert (data / "small").read_text() == "small" and not (data / "new").exists()


SEEN = 0


def counted(samples):
    """Count in a variable of the module."""
    global SEEN
    SEEN += len(samples)
    return samples


def made_of(iterator):
    """Return a function that counts by an iterator."""
    return lambda: next(iterator)


def test_variables_that_change_are_named():
    objects = {
        "collate_fn": counted,
        "count": made_of(itertools.count()),
        "still": made_of(iter([1, 2])),
    }
    objects |= {"endless": made_of(item for item in [1, 2]), "long": made_of(iter(range(10**9)))}
    digests_before = module_variables.variable_digests(objects, objects)
    counted([1, 2])
    for name in ("count", "endless", "long"):
        objects[name]()
    named = [
        "test_drill_comparison.SEEN",
        "test_drill_comparison.made_of.<locals>.<lambda>.iterator",
    ]
    assert (
        module_variables.changed_variables(
            digests_before, module_variables.variable_digests(objects, objects)
        )
        == named
    )


class Meter:
    """A sum of losses, as in PyTorch's ImageNet example; other such sums follow."""

    instances = []

    def __init__(self) -> None:
        self.sum = 0.0
        self.instances.append(self)


METER = Meter()
BANK = torch.zeros(100_000, 2)
SCORES = [0] * 100_000
FRIEND = torch.nn.BatchNorm1d(2)
MODEL = Meter()
MODELS = [MODEL]


@functools.lru_cache
def projection(size):
    return torch.randn(size)


@functools.lru_cache
def squares(size):
    return torch.arange(size) ** 2


def remembers(number):
    """Change all of these."""
    remembers.calls += 1
    METER.sum += number
    BANK[:] = number
    SCORES[0] = number
    FRIEND(torch.ones(2, 2) * number)
    records.limit = number
    MODELS[0].sum += number
    projection(number), squares(number)


remembers.calls = 0


def test_objects_in_variables_that_change_are_named(monkeypatch):
    """What a checkpoint has is not named, nor a cache of what is computed again."""
    monkeypatch.setattr(records, "limit", 0, raising=False)
    digests = lambda: module_variables.variable_digests(  # noqa: E731
        {"collate_fn": remembers, "model": MODEL}, {"model": MODEL}
    )
    before = digests()
    assert digests() == before
    remembers(3)
    changed = module_variables.changed_variables(before, digests())
    assert [name for name in changed if "FRIEND.running" not in name] == [
        "records.limit",
        "test_drill_comparison.BANK",
        "test_drill_comparison.FRIEND.num_batches_tracked",
        "test_drill_comparison.METER.sum",
        "test_drill_comparison.SCORES",
        "test_drill_comparison.projection",
        "test_drill_comparison.remembers.calls",
    ]
    Meter()
    assert "test_drill_comparison.Meter.instances" in module_variables.changed_variables(
        before, digests()
    )


def test_what_a_function_has_closed_over_is_named_where_no_checkpoint_has_it():
    total = 0

    def add():
        nonlocal total
        total += 1

    digests_before = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    add()
    digests_after = [
        module_variables.variable_digests({"add": add}, saved) for saved in ({}, {"add": add})
    ]
    assert module_variables.changed_variables(digests_before[0], digests_after[0]) == [
        f"test_drill_comparison.{add.__qualname__}.total"
    ]
    assert module_variables.changed_variables(digests_before[1], digests_after[1]) == []


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


def drilled(folder: Path, resume=None, **asked) -> drilled_run.Drilled:
    settings = {"folder": folder, "reached": folder / "reached", "epochs": 2, "steps": 3}
    return drilled_run.Drilled(settings | {"moment": None, "workers": None} | asked, resume)


def trainer_of(**values) -> SimpleNamespace:
    """Return what a drilled run asks of a trainer."""
    known = {
        "loggers": [],
        "callbacks": [],
        "optimizers": [],
        "lr_scheduler_configs": [],
        "lightning_module": LightningModule(),
        "datamodule": None,
        "train_dataloader": None,
        "val_dataloaders": None,
        "fit_loop": SimpleNamespace(max_epochs=9, min_epochs=None),
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
        "global_step": 5,
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
    asked = {"folder": tmp_path, "reached": "x", "epochs": 2, "steps": 3, "moment": None}
    environment = replace(
        SageMakerEnvironment.read(), drill=asked | {"workers": None}, checkpoint_dir=tmp_path / "a"
    )
    resume = ExactResume("mine", every_n_minutes=5, every_n_steps=50, environment=environment)
    assert resume.folder.path == tmp_path / "a"
    assert (resume.every_n_steps, resume.every_n_minutes) == (2, 0)


@pytest.mark.parametrize(
    ("max_epochs", "min_epochs", "expected"),
    [
        (9, None, (2, 0)),
        (1, None, (1, 0)),
        (None, 1, (2, 1)),
        (-1, 5, (2, 2)),
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
    progress = SimpleNamespace(current=SimpleNamespace(ready=4))
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    groups = [[{"lr": 0.5}, {"lr": torch.tensor(0.25)}], [{"lr": 1.0}]]
    optimizers = [SimpleNamespace(param_groups=each) for each in groups]
    trainer = trainer_of(fit_loop=fit_loop, optimizers=optimizers, global_rank=1)
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


STEPS, RATES, WORKERS, SAMPLES = 1, 1, 1, 1


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
    monkeypatch.setattr(sys.modules[__name__], name, 2)
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
    run = drilled(tmp_path, SimpleNamespace(writer=writer, stop=stop), moment=["epoch", 1])
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
