"""Runs a configuration with and without random interruptions, and compares."""

import contextlib
import csv
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

import warm  # noqa: E402

from zoo.table import CONFIGURATIONS, Configuration  # noqa: E402

PROGRAM = ROOT / "tests/zoo/program.py"
USERS = ROOT / "tests/zoo/users"
# From a start, or from an interruption, to the end; what takes longer hangs.
HANG_SECONDS = 240
LAUNCHERS = {"process": 1} | {
    f"{launcher}-{ranks}": ranks for launcher in ("lightning", "torchrun") for ranks in (2, 3, 4)
}


class Job:
    """A job of a configuration in a folder, started as often as it takes.

    Args:
        launcher: One of LAUNCHERS.
        every: Steps between its checkpoints, beside those at epochs' ends.
    """

    def __init__(
        self, folder: Path, configuration: Configuration, launcher: str, every: int = 1000
    ) -> None:
        self.folder = folder
        self.configuration = configuration
        self.launcher = launcher
        folder.mkdir(parents=True)
        flags = json.loads(json.dumps(configuration.flags))
        ranks = LAUNCHERS[launcher]
        flags["trainer"]["devices"] = ranks
        if ranks == 1:
            flags["trainer"].pop("strategy", None)
        flags.setdefault("resume", {}).update(every_n_steps=every, every_n_minutes=0)
        (folder / "job.json").write_text(json.dumps(flags, indent=1))
        self.output = ""

    def start(self, **variables: str) -> warm.Started:
        """Start the job; its output is added to its log."""
        mode = ["torchrun"] if self.launcher.startswith("torchrun") else []
        mode += (
            ["script", str(USERS / self.configuration.program)]
            if self.configuration.program
            else []
        )
        argv = [
            "python",
            PROGRAM,
            *mode,
            "--config=job.json",
            f"--trainer.devices={LAUNCHERS[self.launcher]}",
        ]
        return self.start_command(argv, USERS, variables)

    def start_command(
        self, argv: Sequence[object], modules: Path, variables: Mapping[str, str]
    ) -> warm.Started:
        """Start a command of program.py; its output is added to the job's log.

        Args:
            argv: The command.
            modules: The folder in which it finds modules of its own.
            variables: More variables of its environment.
        """
        for name in ("sent", "hooks"):
            (self.folder / name).unlink(missing_ok=True)
        variables_kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("ZOO_", "SM_", "PL_"))
        }
        environment = variables_kept | {
            "PYTHONPATH": f"{modules}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "ZOO_SENT": str(self.folder / "sent"),
            "ZOO_COUNT": str(self.folder / "hooks"),
        }
        log = self.folder / "log"
        self.size_before = log.stat().st_size if log.exists() else 0
        with log.open("a") as output:
            return warm.start(argv, self.folder, environment | dict(variables), output.fileno())

    def wait(self, process: warm.Started, seconds: float = HANG_SECONDS) -> int | None:
        """Return the job's exit status; None if it still runs after `seconds`.

        `output` is its output since its start.
        """
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.output = (
                (self.folder / "log").read_bytes()[self.size_before :].decode(errors="replace")
            )

    def processes(self) -> list[int]:
        """Return the ids of all processes that work in the job's folder."""
        ids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cwd").readlink().is_relative_to(self.folder):
                        ids.append(int(entry.name))
                except OSError:
                    continue
        return ids

    def go_to_another_machine(self) -> None:
        """Lose what a job without a checkpoint has written.

        On the next instance only checkpoints are there again.
        """
        if any(self.folder.rglob("step-*.ckpt")):
            return
        for path in self.folder.iterdir():
            if is_of_user(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def end(self) -> list[int]:
        """Kill the processes that are left, and return their ids."""
        ids = self.processes()
        for number in ids:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return ids


# Results ------------------------------------------------------------------------------------------


def result(job: Job) -> dict[str, dict]:
    """Return a job's results: weights, metrics, curves, tables and files, each by name."""
    import torch

    folder = job.folder
    configuration = job.configuration
    state = torch.load(folder / "output/model/model.pt", weights_only=True)
    about = json.loads((folder / "output/model/model.json").read_text())
    own = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and is_of_user(path.relative_to(folder).parts[0])
        and path.suffix != ".sagemaker-ignore"
    ]
    return {
        "weights": {name: digest(value) for name, value in state.items()},
        "metrics": compared(about.pop("metrics"), configuration),
        "model.json": {
            key: json.dumps(about[key])
            for key in about
            if key not in ("versions", "revision", "resumes", "restarts")
        },
        "curves": compared(curves(folder), configuration),
        "tables": compared(tables(own), configuration),
        "files": {str(path.relative_to(folder)): "" for path in own if "tfevents" not in path.name},
    }


