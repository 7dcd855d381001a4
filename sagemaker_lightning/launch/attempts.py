"""Runs a job's program, and starts it again in the same container when a rank has died."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from sagemaker_lightning.contract import deadlines, failures
from sagemaker_lightning.contract.environment import (
    COPIES_VARIABLE,
    RESTARTS_VARIABLE,
    SageMakerEnvironment,
    failure_file,
)
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.launch import job_end, job_watch
from sagemaker_lightning.launch.memory_folder import memory_folder
from sagemaker_lightning.launch.restarts import Restarts, cause, most, step_reached
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.messages import Fault, FaultKind
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.supervisor import Supervisor

# Linux lets a variable have 128 KiB.
MAX_LISTED = 100
MAX_REASON_CHARACTERS = 150
LAST_KINDS = (FaultKind.STOP, FaultKind.MISTAKE)
"""Faults after which no host starts anything again, whatever the others say."""


def run(
    here: SageMakerEnvironment,
    program: str,
    hyperparameters: Mapping[str, object],
    supervisor: Supervisor,
    attempt: Callable[[Watchdog, Restarts], None],
) -> None:
    """Call `attempt` until it ends well, or must not be repeated.

    Each call has a watch of its own. All hosts come to the same decision, because each knows how
    the program has ended on all of them.

    Raises the error of the last call; Interrupted if the job was stopped before a start.

    Args:
        here: Describes the job and this host.
        program: What the job runs.
        hyperparameters: The job's hyperparameters.
        supervisor: Runs the program.
        attempt: Runs the program once, and raises an error if it does not end well on all hosts.
    """
    restarts = Restarts(most(hyperparameters, os.environ))
    early = EarlyReason(here.current_host)
    supervisor.on_ignored = early.write
    folder = memory_folder() if restarts.most else nullcontext()
    with early, folder as restarts.copies:
        _run(here, program, hyperparameters, supervisor, attempt, restarts)


def _run(
    here: SageMakerEnvironment,
    program: str,
    hyperparameters: Mapping[str, object],
    supervisor: Supervisor,
    attempt: Callable[[Watchdog, Restarts], None],
    restarts: Restarts,
) -> None:
    """Do what `run` does, with no restart taken so far."""
    while True:
        with job_watch.watchdog(here, program, hyperparameters, supervisor, restarts) as watchdog:
            try:
                if restarts.taken:
                    supervisor.prepare_again()
                attempt(watchdog, restarts)
                return
            except BaseException as error:
                stop_signal = supervisor.stop_signal
                final = job_end.tell_hosts(watchdog, here.current_host, error, stop_signal)
                note_progress(restarts, watchdog.path)
                restart = _restart(here, watchdog, restarts, final)
                if not restart:
                    if final is error:
                        raise
                    raise final from None
        restarts.taken.append(restart)
        _forget_failure()
        log.info(
            f"restart {len(restarts.taken)} in this container (at most {restarts.most} an hour)"
            f"{'' if restart.step is None else f', after step {restart.step}'}: {restart.why}"
        )


class EarlyReason:
    """The reason of a job whose program ignores a stop: the container may be killed at any moment.

    How the program ends in fact takes its place, once the block has been left.

    Args:
        host: The name of this host.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.reason = ""

    def write(self, why: str) -> None:
        """Write a reason to the failure file, if there is none."""
        file = failure_file(os.environ)
        if file and not failures.written(file):
            self.reason = f"{job_end.Interrupted(why)} [host {self.host}]"
            with suppress(OSError):
                failures.write(file, self.reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        file = failure_file(os.environ)
        if file and self.reason and failures.written(file) == self.reason:
            _forget_failure()


def variables(restarts: Restarts) -> dict[str, str]:
    """Return the variables by which a program knows its restarts."""
    copies = {COPIES_VARIABLE: str(restarts.copies)} if restarts.copies else {}
    if not restarts.taken:
        return copies
    listed = [
        asdict(restart) | {"why": restart.why[:MAX_REASON_CHARACTERS]}
        for restart in restarts.taken[-MAX_LISTED:]
    ]
    return copies | {RESTARTS_VARIABLE: json.dumps(listed)}


def note_progress(restarts: Restarts, watch: Path) -> None:
    """Complete the newest restart by what this host's ranks have done since.

    Args:
        restarts: The restarts so far.
        watch: The socket of this host's watch.
    """
    trained = [rank for rank in rank_progress.read(watch) if rank.first_step_at]
    if not (restarts.taken and trained):
        return
    restarts.taken[-1] = restarts.taken[-1].continued(
        min(rank.began_with for rank in trained), max(rank.first_step_at for rank in trained)
    )


def _restart(
    here: SageMakerEnvironment, watchdog: Watchdog, restarts: Restarts, error: BaseException
) -> ContainerRestart | None:
    """Return the restart that follows a fault; None if there is none.

    `error` then has an attribute that says how often the program was started again.
    """
    own = job_end.fault_of(error, watchdog)
    said_at = time.monotonic()
    watchdog.tell_fault(own)
    faults: dict[str, Fault | None] = {here.current_host: own}
    if restarts.most and own.kind not in LAST_KINDS:
        faults |= watchdog.wait_for_faults(deadlines.faults_are_known(here.peer_timeout))
    now = time.monotonic()
    faults[here.current_host] = own.aged(now - said_at)
    faults = dict(sorted(faults.items()))
    why_not = restarts.why_not(faults, now)
    if not why_not:
        known = {host: fault for host, fault in faults.items() if fault}
        step = step_reached(known.values())
        came_at = now - max(fault.seconds_ago for fault in known.values())
        return ContainerRestart(_why_and_where(known), step, came_at)
    if own.kind is not FaultKind.STOP:
        error.restarts = restarts.summary(why_not)  # type: ignore[attr-defined]  # of any class
    return None


def _why_and_where(faults: Mapping[str, Fault]) -> str:
    """Return what has ended the job's programs; of several hosts, also on which one.

    Args:
        faults: How the program of each host has ended, by its name.
    """
    first = cause(faults)
    host = next(name for name, fault in faults.items() if fault is first)
    is_clear = len(faults) == 1 or first.why.startswith("host ")
    return first.why if is_clear else f"host {host}: {first.why}"


def _forget_failure() -> None:
    """Remove the reason in the failure file: it is not that of the job's end."""
    if file := failure_file(os.environ):
        with suppress(OSError):
            file.unlink(missing_ok=True)
