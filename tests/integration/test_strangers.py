"""User code of many kinds, stopped and killed at any place of a run.

It ends with the weights of an uninterrupted run.
"""

import csv
import json
import os
from pathlib import Path

import nightly
import pytest
import torch
import warm
from containers import ROOT

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests/support/interruptible.py"
HANG_SECONDS = 90  # what takes longer hangs
FLAGS = [
    "--model=strangers.Model",
    "--data=strangers.Data",
    "--trainer.max_epochs=3",
    "--trainer.accelerator=cpu",
    "--checkpoint.monitor=null",
    "--progress.every_n_seconds=100",
    "--resume.every_n_minutes=0",
    "--trainer.enable_model_summary=false",
]


class Run:
    """A job in a folder, started as often as necessary."""

    program = PROGRAM

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.flags = [*FLAGS, *flags]
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *flags: str, **variables: str) -> int:
        """Start it, and return its exit status."""
        log = self.folder / "log"
        length_before = len(log.read_text()) if log.exists() else 0
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")} | variables
        with log.open("a") as output:
            process = warm.start(
                ["python", self.program, *self.flags, *flags],
                self.folder,
                environment,
                output.fileno(),
            )
        try:
            return process.wait(HANG_SECONDS)
        finally:
            process.kill()
            self.output = log.read_text()[length_before:]

    def finish(self, *flags: str, **variables: str) -> dict[str, torch.Tensor]:
        """Run it to its end, and return its weights."""
        assert self.start(*flags, **variables) == 0, self.output[-3000:]
        return torch.load(self.folder / "output/model/model.pt", weights_only=True)


def same(first_weights: dict, second_weights: dict) -> list[str]:
    """Return the names of the weights that differ."""
    return [
        name
        for name in first_weights
        if not torch.equal(
            *(weights[name].to_dense() for weights in (first_weights, second_weights))
        )
    ]


def check(folder: Path, *flags: str, at: tuple[str, ...] = ("1:6",)) -> str:
    """Compare an uninterrupted run with one that is stopped at each of `at`.

    Return the output of the last attempt.
    """
    alone = Run(folder / "alone", *flags)
    run = Run(folder / "run", *flags)
    expected = alone.finish()
    for position in at:
        assert run.start(STOP_AT=position) == 143, run.output[-3000:]
    assert not same(expected, run.finish())
    assert "\nresumed at step " in run.output and "warning: resumed" not in run.output, run.output
    return run.output


WORKERS_FLAG = "--data.workers=1"
PERSISTENT_FLAG = "--data.persistent=true"
STRANGERS = {
    "the control": [],
    "with workers": [WORKERS_FLAG],
    "the number of steps is asked for": ["--model=strangers.Estimated", WORKERS_FLAG],
    "drawn on the way to the device": ["--model=strangers.Augmented", WORKERS_FLAG],
    "a pass over the data as an epoch begins": [
        "--model=strangers.Anchored",
        "--data.dataset=numpy",
    ],
    "the same of a stream in workers": [
        "--model=strangers.Anchored",
        "--data.dataset=stream",
        WORKERS_FLAG,
    ],
    "two optimizers, by hand": ["--model=strangers.Adversarial"],
    "accumulated gradients": ["--trainer.accumulate_grad_batches=3"],
    "eval mode": ["--model=strangers.EvalMode"],
    "a numpy scalar in a schedule": ["--model=strangers.NumpyCosine"],
    "a sparse buffer": ["--model=strangers.Sparse"],
    "lazy layers and buffers": ["--model=strangers.Lazy"],
    "plain attributes": ["--model=strangers.Remembering"],
    "metrics in wrappers": ["--model=strangers.Measured"],
    "a state of a part": ["--model=strangers.Partial"],
    "hyperparameters of any kind": ["--model=strangers.Hyper"],
    "a numpy generator": ["--data.dataset=numpy"],
    "a numpy generator in a worker that stays": [
        "--data.dataset=numpy",
        WORKERS_FLAG,
        PERSISTENT_FLAG,
    ],
    "a RandomState": ["--data.dataset=state", WORKERS_FLAG],
    "a random.Random": ["--data.dataset=random"],
    "a torch.Generator": ["--data.dataset=torch"],
    "a generator of the module": ["--data.dataset=module", WORKERS_FLAG],
    "a generator in collate_fn": ["--data.collate=true", WORKERS_FLAG],
    "a sampler with a generator": ["--data.sampler=shuffled", WORKERS_FLAG, PERSISTENT_FLAG],
    "a sampler that counts": ["--data.sampler=counting"],
    "an iterable dataset": ["--data.dataset=stream"],
    "an iterable dataset in workers": [
        "--data.dataset=stream",
        WORKERS_FLAG,
        PERSISTENT_FLAG,
        "--model=strangers.Augmented",
    ],
    "a loader that saves its state, of a stream": [
        "--data.kind=stateful",
        "--data.dataset=saved",
        "--data.workers=2",
    ],
    "a dict of loaders": ["--data.several=true", "--data.sampler=counting"],
    "a validation while gradients are added up": [
        "--trainer.accumulate_grad_batches=4",
        "--data=strangers.Validated",
        "--trainer.val_check_interval=3",
    ],
}


