"""Lets ranks of two hosts die and freeze at random, and compares the jobs with undisturbed ones.

    python tests/tools/rank_soak.py --rounds=100 --seed=1 --results=FILE [KIND ...]

It needs root: the hosts are processes of this machine, each with a network of its own. Each round
is a job of the real `train` in the rehearsal, with one to three faults. It adds a line of JSON to
the file of results; a round that is in the file already is not done again. At the end, it prints
how many rounds of each kind have ended with the same bits, and without a process left.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import interruptible
import soak_rounds
from rehearsals import Rehearsal

from sagemaker_rehearsal import faults

KINDS = {
    "Lightning": ("app/train_multi_node.py", 1),
    "Lightning, 2 ranks a host": ("app/train_multi_node.py", 2),
    "torchrun": ("app/train_torchrun.py", 1),
    "torchrun, 2 ranks a host": ("app/train_torchrun.py", 2),
}
"""The program of each kind of round, and the ranks of a host."""
DEADLY = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE]
DEADLY += [signal.SIGILL, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM, signal.SIGXCPU]
MOST_FAULTS = 3
LATEST_SECONDS = 12.0
"""From the first rank, or from a new step in the log, to a fault, at most."""
FREEZE = 0.3
"""Share of the faults that are not a signal to end by."""
TRAINS = 0.7
"""Share of the faults that wait for a new step; the others may come before."""
HANG_SECONDS = 15.0  # of the watch, in place of ten minutes
FREEZES = [0.5, 3.0, 8.0, 1000.0]  # seconds; the last one counts as hanging
JOB_SECONDS = 600.0
HYPERPARAMETERS = {
    "model": "tests.support.interruptible.Model",
    "model.sleep": "0.1",
    "model.val_sleep": "0.05",
    "data": "tests.support.interruptible.Data",
    "data.size": "92",
    "trainer.accelerator": "cpu",
    "checkpoint.monitor": "val_loss",
    "progress.every_n_seconds": "0.5",
    "max_restarts": "20",
}
STEPS = 200
BY_THE_RULE = "it came back at the same step"
"""In the reason of a job that has ended as it has to: two faults have met the same step."""


@dataclass
class Round:
    kind: str
    seed: int
    faults: list[str] = field(default_factory=list)
    lost: list[int | None] = field(default_factory=list)
    """The steps that each restart has lost."""
    seconds: list[float | None] = field(default_factory=list)
    """From each death to the next new step."""
    problem: str = ""
    """It is empty if the round ended with the same bits, or by the rule."""
    by_the_rule: bool = False
    commit: str = ""


def start(server: Rehearsal, kind: str) -> str:
    """Start a job of two hosts, and return its name."""
    program, devices = KINDS[kind]
    batches = -(-92 // (4 * 2 * devices))
    flags = {"trainer.devices": str(devices), "trainer.max_epochs": str(STEPS // batches)}
    return server.create(
        "none",
        HyperParameters=HYPERPARAMETERS | flags,
        Environment={
            "OMP_NUM_THREADS": "1",
            "SAGEMAKER_PROGRAM": program,
            "SAGEMAKER_LIGHTNING_HANG_TIMEOUT": str(HANG_SECONDS),
        },
        StoppingCondition={"MaxRuntimeInSeconds": int(JOB_SECONDS)},
        hosts=2,
    )


def ranks(server: Rehearsal) -> list[tuple[str, int]]:
    """Return the ranks of all hosts, in words, with their PIDs."""
    hosts = psutil.Process(server.process.pid).children()
    found = [(number, faults.find_ranks(host.pid)) for number, host in enumerate(hosts, 1)]
    return [
        (f"host {number}, rank {rank}", pid)
        for number, of_host in found
        for rank, pid in of_host.items()
        if _is_rank(pid)
    ]


def _is_rank(pid: int) -> bool:
    """Return whether a process is a rank: where there is none yet, find_ranks names another one."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        words = process.cmdline()
        return process.name().startswith("rank-") or any("app/train" in word for word in words)
    return False


def steps(server: Rehearsal, name: str) -> list[str]:
    """Return the lines of the log that have a step."""
    lines = server.lines(name).get("algo-1", [])
    return [line for line in lines if re.search(r"\bstep=\d", line)]


