"""Runs the job's program, passes signals on, and leaves no process behind.

It also keeps the end of the program's stderr.

The toolkit itself registers no signal handler (aws/sagemaker-training-toolkit issues 125 and 173).
As PID 1 it ignores SIGTERM; behind an init, SIGTERM kills it. Either way the program never hears
that it is to stop.
"""

import ctypes
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil

from sagemaker_lightning.contract.deadlines import (
    HOOK_KILLS,
    REST_IS_KILLED,
    STDERR_IS_READ,
    STOP_IS_LATE,
)
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.process_stat import has_signal, process_stat, process_status
from sagemaker_lightning.contract.shutdown import handled_signals

STDERR_BYTES_KEPT = 64 * 2**10
"""Bytes of stderr that are kept: enough for a traceback of each of a few ranks."""
LOOKS_FOR_ORPHANS = 1.0
"""Seconds between two looks at whether a deaf process waits for what its program has left."""
OUTPUT_IS_READ = 1.0
"""Seconds that what reads a program's output gets to end by itself once the program has ended."""
REAPS_AFTER = 10
"""Looks at the program, ten in a second, between two at the orphans that have ended."""
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
MARK_VARIABLE = "SAGEMAKER_LIGHTNING_TRAIN"
"""The variable that entrypoint.sh starts `train` with; all that the job starts inherits it."""


class StoppedBeforeStart(BaseException):
    """The job was asked to stop before its program was started.

    It is not an Exception: the toolkit would take that for a failure of pip.
    """


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    status: int
    """Exit status; -N if signal N killed it."""
    stop_signal: int | None
    """The signal that asked it to stop; None if it got none."""
    stderr: str
    """The last STDERR_BYTES_KEPT bytes of its stderr, or of both streams."""


