"""Decides how a job ended on this host: with success, by a failure or by a stop."""

import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from signal import Signals
from typing import NamedTuple

from sagemaker_lightning.contract import failures, shutdown
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log, say_last
from sagemaker_lightning.launch import ownership
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.messages import Fault, FaultKind
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.supervisor import ProgramEnd, StoppedBeforeStart, Supervisor

# What an error of a GPU, of its memory, or of the connections between ranks has in its text.
OF_A_DEVICE = re.compile(
    r"\b(CUDA|NCCL|cuDNN|cuBLAS)|OutOfMemoryError|out of (GPU|host) memory|uncorrectable ECC",
    re.IGNORECASE,
)
# Exit statuses of a program that something other than this process asked to stop, each with the
# signal that it used.
STOP_SIGNALS = {
    sign: number for number in shutdown.SIGNALS for sign in (-number, shutdown.status(number))
}


class Outcome(Enum):
    """How a job's program ended on this host."""

    SUCCESS = "it ended well"
    STOPPED = "it was asked to stop"
    STOPPED_ELSEWHERE = "another host, or a rank, was asked to stop"
    FAILED = "it failed"
    UNFINISHED = "it exited with status 0 before its training had ended"
    NO_MODEL = "it exited with status 0 and did not write its model"
    FAILED_ELSEWHERE = "another host, or a rank, is the cause"


class Known(NamedTuple):
    """What is known of the end of a job's program."""

    failed: bool
    """Whether its exit status is not 0."""
    asked: bool = False
    """Whether a signal asked it to stop: through this process, or from elsewhere.

    One that came when this process had already begun to end it asked for nothing more. Where a host
    is gone, the others may be asked to stop because of that.
    """
    ended_by_us: bool = False
    """Whether this process ended it because of a rank or another host."""
    unexplained: bool = False
    """Whether it failed, and all that it says is that a rank was lost."""
    reason: bool = False
    """Whether a rank or another host has given a reason to end."""
    reason_is_local: bool = False
    """Whether that comes from a rank of this host."""
    reason_is_request: bool = False
    """Whether that is a request to stop."""
    killed: bool = False
    """Whether a rank was killed first. Then its launcher has asked the others to stop."""
    is_unfinished: bool = False
    """Whether a rank of it has ended within its training with exit status 0, and no more is known
    of why it failed, if it did."""
    lacks_model: bool = False
    """Whether it did not fail, and has not written the model that it has to write."""


def outcome(known: Known) -> Outcome:
    """Return how a job's program ended."""
    # The program's own end says more than a reason that a rank of this host gives.
    counts = known.unexplained or known.ended_by_us or not known.reason_is_local
    is_effect = known.killed and known.reason_is_local and known.reason_is_request
    if known.reason_is_request and not is_effect and (known.failed or counts):
        return Outcome.STOPPED_ELSEWHERE
    if known.failed and known.asked:
        return Outcome.STOPPED
    if known.reason and counts and not is_effect:
        return Outcome.FAILED_ELSEWHERE
    if known.is_unfinished:
        return Outcome.STOPPED if known.asked else Outcome.UNFINISHED
    if known.lacks_model:
        return Outcome.STOPPED if known.asked else Outcome.NO_MODEL
    return Outcome.FAILED if known.failed else Outcome.SUCCESS


class Evidence(NamedTuple):
    """What is found at the end of a job's program, of its ranks and of the other hosts."""

    known: Known
    """What decides how the job has ended."""
    number: int | None
    """The signal that asked it, or a rank, to stop; None if none did."""
    reason: StopReason | None
    """The reason to end that a rank or another host has given; None without one."""
    unfinished: "Unfinished | HiddenFailure | None"
    """The error to raise if it ended within its training with exit status 0."""


