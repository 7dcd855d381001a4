"""Interrupts the first steps of a training at several moments, and compares what comes out with a run left alone.

    python -m sagemaker_lightning.drill -- python app/train.py --model=mine.Model --data=mine.Data
    python -m sagemaker_lightning.drill -- python my_train.py           a program of your own that trains by cli/run.py
    python -m sagemaker_lightning.drill -- python app/train_torchrun.py --trainer.devices=2 --trainer.accelerator=cpu
    docker run IMAGE python -m sagemaker_lightning.drill -- train       the job whose files are mounted at /opt/ml

The command is started as it is given, as often as it takes, in a folder of its own that looks like the working folder:
a few short epochs, first left alone, then once for each interruption: within an epoch, at an epoch's end, in a
validation, each by SIGKILL and by SIGTERM, and with another number of data workers. Each of these runs is started
again and trains to its end: with the same weights, optimizers, metrics, curves and model files, to the last bit, or the
first difference is named, and its likely cause.

Nothing is written to the job's own folders: its model, checkpoints and logs go to the drill's folder, whatever the
flags say, and so does what the program writes to relative paths; not what it writes to absolute ones by itself. Files
above 64 MiB, and folders of very many files, are not copied there but linked: the data.

Exit status: 0 if all is identical, 1 if not, or if the command fails when it is left alone, 2 for a mistake in the
flags.
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

import psutil

from sagemaker_lightning.contract import failures
from sagemaker_lightning.contract.environment import drilled
from sagemaker_lightning.contract.shutdown import newest_step
from sagemaker_lightning.drill import comparison
from sagemaker_lightning.process.supervisor import adopt_orphans, living

HOME = Path(__file__).resolve().parents[2]  # beside this package: where entrypoint.sh is
GRACE = 120.0  # seconds from SIGTERM to the end: after these, SageMaker kills
VERDICT = re.compile(r"(warning: )?resumed at step \d+: ")
COPIED = 2**26, 2**28  # bytes of a file, and of all files, that are copied and not linked
# files and folders of the working folder that are looked at; folders beyond are linked as they are
ENTRIES = 10_000
CAUSES = {
    "batch": "something that the samples or their order depend on is not restored, such as a variable of a module or "
    "in a closure, an object that is no plain value, a file",
    "learning rate": "what changes the rate counts by itself",
    "loss": "the batch is the same, so something that the step depends on is not restored, such as a variable of a "
    "module or in a closure, an object that is no plain value",
    "steps": "the length of an epoch, or what ends the training, depends on something that is not restored",
    "curve": "every step is the same; what writes this curve or file does not go back to the checkpoint with the run",
    "file": "every step is the same; what writes this file depends on something that is not restored",
    "": "every step is the same; what was gathered on the way (a metric, an average, the state of a callback) is not "
    "restored",
}
"""Why a run that is the same each time it is left alone is another one when it is interrupted, by what differs."""
CURES = {
    "batch": "make a sample a function of its index and the random generators, or keep what it depends on in plain "
    "attributes of the dataset, the sampler or the data module",
    "learning rate": "return it from configure_optimizers, or keep its count in plain attributes of the module",
    "curve": "log by the trainer's loggers",
    "": "keep it in buffers or plain attributes of the module or a callback, or save it in on_save_checkpoint",
}
"""What to do about it."""
NOT_REPEATABLE = {
    "batch": "the samples or their order depend on what no seed decides: the time, os.urandom, the order of a set, a "
    "generator seeded from these",
    "": "the step depends on what no seed decides (the time, os.urandom, ...), or a kernel is not deterministic "
    "(--trainer.deterministic=true makes it so, or names it)",
}


class Impossible(Exception):
    """The drill cannot be done, for the reason that it says in one line."""


@dataclass(frozen=True)
class Interruption:
    """A signal at a moment, and with how many data workers the run goes on then."""

    name: str
    words: str
    number: signal.Signals
    moment: tuple
    """Kind, epoch and batch, as drill/drilled_run.py writes them down."""
    workers: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int | None
    """Exit status, -N if signal N ended it; None if it hung."""
    interrupted: bool
    """Whether it came to the moment at which it was to be."""
    said: str
    """All that it wrote."""

    @property
    def verdict(self) -> str:
        """What a run that goes on says of itself: whether it does what it did before."""
        lines = [line for line in self.said.splitlines() if VERDICT.match(line)]
        return lines[-1] if lines else ""

    @property
    def error(self) -> str:
        """Why it failed, in a line, as it says itself."""
        lines = [line for line in self.said.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else failures.last_error(self.said)[0] or "it said nothing"


class Bench:
    """The folder in which the command is run.

    Args:
        folder: The drill's folder; each run is in `run` below it, so that all have the same paths, until it is kept.
        command: The program and its arguments.
        limits: What drill/drilled_run.py is asked for in each run.
        timeout: Seconds after which a process hangs.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], limits: dict[str, int], timeout: float
    ) -> None:
        self.folder, self.command, self.limits, self.timeout = (
            folder,
            list(command),
            limits,
            timeout,
        )
        if self.command == ["train"]:  # of the toolkit, whose folders entrypoint.sh prepares
            self.command = [str(HOME / "entrypoint.sh"), "train"]
        self.run = folder / "run"
        self.others = {child.pid for child in psutil.Process().children()}

    def prepare(self) -> None:
        """Make the folder of a run."""
        self.run.mkdir()
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
        """Keep the folder of a run under a name, and return it."""
        kept = self.folder / name
        self.run.rename(kept)
        return kept

    def start(self, interruption: Interruption | None = None, workers: int | None = None) -> Ended:
        """Start the command, interrupt it if that is asked for, and return when nothing of it is left."""
        moment = interruption and list(interruption.moment)
        reached = self.run / "reached"
        reached.unlink(missing_ok=True)
        asked = {
            "folder": str(self.run),
            "reached": str(reached),
            "moment": moment,
            "workers": workers,
        }
        variables = drilled(os.environ, self.run / "ml", self.limits | asked)
        # Where this Python is, `python` and `torchrun` are too.
        variables["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        )
        log = self.run / "log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    self.command, cwd=self.run / "work", env=variables, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise Impossible(
                    f"{self.command[0]}: cannot be started ({error.strerror})"
                ) from None
        try:
            status, interrupted = self._wait(process, interruption, reached)
        finally:
            self._end(process)
        with log.open("rb") as file:
            file.seek(before)
            return Ended(status, interrupted, file.read().decode(errors="replace"))

    def _wait(
        self, process: subprocess.Popen, interruption: Interruption | None, reached: Path
    ) -> tuple[int | None, bool]:
        """Return the exit status of the process, None if it hangs, and whether it was interrupted: it is, when it says
        that it waits for that."""
        end, interrupted = time.monotonic() + self.timeout, False
        while (status := process.poll()) is None and time.monotonic() < end:
            if interruption and not interrupted and reached.exists():
                interrupted = True
                if interruption.number == SIGKILL:
                    self._end(process)
                    continue
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, interruption.number)
                reached.unlink()
                end = time.monotonic() + min(GRACE, self.timeout)
            time.sleep(0.02)
        return status, interrupted

    def _end(self, process: subprocess.Popen) -> None:
        """Kill all that is left of the process and of what it has started."""
        while left := living(process.pid, self.others):
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.01)
        process.wait()