def is_of_user(name: str) -> bool:
    """Return whether a file or folder of a job belongs to its user.

    A kill may leave hidden ones; those are ignored.
    """
    return name not in ("output", "log", "job.json", "hooks", "sent") and not name.startswith(".")


def compared(values: dict, configuration: Configuration) -> dict:
    """Return the values except those that a clock decides."""
    return {
        name: value
        for name, value in values.items()
        if not name.startswith(configuration.ignored or ("\0",))
    }


def digest(value) -> str:
    """Return a hash of a tensor's dtype, shape and bits."""
    import torch

    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    dense = value.to_dense() if value.layout != torch.strided else value
    bits = dense.detach().contiguous().reshape(-1).view(torch.uint8) if dense.numel() else dense
    text = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
    return hashlib.sha256(text + bits.numpy().tobytes()).hexdigest()[:16]


def curves(folder: Path) -> dict[str, str]:
    """Return the values of TensorBoard's files by tag and step, each once.

    A training that was killed before its first checkpoint has left a file of its own. What it has
    written is written again, and has to be the same.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    values_by_name: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        if "/system/" in str(path):
            continue
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else value
                values_by_name.setdefault(f"{value.tag}@{event.step}", set()).add(str(number))
    return {name: " and ".join(sorted(values)) for name, values in values_by_name.items()}


def tables(files: list[Path]) -> dict[str, object]:
    """Return each value of metrics.csv by column, step and epoch."""
    values_by_name: dict[str, object] = {}
    for path in files:
        if path.name == "metrics.csv":
            with path.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    for column, value in row.items():
                        if value:
                            values_by_name[f"{column}@{row.get('step')}"] = value
    return values_by_name


def differences(expected: dict[str, dict], actual: dict[str, dict]) -> list[str]:
    """Return how two results differ, the most important differences first."""
    lines = []
    for subject, values in expected.items():
        names = sorted({*values, *actual[subject]}, key=natural)
        differing = [
            name for name in names if str(values.get(name)) != str(actual[subject].get(name))
        ]
        if differing:
            values = [
                str(side.get(differing[0], "absent"))[:100] for side in (values, actual[subject])
            ]
            lines.append(
                f"{subject}: {len(differing)} of {len(names)} differ, first {differing[0]}: "
                f"{' and '.join(values)}"
            )
    return lines


def natural(name: str) -> tuple:
    """Return a key that sorts by the step first."""
    step = name.rpartition("@")[2]
    return (int(step) if step.lstrip("-").isdigit() else -1, name)


# Rounds -------------------------------------------------------------------------------------------

# Lines in which a run says that it is not exact, or not supported.
NOT_EXACT = re.compile(
    r"^.*(not that of the interrupted run|cannot be saved|no checkpoint saves it|differs "
    r"from that of an uninterrupted run|not exact|cannot be resumed|not supported|as Lightning "
    r"does; an interruption makes it start over).*$",
    re.MULTILINE,
)


@dataclass
class Reference:
    """An uninterrupted run of a configuration."""

    seconds: float
    hooks: int
    result: dict[str, dict]
    output: str


@dataclass
class Interruption:
    """A signal, and what it caused."""

    signal: str
    whom: str
    moment: str
    status: int | None = None
    step: int | None = None
    """The step that the job says it can be resumed from."""
    left: int = 0
    """Processes that were still there ten seconds after."""
    sent: bool = False


@dataclass
class Round:
    """A job that is interrupted until it comes to its end."""

    configuration: str
    launcher: str
    seed: int
    every: int = 0
    outcome: str = ""
    detail: str = ""
    interruptions: list[Interruption] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""

    def row(self) -> dict:
        """Return the round as a line of JSON."""
        return asdict(self)


def uninterrupted_run(folder: Path, configuration: Configuration, launcher: str) -> Reference:
    """Run a configuration to its end; if it fails, raise RuntimeError with its output."""
    job = Job(folder, configuration, launcher)
    started = time.monotonic()
    status = job.wait(job.start())
    seconds = time.monotonic() - started
    job.end()
    if status != 0:
        raise RuntimeError(
            f"left alone, {configuration.name!r} ended with {status}: {job.output[-2000:]}"
        )
    return Reference(seconds, int((folder / "hooks").read_text()), result(job), job.output)


def interrupted(
    folder: Path, reference: Reference, round: Round, interruptions: Iterable[Interruption]
) -> Round:
    """Interrupt a job at each start, let it end, and return its round with the outcome."""
    job = Job(folder, CONFIGURATIONS[round.configuration], round.launcher, round.every)
    started = time.monotonic()
    output = ""
    try:
        for interruption in interruptions:
            was_interrupted = interrupt(job, interruption)
            output += job.output
            if not was_interrupted:
                break
            round.interruptions.append(interruption)
            if wrong := faults(job, interruption, round.launcher):
                round.outcome, round.detail = wrong
                return round
            job.go_to_another_machine()
        status = job.wait(job.start())
        round.outcome, round.detail = outcome_and_detail(
            job, reference, status, output + job.output
        )
        return round
    except FileNotFoundError as error:
        round.outcome = "lost"
        round.detail = f"{error}: {job.output[-1000:]}"
        return round
    finally:
        round.seconds = float(f"{time.monotonic() - started:.2f}")
        job.end()


def outcome_and_detail(
    job: Job, reference: Reference, status: int | None, output: str
) -> tuple[str, str]:
    """Return outcome and detail of a job that has come to its end.

    `output` is its output since its first start.
    """
    plainly = NOT_EXACT.search(output)
    limitation = plainly.group(0) if plainly else ""
    if status is None:
        return "hung", job.output[-1500:]
    if status != 0:
        return (
            ("said", limitation)
            if limitation
            else ("crashed", f"status {status}: {job.output[-1500:]}")
        )
    if not limitation and (lost := forgotten_promise(output)):
        return "lost", lost
    if differing := differences(reference.result, result(job)):
        return ("said", limitation) if limitation else ("wrong", "; ".join(differing))
    return "identical", limitation


def forgotten_promise(output: str) -> str:
    """Return which step a job promised to resume from and did not reach, or "".

    The job is right if it resumed from the step that it said, or from a later one.
    """
    for promise in re.finditer(r"^interrupted, resume from step (\d+):", output, re.MULTILINE):
        later = [
            int(step)
            for step in re.findall(
                r"^resuming from step (\d+):", output[promise.end() :], re.MULTILINE
            )
        ]
        if int(promise[1]) > max(later, default=0):
            return f"{promise[0]} and then it continued from {later}"
    return ""


def draws(round: Round, reference: Reference, tries: int) -> Iterator[Interruption]:
    """Yield up to `tries` interruptions, which the seed of a round decides.

    The earlier ones are drawn from a larger part of the run.
    """
    draw = random.Random(f"{round.seed} {round.configuration} {round.launcher}")
    round.every = draw.choice([3, 5, 1000])
    return (
        drawn_interruption(draw, LAUNCHERS[round.launcher], reference, 0.8 / (number + 1))
        for number in range(tries)
    )


PLACES = (
    Interruption("SIGTERM", "all", "hook 0 training_step:2 0"),
    Interruption("SIGKILL", "all", "hook 0 training_step:2 0.001"),
    Interruption("SIGTERM", "all", "hook 0 on_train_epoch_end:1 0"),
)
"""Twice within an epoch, as far as it has batches, and once at its end."""


def placed(round: Round) -> Iterator[Interruption]:
    """Yield the interruptions of PLACES; a checkpoint is saved after each step."""
    round.every = 1
    return (replace(interruption) for interruption in PLACES)


def drawn_interruption(
    draw: random.Random, ranks: int, reference: Reference, share: float
) -> Interruption:
    """Draw a signal, its target and its moment, within this share of the run.

    The moment is a hook, or a time.
    """
    signal_name = draw.choice(["SIGTERM", "SIGKILL"])
    if ranks == 1:
        whom = "self" if signal_name == "SIGTERM" else "all"
        whom = draw.choice([whom, "all"])
    elif signal_name == "SIGTERM":
        whom = draw.choice(["all", "self", "root"])
    else:
        whom = "all" if draw.random() < 0.85 else "self"
    if draw.random() < 0.8:
        rank = draw.randrange(ranks)
        hook = draw.randint(1, max(1, int(reference.hooks * share)))
        return Interruption(signal_name, whom, f"hook {rank} {hook} {draw.uniform(0, 0.004):.5f}")
    return Interruption(
        signal_name,
        "all" if whom == "self" else whom,
        f"time {draw.uniform(0, reference.seconds * share):.3f}",
    )


def interrupt(job: Job, interruption: Interruption) -> bool:
    """Start a job and interrupt it; return whether it was interrupted before its end."""
    unit, *numbers = interruption.moment.split()
    number = getattr(signal, interruption.signal)
    if unit == "hook":
        process = job.start(ZOO_AT=f"{' '.join(numbers)} {int(number)} {interruption.whom}")
        interruption.status = job.wait(process)
        interruption.sent = (job.folder / "sent").exists()
    else:
        process = job.start()
        interruption.sent = job.wait(process, float(numbers[0])) is None
        if interruption.sent:
            chosen = (
                [process.pid]
                if interruption.whom == "root" and number == signal.SIGTERM
                else job.processes()
            )
            for pid in sorted(chosen, key=lambda pid: pid != process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        interruption.status = job.wait(process)
    if interruption.signal == "SIGKILL":
        job.end()
        process.wait()
    elif interruption.status is not None:
        deadline = time.monotonic() + 10
        while job.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        interruption.left = len(job.end())
    if step := re.search(r"resume from step (\d+)", job.output):
        interruption.step = int(step.group(1))
    return interruption.sent or interruption.status != 0


def faults(job: Job, interruption: Interruption, launcher: str) -> tuple[str, str] | None:
    """Return outcome and detail if an interrupted job ended wrong, else None."""
    if interruption.status is None:
        return "hung", job.output[-1500:]
    if interruption.left:
        return "hung", f"{interruption.left} processes were left: {job.output[-500:]}"
    if not interruption.sent:
        plainly = NOT_EXACT.search(job.output)
        return (
            ("said", plainly.group(0))
            if plainly
            else ("crashed", f"status {interruption.status}: {job.output[-1500:]}")
        )
    # Before the first step, Lightning's launcher kills the ranks, and itself, after one has ended.
    of_ranks = (1, -9) if LAUNCHERS[launcher] > 1 else ()
    expected = {
        "SIGTERM": (0, 143, -15, *of_ranks),
        "SIGKILL": (-9, 0, 1),
    }[interruption.signal]
    if interruption.status not in expected:
        return (
            "crashed",
            f"status {interruption.status} after {interruption.signal}: {job.output[-1500:]}",
        )
    return None