def judge(
    name: str,
    end: ProgramEnd,
    supervisor: Supervisor,
    watchdog: Watchdog,
    missing_model: Callable[[], str] = str,
    needs_model: bool = False,
    script_failure: Path | None = None,
) -> None:
    """Print how a job's program ended, and return once it has ended well on all hosts.

    Raises Interrupted, OtherFailed, ProgramFailed, Unfinished or NoModel otherwise.

    Args:
        name: What to call the program.
        end: How it ended.
        supervisor: Has run it.
        watchdog: Watches the other hosts and this host's ranks.
        missing_model: Returns what is wrong if it ended well without a model; else "".
        needs_model: Whether the job fails then; otherwise a warning says so.
        script_failure: The job's failure file if the program is a script that runs the job's own,
            as SDK 3's is, and may hide how that has ended; else None.
    """
    watchdog.program_ended()
    if _ended_by_us_first(supervisor):
        log.info(f"{name}: was ended because a rank or another host failed")
    else:
        log.info(f"{name}: {described(end.status, end.stop_signal)}")
    failed = ProgramFailed(name, end, _ended_ranks(supervisor, watchdog))
    missing = "" if end.status else missing_model()
    lacks_model = bool(missing and needs_model)
    found = _evidence(failed, end, supervisor, watchdog, script_failure, lacks_model)
    result = outcome(found.known)
    if result is Outcome.STOPPED:
        how = described(end.status, end.stop_signal)
        if end.stop_signal and supervisor.has_killed:
            how += ": that signal alone did not end it"
        raise Interrupted(str(found.unfinished or missing or f"{name} {how}"), found.number)
    if result is Outcome.FAILED:
        raise failed
    if found.unfinished and result is Outcome.UNFINISHED:
        raise found.unfinished
    if result is Outcome.NO_MODEL:
        raise NoModel(missing)
    if found.reason and result is not Outcome.SUCCESS:
        is_stop = result is Outcome.STOPPED_ELSEWHERE
        raise error_for(found.reason, end.stop_signal if is_stop else None)
    if missing:
        log.warning(missing)
    if reason := watchdog.wait_until_all_are_done():
        raise error_for(reason)


def _ended_by_us_first(supervisor: Supervisor) -> bool:
    """Return whether this process ended the program before a stop was requested."""
    return supervisor.grace is not None and not supervisor.stop_came_first


def _evidence(
    failed: "ProgramFailed",
    end: ProgramEnd,
    supervisor: Supervisor,
    watchdog: Watchdog,
    script_failure: Path | None,
    lacks_model: bool,
) -> Evidence:
    """Return what is known of a program's end; wait for the reason that another host may give.

    Args:
        failed: What the program's own output says, if it failed.
        end: See `judge`.
        supervisor: See `judge`.
        watchdog: See `judge`.
        script_failure: See `judge`.
        lacks_model: Whether it did not fail, and has not written the model that it has to write.
    """
    ended_by_us = supervisor.grace is not None
    # The program's own log may mislead: if a rank has lost a peer, the cause is elsewhere.
    lost_a_peer = failed.lost_a_peer or (watchdog.lost_peer and not watchdog.known_reason)
    # The signal by which something other than this process has asked the program, or one of its
    # ranks, to stop. Before the training, the others do not stop with that rank.
    number = end.stop_signal
    if not (number or ended_by_us):
        statuses: list[int | None] = [end.status, failed.ranks_status]
        if lost_a_peer and not (failed.killed or failed.is_torchruns):
            statuses.append(watchdog.first_status)
        number = next((STOP_SIGNALS[each] for each in statuses if each in STOP_SIGNALS), None)
    unexplained = bool(end.status) and not (failed.killed or number) and lost_a_peer
    reason = watchdog.wait_for_reason() if unexplained else watchdog.known_reason
    unfinished: Unfinished | HiddenFailure | None = None
    if not end.status or (unexplained and not ended_by_us):
        # A program that has failed, or a script, does not tell how its ranks have ended.
        must_be_known = bool(end.status or script_failure)
        unfinished = _unfinished(must_be_known, supervisor, watchdog)
    if script_failure and not (end.status or unfinished):
        unfinished = _hidden_failure(script_failure, watchdog)
    if unfinished and end.status and reason and reason.is_local:
        reason = None  # it says no more than that
    known = Known(
        failed=bool(end.status),
        asked=bool(number) and not _ended_by_us_first(supervisor),
        ended_by_us=ended_by_us,
        unexplained=unexplained,
        reason=bool(reason),
        reason_is_local=bool(reason and reason.is_local),
        reason_is_request=bool(reason and reason.is_request),
        killed=bool(failed.killed),
        is_unfinished=bool(unfinished),
        lacks_model=lacks_model,
    )
    return Evidence(known, number, reason, unfinished)


