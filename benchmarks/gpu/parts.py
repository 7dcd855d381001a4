"""The measurements on a GPU, part by part, the most valuable first."""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    accuracy,
    interruption_cost,
    original,
    report,
    similarity,
    startup,
    step,
    turns,
)
from benchmarks.gpu import exactness, profiling
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import Task
from benchmarks.step import Setting

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """The options of a call."""

    results: Results
    folder: Path
    """For temporary files."""
    data_dir: Path | None
    miniature: bool = False
    """Whether all is tiny, and on a CPU: a rehearsal, which measures nothing."""

    @property
    def accelerator(self) -> str:
        """The device to train on, by Lightning's name."""
        return "cpu" if self.miniature else "gpu"

    def rounds(self, n: int) -> range:
        """Return the rounds of a measurement that is done n times."""
        return range(1, (1 if self.miniature else n) + 1)


@dataclass(frozen=True)
class Part:
    """A part: what it measures, and the columns of its table.

    Each column is a number or a truth value of a record.
    """

    what: str
    seconds: float
    """It may take."""
    tasks: Callable[[Options], list[Task]]
    columns: Mapping[str, Callable[[Record], float | bool]]
    needs_data: bool = False
    details: Callable[[Sequence[Record]], str] = lambda records: ""
    """What the report says below the table."""


# Exact resume -------------------------------------------------------------------------------------

DETERMINISTIC = {"trainer.deterministic": "true"}
BF16 = {"trainer.precision": "bf16-mixed"}
RECIPES_OWN = {"model.stem": "small", "model.channels_last": "true"}
RESUMED = {
    "fp32, deterministic": DETERMINISTIC,
    "bf16, deterministic": BF16 | RECIPES_OWN | DETERMINISTIC,
    "bf16, compiled, deterministic": BF16 | RECIPES_OWN | DETERMINISTIC | {"model.compile": "true"},
    "fp32": {},
    "bf16": BF16 | RECIPES_OWN,
    "bf16, compiled": BF16 | RECIPES_OWN | {"model.compile": "true"},
}
TOGETHER = 10  # jobs that are interrupted side by side: nothing is timed there


def resume(options: Options) -> list[Task]:
    """Interrupt jobs, n = 10 for each setting."""
    settings = {"fp32": {}} if options.miniature else RESUMED
    short_run = (
        {"trainer.max_epochs": "1", "trainer.limit_train_batches": "6"} if options.miniature else {}
    )
    flags_of_settings = {
        setting: exactness.FLAGS
        | setting_flags
        | short_run
        | {"trainer.accelerator": options.accelerator}
        for setting, setting_flags in settings.items()
    }
    tasks = []
    jobs = 1 if options.miniature else TOGETHER
    for setting, flags in flags_of_settings.items():
        tasks.append(Task(setting, 0, partial(exactness.left_alone, flags, options.folder)))
        setting_records = partial(options.results.records, "resume", setting)
        work = partial(exactness.interrupted, flags, options.folder, setting_records, jobs)
        tasks.append(Task(setting, 1, work))
    return tasks


def exact(records: Sequence[Record]) -> str:
    """Say how many interrupted jobs ended with the bits of uninterrupted ones."""
    lines = []
    for setting in dict.fromkeys(record["setting"] for record in records):
        setting_records = [record for record in records if record["setting"] == setting]
        jobs = [job for record in setting_records for job in record.get("jobs", [])]
        alike = [
            len(set(record["weights"])) == 1 for record in setting_records if "weights" in record
        ]
        count = {key: sum(job[key] for job in jobs) for key in ("right", "kills", "stops", "hung")}
        lines.append(
            f"- {setting}: {count['right']} of {len(jobs)} interrupted jobs ended with the bits "
            f"of one left alone; {count['kills']} kills, {count['stops']} stops, "
            f"{count['hung']} hung; two jobs left alone: "
            f"{'the same bits' if all(alike) else 'DIFFERENT bits'}"
        )
    return "\n".join(lines)


# The step -----------------------------------------------------------------------------------------

VARIANTS = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "bf16, compiled": {"precision": "bf16-mixed", "compile": True},
}
STEPS = {32: 200, 256: 100, 512: 60, 1024: 30}  # timed steps of a turn: a second or less


