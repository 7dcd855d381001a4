"""Interrupts the first steps of a training and compares it with a run left alone.

    python -m sagemaker_lightning.drill -- python app/train.py --model=mine.Model --data=mine.Data
    python -m sagemaker_lightning.drill -- python my_train.py    # your own program that trains by
                                                                 # sagemaker_lightning/cli/run.py
    python -m sagemaker_lightning.drill -- \\
        python app/train_torchrun.py --trainer.devices=2 --trainer.accelerator=cpu
    docker run IMAGE python -m sagemaker_lightning.drill -- train    # the job mounted at /opt/ml

The drill starts the command, unchanged, several times, each time in a new folder that looks like
the working folder. Each run trains a few short epochs. The first run is left alone. Then there is
one run for each interruption: within an epoch, at an epoch's end and in a validation, each by
SIGKILL and by SIGTERM; and one that continues with another number of data workers. The drill starts
each interrupted run again and lets it train to its end. Weights, optimizers, metrics, curves and
model files must then be the same to the last bit. If they are not, the drill names the first
difference and its likely cause.

The drill writes nothing to the job's own folders. The model, checkpoints and logs go to the drill's
folder, whatever the flags say, and so does what the program writes to relative paths. What the
program itself writes to absolute paths is not redirected. The drill links files above 64 MiB, and
folders of very many files, instead of copying them: these are the data.

Exit status: 0 if everything is identical; 1 if not, or if the command fails when it is left alone;
2 for a mistake in the flags.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any, NoReturn

try:
    import psutil

    from sagemaker_lightning.contract import failures
    from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
    from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
    from sagemaker_lightning.contract.environment import drilled
    from sagemaker_lightning.drill import comparison, hook
    from sagemaker_lightning.process.supervisor import adopt_orphans, living_processes
    from sagemaker_lightning.resume.parts.given_parts import HINT
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; use the python of the training that is to "
        "be drilled"
    )

ENTRYPOINT = Path(__file__).resolve().parents[1] / "launch/entrypoint.sh"
VERDICT = re.compile(r"(warning: )?resumed at step \d+: ")
# Bytes of one file, and of all files together, that are copied; larger ones are linked.
MAX_COPIED_BYTES = 2**26, 2**28
# How many files and folders of the working folder are looked at. Folders beyond that are linked as
# they are.
MAX_ENTRIES = 10_000
CAUSES = {
    "batch": (
        "something that the samples or their order depend on is not restored, such as a variable "
        "of a module or in a closure, an object that is not a plain value, a file"
    ),
    "learning rate": "the code that changes the rate keeps a count of its own",
    "loss": (
        "the batch is the same, so something that the step depends on is not restored, such as a "
        "variable of a module or in a closure, an object that is not a plain value"
    ),
    "steps": (
        "the length of an epoch, or what ends the training, depends on something that is not "
        "restored"
    ),
    "curve": (
        "every step is the same; the code that writes this curve or file does not return to the "
        "checkpoint with the run"
    ),
    "file": (
        "every step is the same; the code that writes this file depends on something that is not "
        "restored"
    ),
    "": (
        "every step is the same; something that the steps add to (a metric, an average, the state "
        "of a callback) is not restored"
    ),
}
"""By the kind of difference: why an interrupted run differs though runs left alone are equal."""
CURES = {
    "batch": (
        "make a sample a function of its index and the random generators, or keep what it depends "
        "on in plain attributes of the dataset, the sampler or the data module"
    ),
    "learning rate": (
        "return it from configure_optimizers, or keep its count in plain attributes of the module"
    ),
    "curve": "log by the trainer's loggers",
    "": (
        "keep it in buffers or plain attributes of the module or a callback, save it in "
        f"on_save_checkpoint, or {HINT}"
    ),
}
"""By the kind of difference: what the user can do about it."""
NOT_REPEATABLE = {
    "batch": (
        "the samples or their order depend on what no seed decides: the time, os.urandom, the "
        "order of a set, a generator seeded from these"
    ),
    "": (
        "the step depends on what no seed decides (the time, os.urandom, ...), or a kernel is not "
        "deterministic (--trainer.deterministic=true makes it so, or names it)"
    ),
}


Moment = tuple[Any, ...]
"""Kind, epoch and batch, as drill/drilled_run.py records them."""


class Impossible(Exception):
    """The drill cannot be done; the message says why in one line."""


@dataclass(frozen=True)
class Interruption:
    """A signal sent at one moment of a run."""

    name: str
    words: str
    number: signal.Signals
    moment: Moment
    workers: int | None = None
    """Number of data workers with which the run continues afterwards; None for the loaders' own."""