def _ended_ranks(supervisor: Supervisor, watchdog: Watchdog) -> list[tuple[str, int]]:
    """Return how ranks of this host have ended whose launcher, another rank, has not asked for it.

    Each is the rank in words, and its exit status. The ranks of a user's own program need not speak
    to the watch (callbacks/heartbeat.py), but each notes its progress.
    """
    return [
        (f"the rank with PID {rank.pid}", supervisor.statuses[rank.pid])
        for rank in rank_progress.read(watchdog.path)
        if rank.pid in supervisor.statuses
    ]


def _unfinished(
    must_be_known: bool, supervisor: Supervisor, watchdog: Watchdog
) -> "Unfinished | None":
    """Return the error of a rank that has ended within its training with exit status 0.

    None if there is none. The ranks are the program itself and those that it has launched. What
    else trains below it, the program may have ended on purpose, such as a search for
    hyperparameters.

    Args:
        must_be_known: Whether the ranks' own exit statuses count alone, and of all ranks; if not,
            those that the program has launched ended as it did, unless it is known better.
        supervisor: See `judge`.
        watchdog: See `judge`.
    """
    program = supervisor.child.pid if supervisor.child else 0
    statuses = {**watchdog.statuses, **supervisor.statuses}
    for rank in rank_progress.read(watchdog.path):
        counts = must_be_known or program in (rank.pid, rank.launcher)
        status = statuses.get(rank.pid, None if must_be_known else 0)
        if counts and rank.is_training and not rank.has_failed and status == 0:
            return Unfinished(
                f"{A_RANK} {rank.pid} ended with exit status 0 within its training, after step "
                f"{rank.step}"
            )
    return None


def _hidden_failure(failure: Path, watchdog: Watchdog) -> "HiddenFailure | None":
    """Return the error that a script has hidden, if no training below it has come to its end.

    Args:
        failure: The job's failure file.
        watchdog: See `judge`.
    """
    ranks = list(rank_progress.read(watchdog.path))
    if not ranks or any(not (rank.is_training or rank.has_failed) for rank in ranks):
        return None
    if any(rank.has_failed for rank in ranks):
        written = failures.written(failure)
        return HiddenFailure(written.splitlines()[0].removeprefix("error: ")) if written else None
    rank = max(ranks, key=lambda rank: rank.moved_at)
    return HiddenFailure(f"{A_RANK} {rank.pid} ended within its training, after step {rank.step}")


def tell_hosts(
    watchdog: Watchdog, host: str, error: BaseException, stop_signal: int | None
) -> BaseException:
    """Tell the other hosts why the job ends on this one, and return the error to raise for it.

    Args:
        watchdog: Tells them.
        host: The name of this host.
        error: What has ended it.
        stop_signal: The signal that asked this process to stop; None if none did.
    """
    if isinstance(error, StoppedBeforeStart):
        error = Interrupted(str(error), stop_signal)
    where = "" if isinstance(error, (OtherFailed, Interrupted)) else f"host {host}: "
    watchdog.fail(f"{where}{line_of(error)}", is_request=isinstance(error, Interrupted))
    return error


def fault_of(error: BaseException, watchdog: Watchdog) -> Fault:
    """Return what the other hosts have to know of how the program ended on this one.

    Args:
        error: What has ended it.
        watchdog: Watches this host's ranks.
    """
    ranks = list(rank_progress.read(watchdog.path))
    step = max((rank.step for rank in ranks if rank.first_step_at), default=None)
    began_with = max((rank.began_with for rank in ranks), default=None)
    now = time.monotonic()
    came_at = [rank.moved_at for rank in ranks if rank.has_failed]
    came_at += [watchdog.trouble_at] if watchdog.trouble_at else []
    seconds_ago = now - min(came_at, default=now)
    return Fault(line_of(error), _kind(error, watchdog), step, began_with, seconds_ago)


