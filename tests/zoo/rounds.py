"""Runs a configuration uninterrupted and interrupted at random moments, and compares."""

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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import warm  # noqa: E402

from zoo.table import CONFIGURATIONS, Configuration  # noqa: E402

PROGRAM = ROOT / "tests/zoo/program.py"
USERS = ROOT / "tests/zoo/users"
# Seconds from a start, or from an interruption, to the end; what takes longer hangs.
LIMIT = 240
LAUNCHERS = {"process": 1, "lightning-2": 2, "torchrun-2": 2, "lightning-3": 3, "torchrun-3": 3}


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
        self.said = ""

    def start(self, **variables: str) -> warm.Started:
        """Start the job; its output is added to its log."""
        for name in ("sent", "hooks"):
            (self.folder / name).unlink(missing_ok=True)
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
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("ZOO_", "SM_", "PL_"))
        }
        environment = kept | {
            "PYTHONPATH": f"{USERS}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "ZOO_SENT": str(self.folder / "sent"),
            "ZOO_COUNT": str(self.folder / "hooks"),
        }
        log = self.folder / "log"
        self.before = log.stat().st_size if log.exists() else 0
        with log.open("a") as output:
            return warm.start(argv, self.folder, environment | variables, output.fileno())

    def wait(self, process: warm.Started, seconds: float = LIMIT) -> int | None:
        """Return the job's exit status; None if it still runs after `seconds`.

        `said` is its output since its start.
        """
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.said = (self.folder / "log").read_bytes()[self.before :].decode(errors="replace")

    def processes(self) -> list[int]:
        """Return the ids of all processes that work in the job's folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cwd").readlink().is_relative_to(self.folder):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def go_to_another_machine(self) -> None:
        """Lose what a job without a checkpoint has written.

        On the next instance only checkpoints are there again.
        """
        if any(self.folder.rglob("step-*.ckpt")):
            return
        for path in self.folder.iterdir():
            if users(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def end(self) -> list[int]:
        """Kill the processes that are left, and return their ids."""
        left = self.processes()
        for number in left:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return left


# Results ------------------------------------------------------------------------------------------


def result(job: Job) -> dict[str, dict]:
    """Return what a job has left: weights, metrics, curves, tables and files, each by name."""
    import torch

    folder = job.folder
    configuration = job.configuration
    state = torch.load(folder / "output/model/model.pt", weights_only=True)
    about = json.loads((folder / "output/model/model.json").read_text())
    own = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and users(path.relative_to(folder).parts[0])
        and path.suffix != ".sagemaker-ignore"
    ]
    return {
        "weights": {name: digest(value) for name, value in state.items()},
        "metrics": compared(about.pop("metrics"), configuration),
        "model.json": {
            key: json.dumps(about[key])
            for key in about
            if key not in ("versions", "revision", "resumes")
        },
        "curves": compared(curves(folder), configuration),
        "tables": compared(tables(own), configuration),
        "files": {str(path.relative_to(folder)): "" for path in own if "tfevents" not in path.name},
    }


def users(name: str) -> bool:
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


def curves(folder: Path) -> dict[str, object]:
    """Return each value of TensorBoard's files by tag and step.

    A value that is written twice has to be the same.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, object] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        if "/system/" in str(path):
            continue
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                name = f"{value.tag}@{event.step}"
                one = value.simple_value if value.HasField("simple_value") else str(value)
                if found.setdefault(name, one) != one and one == one:
                    found[name] = f"{found[name]} and {one}"
    return found


def tables(files: list[Path]) -> dict[str, object]:
    """Return each value of metrics.csv by column, step and epoch."""
    found: dict[str, object] = {}
    for path in files:
        if path.name == "metrics.csv":
            with path.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    for column, value in row.items():
                        if value:
                            found[f"{column}@{row.get('step')}"] = value
    return found


def differences(expected: dict[str, dict], found: dict[str, dict]) -> list[str]:
    """Return how two results differ, the most important differences first."""
    lines = []
    for kind, values in expected.items():
        names = sorted({*values, *found[kind]}, key=natural)
        other = [name for name in names if str(values.get(name)) != str(found[kind].get(name))]
        if other:
            values = [str(side.get(other[0], "absent"))[:100] for side in (values, found[kind])]
            lines.append(
                f"{kind}: {len(other)} of {len(names)} differ, first {other[0]}: "
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
    r"^.*(not that of the interrupted run|no checkpoint can hold|no checkpoint saves it|differs "
    r"from that of an uninterrupted run|not exact|cannot be resumed|not supported|as Lightning "
    r"does; an interruption makes it start anew).*$",
    re.MULTILINE,
)


@dataclass
class Reference:
    """An uninterrupted run of a configuration."""

    seconds: float
    hooks: int
    result: dict[str, dict]
    said: str


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


def left_alone(folder: Path, configuration: Configuration, launcher: str) -> Reference:
    """Run a configuration to its end; if it fails, raise RuntimeError with its output."""
    job = Job(folder, configuration, launcher)
    began = time.monotonic()
    status = job.wait(job.start())
    seconds = time.monotonic() - began
    job.end()
    if status != 0:
        raise RuntimeError(
            f"left alone, {configuration.name!r} ended with {status}: {job.said[-2000:]}"
        )
    return Reference(seconds, int((folder / "hooks").read_text()), result(job), job.said)