# The soak runs these. Other tests have their mechanism alone: test_object_graph.py,
# test_own_loaders.py and unit/data/loaders; or they are configurations of the zoo, too.
ALWAYS_RUN = [
    "the control",
    "a generator in collate_fn",
    "with workers",
    "drawn on the way to the device",
    "lazy layers and buffers",
]
"""The zoo has these kinds and the others, too."""


EPOCH_ENDS = [
    "the number of steps is asked for",
    "a pass over the data as an epoch begins",
    "a sampler that counts",
    "the same of a stream in workers",
    "an iterable dataset",
    "plain attributes",
    "a loader that saves its state, of a stream",
    "a numpy generator in a worker that stays",
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS_RUN else pytest.mark.thorough)
        for name in STRANGERS
        if name not in EPOCH_ENDS
    ],
)
def test_within_an_epoch(tmp_path: Path, name):
    check(tmp_path, *STRANGERS[name])


@pytest.mark.parametrize("name", nightly.all_but(["a sampler that counts"], EPOCH_ENDS))
def test_within_an_epoch_and_at_its_end(tmp_path: Path, name):
    check(tmp_path, *STRANGERS[name], at=("0:9", "1:6", "2:0"))


CSV_LOGGER = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "version": "one"}}
FLAGS_WITH_LOGGER = [
    *STRANGERS["plain attributes"],
    "--data=strangers.Validated",
    "--trainer.log_every_n_steps=1",
    f"--trainer.logger={json.dumps(CSV_LOGGER)}",
]


def rows(run: Run) -> str:
    """Return the rows that the run's CSVLogger has written."""
    return (run.folder / "logs/lightning_logs/one/metrics.csv").read_text()


def test_more_steps_than_before_continue_within_the_epoch(tmp_path: Path):
    """It equals one run of all steps; started again without more steps, it stays as it was."""
    alone, run = (
        Run(tmp_path / name, *FLAGS_WITH_LOGGER, "--trainer.max_epochs=-1")
        for name in ("alone", "run")
    )
    alone.flags.append("--trainer.max_steps=33")
    expected = alone.finish()
    run.flags.append("--trainer.max_steps=15")
    short = run.finish()
    curve = None
    curve = rows(run)
    described = (run.folder / "output/model/model.json").read_text()
    (run.folder / "output/model/model.json").unlink()
    assert (
        not same(short, run.finish())
        and "nothing is left to train: step 15 was the last one" in run.output
    )
    assert rows(run) == curve and (run.folder / "output/model/model.json").read_text() == described
    run.flags[-1] = "--trainer.max_steps=33"
    assert not same(expected, run.finish()) and "resuming from step 15: " in run.output
    assert rows(run) == rows(alone)


