"""Writes the failure file: one line for a person, in the log and as FailureReason, too."""

import os
import re
import resource
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract.atomic_files import write_instead
from sagemaker_lightning.contract.errors import ESCAPES, UserError, printable
from sagemaker_lightning.contract.log import say_last

# SageMaker shows this many characters of the failure file (API reference, FailureReason).
FAILURE_REASON_CHARACTERS = 1024
LONGEST_REASON = 2**16
"""Characters of a failure file that are read: enough for a traceback."""

LOST_PEER = "lost a peer"
LAST_LINE = "its last line: "
NO_LINE = "nothing on its stderr says why"
OWN_REASON_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end a rank for a reason of its own, whatever happened to other ranks.

SIGABRT is not one of them: NCCL and gloo abort where a peer is gone.
"""
OWN_REASONS = {-number for number in OWN_REASON_SIGNALS}
"""The exit statuses of ranks that these have ended."""
MISTAKES = (
    *("UserError", "ImportError", "ModuleNotFoundError"),
    *("SyntaxError", "IndentationError", "TabError"),
)
"""Errors that the same program has again, by the names of their classes."""
MISTAKE_FILE = "mistake"
"""Beside the socket of a node's watch: a program of the node has ended by a mistake."""
OUT_OF_MEMORY = (
    "most likely out of host memory; use smaller batches or fewer processes, or a larger instance"
)

HOST_MEMORY = (
    r"MemoryError|bad_alloc|DefaultCPUAllocator|Cannot allocate memory|failed to map segment"
    r"|DataLoader worker .* is killed by signal: Killed"
)
NO_SPACE = (
    r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|unexpected pos \d+ vs"
)
SHARED_MEMORY_IS_FULL = (
    "shared memory (/dev/shm) is full: set --data.num_workers=0, or start the container with "
    "--shm-size=1g"
)
NCCLS_OWN = r"NCCL.*(unhandled cuda error|invalid (usage|argument)|Duplicate GPU)"
"""What NCCL says where a rank's own device or call is the cause, and no peer that has gone.

See `ncclGetErrorString` (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html).
"""
SMALLEST_FREE = 2**20
"""Bytes that /dev/shm has free, at least, where it is not why something has no space."""
# A pattern of an exception's class and text, and what to do about it. The first match counts.
ADVICE = (
    (
        r"OutOfMemoryError|CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED",
        "out of GPU memory: make --data.batch_size smaller (and "
        "--trainer.accumulate_grad_batches larger), use --trainer.precision=16-mixed, or take a "
        "GPU with more memory",
    ),
    (
        HOST_MEMORY,
        "out of host memory: use smaller batches or fewer processes, or take an instance with "
        "more memory",
    ),
    (
        r"DataLoader worker .*(shared memory|Bus error)|bus error.*shm|</torch_\d.*No space left"
        r"|/dev/shm/.*No space left",
        SHARED_MEMORY_IS_FULL,
    ),
    (
        NO_SPACE,
        "disk full: make the job's volume larger (VolumeSizeInGB), or keep fewer checkpoints",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "batch norm cannot train on a batch of one sample, such as the last of an epoch: give "
        "another --data.batch_size, or drop_last=True in the DataLoader",
    ),
    (
        rf"(?s)^(?!.*{NCCLS_OWN}).*(Dist(Network|Store|Backend)Error|ProcessGroup|gloo|TCPStore"
        # Without a text, it is multiprocessing's: the process at the other end has gone.
        r"|Rendezvous(Connection|Timeout)Error|NCCL.*(remote|time|system error)|^EOFError$)",
        f"{LOST_PEER}, or never reached it: the cause is in the log of the rank that ended first",
    ),
    (
        r"No usable temporary directory",
        "no folder for temporary files: start the container with --tmpfs /tmp, or name one that "
        "can be written by TMPDIR",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "import failed: put what is missing into the job's source, or name it in the "
        "requirements.txt there",
    ),
    (
        r"SSH daemon not found",  # SDK 3's mpi_driver.py
        "this image has no MPI: give distributed=Torchrun() in place of MPI()",
    ),
    (
        r"NoCredentialsError|Unable to locate credentials|AccessDenied|\(403\)|403:? Forbidden",
        "no access to AWS: give the job's role (on a desk: the container, by AWS_* variables) "
        "what it needs",
    ),
    (
        r"^(?!IsADirectoryError|NotADirectoryError|PermissionError).*/input/data/",
        "missing in the input channels: give the channel or the file, or correct the path",
    ),
)