def interrupted(
    folder: Path, reference: Reference, round: Round, interruptions: Iterable[Interruption]
) -> Round:
    """Interrupt a job at each start, let it end, and return the round with its outcome."""
    job = Job(folder, CONFIGURATIONS[round.configuration], round.launcher, round.every)
    began = time.monotonic()
    said = ""
    try:
        for one in interruptions:
            came = interrupt(job, one)
            said += job.said
            if not came:
                break
            round.interruptions.append(one)
            if wrong := faults(job, one, round.launcher):
                round.outcome, round.detail = wrong
                return round
            job.go_to_another_machine()
        status = job.wait(job.start())
        round.outcome, round.detail = judged(job, reference, status, said + job.said)
        return round
    except FileNotFoundError as error:
        round.outcome = "lost"
        round.detail = f"{error}: {job.said[-1000:]}"
        return round
    finally:
        round.seconds = float(f"{time.monotonic() - began:.2f}")
        job.end()


def judged(job: Job, reference: Reference, status: int | None, said: str) -> tuple[str, str]:
    """Return outcome and detail of a job that has come to its end.

    `said` is its output since its first start.
    """
    plainly = NOT_EXACT.search(said)
    line = plainly.group(0) if plainly else ""
    if status is None:
        return "hung", job.said[-1500:]
    if status != 0:
        return ("said", line) if line else ("crashed", f"status {status}: {job.said[-1500:]}")
    if not line and (lost := forgotten(said)):
        return "lost", lost
    if other := differences(reference.result, result(job)):
        return ("said", line) if line else ("wrong", "; ".join(other))
    return "identical", line


def forgotten(said: str) -> str:
    """Return which step a job promised to resume from and did not reach, or "".

    The job is right if it resumed from the step that it said, or from a later one.
    """
    for promise in re.finditer(r"^interrupted, resume from step (\d+):", said, re.MULTILINE):
        later = [
            int(step)
            for step in re.findall(
                r"^resuming from step (\d+):", said[promise.end() :], re.MULTILINE
            )
        ]
        if int(promise[1]) > max(later, default=0):
            return f"{promise[0]} and then it went on from {later}"
    return ""


def draws(round: Round, reference: Reference, tries: int) -> Iterator[Interruption]:
    """Yield up to `tries` interruptions, which the seed of a round decides.

    The earlier ones are drawn from a larger part of the run.
    """
    draw = random.Random(f"{round.seed} {round.configuration} {round.launcher}")
    round.every = draw.choice([3, 5, 1000])
    return (
        drawn(draw, LAUNCHERS[round.launcher], reference, 0.8 / (number + 1))
        for number in range(tries)
    )


def drawn(draw: random.Random, ranks: int, reference: Reference, part: float) -> Interruption:
    """Draw a signal, its target and its moment, within this part of the run.

    The moment is a hook, or a time.
    """
    kind = draw.choice(["SIGTERM", "SIGKILL"])
    if ranks == 1:
        whom = "self" if kind == "SIGTERM" else "all"
        whom = draw.choice([whom, "all"])
    elif kind == "SIGTERM":
        whom = draw.choice(["all", "self", "root"])
    else:
        whom = "all" if draw.random() < 0.85 else "self"
    if draw.random() < 0.8:
        rank = draw.randrange(ranks)
        hook = draw.randint(1, max(1, int(reference.hooks * part)))
        return Interruption(kind, whom, f"hook {rank} {hook} {draw.uniform(0, 0.004):.5f}")
    return Interruption(
        kind,
        "all" if whom == "self" else whom,
        f"time {draw.uniform(0, reference.seconds * part):.3f}",
    )


def interrupt(job: Job, one: Interruption) -> bool:
    """Start a job and interrupt it; return whether it was interrupted before its end."""
    how, *numbers = one.moment.split()
    number = getattr(signal, one.signal)
    if how == "hook":
        process = job.start(ZOO_AT=f"{' '.join(numbers)} {int(number)} {one.whom}")
        one.status = job.wait(process)
        one.sent = (job.folder / "sent").exists()
    else:
        process = job.start()
        one.sent = job.wait(process, float(numbers[0])) is None
        if one.sent:
            chosen = (
                [process.pid]
                if one.whom == "root" and number == signal.SIGTERM
                else job.processes()
            )
            for pid in sorted(chosen, key=lambda pid: pid != process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        one.status = job.wait(process)
    if one.signal == "SIGKILL":
        job.end()
        process.wait()
    elif one.status is not None:
        end = time.monotonic() + 10
        while job.processes() and time.monotonic() < end:
            time.sleep(0.05)
        one.left = len(job.end())
    if step := re.search(r"resume from step (\d+)", job.said):
        one.step = int(step.group(1))
    return one.sent or one.status != 0


def faults(job: Job, one: Interruption, launcher: str) -> tuple[str, str] | None:
    """Return what is wrong with an interrupted job's end, as outcome and detail, or None."""
    if one.status is None:
        return "hung", job.said[-1500:]
    if one.left:
        return "hung", f"{one.left} processes were left: {job.said[-500:]}"
    if not one.sent:
        plainly = NOT_EXACT.search(job.said)
        return (
            ("said", plainly.group(0))
            if plainly
            else ("crashed", f"status {one.status}: {job.said[-1500:]}")
        )
    expected = {
        "SIGTERM": (0, 143, -15, 1 if LAUNCHERS[launcher] > 1 else 143),
        "SIGKILL": (-9, 0, 1),
    }[one.signal]
    if one.status not in expected:
        return "crashed", f"status {one.status} after {one.signal}: {job.said[-1500:]}"
    return None