class Started:
    """A program that another process has started, and that is a child of this one now.

    Args:
        pid: Its PID, and that of its process group.
        stderr: The end of its stderr to read from.
    """

    stdout = None
    """Its stdout is this process's."""

    def __init__(self, pid: int, stderr: int) -> None:
        self.pid = pid
        self.stderr = os.fdopen(stderr, "rb", buffering=0)

    def wait(self) -> int:
        """Return its exit status once it has ended, -N if signal N killed it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class Supervisor:
    """While it is entered, passes SIGTERM, SIGINT and SIGHUP on to the program.

    Before `run`, these signals raise StoppedBeforeStart.

    Args:
        is_deaf: Whether a process, given by its command line, dies of a signal in place of what it
            has started: it gets none then. None if all processes of the group get signals.

    Attributes:
        stop_signal: The last signal that asked the job to stop; None before.
        grace: Seconds that `terminate` left the program; None if `terminate` was not called.
        stop_came_first: Whether the job had been asked to stop when `terminate` was called.
        has_killed: Whether SIGKILL has ended the program, or what was left of it, in the end.
        statuses: The exit status of each process that this one has reaped for the program, -N for
            signal N, by PID: the kernel forgets it then. Other threads may read it.
        on_ignored: Called, in another thread, with a line that says that the program ignores the
            signal that asked it to stop.
    """

    def __init__(self, is_deaf: Callable[[list[str]], bool] | None = None) -> None:
        self.is_deaf = is_deaf
        self.stop_signal: int | None = None
        self.starting = False  # whether `run` was called
        self.child: subprocess.Popen[bytes] | Started | None = None
        self.grace: float | None = None
        self.stop_came_first = False
        self.has_killed = False
        self.timers: list[threading.Timer] = []
        self.unrelated_pids: set[int] = set()
        self.left: set[int] = set()
        """The PIDs of what the program has left running, and what was to end because of that."""
        self.heard: set[int] = set()
        """The PIDs of what had a handler of the signal when it got it."""
        self.asked: set[int] = set()
        """The PIDs of what is in sessions of their own and was asked to stop."""
        self.statuses: dict[int, int] = {}
        self.on_ignored: Callable[[str], None] = lambda line: None
        self.starting_aside = threading.Lock()
        self.ended_orphans: set[int] = set()
        """The PIDs of those that had ended when this process looked last, and were not reaped."""

    def __enter__(self) -> "Supervisor":
        numbers = handled_signals()
        self.previous = {number: signal.signal(number, self._pass_on) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # entrypoint.sh has blocked them
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def run(
        self,
        command: list[str],
        cwd: Path,
        variables: Mapping[str, str] | None = None,
        keeps_stdout: bool = False,
        started: Started | None = None,
    ) -> ProgramEnd:
        """Run a command in its own process group until all that it started has ended.

        Args:
            command: The program and its arguments.
            cwd: Its working directory.
            variables: Its environment; this process's if None.
            keeps_stdout: Whether it may say on its stdout why it fails: then both streams go to
                this process's stdout, and the end of both is kept.
            started: The program, if it runs already; None to start it.
        """
        self.starting = True
        adopt_orphans()
        self.unrelated_pids = {child.pid for child in psutil.Process().children()}
        if started:
            self.unrelated_pids.discard(started.pid)
        self.child = started or subprocess.Popen(
            command,
            cwd=cwd,
            env=variables,
            start_new_session=True,
            stdout=subprocess.PIPE if keeps_stdout else None,
            stderr=subprocess.STDOUT if keeps_stdout else subprocess.PIPE,
        )
        stderr_end = bytearray()
        target = sys.stdout if keeps_stdout else sys.stderr
        source = self.child.stdout or self.child.stderr
        assert source is not None  # one of them is a pipe
        reader = threading.Thread(
            target=_copy, args=(source.fileno(), target, stderr_end), daemon=True
        )
        reader.start()
        # The signal may have come before there was a program to pass it on to. If the program has
        # got it, it gets no second one: it may be saving.
        if self.stop_signal and not self.timers:
            self._stop(self.stop_signal, HOOK_KILLS)
        elif self.grace is not None and not self.timers:
            self.terminate(self.grace)
        if self.is_deaf:
            threading.Thread(
                target=self._end_orphans, args=(self.child.pid, self.is_deaf), daemon=True
            ).start()
        # If a signal came right before this thread waited in the kernel, Python would run its
        # handler at the program's end. So it looks again and again.
        looks = itertools.count(1)
        while self.child.pid not in self.statuses:
            time.sleep(0.1)
            note_status(self.child.pid, self.statuses, os.WNOHANG)
            if next(looks) % REAPS_AFTER == 0:
                self._reap_orphans()
        status = self.child.wait()
        for process in self._living_processes():
            # A rank that is frozen dies of its launcher's end (process/parent_process.py) only
            # once it continues.
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        rest = self._living_processes()
        if self.timers:
            self._ask_own_sessions(rest, self.child.pid)
        elif rest:
            self.left.update(process.pid for process in rest)
            self._stop(signal.SIGTERM, REST_IS_KILLED)
        # A shell dies of the signal at once, but a program that it has started may be saving.
        while self._living_processes():
            time.sleep(0.1)
        # Who has started it may not know what has become of it. A failure has other reasons.
        ended = {self.statuses.get(pid) for pid in self.left}
        if status == 0 and ended & {-signal.SIGTERM, -signal.SIGKILL}:
            log.warning(
                "the program has ended, and what it has left running was ended by SIGTERM "
                f"or, {REST_IS_KILLED:.0f} s later, by SIGKILL"
            )
        for timer in self.timers:
            timer.cancel()
        reader.join(timeout=STDERR_IS_READ)
        return ProgramEnd(status, self.stop_signal, bytes(stderr_end).decode(errors="replace"))

    def start_aside(
        self, command: list[str], cwd: Path, variables: Mapping[str, str], stdin: int
    ) -> subprocess.Popen[bytes]:
        """Start a process that is not the program's: `run` neither waits for it nor ends it.

        Its stdin is a file descriptor of this process, and what it says of errors is lost. It may
        be called from any thread.
        """
        with self.starting_aside:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=variables,
                start_new_session=True,
                stdin=stdin,
                stderr=subprocess.DEVNULL,
            )
            self.unrelated_pids.add(process.pid)
        return process

    def prepare_again(self) -> None:
        """Forget the program that has ended: `run` may be called again.

        Raises StoppedBeforeStart if the job was asked to stop meanwhile.
        """
        self.starting = self.has_killed = False
        self.child = self.grace = None
        self.left.clear()
        self.heard.clear()
        self.asked.clear()
        while self.timers:
            self.timers.pop().cancel()
        if self.stop_signal:
            self._refuse_start(self.stop_signal)

    def terminate(self, grace: float) -> None:
        """Send the program SIGTERM, and SIGKILL to what is left after `grace` seconds.

        It can be called from any thread. If the program is not started yet, `run` ends it after
        its start.
        """
        self.stop_came_first = bool(self.stop_signal)
        self.grace = grace
        if self.child:
            # A program that was asked to stop may be saving, so it gets no second signal.
            self._stop(None if self.stop_signal else signal.SIGTERM, grace)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = number
        if self.child:
            # A program that `terminate` has sent its signal may be saving: it gets no second one.
            has_got_one = self.grace is not None and self.timers
            self._stop(None if has_got_one else number, HOOK_KILLS)
        elif not self.starting:
            self._refuse_start(number)

    def _refuse_start(self, number: int) -> None:
        raise StoppedBeforeStart(
            f"{signal.Signals(number).name} came before the program was started"
        )

    def _stop(self, number: int | None, grace: float) -> None:
        """Send a signal to the program's group; kill what is left after `grace` s."""
        is_first_stop = grace == HOOK_KILLS and not self.timers
        self._start_timer(grace, self._kill)
        if is_first_stop:
            self._start_timer(STOP_IS_LATE, self._say_that_it_runs)
        if number and self.child:
            living = self._living_processes()
            self.heard |= {each.pid for each in living if catches(each.pid, number)}
            self._signal_group(self.child.pid, number)

    def _start_timer(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self.timers.append(timer)
        timer.start()

    def _say_that_it_runs(self) -> None:
        """Print that the program was asked to stop and has not ended."""
        number = self.stop_signal or signal.SIGTERM
        hearing = [
            process
            for process in self._living_processes()
            if not (self.is_deaf and self.is_deaf(command_line(process.pid)))
        ]
        if not (hearing and self.child):
            return
        what = "the program"
        if self.child.pid in self.statuses:
            what = "something that the program has started"
        # Who has heard it may ignore a second one, while it saves or ends.
        is_ignored = all(
            process.pid not in self.heard and ignores(process.pid, number) for process in hearing
        )
        why = "it ignores the signal" if is_ignored else "it saves, or does not act on the signal"
        line = (
            f"{what} has not ended {STOP_IS_LATE:.0f} s after {signal.Signals(number).name}: "
            f"{why}; SIGKILL comes {HOOK_KILLS:.0f} s after the signal, or before"
        )
        log.log(logging.WARNING if is_ignored else logging.INFO, line)
        if is_ignored:
            self.on_ignored(line)

    def _signal_group(self, group: int, number: int) -> None:
        """Send a signal to the program's group, without the processes in it that are deaf.

        Where all of them are, nothing has been started yet that could hear it: all get it. What
        would die of it, and reads through a pipe what a process prints that catches it, such as
        `tee`, gets it once that has ended.
        """
        hearing = []
        has_deaf = False
        # psutil.process_iter() keeps processes from call to call: one whose PID another process has
        # now would get no signal.
        for pid in psutil.pids():
            with suppress(psutil.Error, ProcessLookupError):
                process = psutil.Process(pid)
                if os.getpgid(process.pid) != group:
                    continue
                if self.is_deaf and self.is_deaf(process.cmdline()):
                    has_deaf = True
                else:
                    hearing.append(process)
        catching = [process for process in hearing if catches(process.pid, number)]
        later = _readers(catching, [each for each in hearing if each not in catching])
        if hearing and (has_deaf or later):
            _send([process for process in hearing if process not in later], number)
        else:  # at once, also to what is started meanwhile
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        if later:
            args = later, number, catching
            threading.Thread(target=_send_later, args=args, daemon=True).start()

    def _ask_own_sessions(self, processes: Iterable[psutil.Process], group: int) -> None:
        """Send SIGTERM, once, to what has a session of its own.

        The signal that the program's group has got did not reach it, unless the program has passed
        it on.
        """
        new = [
            process
            for process in processes
            if process.pid not in self.asked and not _is_in_group(process.pid, group)
        ]
        _send(new, signal.SIGTERM)
        self.asked.update(process.pid for process in new)

    def _end_orphans(self, child: int, is_deaf: Callable[[list[str]], bool]) -> None:
        """End what the job's program has left running, while a deaf process still waits for it.

        SDK 3's driver reads its program's output to the end before it asks how the program ended.
        What the program has started may hold that output open for ever. If the program was asked to
        stop, what it has started in a session of its own, which has got no signal, is asked now.

        Args:
            child: The PID of the process that `run` waits for.
            is_deaf: As in `Supervisor`.
        """
        ended: set[int] = set()  # processes that a deaf one has started, and does not ask for
        kills_at = 0.0
        while child not in self.statuses:
            before, ended = ended, _unreaped_children(child, is_deaf)
            if before & ended:
                left = [
                    process
                    for process in self._living_processes()
                    if not is_deaf(command_line(process.pid))
                ]
                if self.timers:
                    self._ask_own_sessions(left, child)
                else:
                    kills_at = kills_at or time.monotonic() + REST_IS_KILLED
                    self.left.update(process.pid for process in left)
                    is_late = time.monotonic() > kills_at
                    _send(left, signal.SIGKILL if is_late else signal.SIGTERM)
            time.sleep(LOOKS_FOR_ORPHANS)

    def _reap_orphans(self) -> None:
        """Reap what has ended, and has lost the process that had started it, as an init does.

        A program that starts many such processes could start no more in the end. What this process
        has started itself is reaped by who waits for it, before the second look.
        """
        with self.starting_aside:
            assert self.child is not None  # the program runs
            before, self.ended_orphans = self.ended_orphans, set()
            for pid in own_children() - self.unrelated_pids - {self.child.pid}:
                if process_stat(pid)[:1] != ["Z"]:
                    continue
                if pid not in before:
                    self.ended_orphans.add(pid)
                    continue
                with suppress(ChildProcessError):
                    reap(pid, self.statuses)

    def _kill(self) -> None:
        for process in self._living_processes():
            self.has_killed = True
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _living_processes(self) -> list[psutil.Process]:
        with self.starting_aside:
            if not self.child:
                return []
            return living_processes(self.child.pid, self.unrelated_pids, self.statuses)


def adopt_orphans() -> None:
    """Make this process the parent of every process below it whose own parent ends.

    It has the same effect in a container and behind an init.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def own_children() -> set[int]:
    """Return the PIDs of the children of this process; none where the kernel lists none.

    proc(5) has them by thread ("/proc/tid/children"), in less time than a look at all processes.
    """
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; True if it is gone.

    Args:
        pid: Its PID.
        number: The signal.
    """
    fields = process_status(pid)
    return not fields or has_signal(fields["SigIgn"], number)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal; False if it is gone.

    Args:
        pid: Its PID.
        number: The signal.
    """
    return has_signal(process_status(pid).get("SigCgt", "0"), number)


def _readers(
    writers: Sequence[psutil.Process], processes: Sequence[psutil.Process]
) -> list[psutil.Process]:
    """Return those of some processes that read, through pipes, what others print.

    Args:
        writers: The others.
        processes: The processes; one may read what another one has read and prints.
    """
    found: list[psutil.Process] = []
    pipes = {_pipe(process.pid, end) for process in writers for end in (1, 2)} - {""}
    while new := [each for each in processes if each not in found and _pipe(each.pid, 0) in pipes]:
        found += new
        pipes |= {_pipe(process.pid, end) for process in new for end in (1, 2)} - {""}
    return found


def _pipe(pid: int, number: int) -> str:
    """Return the name of the pipe that is a file of a process; "" if it is another file."""
    with suppress(OSError):
        name = str(Path(f"/proc/{pid}/fd/{number}").readlink())
        return name if name.startswith("pipe:") else ""
    return ""


def _is_in_group(pid: int, group: int) -> bool:
    """Return whether a process is in a process group; True if it is gone."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return True


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those of some processes that are there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _send_later(
    processes: Iterable[psutil.Process], number: int, others: Sequence[psutil.Process]
) -> None:
    """Send a signal to some processes once others have ended, and their output was read.

    Args:
        processes: The processes.
        number: The signal.
        others: The processes that end first.
    """
    while any(
        process.is_running() and process_stat(process.pid)[:1] != ["Z"] for process in others
    ):
        time.sleep(0.1)
    time.sleep(OUTPUT_IS_READ)
    _send(processes, number)


def note_status(pid: int, statuses: dict[int, int], options: int = 0) -> None:
    """Wait for the end of a child of this process, and note its exit status; do not reap it.

    Args:
        pid: Its PID.
        statuses: Gets the status, -N for signal N, by PID.
        options: More options for waitid(2), such as os.WNOHANG.
    """
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options)
    if end:
        statuses[pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def reap(pid: int, statuses: dict[int, int]) -> None:
    """Reap a child of this process that has ended, and note its exit status.

    Args:
        pid: Its PID.
        statuses: As in `note_status`.
    """
    note_status(pid, statuses, os.WNOHANG)
    os.waitpid(pid, os.WNOHANG)


def living_processes(
    program: int, others: Container[int], statuses: dict[int, int]
) -> list[psutil.Process]:
    """Return the living processes that a program started, itself included.

    Their process groups do not matter. Those that came into the container from outside are left
    out: a session of SageMaker's remote debugging, or of `docker exec`.

    It also reaps those of them that have ended and have become children of this process.

    Args:
        program: PID of the program, a child of this process.
        others: PIDs of the children of this process that have nothing to do with the program.
        statuses: Gets the exit status of each that is reaped, -N for signal N, by PID.
    """
    children = [child for child in psutil.Process().children() if child.pid not in others]
    running = []
    for process in [*children, *(below for child in children for below in _descendants(child))]:
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                if not _came_from_outside(process):
                    running.append(process)
            # Only its new parent, this process, can reap an orphan.
            elif process.pid != program and process.ppid() == os.getpid():
                reap(process.pid, statuses)
    return running


def _came_from_outside(process: psutil.Process) -> bool:
    """Return whether the job did not start a process.

    It may be a child of this process: so is every orphan in a container whose first process this
    is.
    """
    with suppress(psutil.AccessDenied):  # what the job starts as another user stays the job's
        return (
            MARK_VARIABLE in psutil.Process().environ() and MARK_VARIABLE not in process.environ()
        )
    return False


def _unreaped_children(pid: int, is_deaf: Callable[[list[str]], bool]) -> set[int]:
    """Return the PIDs of processes that have ended, and that a deaf process has not asked for.

    Args:
        pid: The PID of the process below which they are.
        is_deaf: As in `Supervisor`.
    """
    found = set()
    with suppress(psutil.NoSuchProcess):
        for process in _descendants(psutil.Process(pid)):
            with suppress(psutil.NoSuchProcess):
                parent = process.parent()  # None if it has just ended
                is_ended = process.status() == psutil.STATUS_ZOMBIE
                if parent and is_ended and is_deaf(parent.cmdline()):
                    found.add(process.pid)
    return found


def command_line(pid: int) -> list[str]:
    """Return the command line of a process; [] if it is gone."""
    with suppress(psutil.Error):
        found: list[str] = psutil.Process(pid).cmdline()
        return found
    return []


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    return []


def _copy(source: int, target: TextIO, kept: bytearray) -> None:
    """Copy file descriptor `source` to a stream, and keep its last bytes in `kept`."""
    while chunk := os.read(source, 2**16):
        with suppress(OSError):
            target.buffer.write(chunk)
            target.flush()
        kept += chunk
        del kept[:-STDERR_BYTES_KEPT]