@pytest.mark.parametrize("steps", nightly.all_but([26], [20, 26]))
def test_the_last_validation_of_a_number_of_steps(tmp_path: Path, steps):
    """At an epoch's end, and within an epoch: it is run again, with all that comes after it."""
    flags = [
        *FLAGS_WITH_LOGGER,
        "--model=strangers.Forgetful",
        f"--trainer.max_steps={steps}",
        "--trainer.max_epochs=-1",
        "--trainer.val_check_interval=2",
        "--checkpoint.monitor=val_loss",
    ]
    alone = Run(tmp_path / "alone", *flags)
    run = Run(tmp_path / "run", *flags)
    expected = alone.finish()
    assert (
        run.start(STOP_AT=f"validation {steps}") == 143
        and f"resume from step {steps}: SIGTERM" in run.output
    )
    assert not same(expected, run.finish())
    assert rows(run) == rows(alone)
    assert [file.name for file in alone.folder.rglob("best-*")] == [
        file.name for file in run.folder.rglob("best-*")
    ]


def test_steps_are_logged_as_lightning_does(tmp_path: Path):
    """Steps are logged as Lightning logs them.

    So they are in a run with a limit of steps, which Lightning's own loops take for a resumed one.
    """
    flags = [
        *FLAGS_WITH_LOGGER,
        "--trainer.max_steps=25",
        "--trainer.max_epochs=-1",
        "--data.dataset=numpy",
    ]
    exact = Run(tmp_path / "exact", *flags)
    plain = Run(tmp_path / "plain", *flags, "--resume.exact=false")
    exact.finish(), plain.finish()
    steps = [
        [row["step"] for row in csv.DictReader(rows(run).splitlines())] for run in (exact, plain)
    ]
    assert steps[0] == steps[1]


def test_before_the_first_step(tmp_path: Path):
    """A run can be stopped before its first step.

    A module that steps by itself has a checkpoint then, and so has one that accumulates gradients.
    """
    for name, flags in (
        ("by hand", ["--model=strangers.Accumulating"]),
        ("by Lightning", ["--trainer.accumulate_grad_batches=4"]),
    ):
        alone = Run(tmp_path / name / "alone", *flags)
        run = Run(tmp_path / name / "run", *flags)
        assert run.start(STOP_AT="0:1") == 143
        assert (
            "interrupted, resume from step 0: SIGTERM; "
            "output/data/checkpoints/step-000000000.ckpt is complete" in run.output
        )
        assert not same(alone.finish(), run.finish()) and "resuming from step 0: " in run.output


def test_ranks_that_would_be_copies_are_processes_of_their_own(tmp_path: Path):
    """So they are if interrupted, and with a class of Lightning's that means the same."""
    flags = ["--trainer.devices=2", "--data.sampler=shuffled"]
    expected = Run(tmp_path / "ddp", *flags, "--trainer.strategy=ddp").finish()
    run = Run(tmp_path / "spawn", *flags, "--trainer.strategy=ddp_spawn")
    assert run.start(STOP_AT="1:2") == 143
    assert not same(expected, run.finish())
    assert (
        run.output.count("--trainer.strategy=ddp_spawn: runs as ddp, which computes the same\n")
        == 1
    )
    strategy = {"class_path": "DDPStrategy", "init_args": {"start_method": "fork"}}
    assert not same(
        expected,
        Run(tmp_path / "class", *flags, f"--trainer.strategy={json.dumps(strategy)}").finish(),
    )


def test_sizes_and_workers_by_any_name_follow_the_machine(tmp_path: Path):
    """Sizes and workers follow the machine, whatever their names are.

    No other number does: not another batch of all ranks, and not a number that equals a rank's
    batch by chance.
    """
    run = Run(tmp_path, "--data=strangers.Named", "--data.processes=1")
    run.flags += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    assert run.start(STOP_AT="1:2") == 143
    run.flags[-2:] = ["--trainer.devices=1"]
    for flag, says in {
        "--data.samples=6": "--data.samples was 4, is 6",
        "--data.times=8": "--data.times was 4, is 8",
        "--data.times=1": "--data.times was 4, is 1",
    }.items():
        run.flags.append(flag)
        assert run.start() == 1 and f"is of another run: {says}; continue" in run.output
        run.flags.pop()
    run.flags += ["--data.samples=8", "--data.processes=2"]
    run.finish()
    assert "resuming from step" in run.output and "2 ranks saved it, now there are 1" in run.output