def _kind(error: BaseException, watchdog: Watchdog) -> FaultKind:
    """Return what has ended a program, by the error that this process has made of it."""
    if isinstance(error, Interrupted):
        return FaultKind.STOP
    # A rank that makes the mistake leaves this file.
    if isinstance(error, UserError) or watchdog.path.with_name(failures.MISTAKE_FILE).exists():
        return FaultKind.MISTAKE
    if isinstance(error, OtherFailed) and not error.reason.is_local:
        return FaultKind.EFFECT
    if isinstance(error, OtherFailed):
        is_death = error.reason in watchdog.suspicions or OF_A_DEVICE.search(error.reason.why)
        return FaultKind.DEATH if is_death else FaultKind.ERROR
    if isinstance(error, HiddenFailure):
        # Without an error that it has written, a signal may have ended it.
        is_death = str(error).startswith(A_RANK) or OF_A_DEVICE.search(str(error))
        return FaultKind.DEATH if is_death else FaultKind.ERROR
    if isinstance(error, ProgramFailed):
        if error.kind in failures.MISTAKES:
            return FaultKind.MISTAKE
        if error.is_death or error.lost_a_peer or OF_A_DEVICE.search(str(error)):
            return FaultKind.DEATH
    return FaultKind.ERROR


class OtherFailed(Exception):
    """The program ended because of another host, or because of a rank of this one.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: StopReason) -> None:
        self.reason = reason
        super().__init__(reason.why)


A_RANK = "the rank with PID"
EARLY = "code of the job has ended it early (os._exit(0), SystemExit or the like)"
"""What is said of a program that has ended with exit status 0 and is not done."""


class NoModel(UserError):
    """The image's own program ended with exit status 0 and has written no model."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"{missing}: {EARLY}; return instead")


class Unfinished(UserError):
    """A program ended with exit status 0 within its training.

    A job that counts as completed is not continued by anybody, and its model would be whatever is
    there. The program is not started again, as it may have ended so on purpose.
    """

    def __init__(self, unfinished: str) -> None:
        super().__init__(
            f"{unfinished}: {EARLY}; to end a training, set trainer.should_stop = True"
        )


class HiddenFailure(Exception):
    """A script ended with exit status 0, and what it runs has not ended well.

    Args:
        why: The error, or what is known of the end.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}; the job's command ended with exit status 0 all the same: if it has a pipe, "
            "put `set -o pipefail;` before it"
        )


class Interrupted(Exception):
    """The job was asked to stop; the text says from which step to resume.

    Args:
        reason: What stopped it, or a line about that which the program has made already.
        number: The signal that asked it to stop; SIGTERM if None.
    """

    def __init__(self, reason: str, number: int | None = None) -> None:
        self.number = number or signal.SIGTERM
        if not reason.startswith("interrupted"):
            here = SageMakerEnvironment.read()
            home = here.checkpoint_home(here.checkpoint_dir)
            reason = shutdown.interruption_by_names(home, reason)
        super().__init__(reason)


def error_for(reason: StopReason, asked: int | None = None) -> Exception:
    """Return what to raise for a reason to end that another host, or a rank of this one, has given.

    `asked` is the signal that asked the program of this host to stop, if one did.
    """
    return Interrupted(reason.why, asked) if reason.is_request else OtherFailed(reason)


class ProgramFailed(Exception):
    """The program did not end well; the text says how, and why if its stderr does.

    Attributes:
        trace: The traceback of the error; "" if stderr has none.
        killed: The rank that a signal has ended for a reason of its own, such as SIGKILL, in
            words; "" if there is none.
        lost_a_peer: Whether the error is that a rank lost another one.
        is_torchruns: Whether the error is torchrun's own, such as that its other hosts are gone; it
            then asks this host's ranks to stop.
        kind: The name of the error's class; "" if stderr has none.
        ranks_status: The exit status of the rank that its launcher names, -N for signal N; 0 if it
            names none.
        status: The program's exit status as a shell has it: 128 + N for signal N.
        is_death: Whether a signal has ended the program, or one of its ranks.
    """

    def __init__(
        self, name: str, program_end: ProgramEnd, ended_ranks: Sequence[tuple[str, int]] = ()
    ) -> None:
        why, self.trace = failures.last_error(program_end.stderr)
        self.lost_a_peer = why.startswith(failures.LOST_PEER)
        rank, status = failures.ended_rank(program_end.stderr)
        if self.lost_a_peer and status not in failures.OWN_REASONS:
            rank, status = failures.least_doubtful([*ended_ranks]) or (rank, status)
        self.ranks_status = status
        self.kind = failures.class_of(self.trace)
        self.is_torchruns = failures.is_of_torchrun(self.trace)
        # An error says more than a crash, unless the crash has led to it. A crash's own trace says
        # where it was, not why.
        has_error = bool(self.trace) and not why.startswith(failures.CRASH)
        is_reason = status == -signal.SIGKILL or not has_error or self.lost_a_peer
        self.killed = rank if status in failures.OWN_REASONS and is_reason else ""
        ended = program_end.status
        self.status = ended if ended >= 0 else shutdown.status(-ended)
        by_signal = 128 < self.status <= 128 + signal.SIGRTMAX
        # A crash has a trace as well, of no error's class.
        self.is_death = status < 0 or (by_signal and not self.kind)
        if self.killed or (status < 0 and not has_error):
            advice = f": {failures.OUT_OF_MEMORY}" if status == -signal.SIGKILL else ""
            # How its launcher has ended says no more, and differs between launchers.
            super().__init__(f"{name}: {rank} {described(status)}{advice}")
            return
        # SIGKILL, and it was not Lightning that sent it because a rank had ended.
        if program_end.status in (-9, 128 + 9) and not (rank or self.trace):
            why = failures.OUT_OF_MEMORY
        super().__init__(
            f"{name} {described(program_end.status, program_end.stop_signal)}: "
            f"{why or failures.NO_LINE}"
        )


def described(status: int, asked: int | None = None) -> str:
    """Return in words how a process ended.

    Args:
        status: Its exit status, -N if signal N killed it.
        asked: The signal that asked it to stop before, if one did.
    """
    after = f" after {Signals(asked).name}" if asked else ""
    return (
        f"was killed by {Signals(-status).name}{after}"
        if status < 0
        else f"ended with exit status {status}{after}"
    )


ERRORS = (UserError, ProgramFailed, OtherFailed, Interrupted, HiddenFailure)
"""The errors that are raised on purpose: their one line says all.