def mirror(source: Path, target: Path, without: Path) -> None:
    """Make `target` look like the folder `source`: what is written to it changes nothing in `source`.

    Files are copied, up to COPIED. Larger ones, hidden folders, and folders with more files than are worth looking at
    are links: data is read, not written. `without` is left out.
    """
    count, size, queue = 0, 0, [(source, target)]
    for folder, copy in queue:  # which grows, level by level
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if count + len(entries) > ENTRIES and folder != source:
            copy.symlink_to(folder)
            continue
        count += len(entries)
        copy.mkdir(parents=True)
        for entry in entries:
            path, there = Path(entry.path), copy / entry.name
            if path == without:
                continue
            if (
                entry.is_dir(follow_symlinks=False)
                and entry.name[0] != "."
                and os.access(path, os.R_OK | os.X_OK)
            ):
                queue.append((path, there))
                continue
            plain = entry.is_file(follow_symlinks=False) and os.access(path, os.R_OK)
            length = entry.stat().st_size if plain else 0
            if plain and length <= COPIED[0] and size + length <= COPIED[1]:
                shutil.copy2(path, there)
                size += length
            else:
                there.symlink_to(path.resolve())


def planned(done: Sequence[dict]) -> tuple[list[Interruption], list[str]]:
    """Return the interruptions that a run has moments for, by what it wrote down when it was left alone; and what it
    has no moment for."""
    moments: dict[str, list[tuple]] = defaultdict(list)
    for step in done:
        moments[step["at"][0]].append(tuple(step["at"]))
    epochs = sorted({at[1] for at in moments["batch"]})
    # one in the middle, so that there is something before it and after it
    epoch = epochs[len(epochs) // 2]
    batches = [at for at in moments["batch"] if at[1] == epoch]
    first, second = batches[(len(batches) - 1) // 2], batches[len(batches) // 2]
    found, lacking = [], []

    def add(name: str, words: str, kill: tuple, stop: tuple) -> None:
        found.append(Interruption(f"kill-{name}", f"kill {words}", SIGKILL, kill))
        found.append(Interruption(f"stop-{name}", f"stop {words}", SIGTERM, stop))

    add("in-epoch", "within an epoch", second, first)
    if len(epochs) > 1:
        add("at-epoch-end", "at an epoch's end", moments["epoch"][0], moments["epoch"][0])
    else:
        lacking.append("an epoch's end: there is one epoch only")
    if (
        validations := [at for at in moments["validation"] if at[1] == epoch]
        or moments["validation"]
    ):
        add("in-validation", "in a validation", validations[len(validations) // 2], validations[0])
    else:
        lacking.append("a validation: there is none")
    workers = next(step["workers"] for step in done if step["at"][0] == "start")
    if workers is None:
        lacking.append(
            "another number of data workers: the training data is in no DataLoader that takes one"
        )
    else:
        other = 1 if workers == 2 else 2
        words = f"stop within an epoch, go on with {other} data workers in place of {workers}"
        found.append(Interruption("workers", words, SIGTERM, first, other))
    return found, lacking


class Drill:
    """A drill: a run left alone, and those that are interrupted.

    Args:
        bench: Where the command runs.
        keeps: Whether the folder of each run is kept.
    """

    def __init__(self, bench: Bench, keeps: bool) -> None:
        self.bench, self.keeps = bench, keeps
        self.alone: Path | None = None
        self.repeatable: bool | None = None  # None as long as it was not looked at
        self.verdict = ""  # of the run that went on last, by itself

    def left_alone(self) -> list[dict]:
        """Run the command without an interruption, and return what it wrote down; Impossible if nothing came of it."""
        began = time.monotonic()
        self.bench.prepare()
        ended = self.bench.start()
        if ended.status is None:
            raise Impossible(
                f"the command, left alone, had not ended after {self.bench.timeout:.0f} s; give a larger --timeout, or "
                "fewer --steps"
            )
        if ended.status:
            print(ended.said, end="", flush=True)
            raise Impossible(
                f"the command, left alone, fails with exit status {ended.status}: {ended.error}"
            )
        self.alone = self.bench.keep("alone")
        done = comparison.steps(self.alone)
        if not any(step["at"][0] == "batch" for step in done):
            raise Impossible(
                "the command ended with exit status 0 and trained nothing by sagemaker_lightning.cli.run; allowed is a "
                "program that trains by it, as app/train.py does"
            )
        if not newest_step(self.alone / "ml/checkpoints"):
            raise Impossible(
                "the command trains without checkpoints to go on from; leave out --resume.exact=false, "
                "--trainer.enable_checkpointing=false and --trainer.fast_dev_run"
            )
        last = [step for step in done if step["at"][0] == "batch"][-1]
        print(
            f"left alone: {last['step']} steps in {last['at'][1] + 1} epochs, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        return done

    def interrupt(self, one: Interruption) -> tuple[str, bool]:
        """Interrupt a run and let it go on to its end; return what came of it, and whether that is as it should be."""
        self.bench.prepare()
        wrong = self._interrupt(one)
        folder = self.bench.keep(one.name)
        starts = [step["step"] for step in comparison.steps(folder) if step["at"][0] == "start"]
        wrong = wrong or self._different(folder, one)
        if not self.keeps:
            shutil.rmtree(folder)
        step = starts[-1] if starts else 0
        how = f"gone on with from step {step}" if step else "begun anew: it had no checkpoint yet"
        alarm = (
            f"; but the run itself said: {self.verdict}"
            if self.verdict.startswith("warning: ")
            else ""
        )
        return wrong or f"identical, {how}{alarm}", not wrong

    def _interrupt(self, one: Interruption) -> str:
        """Interrupt a run and start it again; return what goes wrong on the way."""
        self.verdict = ""
        ended = self.bench.start(one)
        if not ended.interrupted:
            why = (
                "it hung"
                if ended.status is None
                else f"it ended with status {ended.status}: {ended.error}"
            )
            return f"NOT REPEATED: the run did not come to the moment at which it was to be interrupted, but {why}"
        if one.number == SIGTERM and ended.status is None:
            return f"HUNG: {min(GRACE, self.bench.timeout):.0f} s after SIGTERM it had not ended"
        if one.number == SIGTERM and not ended.status:
            return "NOT STOPPED: in spite of SIGTERM it went on to its end; SageMaker would have killed it on the way"
        if one.number == SIGTERM and not newest_step(self.bench.run / "ml/checkpoints"):
            return f"NO CHECKPOINT was there after SIGTERM: {ended.error}"
        ended = self.bench.start(workers=one.workers)
        self.verdict = ended.verdict
        if ended.status is None:
            return f"HUNG: started again, it had not ended after {self.bench.timeout:.0f} s"
        if ended.status:
            return f"FAILS when it is started again, with exit status {ended.status}: {ended.error}"
        return ""

    def _different(self, folder: Path, one: Interruption) -> str:
        """Return how an interrupted run differs from the one left alone, and why that may be; "" if it does not."""
        found = comparison.differences(self.alone, folder)
        if not found:
            return ""
        lines = [
            f"DIFFERENT, first in {found[0].words}",
            *(f"and in {other.words}" for other in found[1:6]),
        ]
        if len(found) > 6:
            lines.append(f"and in {len(found) - 6} more")
        if self.verdict:
            lines.append(f"the run itself said: {self.verdict}")
        if self.repeatable is None:
            self.repeatable = self._is_repeatable()
        return "\n  ".join(
            [*lines, f"likely cause: {self._cause(found[0].kind, one.workers is not None)}"]
        )

    def _cause(self, kind: str, of_workers: bool) -> str:
        """Return why a kind of difference may be, and what to do about it."""
        if not self.repeatable:
            return (
                f"two runs left alone differ, too: {NOT_REPEATABLE.get(kind, NOT_REPEATABLE[''])}"
            )
        cause = CAUSES.get(kind, CAUSES[""])
        if names := next(
            (step["changed"] for step in comparison.steps(self.alone) if step["at"][0] == "end"), []
        ):
            more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
            cause = f"{', '.join(names[:3])}{more}, which changes while the run trains, and which no checkpoint has"
        elif of_workers:
            cause += "; or it is counted or drawn by a data worker, and is another one with more or fewer of them"
        return f"{cause}; {CURES.get(kind, CURES[''])}"

    def _is_repeatable(self) -> bool:
        """Return whether a second run left alone is the same as the first."""
        self.bench.prepare()
        ended = self.bench.start()
        again = self.bench.keep("alone-again")
        return ended.status == 0 and not comparison.differences(self.alone, again)


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line."""

    def error(self, message: str) -> None:
        """Leave with the line alone."""
        self.exit(2, f"error: {message}; python -m sagemaker_lightning.drill --help\n")


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is a whole number above 0")
    return int(text)


NAMES = ["kill-in-epoch", "stop-in-epoch", "kill-at-epoch-end", "stop-at-epoch-end", "kill-in-validation",
         "stop-in-validation", "workers"]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of what comes before the command."""
    found = Parser(
        prog="python -m sagemaker_lightning.drill",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m sagemaker_lightning.drill [FLAG]... -- COMMAND...", allow_abbrev=False,
    )  # fmt: skip
    add = found.add_argument
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
        choices=NAMES,
        help="one interruption in place of all; may be repeated",
    )
    add("--keep", action="store_true", help="keep the drill's folder, and say where it is")
    return found


def main(args: list[str] | None = None) -> int:
    """Drill, and return the exit status."""
    args = sys.argv[1:] if args is None else args
    place = args.index("--") if "--" in args else len(args)
    given, command = parser().parse_args(args[:place]), args[place + 1 :]
    if not command:
        parser().error("found no command; allowed is one after --, e.g. -- python app/train.py")
    for number in (SIGTERM, signal.SIGHUP):
        # what was started is ended on the way out
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="drill-")).resolve()
    limits = {"epochs": given.epochs, "steps": -(-given.steps // given.epochs)}
    print(f"drill: {shlex.join(command)}", flush=True)
    try:
        drill = Drill(Bench(folder, command, limits, given.timeout), given.keep)
        return run(drill, given.only or NAMES)
    except Impossible as reason:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if given.keep:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def run(drill: Drill, names: Sequence[str]) -> int:
    """Interrupt in the ways that are named, print what comes of it, and return the exit status."""
    interruptions, lacking = planned(drill.left_alone())
    for words in lacking:
        print(f"not drilled: {words}", flush=True)
    chosen = [one for one in interruptions if one.name in names]
    if not chosen:
        raise Impossible(f"--only: found {', '.join(names)}, for which this run has no moment")
    wrong = []
    for one in chosen:
        words, right = drill.interrupt(one)
        print(f"{one.words}: {words}", flush=True)
        if not right:
            wrong.append(one.name)
        if drill.repeatable is False:  # all others would be different, too
            break
    if wrong:
        print(f"NOT identical: {', '.join(wrong)}", flush=True)
        return 1
    print(
        f"identical: {len(chosen)} interruptions; weights, optimizers, metrics, curves, model files",
        flush=True,
    )
    return 0
