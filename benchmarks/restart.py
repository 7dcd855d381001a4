"""Seconds from the death of a rank to its next step / from a start to the first step.

    python -m benchmarks.restart [--n 5] [--hosts 2]     ratios, a job and two minutes each
    python -m benchmarks.restart --goodput 300           a death every 30 s, for 300 s
    python -m benchmarks.restart --copies 300            what copies in memory cost / what they say

A job of two ranks trains on the default data. It is started by the toolkit's `train`, or, with two
hosts, by the rehearsal as processes of this machine, which needs root. One rank is killed, and all
start again in the container. A new job would need a new container as well, which takes minutes; the
ratio leaves it out.

Goodput is the share of the time, from the first step to the last, that the steps of the finished
training take. A step counts once, also if it was repeated, with the median of what steps took.

A copy costs what the steps from it on take longer than the steps around them. Copies are taken more
often than in a job, to have many of them.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report, startup
from sagemaker_lightning import ExactResume
from sagemaker_lightning.resume import memory_copies

CALLBACK = f"{__package__}.restart.Dies"
PLAN = "BENCHMARK_PLAN"
ENGINE = ("--engine=processes",)
PAIRS = 5  # default of --n
TRAINS_SECONDS = 30.0  # from a first step to a death
AFTER_SECONDS = 1.0  # from the last death's first step to the end
COPIES_SHARE = 0.3  # of the time, in place of a hundredth: enough copies to count
COPY_STEPS = 3  # a copy is written by then
STEPS_AROUND = 8  # before and after them
NOTE = re.compile(r"^AT (\S+) STEP (\d+)$", re.MULTILINE)
COPY_NOTE = re.compile(r"^STEP (\S+) (\d+) (\S+) (\S+)$", re.MULTILINE)
LEGS = {
    "ended": "all ranks have ended",
    "setup": "imports, flags and data; the ranks have met",
    "start": "model, and what is restored",
    "step": "the first step",
}
"""What is done, in this order, from a death to the next step, by the mark at its end."""
MARK = re.compile(r"^MARK (\w+) (\S+)$", re.MULTILINE)
ENDED = re.compile(r"restart \d+ in this container ")
"""The launcher's line once all ranks have ended."""


@dataclass(frozen=True)
class Plan:
    """What befalls a job."""

    deaths: int = 1
    """How many there are; the first run comes before the first one."""
    every: float = TRAINS_SECONDS
    """Seconds between two of them, and before the first."""
    trains: float = 0.0
    """Seconds from the first step to the end; 0 to end soon after the last death."""
    copies_share: float = 0.0
    """The share of the time that copies in memory may take; 0 for that of any job."""