CRASH = "Fatal Python error: "
# What faulthandler writes about a crash in native code. The thread that has crashed is the current
# one, if it knows.
FATAL = re.compile(
    rf"^({CRASH}.*)\n(?:(?:.*\n)*?(?=Current)|(?:.*\n)*?)"
    r"((?:Current t|T)hread .*\n(?:  .*\n)*)",
    re.MULTILINE,
)
# What native code, such as NCCL's watchdog, writes about an exception that nothing caught.
NATIVE = re.compile(
    r"^terminate called after throwing an instance of '(.+)'(?:\n *what\(\): *(.*))?", re.MULTILINE
)
# A line of the log of native code, such as "[E1122 10:00:00.1 x.cpp:9]",
# or of a launcher, or of `reported`.
NO_MESSAGE = re.compile(
    r"terminate called after throwing |\[[EWIF]\d{4} "
    r"|(\[rank: \d+\] )?Child process with PID \d+ terminated with code |error: .* \[host .*\]$"
)
CHILD_FAILED = "ChildFailedError"
"""The error by which torchrun says that a rank has failed."""
OF_TORCHRUN = re.compile(r"/torch/distributed/elastic/(agent|rendezvous)/")
"""Files of torchrun's process that watches over a host's ranks."""
# A line of a launcher's about a rank: Lightning's, torchrun's.
OF_A_LAUNCHER = re.compile(
    r"(\[rank: \d+\] )?Child process with PID \d+ |[EW]\d{4} .*torch/distributed/"
)
# What Python prints between an exception and the next one, which the first has led to
# (traceback.py).
CHAIN_LINES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# A warning, as Python and Lightning write one, with the line of code that Python adds.
WARNING = re.compile(r"^\S+\.py:\d+: .*\n(?:  .*\n)?", re.MULTILINE)
# What Python writes about a file that it cannot compile.
SYNTAX = re.compile(
    r'^  File "(.+)", line (\d+)\n(?: .*\n)*((?:Syntax|Indentation|Tab)Error: .*)', re.MULTILINE
)


def explain(kind: str, message: str) -> str:
    """Return one line about an exception, with what to do about it if that is known.

    Args:
        kind: Name of the exception's class.
        message: Its text.
    """
    text = _with_short_words(" ".join(f"{kind}: {message}".split()).rstrip(": "))
    pattern, advice = _known_cause(text)
    if pattern is HOST_MEMORY and (limit := address_limit()):
        advice = f"{limit}: raise that limit"
    if pattern is NO_SPACE and text.endswith("left on device") and shared_memory_is_full():
        advice = SHARED_MEMORY_IS_FULL  # such as of a semaphore, which has no path
    return f"{advice} ({_shortened(text, 400)})" if advice else _shortened(text, 700)


def has_known_cause(kind: str, message: str) -> bool:
    """Return whether it is known what leads to such an exception, as `explain` says it.

    Args:
        kind: Name of the exception's class.
        message: Its text.
    """
    return _known_cause(f"{kind}: {message}")[0] is not None


def _known_cause(text: str) -> tuple[str | None, str | None]:
    """Return the pattern that an exception's text has, and what to do; None without one."""
    matches = (each for each in ADVICE if re.search(each[0], text, re.IGNORECASE))
    return next(matches, (None, None))