def strike(draws: random.Random, server: Rehearsal, name: str) -> str:
    """Let a fault happen to a rank that is drawn; return it in words, "" if the job has ended."""
    freezes = draws.random() < FREEZE
    number = draws.choice([*DEADLY, *[signal.SIGKILL] * len(DEADLY)])
    seconds = draws.choice(FREEZES)
    place = draws.random()
    waits = draws.random() < TRAINS
    before = steps(server, name)
    for seconds_more in (0.0, draws.uniform(0, LATEST_SECONDS)):
        time.sleep(seconds_more)
        while not (there := ranks(server)) or (waits and steps(server, name) == before):
            if server.describe(name)["TrainingJobStatus"] != "InProgress":
                return ""
            time.sleep(0.2)
    who, pid = there[int(place * len(there))]
    with suppress(ProcessLookupError, faults.CannotInject):
        if not freezes:
            os.kill(pid, number)
            return f"{number.name} for {who}"
        thaw = faults.freeze(pid)
        time.sleep(min(seconds, 2 * HANG_SECONDS))
        thaw()
        return f"{who} stands still for {seconds} s"
    return f"{who} had ended"


def left_of(name: str) -> list[str]:
    """Return the processes of a job that are left, after some seconds."""
    deadline = time.monotonic() + 10
    while True:
        left = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            with suppress(psutil.Error):
                if process.environ().get("TRAINING_JOB_NAME") == name:
                    left.append(f"{process.pid} {' '.join(process.info['cmdline'])[:100]}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def weights(server: Rehearsal, name: str) -> str:
    """Return the hash of a job's weights."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(server.archive(name)["model.pt"])
        return interruptible.weights(Path(file.name))


@cache
def undisturbed(server: Rehearsal, kind: str) -> str:
    """Return the hash of the weights of a job that is left alone."""
    name = start(server, kind)
    ended = server.wait_until_ended(name, JOB_SECONDS)
    assert ended["TrainingJobStatus"] == "Completed", ended
    assert not json.loads(server.archive(name)["model.json"])["restarts"]
    return weights(server, name)


def disturbed(server: Rehearsal, kind: str, seed: int) -> Round:
    draws = random.Random(f"{kind} {seed}")
    expected = undisturbed(server, kind)
    result = Round(kind, seed)
    name = start(server, kind)
    for _ in range(draws.randint(1, MOST_FAULTS)):
        if fault := strike(draws, server, name):
            result.faults.append(fault)
    ended = server.wait_until_ended(name, JOB_SECONDS)
    if left := left_of(name):
        result.problem = f"processes left: {left}"
    elif ended["TrainingJobStatus"] != "Completed":
        reason = ended.get("FailureReason", "it has no reason")
        result.by_the_rule = BY_THE_RULE in reason
        result.problem = "" if result.by_the_rule else reason
    else:
        restarts = json.loads(server.archive(name)["model.json"])["restarts"]
        result.lost = [each["lost_steps"] for each in restarts]
        result.seconds = [each["seconds"] for each in restarts]
        if weights(server, name) != expected:
            result.problem = "other bits"
    if result.problem:
        for host, lines in server.lines(name).items():
            print(host, *lines[-40:], sep="\n    ", flush=True)
    return result


def table(rows: list[Round]) -> str:
    """Return how many rounds of each kind ended with the same bits."""
    lines = [
        "| kind | identical | by the rule | faults | restarts |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in (*KINDS, "all"):
        of_kind = [row for row in rows if kind in (row.kind, "all")]
        count = Counter(
            "rule" if row.by_the_rule else "problem" if row.problem else "same" for row in of_kind
        )
        struck = sum(len(row.faults) for row in of_kind)
        restarts = sum(len(row.lost) for row in of_kind)
        lines.append(
            f"| {kind} | {count['same']} of {len(of_kind)} | {count['rule']} | {struck} "
            f"| {restarts} |"
        )
    return "\n".join(lines)


def said(row: Round) -> str:
    ended = row.problem or ("by the rule" if row.by_the_rule else "identical")
    return f"{ended}; {row.faults}, lost {row.lost}"


def main() -> None:
    results = Path("output/rank_soak.jsonl")
    arguments = soak_rounds.arguments_of(__doc__.splitlines()[0], KINDS, results)
    with (
        tempfile.TemporaryDirectory(prefix="rank-soak-") as folder,
        Rehearsal(Path(folder), "--engine=processes") as server,
    ):
        soak_rounds.run(arguments, Round, partial(disturbed, server), table, said)


if __name__ == "__main__":
    main()
