"""Runs measurements one after another, each in a process of its own.

A measurement may fail or hang without harm to the others. Its process is forked from this one,
which has imported everything and never uses the GPU: CUDA does not survive a fork, and imports take
longest in a short measurement.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.results import Results

FORK = multiprocessing.get_context("fork")


class Overrun(Exception):
    """A measurement did not end within its time."""


@dataclass(frozen=True)
class Task:
    """One measurement: of a setting, in a round."""

    setting: str
    round: int
    work: Callable[[], dict[str, Any]]


def call(work: Callable[[], Any], seconds: float, log: Path) -> Any:
    """Return `work`'s result from a process of its own; its output goes to `log`.

    Overrun: it took longer, and nothing of it is left. RuntimeError: it failed, with a line that
    says why.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_work, args=(work, sender, log))
    process.start()
    sender.close()
    try:
        if not wait([receiver, process.sentinel], seconds):
            raise Overrun
        succeeded, value = (
            receiver.recv() if receiver.poll() else (False, "it was killed, or it crashed")
        )
    except EOFError:
        succeeded = False
        value = "it was killed, or it crashed"
    finally:
        _end(process)
        receiver.close()
    if not succeeded:
        raise RuntimeError(value)
    return value


def _work(work: Callable[[], Any], sender, log: Path) -> None:
    os.setpgid(0, 0)  # so that all of it can be ended
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        outcome = True, work()
    except BaseException as error:
        traceback.print_exc()
        outcome = False, _line(error)
    sys.stdout.flush()
    sender.send(outcome)


def _line(error: BaseException) -> str:
    """Return an exception's message in one line.

    A SystemExit's text ends with the line that counts.
    """
    lines = [
        line for line in str(error).splitlines() if line.strip() and not line.endswith("see above")
    ]
    if not isinstance(error, SystemExit):
        lines = [f"{type(error).__name__}: {lines[0] if lines else ''}"]
    return (lines[-1] if lines else "it left").strip()[:300]


def _end(process) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def run(
    name: str, tasks: Iterable[Task], results: Results, seconds: float, log: Path
) -> Iterator[str]:
    """Run the tasks that are not in the results yet, in order; yield a line for each.

    It takes at most so many seconds. A setting that fails is left out; the others continue.
    """
    part = results.part(name)
    began = time.monotonic()
    seconds_before = part["seconds"]
    failed = {}
    overran = False
    tasks = list(tasks)
    recorded = {(record["setting"], record["round"]) for record in part["records"]}
    for task in tasks:
        if (task.setting, task.round) in recorded or task.setting in failed:
            continue
        seconds_left = seconds - (time.monotonic() - began)
        try:
            if seconds_left <= 0:
                raise Overrun
            value = call(task.work, seconds_left, log)
        except Overrun:
            overran = True
            break
        except RuntimeError as error:
            failed[task.setting] = str(error)
            yield f"{name}, {task.setting}: failed: {error}"
            continue
        part["records"].append({"setting": task.setting, "round": task.round} | value)
        part["seconds"] = round(seconds_before + time.monotonic() - began, 1)
        results.write()
        yield (
            f"{name}, {task.setting}, round {task.round}: "
            f"done in {time.monotonic() - began:.0f} s of this part"
        )
    missing = len(
        {(task.setting, task.round) for task in tasks}
        - {(record["setting"], record["round"]) for record in part["records"]}
    )
    part["status"] = "failed" if failed else "unfinished" if missing else "complete"
    lines = (
        [f"{missing} of {len(tasks)} measurements are missing: its {seconds:.0f} s were over"]
        if overran
        else []
    )
    part["line"] = "; ".join(
        [*lines, *(f"{setting} failed: {line}" for setting, line in failed.items())]
    )
    results.write()
    yield ": ".join(filter(None, (name, part["status"], part["line"])))