class Dies(Callback):
    """Prints where rank 0 is, and kills the last rank, as the plan says."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print when the ranks have met."""
        _mark("setup", trainer.is_global_zero and stage == "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out what is planned."""
        _mark("start", trainer.is_global_zero)
        self.stepped_in = 0  # a restarted run continues with what it was
        self.plan = Plan(**json.loads(os.environ[PLAN]))
        self.resume = next(each for each in trainer.callbacks if isinstance(each, ExactResume))
        self.noted = 0.0  # and with this
        memory_copies.MAX_SHARE = self.plan.copies_share or memory_copies.MAX_SHARE

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the time, kill this rank, or end the training."""
        _mark("step", trainer.is_global_zero and self.stepped_in != os.getpid())
        self.stepped_in = os.getpid()
        now = time.time()
        began = Path(os.environ["SAGEMAKER_BASE_DIR"], "began")
        if trainer.local_rank == 0 and not began.exists():
            began.write_text(str(now))
        since = now - float(began.read_text() if began.exists() else now)
        first_step_at = self.resume.container_restarts.progress.first_step_at
        since_start = time.monotonic() - first_step_at / 1e9 if first_step_at else 0.0
        deaths = len(self.resume.restarts)
        if trainer.is_global_zero and self.plan.copies_share:
            copies = self.resume.run.copies
            print("STEP", now, trainer.current_epoch, copies.taken_at, copies.spent, flush=True)
        if trainer.is_global_zero and now - self.noted >= 1:
            self.noted = now
            print(f"AT {now:.3f} STEP {trainer.global_step}", flush=True)
        is_over = deaths >= self.plan.deaths and since_start >= AFTER_SECONDS
        if self.plan.trains:
            is_over = since >= self.plan.trains
        # All ranks end at the same step.
        if trainer.strategy.reduce_boolean_decision(is_over, all=False):
            trainer.should_stop = True
            return
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and deaths < self.plan.deaths and since_start >= self.plan.every:
            _mark("death")
            os.kill(os.getpid(), signal.SIGKILL)


def _mark(name: str, prints: bool = True) -> None:
    if prints:
        print(f"MARK {name} {time.time():.3f}", flush=True)


@dataclass(frozen=True)
class Job:
    """What a job has printed and written."""

    started: float
    """When it was started, in seconds since 1970."""
    printed: str
    restarts: list[dict[str, Any]]
    """Those of model.json."""

    @property
    def notes(self) -> list[tuple[float, int]]:
        """Time and step, once a second."""
        found = NOTE.findall(self.printed)
        if not found:
            raise SystemExit(f"{self.printed}error: the job has trained nothing, see above")
        return [(float(at), int(step)) for at, step in found]

    @property
    def legs(self) -> dict[str, float]:
        """The seconds of each of LEGS after the first death; on several hosts, two are one."""
        marks = [(float(at), name) for name, at in MARK.findall(self.printed)]
        last = min(at for at, name in marks if name == "death")
        found = {}
        for name in LEGS:
            if times := [at for at, other in marks if other == name and at >= last]:
                found[name] = min(times) - last
                last = min(times)
        return found

    @property
    def step_seconds(self) -> float:
        """The median of what a step took."""
        pairs = zip(self.notes, self.notes[1:], strict=False)
        return statistics.median(
            (after[0] - before[0]) / (after[1] - before[1])
            for before, after in pairs
            if after[1] > before[1] and after[0] - before[0] < TRAINS_SECONDS / 10
        )

    @property
    def goodput(self) -> float:
        """The share of the time, from the first step to the last, that useful steps take."""
        (first, begun_with), *_, (last, step) = self.notes
        return (step - begun_with) * self.step_seconds / (last - first)


def job(hosts: int, plan: Plan) -> Job:
    """Run a job; SystemExit if it fails, or was not started again as often as planned."""
    hyperparameters = {
        "resume.every_n_minutes": "60" if plan.copies_share else "0.5",
        "trainer.callbacks+": CALLBACK,
        "trainer.accelerator": "cpu",
        "trainer.devices": str(2 // hosts),
        "trainer.max_epochs": "1000000",
        "max_restarts": "1000",
    }
    variables = {PLAN: json.dumps(vars(plan)), "OMP_NUM_THREADS": "1"}
    ended = (_one_host if hosts == 1 else _several_hosts)(hosts, hyperparameters, variables)
    if not plan.trains and len(ended.restarts) != plan.deaths:
        raise SystemExit(f"{ended.printed}error: the job was not started again, see above")
    return ended


def _one_host(hosts: int, hyperparameters: dict[str, str], variables: dict[str, str]) -> Job:
    with tempfile.TemporaryDirectory() as base_dir:
        startup.settings(Path(base_dir), **hyperparameters)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        started = time.time()
        process = subprocess.Popen(
            [str(report.ROOT / "entrypoint.sh"), "train"],
            cwd=base_dir,
            env=report.variables(
                PATH=path,
                SAGEMAKER_BASE_DIR=base_dir,
                SAGEMAKER_PROGRAM="app/train_multi_node.py",
                SAGEMAKER_TRAINING_MODULE="sagemaker_lightning.launch.toolkit_hook:main",
                **variables,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = ""
        for line in process.stdout:
            printed += line
            if ENDED.match(line):
                printed += f"MARK ended {time.time():.3f}\n"
        if process.wait():
            raise SystemExit(f"{printed}error: the job failed, see above")
        about = json.loads(Path(base_dir, "model/model.json").read_text())
    return Job(started, printed, about["restarts"])


def _several_hosts(hosts: int, hyperparameters: dict[str, str], variables: dict[str, str]) -> Job:
    sys.path.insert(0, str(report.ROOT / "tests/support"))
    from containers import IMAGE_TAG
    from rehearsals import Rehearsal

    with tempfile.TemporaryDirectory() as folder, Rehearsal(Path(folder), *ENGINE) as server:
        started = time.time()
        name = server.create(
            IMAGE_TAG,
            hosts=hosts,
            HyperParameters=hyperparameters,
            Environment=variables,
            StoppingCondition={"MaxRuntimeInSeconds": 3600},
        )
        ended = server.wait_until_ended(name, 3600)
        printed = "\n".join(line for lines in server.lines(name).values() for line in lines)
        if ended["TrainingJobStatus"] != "Completed":
            raise SystemExit(f"{printed}\nerror: {ended.get('FailureReason')}")
        about = json.loads(server.archive(name)["model.json"])
    return Job(started, printed, about["restarts"])


def rounds(n: int, hosts: int) -> Iterator[float]:
    """Yield the ratio of each round, after one that fills the file cache and does not count."""
    for number in range(n + 1):
        ended = job(hosts, Plan())
        (restart,) = ended.restarts
        start = ended.notes[0][0] - ended.started
        if number:
            lost = restart["lost_steps"]
            print(
                f"restart: {restart['seconds']:.1f} / {start:.1f} = "
                f"{restart['seconds'] / start:.3f}; {lost} steps lost, "
                f"{lost * ended.step_seconds:.2f} s of training",
                flush=True,
            )
            for name, seconds in ended.legs.items():
                print(f"    {seconds:.2f} s: {LEGS[name]}", flush=True)
            yield restart["seconds"] / start


def with_goodput(seconds: float, hosts: int) -> report.Comparison:
    """Kill a rank again and again, and return the share of the time that was useful."""
    ended = job(hosts, Plan(deaths=1000, trains=seconds))
    again = [restart["seconds"] for restart in ended.restarts]
    lost = [restart["lost_steps"] for restart in ended.restarts]
    print(
        f"{len(again)} deaths; back within {statistics.median(again):.1f} s [{min(again):.1f}.."
        f"{max(again):.1f}]; {statistics.median(lost):.0f} steps lost "
        f"[{min(lost)}..{max(lost)}] of {ended.step_seconds * 1000:.0f} ms",
        flush=True,
    )
    what = f"seconds: useful steps / all, with a death every {TRAINS_SECONDS:.0f} s of training"
    return report.Comparison(f"goodput, {_machines(hosts)}", what, [ended.goodput])


def with_copies(seconds: float, hosts: int) -> report.Comparison:
    """Compare what each copy in memory adds to the steps around it with what it counts."""
    ended = job(hosts, Plan(deaths=0, trains=seconds, copies_share=COPIES_SHARE))
    ratios = [added / counted for added, counted in copies_of(ended.printed)]
    print(f"{len(ratios)} copies; steps of {ended.step_seconds * 1000:.0f} ms", flush=True)
    what = "seconds: what a copy in memory adds to the steps from it on / what it counts"
    return report.Comparison(f"copies, {_machines(hosts)}", what, ratios)


def copies_of(printed: str) -> Iterator[tuple[float, float]]:
    """Yield what each copy adds to the steps, and what it counts, in seconds.

    Copies beside an epoch's end are left out: a validation and a checkpoint are there.
    """
    notes = [tuple(map(float, note)) for note in COPY_NOTE.findall(printed)]
    steps = list(zip(notes, notes[1:], strict=False))
    # A step of another epoch than the one before has the end of that epoch in it.
    durations = [after[0] - before[0] if after[1] == before[1] else None for before, after in steps]
    copies = [
        number
        for number, (before, after) in enumerate(steps)
        if after[2] != before[2] and durations[number] is not None
    ]
    slow = {copy + more for copy in copies for more in range(COPY_STEPS)}
    for copy in copies:
        own = durations[copy : copy + COPY_STEPS]
        first = max(copy - STEPS_AROUND, 0)
        around = [
            duration
            for number, duration in enumerate(durations[first : copy + STEPS_AROUND], first)
            if duration is not None and number not in slow
        ]
        counted = notes[min(copy + COPY_STEPS + 1, len(notes) - 1)][3] - notes[copy][3]
        if len(around) >= STEPS_AROUND / 2 and counted and None not in own:
            yield sum(own) - len(own) * statistics.mean(around), counted


def _machines(hosts: int) -> str:
    return "two ranks" if hosts == 1 else "two hosts"


def run(n: int, hosts: int, goodput: float = 0.0, copies: float = 0.0) -> list[report.Comparison]:
    """Return what the flags ask for; by default, a death's ratio to a start, in n rounds."""
    if goodput:
        return [with_goodput(goodput, hosts)]
    if copies:
        return [with_copies(copies, hosts)]
    what = "seconds: a rank's death to the next step / start to the first step"
    return [report.Comparison(f"restart, {_machines(hosts)}", what, list(rounds(n, hosts)))]


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--goodput", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--copies", type=float, default=0.0, metavar="SECONDS")
    report.publish(run(**vars(parser.parse_args())))