def sized(setting: Setting, steps: int) -> Setting:
    """Return a setting with as many images in one epoch as the turns of a process take."""
    held_out = 10_000  # the data module's default for validation
    needed = (turns.TURNS * (turns.WARMUP_STEPS + steps) + 2) * setting.batch_size + held_out
    return replace(setting, images=max(50_000, needed))


def steps(options: Options) -> list[Task]:
    """Compare our training with a bare loop, three times for each setting."""
    settings = {
        f"batch {size}, {name}": Setting(size, **variant)
        for size in (32, 256, 1024)
        for name, variant in VARIANTS.items()
    }
    recipes = {"precision": "bf16-mixed", "compile": True, "channels_last": True, "stem": "small"}
    settings["batch 512, as the recipe `fast`"] = Setting(512, **recipes)
    if options.miniature:
        settings = {"batch 4, fp32": Setting(4)}
    tasks = []
    for number in options.rounds(3):
        for name, setting in settings.items():
            count = STEPS.get(setting.batch_size, 1)
            sides = [
                partial(side, setting=sized(setting, count)) for side in (step.ours, step.bare)
            ]
            tasks.append(Task(name, number, partial(raced, *sides, steps=count)))
    return tasks


def raced(ours: Callable, other: Callable, steps: int) -> dict[str, Any]:
    """Return the images/s of both sides in each turn."""
    rates = turns.pair(ours, other, steps, start="fork")
    return {"ours": [pair[0] for pair in rates], "other": [pair[1] for pair in rates]}


def ratio(record: Record) -> float:
    """Return ours / other: the median over the turns."""
    return statistics.median(
        ours / other for ours, other in zip(record["ours"], record["other"], strict=True)
    )


RATES = {
    "ours / other": ratio,
    "ours, images/s": lambda record: statistics.median(record["ours"]),
    "other, images/s": lambda record: statistics.median(record["other"]),
}

# The recipes --------------------------------------------------------------------------------------

TINY = [
    "--trainer.max_steps=3",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--data.batch_size=8",
]
TINY += ["--model.compile=false", "--model.stem=imagenet"]


def recipe(name: str, n: int, options: Options) -> list[Task]:
    """Train by a recipe through app/train.py, n times."""
    flags = TINY if options.miniature else []
    return [
        Task(name, seed, partial(trained, name, options.data_dir, seed, flags))
        for seed in options.rounds(n)
    ]


def trained(name: str, data_dir: Path, seed: int, flags: list[str]) -> dict[str, Any]:
    """Train by a recipe, in a process as a user starts it."""
    return accuracy.once(name, data_dir, seed, flags)._asdict()


ACCURACIES = {
    "test accuracy": lambda record: record["accuracy"],
    "seconds of training": lambda record: record["seconds"],
    "after its first two steps": lambda record: record["steady"],
    "seconds of the process": lambda record: record["process"],
}

# The original's recipe ----------------------------------------------------------------------------


def against_the_original(options: Options) -> list[Task]:
    """Compare with the original tutorial's recipe, three times each.

    Ours trains as the original does, and then with the settings that suit a GPU.
    """
    settings = {
        "as it trains: batch 32, Adam, fp32": Setting(),
        "batch 1024, bf16, channels last": Setting(1024, "bf16-mixed", channels_last=True),
        "batch 1024, bf16, channels last, compiled": Setting(
            1024, "bf16-mixed", compile=True, channels_last=True
        ),
    }
    if options.miniature:
        settings = {"batch 32": Setting()}
    count = 1 if options.miniature else 60
    other = partial(original.recipe, data_dir=None)
    return [
        Task(
            name,
            number,
            partial(raced, partial(step.ours, setting=sized(setting, count)), other, steps=count),
        )
        for number in options.rounds(3)
        for name, setting in settings.items()
    ]


# Start-up and checkpoints -------------------------------------------------------------------------


def costs(options: Options) -> list[Task]:
    """Measure the cost of a start and of a checkpoint."""
    tasks = []
    for number in options.rounds(3):
        for manner in ("background", "waiting"):
            work = partial(stalls, manner, options.accelerator, 11 if options.miniature else 120)
            tasks.append(Task(f"checkpoint, {manner}", number, work))
        tasks.append(Task("start-up", number, started))
    return tasks


