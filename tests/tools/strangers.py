"""Interrupts programs of users who have read Lightning's documentation, and compares.

    python -m tests.tools.strangers FILE ... [--ranks=2] [--rounds=3] [--seed=N] [--jobs=2]
                                    [--results=FILE] [--keep=FOLDER]

Each FILE is a program of its own, with `ExactResume` among its Trainer's callbacks. At its end it
writes `weights.pt` into its working folder: tensors, numbers and texts, in dicts and lists.

A program first runs to its end twice: with a callback that does nothing in the place of
ExactResume, and left alone. Then, in each round, it is stopped or killed up to three times at
random moments, and runs to its end. Each round adds a line of JSON to the file of results. The
outcomes:

    invalid      the program fails without ExactResume
    identical    the same weights.pt and files
    line         identical, although a line said that it might not be
    said         it differs or was refused, and a line said so
    wrong, crashed, hung, lost    all else
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]

import warm  # noqa: E402
from zoo import rounds  # noqa: E402

from tests.tools import real_projects  # noqa: E402

NOT_EXACT = re.compile(
    rf"{rounds.NOT_EXACT.pattern}|^warning: .*(interrupt|resume|checkpoint).*$", re.MULTILINE
)
"""The programs make no lines of their own that begin so."""
PLAIN = """
import sys, runpy, pytorch_lightning, sagemaker_lightning
from pytorch_lightning.callbacks import Callback


class ExactResume(Callback):
    def __init__(self, *args, **kwargs):
        pass


sagemaker_lightning.ExactResume = ExactResume
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OF_OURS = re.compile(r"step-\d+.*\.(ckpt.*|shard)|.*\.sagemaker-\w+|restarts.*")
"""The names of files that ExactResume makes."""


class Program(rounds.Job):
    """A stranger's program in a folder, started as often as it takes."""

    def __init__(self, folder: Path, script: Path, is_plain: bool = False) -> None:
        self.folder = folder
        self.script = script
        self.is_plain = is_plain
        folder.mkdir(parents=True)

    def start(self, **variables: str) -> warm.Started:
        """Start the program; its output is added to its log."""
        argv = ["python", rounds.PROGRAM, "script", str(self.script)]
        if self.is_plain:
            (self.folder / ".plain.py").write_text(PLAIN)
            argv = ["python", self.folder / ".plain.py", str(self.script)]
        return self.start_command(argv, self.script.parent, variables)

    def result(self) -> dict[str, object]:
        """Return what the program kept, by position, and the names of its files."""
        own = {
            str(path.relative_to(self.folder)): ""
            for path in self.folder.rglob("*")
            if path.is_file()
            and not path.is_symlink()
            and rounds.is_of_user(path.relative_to(self.folder).parts[0])
            and "tfevents" not in path.name
            and not OF_OURS.fullmatch(path.name)
        }
        return (real_projects.result(self.folder) or {}) | {f"file {name}": "" for name in own}


def left_alone(folder: Path, script: Path, is_plain: bool) -> tuple[rounds.Reference, str]:
    """Run a program to its end; return what it came to, and why it failed, or ""."""
    job = Program(folder, script, is_plain)
    started = time.monotonic()
    status = job.wait(job.start())
    seconds = time.monotonic() - started
    job.end()
    failure = "" if status == 0 else f"left alone: status {status}: {job.output[-2500:]}"
    hooks = int((folder / "hooks").read_text()) if (folder / "hooks").exists() else 1
    return rounds.Reference(seconds, hooks, {} if failure else job.result(), job.output), failure


def with_interruptions(
    folder: Path, script: Path, reference: rounds.Reference, round: rounds.Round, tries: int
) -> tuple[str, str]:
    """Interrupt a program and let it end; return outcome and detail."""
    job = Program(folder, script)
    output = ""
    try:
        for interruption in rounds.draws(round, reference, tries):
            was_interrupted = rounds.interrupt(job, interruption)
            output += job.output
            if not was_interrupted:
                break
            round.interruptions.append(interruption)
            if wrong := rounds.faults(job, interruption, round.launcher):
                is_refused = wrong[0] == "crashed" and interruption.status == 1
                said = NOT_EXACT.search(output) if is_refused else None
                return ("said", said.group(0)) if said else wrong
            job.go_to_another_machine()
        status = job.wait(job.start())
        output += job.output
    finally:
        job.end()
    plainly = NOT_EXACT.search(output)
    line = plainly.group(0) if plainly else ""
    if status is None:
        return "hung", job.output[-1500:]
    if status:
        return ("said", line) if line else ("crashed", f"status {status}: {job.output[-2500:]}")
    if differing := real_projects.differences(reference.result, job.result()):
        return ("said" if line else "wrong"), f"{differing}; {line}"
    if not line and (lost := rounds.forgotten_promise(output)):
        return "lost", lost
    return ("line" if line else "identical"), line


def try_program(script: Path, arguments: argparse.Namespace) -> list[dict]:
    """Do the rounds of one program, and return their rows."""
    launcher = "process" if arguments.ranks == 1 else f"lightning-{arguments.ranks}"
    rows = []

    def add(round: rounds.Round, outcome: str, detail: str) -> None:
        round.outcome, round.detail = outcome, detail
        rows.append(round.row())
        moments = ", ".join(
            f"{each.signal} {each.whom} {each.moment}" for each in round.interruptions
        )
        print(f"{outcome:10}{script.name} [{moments}] {detail[:1500]}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        _, failure = left_alone(Path(scratch, "plain"), script, is_plain=True)
        if failure:
            add(rounds.Round(script.stem, launcher, 0), "invalid", failure)
            return rows
        reference, failure = left_alone(Path(scratch, "alone"), script, is_plain=False)
        if failure:
            said = NOT_EXACT.search(failure)
            add(rounds.Round(script.stem, launcher, 0), "said" if said else "crashed", failure)
            return rows
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            round = rounds.Round(script.stem, launcher, seed)
            folder = Path(scratch, str(seed))
            outcome, detail = with_interruptions(
                folder, script, reference, round, arguments.interruptions
            )
            add(round, outcome, detail)
            if arguments.keep and outcome not in ("identical", "line"):
                name = f"{script.stem}-{seed}"
                shutil.copytree(folder, Path(arguments.keep, name), dirs_exist_ok=True)
    return rows


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="that the programs' Trainers start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interruptions", type=int, default=3, help="of a round, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="programs side by side")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--keep", default=None, help="a folder for the jobs that ended otherwise")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
    warm.ensure_server()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        scripts = [file.resolve() for file in arguments.files]
        for rows in pool.map(lambda script: try_program(script, arguments), scripts):
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.writelines(json.dumps(row | {"commit": commit}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