def shared_memory_is_full() -> bool:
    """Return whether /dev/shm has no room for a semaphore or a small tensor."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < SMALLEST_FREE


def address_limit() -> str:
    """Return in words how much memory `ulimit -v` allows this process; "" without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"ulimit -v allows each process {limit / 2**30:.1f} GiB of addresses"


@contextmanager
def reported(
    failure_file: Path | None,
    place: str = "",
    tell: Callable[[str], None] = lambda line: None,
    also: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Turn an exception of the block into one line, a failure file and exit status 1.

    A UserError is shown as that line alone. Any other error is shown with its traceback, and the
    failure file gets the end of the traceback. If an error comes from the loss of a peer, the line
    is about that loss.

    Args:
        failure_file: The file to write, unless it exists; None outside SageMaker.
        place: Host and rank, which the line names at its end.
        tell: Called with the line, for whoever else has to know it.
        also: Returns more to say; it is left out if the error says it already.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # as torch's CheckpointException is
        user_error = _user_error_line(error)
        trace = "" if user_error else traceback.format_exc()
        explained = [
            explain(type(exception).__name__, _text_of(exception))
            for exception in _with_causes(error)
        ]
        cause = next((line for line in explained if line.startswith(LOST_PEER)), explained[0])
        reason = cause if trace else _shortened(user_error, 900)
        more = also()
        line = (
            f"error: {reason}{f' ({more})' if more and more not in reason else ''}"
            f"{place and f' [{place}]'}"
        )
        say_last(trace + line)
        if isinstance(error, (UserError, ImportError, SyntaxError)) or user_error:
            _note_mistake()
        tell(line)
        if failure_file:
            try:
                write(failure_file, line, trace)
            except OSError as unwritable:
                say_last(f"error: {failure_file} could not be written: {unwritable.strerror}")
        sys.exit(1)


def _text_of(error: BaseException) -> str:
    """Return the text of an error; "" if the error cannot say it.

    A group's errors are the text of the group.
    """
    try:
        if isinstance(error, BaseExceptionGroup):
            within = (f"{type(each).__name__}: {_text_of(each)}" for each in error.exceptions)
            return f"{error.message}: {'; '.join(within)}"
        return str(error)
    except Exception:  # of a class of the user's, which may raise anything
        return ""


def _note_mistake() -> None:
    """Tell the node's watch, if there is one, that the same error would come again."""
    if watch := os.environ.get("SAGEMAKER_LIGHTNING_WATCH"):
        with suppress(OSError):
            Path(watch).with_name(MISTAKE_FILE).touch()


def report_uncaught(failure_file: Path | None, place: str = "") -> None:
    """Have a UserError that ends this program reported as `reported` does.

    It is for one that is raised before a program can have entered `reported`. Python calls
    sys.excepthook with an exception that nobody has caught; a notebook shows exceptions by itself.

    Args:
        failure_file: See `reported`.
        place: See `reported`.
    """
    if not isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = _Uncaught(sys.excepthook, failure_file, place)


class _Uncaught:
    """A sys.excepthook that reports a UserError in one line."""

    def __init__(
        self, hook_before: Callable[..., Any], failure_file: Path | None, place: str
    ) -> None:
        self.hook_before = hook_before
        self.failure_file = failure_file
        self.place = place

    def __call__(self, kind: type, error: BaseException, trace: object) -> None:
        if not isinstance(error, UserError):
            self.hook_before(kind, error, trace)
            return
        with suppress(SystemExit), reported(self.failure_file, self.place):
            raise error  # Python itself ends with status 1


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, as Python prints them.

    These are the exceptions from which it was raised, or during whose handling it was raised.
    """
    while error:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _user_error_line(error: BaseException) -> str:
    """Return the text of a UserError in one line; "" for any other error.

    If a copy of this process (strategy="ddp_spawn") raised it, the error is one of torch's own
    class, with that process's traceback in front of the text.
    """
    text = _text_of(error)
    is_user_error = isinstance(error, UserError)
    if type(error).__name__ == "ProcessRaisedException":
        mark = rf"^{re.escape(UserError.__module__)}\.\w+: "
        _, *parts = re.split(mark, text, flags=re.MULTILINE)
        is_user_error = bool(parts)
        text = parts[-1] if parts else text
    return _with_short_words(" ".join(text.split())) if is_user_error else ""


def write(failure_file: Path, line: str, trace: str = "", replaces: bool = False) -> None:
    """Write `line` and the end of `trace` to the failure file, unless it has a reason.

    The first reason that is written is the cause, so it stays.

    Args:
        failure_file: The file.
        line: The reason.
        trace: A traceback; "" for none.
        replaces: Whether it replaces a reason that is there.

    Raises OSError if the file cannot be written.
    """
    if not replaces and written(failure_file):
        return
    # Who reads the reason gets it as text: a program may have printed anything, and a file's name,
    # which an error may have in it, need not be UTF-8.
    line, trace = (printable(ESCAPES.sub("", text), "\n\t") for text in (line, trace))
    room = FAILURE_REASON_CHARACTERS - len(line) - 1
    # The line has the beginning of a long message: the place counts more than its end.
    place = trace.rfind('  File "')
    end = trace[place:][:room] if 0 <= place < len(trace) - room else trace[-room:]
    text = f"{line}\n{end}" if trace and room > 0 else line
    with suppress(FileExistsError):  # another rank was the first
        write_instead(failure_file, text.encode())


def written(failure_file: Path) -> str:
    """Return the reason that a failure file has, or its beginning; "" if it has none.

    The job's program may have written it. What is not a regular file has no reason: it is not
    opened.
    """
    with suppress(OSError):
        if not stat.S_ISREG(failure_file.lstat().st_mode):
            return ""
        # It may have become another file since.
        descriptor = os.open(failure_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(LONGEST_REASON).strip()
    return ""


# A progress bar leaves its line open.
AFTER_A_BAR = re.compile(
    r"(?<=.)(?<!Exception Group )(?=(?:Exception Group )?Traceback \(most recent call last\):$)"
)


def last_error(stderr: str) -> tuple[str, str]:
    """Return (explanation, traceback) of the error that ends a program's stderr.

    Some of the tracebacks there are not the cause: that of a launcher, that of a rank that merely
    lost another rank, and that of an error which came from such a loss. Without any error, the
    explanation is LAST_LINE with the last line, which need not be about the end, and the traceback
    is ""; both are "" if there is no line.
    """
    # "[rank1]: " comes from torch, "  | " and "  +-+---" from an exception group.
    lines = [
        part
        for line in stderr.splitlines()
        for part in AFTER_A_BAR.split(re.sub(r"^\[rank\d+\]:\s?|^ *(\| ?|\+[-+ ]*)+", "", line))
    ]
    starts = [
        number
        for number, line in enumerate(lines)
        if re.match(r"(Exception Group )?Traceback \(most recent", line)
    ]
    errors: list[tuple[str, str]] = []
    came_of_it = False
    for start, limit in zip(starts, [*starts[1:], len(lines)], strict=False):
        rest = range(start + 1, limit)
        end = next(
            (
                number
                for number in rest
                if lines[number] and not lines[number].startswith((" ", "\t"))
            ),
            None,
        )
        if end and not re.search(rf"\b{CHILD_FAILED}\b|SignalException", lines[end]):
            after = takewhile(lambda line: not NO_MESSAGE.match(line), lines[end + 1 :])
            # The lines after the exception's first are its message, if there are only a few, and
            # if it has one.
            more = [line for line in after if line.strip()]
            is_message = ": " in lines[end] and limit == len(lines) and len(more) <= 10
            message = [lines[end], *(more if is_message else [])]
            class_name, _, text = "\n".join(message).partition(": ")
            explanation = (
                errors[-1][0] if came_of_it else explain(class_name.rpartition(".")[2], text)
            )
            errors.append((explanation, "\n".join([*lines[start:end], *message])))
            came_of_it = explanation.startswith(LOST_PEER) and any(
                line in CHAIN_LINES for line in lines[end:limit]
            )
    errors += [
        (explain(native[1], native[2] or ""), native[0])
        for native in NATIVE.finditer("\n".join(lines))
    ]
    causes = [error for error in errors if not error[0].startswith(LOST_PEER)] or errors
    if causes:
        return causes[-1]
    if fatal := FATAL.search(stderr):
        return fatal[1], fatal[2]
    if syntax := SYNTAX.search(stderr):
        return f"{syntax[3]} ({Path(syntax[1]).name}, line {syntax[2]})", syntax[0]
    # What a launcher writes about a rank that has ended says less than that rank's own last line.
    # process/start_notice.py writes the lines that begin with "starting: ".
    own = lines[: starts[0]] if CHILD_FAILED in stderr else lines
    own = WARNING.sub("", "\n".join([*own, ""])).splitlines()
    written = [line.strip() for line in own if line.strip() and not line.startswith("starting: ")]
    written = [line for line in written if not OF_A_LAUNCHER.match(line)] or written
    last_line = written[-1] if written else ""
    if re.search(HOST_MEMORY, last_line, re.IGNORECASE):  # the linker's or glibc's
        return explain("it wrote", last_line), ""
    return f"{LAST_LINE}{_shortened(last_line, 500)}" if last_line else "", ""


def class_of(trace: str) -> str:
    """Return the name of the class of the error that a traceback is about; "" without one."""
    lines = [line for line in trace.splitlines() if line and not line.startswith((" ", "\t"))]
    names = [re.match(r"(?:[\w.]+\.)?(\w+)(:|$)", line) for line in lines[1:] or lines]
    return next((name[1] for name in names if name), "")


def is_of_torchrun(trace: str) -> bool:
    """Return whether a traceback says that torchrun itself has failed, and not a rank."""
    # A rank that torchrun records passes through elastic/multiprocessing, too.
    return bool(OF_TORCHRUN.search(trace)) and CHILD_FAILED not in trace


def ended_rank(stderr: str) -> tuple[str, int]:
    """Return (rank in words, exit status) of the rank whose end its launcher reports.

    The status is -N if signal N killed the rank. Return ("", 0) if there is no such report. If a
    signal has ended one of several ranks for a reason of its own, such as SIGKILL, that is the
    cause, because the others only miss it.
    """
    # torchrun's report has the first rank that ended at its end.
    reports = [
        (f"rank {rank}", int(status))
        for rank, status in re.findall(
            r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+) ", stderr
        )
    ]
    # Lightning's report.
    reports += [
        (f"the rank with PID {pid}", int(status))
        for pid, status in re.findall(
            r"Child process with PID (\d+) terminated with code (-?\d+)\b", stderr
        )
    ]
    return least_doubtful(reports) or (reports[-1] if reports else ("", 0))


def least_doubtful(ends: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the first of several ranks' ends that nothing but itself explains.

    SIGKILL comes before other signals. Return None if there is none.

    Args:
        ends: A rank in words, and its exit status.
    """
    own = [end for end in ends if end[1] in OWN_REASONS]
    return min(own, key=lambda end: end[1] != -signal.SIGKILL, default=None)


def _with_short_words(text: str) -> str:
    """Return a text in which what is too long for a line, such as a path, has its ends only."""
    return re.sub(r"\S{250,}", lambda word: f"{word[0][:150]}...{word[0][-60:]}", text)


def _shortened(line: str, length: int) -> str:
    """Return `line`, cut to `length` characters and ended with "..." if longer."""
    return line if len(line) <= length else f"{line[: length - 3]}..."
