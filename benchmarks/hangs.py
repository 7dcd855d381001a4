"""False alarms of the watch for hangs in steps that take longer than its limit; hangs it sees.

    python -m benchmarks.hangs [--steps 1000] [--limit 4] [--jobs 10]

Jobs of one rank each train side by side, as real processes under nodes/hang_watch.py, with a limit
of seconds in place of ten minutes. In turn, a step computes, waits for a child that computes (a
compiler, a data worker), is a validation of many slow batches, or waits for its input for most of
the limit. After its last step, each rank hangs, which has to be seen.

A rank that gets less than a twentieth of a processor for seconds is taken for one that hangs: with
ten minutes, that does not matter, and here the machine has to be quiet.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import report
from sagemaker_lightning.nodes.hang_watch import HangWatch
from sagemaker_lightning.nodes.rank_progress import ProgressFile, read

LONG = 1.5  # times the limit: what a step takes that uses a processor
WAITS = 0.7  # of the limit: what a batch may wait without one
LOOKS = 60  # within the limit, as the watchdog looks


def compute(seconds: float) -> None:
    """Use a processor for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def compile_in_child(seconds: float) -> None:
    """Wait for a child that uses a processor for so long."""
    child = os.fork()
    if not child:
        compute(seconds)
        os._exit(0)
    os.waitpid(child, 0)


def train(folder: Path, steps: int, limit: float) -> None:
    """Be a rank: train so many steps, and hang."""
    progress = ProgressFile(folder / "ranks")
    progress.begin(0)
    for number in range(steps):
        kind = (number + int(folder.name)) % 4
        if kind == 0:
            compute(LONG * limit)
        elif kind == 1:
            compile_in_child(LONG * limit)
        else:
            for _ in range(3 if kind == 2 else 1):
                time.sleep(WAITS * limit)
                progress.move(number)
        progress.batch_ended(number + 1)
    time.sleep(3600)


@dataclass
class Job:
    """A rank, and the watch of its node."""

    folder: Path
    process: subprocess.Popen
    watch: HangWatch
    steps: int
    alarms: dict[int, float] = field(default_factory=dict)
    """After how many seconds without a batch each came, by the step before it."""

    @property
    def is_over(self) -> bool:
        """Whether the hang after the last step was seen."""
        return self.steps in self.alarms

    def look(self) -> None:
        """Look once; an alarm counts once for a step."""
        if self.watch.look(time.monotonic()):
            (rank,) = read(self.folder / "ranks")
            self.alarms.setdefault(rank.step, time.monotonic() - rank.moved_at)


def run(steps: int, limit: float, jobs: int) -> list[Job]:
    """Return the jobs once each has trained its share of the steps, and its hang was seen."""
    share = -(-steps // jobs)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for number in range(jobs):
                own = Path(folder, str(number))
                own.mkdir()
                command = [sys.executable, "-m", __spec__.name, "--rank", str(own)]
                command += [f"--steps={share}", f"--limit={limit}"]
                process = subprocess.Popen(command, env=report.variables(), start_new_session=True)
                started.append(
                    Job(own, process, HangWatch(own / "ranks", limit, lambda: None), share)
                )
            while not all(each.is_over for each in started):
                for each in started:
                    if not each.is_over:
                        each.look()
                    if each.process.poll() is not None:
                        raise SystemExit("error: a rank has ended, see above")
                time.sleep(limit / LOOKS)
        finally:
            for each in started:
                each.process.kill()
                each.process.wait()
    return started


def publish(jobs: list[Job], limit: float) -> None:
    """Print the machine, and what the watch has seen."""
    steps = sum(each.steps for each in jobs)
    alarms = sum(len(each.alarms) - 1 for each in jobs)
    seen = [each.alarms[each.steps] for each in jobs]
    print(f"\n{report.machine()}\n")
    print(
        f"{steps} long steps, {alarms} false alarms; {len(seen)} of {len(jobs)} hangs seen, after "
        f"{min(seen):.1f} to {max(seen):.1f} s, with a limit of {limit:g} s"
    )


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=report.positive, default=1000)
    parser.add_argument("--limit", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--jobs", type=report.positive, default=10)
    parser.add_argument("--rank", type=Path, help="be a rank, in this folder")
    arguments = parser.parse_args()
    if arguments.rank:
        train(arguments.rank, arguments.steps, arguments.limit)
    else:
        publish(run(arguments.steps, arguments.limit, arguments.jobs), arguments.limit)