def stalls(manner: str, accelerator: str, count: int) -> dict[str, Any]:
    """Return the seconds of each step, and of each checkpoint for which training waits.

    The last checkpoint is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        watched = interruption_cost.train(manner, manner == "waiting", accelerator, count)
        size = max(path.stat().st_size for path in Path(manner).glob("step-*"))
        os.chdir("/")
    return {
        "steps": watched.steps,
        "saves": watched.saves[:-1],
        "work": watched.work[:-1],
        "bytes": size,
    }


def started() -> dict[str, Any]:
    """Return the seconds to the first step, and those of the imports alone."""
    return {
        "imports": startup.seconds([sys.executable, *startup.IMPORTS]),
        "first_step": startup.program(),
    }


def _stalled(record: Record) -> float:
    return statistics.median(record["saves"]) if "saves" in record else float("nan")


COSTS = {
    "start to first step / imports": lambda record: (
        record["first_step"] / record["imports"] if "imports" in record else float("nan")
    ),
    "seconds to first step": lambda record: record.get("first_step", float("nan")),
    "a checkpoint's stall, ms": lambda record: 1000 * _stalled(record),
    "the same, in steps": lambda record: (
        _stalled(record) / statistics.median(record["steps"]) if "steps" in record else float("nan")
    ),
    "of 30 s, in which there is one": lambda record: (
        _stalled(record) / interruption_cost.INTERVAL_SECONDS
    ),
}

# Similarity ---------------------------------------------------------------------------------------


def pairs_of_rows(options: Options) -> list[Task]:
    """Compare a block of rows with all rows: ours, the bare product, and faiss-gpu.

    faiss-gpu takes part if it is installed.
    """
    rows = [300] if options.miniature else [20_000, 200_000]
    precisions = ["float32"] if options.miniature else ["float32", "bfloat16"]
    return [
        Task(
            f"{count} rows of 256, {precision}",
            1,
            partial(compared, count, precision, options.miniature),
        )
        for count in rows
        for precision in precisions
    ]


def compared(rows: int, precision: str, miniature: bool) -> dict[str, Any]:
    """Return the seconds of each contender in each round, and the rows of a block."""
    device = torch.device("cpu" if miniature else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        work = similarity.contenders(
            similarity.unit(rows, 256), 10, Path(folder), device, precision
        )
        return {
            "rows": min(similarity.BLOCK_ROWS, rows),
            "seconds": similarity.timed(work, 1 if miniature else 20),
        }


def _against(name: str) -> Callable[[Record], float]:
    def value(record: Record) -> float:
        seconds = record["seconds"]
        their_seconds = seconds.get(name, [])
        return (
            statistics.median(
                map(lambda theirs, ours: theirs / ours, their_seconds, seconds["ours"])
            )
            if their_seconds
            else float("nan")
        )

    return value


ROWS = {
    "rows/s": lambda record: record["rows"] / statistics.median(record["seconds"]["ours"]),
    "ours / bare product": _against("matrix product alone"),
    "ours / faiss-gpu": _against("faiss-gpu, IndexFlatIP"),
}

# Profile ------------------------------------------------------------------------------------------


def profiles(options: Options) -> list[Task]:
    """Profile the step and the validation."""
    settings = {
        "batch 512, as the recipe `fast`": Setting(512, "bf16-mixed", True, True, "small"),
        "batch 32, fp32": Setting(),
        "batch 1024, bf16": Setting(1024, "bf16-mixed"),
    }
    if options.miniature:
        settings = {"batch 4, fp32": Setting(4)}
    count = 2 if options.miniature else 20
    return [
        Task(
            f"{stage}, {name}",
            1,
            partial(profiling.profile, stage, setting, count, options.accelerator),
        )
        for name, setting in settings.items()
        for stage in ("step", "validation")
    ]


PROFILE = {
    "ms a batch": lambda record: record["milliseconds"] / record["batches"],
    "share of the time with no kernel": lambda record: record["idle"],
    "kernels a batch": lambda record: record["kernels"] / record["batches"],
    "longest gap, ms": lambda record: record["longest_gap"],
}

# Sweep --------------------------------------------------------------------------------------------

SWEPT = {
    "fast": [
        "",
        "optimizer.lr=0.2",
        "optimizer.lr=0.45",
        "trainer.max_epochs=12",
        "trainer.max_epochs=18",
        "optimizer.weight_decay=1e-3",
        "optimizer.weight_decay=2.5e-4",
        "data.batch_size=1024 optimizer.lr=0.5",
        "data.batch_size=256 optimizer.lr=0.2",
        "model.label_smoothing=0.2",
        "model.label_smoothing=0.0",
        "lr_scheduler.warmup=0.1",
        "lr_scheduler.warmup=0.35",
        "data.cutout=6",
        "trainer.max_epochs=10",
        "data.batch_size=768 optimizer.lr=0.4",
        "optimizer.lr=0.45 optimizer.weight_decay=1e-3",
        "optimizer.lr=0.2 optimizer.weight_decay=1e-3",
    ],
    "accurate": [
        "",
        "optimizer.lr=0.2",
        "optimizer.weight_decay=1e-3",
        "trainer.max_epochs=45",
        "data.cutout=12",
        "trainer.max_epochs=80",
        "data.batch_size=256 optimizer.lr=0.2",
        "model.label_smoothing=0.2",
        "lr_scheduler.warmup=0.1",
        "data.batch_size=1024 optimizer.lr=0.5",
    ],
}


def sweep(options: Options) -> list[Task]:
    """Train by the recipes with a setting changed.

    Nothing is compiled, which would take longer than the training.
    """
    tasks = []
    more_flags = TINY if options.miniature else ["--model.compile=false"]
    for seed in options.rounds(3):
        for name, changes in SWEPT.items():
            for change in changes[: 1 if options.miniature else None]:
                flags = [*(f"--{word}" for word in change.split()), *more_flags]
                work = partial(forked, name, options.data_dir, 100 + seed, flags, options.folder)
                tasks.append(Task(f"{name}: {change or 'as it is'}", seed, work))
    return tasks


def forked(name: str, data_dir: Path, seed: int, flags: list[str], folder: Path) -> dict[str, Any]:
    """Train by a recipe in a process that has imported everything."""
    import warm

    with tempfile.TemporaryDirectory(dir=folder) as work:
        arguments = [*accuracy.arguments(name, data_dir, seed), *flags]
        variables = os.environ | {"PYTHONPATH": str(report.ROOT)}
        completed = warm.run(
            ["python", report.ROOT / "app/train.py", *arguments],
            Path(work),
            variables,
            timeout=1800,
        )
        log = completed.stdout
        print(log)
    if completed.returncode:
        raise SystemExit(log)
    run = accuracy.printed(log, float("nan"))
    return {"accuracy": run.accuracy, "seconds": run.seconds, "steady": run.steady}


SWEEP = {
    key: ACCURACIES[key]
    for key in ("test accuracy", "seconds of training", "after its first two steps")
}

PARTS: dict[str, Part] = {
    "resume": Part(
        "interrupted jobs that end with the bits of one left alone; "
        "to be: all with --trainer.deterministic=true",
        420,
        resume,
        {},
        details=exact,
    ),
    "step": Part(
        "our training / a bare loop, the same batches; to be: at least 0.95", 480, steps, RATES
    ),
    "fast": Part(
        "recipe `fast`; the aim: 94 % after at most 8 s",
        300,
        partial(recipe, "fast", 10),
        ACCURACIES,
        True,
    ),
    "accurate": Part(
        "recipe `accurate`; the aim: 96 % after at most 30 s",
        270,
        partial(recipe, "accurate", 5),
        ACCURACIES,
        True,
    ),
    "original": Part(
        "our training / the original tutorial's recipe; the aim: 10",
        180,
        against_the_original,
        RATES,
    ),
    "costs": Part("what a start and a checkpoint cost", 150, costs, COSTS),
    "similarity": Part("top 10 of all rows by app/similarity.py", 60, pairs_of_rows, ROWS),
    "profile": Part(
        "where the time of a batch goes", 120, profiles, PROFILE, details=profiling.tables
    ),
    "sweep": Part("the recipes with a setting changed, not compiled", 600, sweep, SWEEP, True),
}
CALL_SECONDS = 35 * 60  # of a call, by default