Any other error is shown with its traceback.
"""


def line_of(error: BaseException) -> str:
    """Return in one line why the job failed and, if known, what to do about it."""
    return (
        " ".join(str(error).split())
        if isinstance(error, ERRORS)
        else failures.explain(type(error).__name__, str(error))
    )


def report(
    error: BaseException,
    path: Path,
    host: str,
    is_no_reason: Callable[[str], object] = lambda written: False,
) -> str:
    """Write the failure file and return its first line.

    If the file cannot be written, print the line and end this process with status 1.

    Args:
        error: What has ended the job.
        path: The failure file.
        host: The name of this host.
        is_no_reason: Whether a text in the failure file says nothing about why.
    """
    prefix = "" if isinstance(error, Interrupted) else "error: "
    restarts = getattr(error, "restarts", "")  # see attempts.run
    more = f" ({restarts})" if restarts else ""
    line = f"{prefix}{line_of(error)}{more} [host {host}]"
    try:
        # A rank, or the job's own program, may have written the file first. If a rank only lost
        # another one, or was stopped because of that, what it wrote is not the reason, and the
        # reason replaces it if we know. A stop is a reason, too; of that, the rank knows more.
        loss = f"error: {failures.LOST_PEER}"
        effects: tuple[str, ...] = ()
        if isinstance(error, OtherFailed) or getattr(error, "killed", False):
            effects = (loss, "interrupted")
        elif isinstance(error, (Interrupted, Unfinished, HiddenFailure)):
            effects = (loss,)
        written = failures.written(path)
        replaces = written.startswith(effects) or bool(is_no_reason(written))
        if more and written and not replaces:
            # The rank knew why; how often it was started again, it did not.
            failures.write(path, f"{written.splitlines()[0]}{more}", written, replaces=True)
        trace = (
            getattr(error, "trace", "")
            if isinstance(error, ERRORS)
            else "".join(traceback.format_exception(error))
        )
        failures.write(path, line, trace, replaces)
        return failures.written(path).splitlines()[0]
    except OSError as unwritable:
        say_last(f"{line}\nerror: {path} could not be written: {unwritable.strerror}")
        ownership.give_to_owners()
        os._exit(1)