@dataclass(frozen=True)
class RunResult:
    """How a process ended."""

    status: int | None
    """Exit status; -N if signal N ended the process; None if it hung."""
    interrupted: bool
    """Whether the run reached the moment of its interruption."""
    output: str
    """Everything that the process wrote to stdout and stderr."""

    @property
    def verdict(self) -> str:
        """The line in which a resumed run says whether it resumed exactly; "" if none."""
        lines = [line for line in self.output.splitlines() if VERDICT.match(line)]
        return lines[-1] if lines else ""

    @property
    def error(self) -> str:
        """The process's own error message, in one line."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else failures.last_error(self.output)[0] or "it said nothing"


class Bench:
    """The folder in which the command runs.

    Args:
        folder: The drill's folder. Each run uses `run` below it, so that all runs have the same
            paths; `keep` then renames that folder.
        command: The program and its arguments.
        limits: "epochs" and "steps" (of an epoch) of each run, for drill/drilled_run.py.
        timeout: Seconds after which a process counts as hung.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], limits: dict[str, int], timeout: float
    ) -> None:
        self.folder = folder
        self.command = list(command)
        self.limits = limits
        self.timeout = timeout
        # `train` is the toolkit's program; entrypoint.sh prepares the toolkit's folders.
        if self.command == ["train"]:
            self.command = [str(ENTRYPOINT), "train"]
        self.run = folder / "run"
        self.registration = folder / "registration"
        self.others = {child.pid for child in psutil.Process().children()}

    def prepare(self) -> None:
        """Make the folder of the next run, and what adds our callback to its Trainers."""
        hook.register(self.registration)
        mirror(Path.cwd(), self.run / "work", self.folder)
        base = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
        for name in ("input/config", "code"):
            if (base / name).is_dir():
                mirror(base / name, self.run / "ml" / name, self.folder)
        for channel in (base / "input/data").glob("*"):
            link = self.run / "ml/input/data" / channel.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(channel)

    def keep(self, name: str) -> Path:
        """Rename the folder of the last run to `name` and return its path."""
        kept = self.folder / name
        self.run.rename(kept)
        return kept

    def start(
        self, interruption: Interruption | None = None, workers: int | None = None
    ) -> RunResult:
        """Start the command and wait until no process of it is left.

        Args:
            interruption: The signal to send and its moment; None leaves the run alone.
            workers: Number of data workers; None for the loaders' own.

        Raises Impossible if the command cannot be started.
        """
        moment = interruption and list(interruption.moment)
        reached = self.run / "reached"
        reached.unlink(missing_ok=True)
        request = {
            "folder": str(self.run),
            "reached": str(reached),
            "moment": moment,
            "workers": workers,
        }
        variables = drilled(os.environ, self.run / "ml", self.limits | request)
        python_path = [str(self.registration), os.environ.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
        # `python` and `torchrun` are beside this Python.
        variables["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        )
        log = self.run / "log"
        log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    self.command,
                    cwd=self.run / "work",
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise Impossible(
                    f"{self.command[0]}: cannot be started ({error.strerror})"
                ) from None
        try:
            status, interrupted = self._wait_for_end(process, interruption, reached)
        finally:
            self._kill_all(process)
        with log.open("rb") as file:
            file.seek(log_start)
            return RunResult(status, interrupted, file.read().decode(errors="replace"))

    def _wait_for_end(
        self, process: subprocess.Popen[bytes], interruption: Interruption | None, reached: Path
    ) -> tuple[int | None, bool]:
        """Wait for the process; return its exit status and whether it was interrupted.

        The exit status is None if the process hangs. The signal is sent once the file `reached`
        exists, with which the run says that it waits for the signal.
        """
        deadline = time.monotonic() + self.timeout
        interrupted = False
        while (status := process.poll()) is None and time.monotonic() < deadline:
            if interruption and not interrupted and reached.exists():
                interrupted = True
                if interruption.number == SIGKILL:
                    self._kill_all(process)
                    continue
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, interruption.number)
                reached.unlink()
                deadline = time.monotonic() + min(SAGEMAKER_KILLS, self.timeout)
            time.sleep(0.02)
        return status, interrupted

    def _kill_all(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of the process and of all that it started."""
        while left := living_processes(process.pid, self.others, {}):
            for process_left in left:
                with suppress(psutil.NoSuchProcess):
                    process_left.kill()
            time.sleep(0.01)
        process.wait()


def mirror(source: Path, target: Path, without: Path) -> None:
    """Make `target` look like `source`, so that writes do not reach `source`.

    Files up to the sizes in MAX_COPIED_BYTES are copied. Larger files, hidden folders, and folders
    with too many files (MAX_ENTRIES) become links: they are data, which is read and not written.
    `without` is left out.
    """
    count = 0
    size = 0
    queue = [(source, target)]
    # The queue grows while it is walked, level by level.
    for folder, target_folder in queue:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if count + len(entries) > MAX_ENTRIES and folder != source:
            target_folder.symlink_to(folder)
            continue
        count += len(entries)
        target_folder.mkdir(parents=True)
        for entry in entries:
            path = Path(entry.path)
            copy_path = target_folder / entry.name
            if path == without:
                continue
            if (
                entry.is_dir(follow_symlinks=False)
                and entry.name[0] != "."
                and os.access(path, os.R_OK | os.X_OK)
            ):
                queue.append((path, copy_path))
                continue
            if entry.is_file(follow_symlinks=False) and os.access(path, os.R_OK):
                length = entry.stat().st_size
                if length <= MAX_COPIED_BYTES[0] and size + length <= MAX_COPIED_BYTES[1]:
                    shutil.copy2(path, copy_path)
                    size += length
                    continue
            copy_path.symlink_to(path.resolve())


def planned(done: Sequence[dict[str, Any]]) -> tuple[list[Interruption], list[str]]:
    """Choose the interruptions of a drill from the steps of the run left alone.

    Args:
        done: What the run recorded, as comparison.steps returns it.

    Returns the interruptions for which the run has a moment, and for each kind without a moment a
    line that says why.
    """
    moments: dict[str, list[Moment]] = defaultdict(list)
    for step in done:
        moments[step["at"][0]].append(tuple(step["at"]))
    epochs = sorted({at[1] for at in moments["batch"]})
    # An epoch in the middle, so that the run has epochs before it and after it.
    epoch = epochs[len(epochs) // 2]
    batches = [at for at in moments["batch"] if at[1] == epoch]
    first = batches[(len(batches) - 1) // 2]
    second = batches[len(batches) // 2]
    interruptions = []
    lacking = []

    def add_kill_and_stop(name: str, words: str, kill: Moment, stop: Moment) -> None:
        interruptions.append(Interruption(f"kill-{name}", f"kill {words}", SIGKILL, kill))
        interruptions.append(Interruption(f"stop-{name}", f"stop {words}", SIGTERM, stop))

    add_kill_and_stop("in-epoch", "within an epoch", second, first)
    if len(epochs) > 1:
        add_kill_and_stop(
            "at-epoch-end", "at an epoch's end", moments["epoch"][0], moments["epoch"][0]
        )
    else:
        lacking.append("an epoch's end: there is one epoch only")
    if (
        validations := [at for at in moments["validation"] if at[1] == epoch]
        or moments["validation"]
    ):
        add_kill_and_stop(
            "in-validation", "in a validation", validations[len(validations) // 2], validations[0]
        )
    else:
        lacking.append("a validation: there is none")
    workers = next(step["workers"] for step in done if step["at"][0] == "start")
    if workers is None:
        lacking.append(
            "another number of data workers: the training data is in no DataLoader that takes one"
        )
    else:
        other = 1 if workers == 2 else 2
        words = f"stop within an epoch, continue with {other} data workers in place of {workers}"
        interruptions.append(Interruption("workers", words, SIGTERM, first, other))
    return interruptions, lacking


class Drill:
    """A run left alone, and the interrupted runs that are compared with it.

    Args:
        bench: Where the command runs.
        keeps: Whether the folder of each run is kept.
    """

    def __init__(self, bench: Bench, keeps: bool) -> None:
        self.bench = bench
        self.keeps = keeps
        self.alone: Path  # the folder of the run left alone, once it has ended
        # Whether two runs left alone are equal; None until `_is_repeatable` has been asked.
        self.repeatable: bool | None = None
        # What the last resumed run said of itself: whether it repeats what it did before.
        self.verdict = ""

    def left_alone(self) -> list[dict[str, Any]]:
        """Run the command without an interruption and return the steps that it recorded.

        Raises Impossible if the command hangs or fails, trains nothing, or writes no checkpoint.
        """
        began = time.monotonic()
        self.bench.prepare()
        result = self.bench.start()
        if result.status is None:
            raise Impossible(
                f"the command, left alone, had not ended after {self.bench.timeout:.0f} s; give a "
                "larger --timeout, or fewer --steps"
            )
        if result.status:
            print(result.output, end="", flush=True)
            raise Impossible(
                f"the command, left alone, fails with exit status {result.status}: {result.error}"
            )
        self.alone = self.bench.keep("alone")
        done = comparison.steps(self.alone)
        if not any(step["at"][0] == "batch" for step in done):
            raise Impossible(
                "the command ended with exit status 0 and trained nothing with ExactResume; "
                "expected a program whose Trainer has it: app/train.py, one with SageMakerCLI, "
                "or one with a Trainer of its own"
            )
        if not any(CheckpointHome(self.alone / "ml/checkpoints").steps()):
            raise Impossible(
                "the command trains without checkpoints to continue from; leave out "
                "--resume.exact=false, --trainer.enable_checkpointing=false and "
                "--trainer.fast_dev_run"
            )
        last = [step for step in done if step["at"][0] == "batch"][-1]
        print(
            f"left alone: {last['step']} steps in {last['at'][1] + 1} epochs, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        return done

    def interrupt(self, interruption: Interruption) -> tuple[str, bool]:
        """Interrupt a run, resume it to its end, and compare it with the one left alone.

        Returns the outcome in words, and whether the run is identical.
        """
        self.bench.prepare()
        wrong = self._interrupt_and_restart(interruption)
        folder = self.bench.keep(interruption.name)
        starts = [step["step"] for step in comparison.steps(folder) if step["at"][0] == "start"]
        wrong = wrong or self._describe_differences(folder, interruption)
        if not self.keeps:
            shutil.rmtree(folder)
        if wrong:
            return wrong, False
        continuation = (
            f"continued from step {starts[-1]}"
            if starts[-1]
            else "started over: it had no checkpoint yet"
        )
        alarm = (
            f"; but the run itself said: {self.verdict}"
            if self.verdict.startswith("warning: ")
            else ""
        )
        return f"identical, {continuation}{alarm}", True

    def _interrupt_and_restart(self, interruption: Interruption) -> str:
        """Interrupt a run and start it again; return what went wrong, "" if nothing did."""
        self.verdict = ""
        result = self.bench.start(interruption)
        if not result.interrupted:
            reason = (
                "it hung"
                if result.status is None
                else f"it ended with status {result.status}: {result.error}"
            )
            return (
                "NOT REPEATED: the run did not come to the moment at which it was to be "
                f"interrupted, but {reason}"
            )
        if interruption.number == SIGTERM and result.status is None:
            seconds = min(SAGEMAKER_KILLS, self.bench.timeout)
            return f"HUNG: {seconds:.0f} s after SIGTERM it had not ended"
        if interruption.number == SIGTERM and not result.status:
            return (
                "NOT STOPPED: in spite of SIGTERM it continued to its end; SageMaker would have "
                "killed it on the way"
            )
        saved = any(CheckpointHome(self.bench.run / "ml/checkpoints").steps())
        if interruption.number == SIGTERM and not saved:
            return f"NO CHECKPOINT was there after SIGTERM: {result.error}"
        result = self.bench.start(workers=interruption.workers)
        self.verdict = result.verdict
        if result.status is None:
            return f"HUNG: started again, it had not ended after {self.bench.timeout:.0f} s"
        if result.status:
            return (
                f"FAILS when it is started again, with exit status {result.status}: {result.error}"
            )
        return ""

    def _describe_differences(self, folder: Path, interruption: Interruption) -> str:
        """Describe how an interrupted run differs, and why; "" if it does not."""
        differences = comparison.differences(self.alone, folder)
        if not differences:
            return ""
        lines = [
            f"DIFFERENT, first in {differences[0].words}",
            *(f"and in {other.words}" for other in differences[1:6]),
        ]
        if len(differences) > 6:
            lines.append(f"and in {len(differences) - 6} more")
        if self.verdict:
            lines.append(f"the run itself said: {self.verdict}")
        if self.repeatable is None:
            self.repeatable = self._is_repeatable()
        return "\n  ".join(
            [
                *lines,
                "likely cause: "
                f"{self._describe_cause(differences[0].kind, interruption.workers is not None)}",
            ]
        )

    def _describe_cause(self, kind: str, workers_changed: bool) -> str:
        """Return the likely cause of a kind of difference, and what to do about it."""
        if not self.repeatable:
            return (
                f"two runs left alone differ, too: {NOT_REPEATABLE.get(kind, NOT_REPEATABLE[''])}"
            )
        cause = CAUSES.get(kind, CAUSES[""])
        names: list[str] = next(
            (step["changed"] for step in comparison.steps(self.alone) if step["at"][0] == "end"), []
        )
        if names:
            more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
            cause = (
                f"{', '.join(names[:3])}{more}, which changes while the run trains, and which no "
                "checkpoint has"
            )
        elif workers_changed:
            cause += (
                "; or it is counted or drawn by a data worker, and is another one with more or "
                "fewer of them"
            )
        return f"{cause}; {CURES.get(kind, CURES[''])}"

    def _is_repeatable(self) -> bool:
        """Run the command alone once more and return whether the two runs are equal."""
        self.bench.prepare()
        result = self.bench.start()
        again = self.bench.keep("alone-again")
        return result.status == 0 and not comparison.differences(self.alone, again)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error line, without the usage, and exit with status 2."""
        self.exit(2, f"error: {message}; python -m sagemaker_lightning.drill --help\n")


def positive(text: str) -> int:
    """Return `text` as an integer above 0; ArgumentTypeError if it is anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number above 0")
    return int(text)


INTERRUPTION_NAMES = [
    "kill-in-epoch",
    "stop-in-epoch",
    "kill-at-epoch-end",
    "stop-at-epoch-end",
    "kill-in-validation",
    "stop-in-validation",
    "workers",
]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the drill's own flags, which come before the command."""
    flag_parser = Parser(
        prog="python -m sagemaker_lightning.drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m sagemaker_lightning.drill [FLAG]... -- COMMAND...",
        allow_abbrev=False,
    )
    add = flag_parser.add_argument
    add(
        "--steps",
        type=positive,
        default=12,
        metavar="N",
        help="optimizer steps of a run (default: %(default)s)",
    )
    add(
        "--epochs",
        type=positive,
        default=3,
        metavar="N",
        help="over which they go (default: %(default)s)",
    )
    add(
        "--timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="a process's; then it hangs (%(default)s)",
    )
    add(
        "--only",
        action="append",
        choices=INTERRUPTION_NAMES,
        help="one interruption in place of all; may be repeated",
    )
    add("--keep", action="store_true", help="keep the drill's folder, and say where it is")
    return flag_parser


def main(args: list[str] | None = None) -> int:
    """Drill the command that follows `--` in `args`, and return the exit status."""
    args = sys.argv[1:] if args is None else args
    separator = args.index("--") if "--" in args else len(args)
    flags = parser().parse_args(args[:separator])
    command = args[separator + 1 :]
    if not command:
        parser().error("found no command; expected one after --, e.g. -- python app/train.py")
    for number in (SIGTERM, signal.SIGHUP):
        # Exit through `finally`, which ends the processes that the drill started.
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="drill-")).resolve()
    steps_per_epoch = -(-flags.steps // flags.epochs)
    limits = {"epochs": flags.epochs, "steps": steps_per_epoch}
    print(f"drill: {shlex.join(command)}", flush=True)
    try:
        drill = Drill(Bench(folder, command, limits, flags.timeout), flags.keep)
        return run(drill, flags.only or INTERRUPTION_NAMES)
    except Impossible as reason:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if flags.keep:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def run(drill: Drill, names: Sequence[str]) -> int:
    """Make the named interruptions, print each outcome, and return the exit status.

    Raises Impossible if the run has a moment for none of them.
    """
    interruptions, lacking = planned(drill.left_alone())
    for reason in lacking:
        print(f"not drilled: {reason}", flush=True)
    chosen = [interruption for interruption in interruptions if interruption.name in names]
    if not chosen:
        raise Impossible(f"--only: found {', '.join(names)}, for which this run has no moment")
    failed = []
    for interruption in chosen:
        outcome, is_identical = drill.interrupt(interruption)
        print(f"{interruption.words}: {outcome}", flush=True)
        if not is_identical:
            failed.append(interruption.name)
        # If runs left alone differ, all other interrupted runs would differ, too.
        if drill.repeatable is False:
            break
    if failed:
        print(f"NOT identical: {', '.join(failed)}", flush=True)
        return 1
    number = "1 interruption" if len(chosen) == 1 else f"{len(chosen)} interruptions"
    print(f"identical: {number}; weights, optimizers, metrics, curves, model files", flush=True)
    return 0
