"""A failure that says why: one line for a person, in the log and as the job's FailureReason."""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from sagemaker_lightning.contract.errors import UserError

FAILURE_REASON_CHARACTERS = (
    1024  # that much of the failure file SageMaker shows (API reference, FailureReason)
)

LOST = "lost a peer"
OUT_OF_MEMORY = (
    "most likely out of host memory; use smaller batches or fewer processes, or a larger instance"
)

# What an exception's class and text tell, and what to do about it. The first that matches counts.
ADVICE = (
    (
        r"OutOfMemoryError|CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED",
        "out of GPU memory: make --data.batch_size smaller (and --trainer.accumulate_grad_batches larger), use "
        "--trainer.precision=16-mixed, or take a GPU with more memory",
    ),
    (
        r"MemoryError|bad_alloc|DefaultCPUAllocator|Cannot allocate memory"
        r"|DataLoader worker .* is killed by signal: Killed",
        "out of host memory: use smaller batches or fewer processes, or take an instance with more memory",
    ),
    (
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|unexpected pos \d+ vs",
        "disk full: make the job's volume larger (VolumeSizeInGB), or keep fewer checkpoints",
    ),
    (
        r"DataLoader worker .*(shared memory|Bus error)|bus error.*shm",
        "shared memory (/dev/shm) is full: set --data.num_workers=0, or start the container with --shm-size=1g",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "batch norm cannot train on a batch of one sample, such as the last of an epoch: give another "
        "--data.batch_size, or drop_last=True in the DataLoader",
    ),
    (
        r"Dist(Network|Store|Backend)Error|ProcessGroup|gloo|TCPStore|Rendezvous(Connection|Timeout)Error"
        r"|NCCL.*(remote|time|system error)",
        f"{LOST}, or never reached it: the cause is in the log of the rank that ended first",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "import failed: put what is missing into the job's source, or name it in the requirements.txt there",
    ),
    (
        r"NoCredentialsError|Unable to locate credentials|AccessDenied|\(403\)|Forbidden",
        "no access to AWS: give the job's role (on a desk: the container, by AWS_* variables) what it needs",
    ),
    (
        r"/input/data/",
        "missing in the input channels: give the channel or the file, or correct the path",
    ),
)

# What faulthandler says of a crash in native code, and Python of a file that it cannot compile.
FATAL = re.compile(
    r"^(Fatal Python error: .*)\n(?:.*\n)*?((?:Current t|T)hread .*\n(?:  .*\n)*)", re.MULTILINE
)
# An exception that nothing caught in native code, as of NCCL's watchdog; such code's log: "[E1122 10:00:00.1 x.cpp:9]".
NATIVE = re.compile(
    r"^terminate called after throwing an instance of '(.+)'(?:\n *what\(\): *(.*))?", re.MULTILINE
)
NATIVE_LOG = re.compile(r"terminate called after throwing |\[[EWIF]\d{4} ")
# What Python prints between an exception and another one that came of it (traceback.py).
CAME_OF_IT = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
SYNTAX = re.compile(
    r'^  File "(.+)", line (\d+)\n(?: .*\n)*((?:Syntax|Indentation|Tab)Error: .*)', re.MULTILINE
)


def explain(kind: str, message: str) -> str:
    """Return one line about an exception of class `kind` that says `message`: what to do, if that is known."""
    said = " ".join(f"{kind}: {message}".split()).rstrip(": ")
    advice = next(
        (text for pattern, text in ADVICE if re.search(pattern, said, re.IGNORECASE)), None
    )
    return f"{advice} ({_shortened(said, 400)})" if advice else _shortened(said, 700)


@contextmanager
def reported(
    failure_file: Path | None,
    place: str = "",
    tell: Callable[[str], None] = lambda line: None,
    also: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Turn an exception of the block into one line, `failure_file` and exit status 1; `place` names host and rank.

    Whoever else has to know is told by `tell`; what `also` returns is said, too, if the error does not say it.
    A UserError is the line alone. For anything else there is the traceback, too; the failure file gets the end of it.
    What comes of the loss of a peer is that loss.
    """
    try:
        yield
    except Exception as error:
        trace = "" if isinstance(error, UserError) else traceback.format_exc()
        explained = [explain(type(one).__name__, str(one)) for one in _and_what_it_came_of(error)]
        cause = next((line for line in explained if line.startswith(LOST)), explained[0])
        reason = cause if trace else _shortened(_said(error), 900)
        more = also()
        line = f"error: {reason}{f' ({more})' if more and more not in reason else ''}{place and f' [{place}]'}"
        print(trace + line, file=sys.stderr, flush=True)
        tell(line)
        if failure_file:
            try:
                write(failure_file, line, trace)
            except OSError as unwritable:
                print(
                    f"error: {failure_file} could not be written: {unwritable.strerror}",
                    file=sys.stderr,
                    flush=True,
                )
        sys.exit(1)


def _and_what_it_came_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from, or while they were handled, as Python prints them."""
    while error:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _said(error: UserError) -> str:
    """Return what a mistake says, in one line; of a data worker's, torch's text is the traceback that ends with it."""
    said, kind = str(error), type(error).__name__
    if said.startswith(f"Caught {kind} in "):
        said = re.split(rf"^[\w.]*\b{kind}: ", said, flags=re.MULTILINE)[-1]
    return " ".join(said.split())


def write(failure_file: Path, line: str, trace: str = "", mode: str = "x") -> None:
    """Write `line` and the end of `trace` to `failure_file`, unless there is one: the first reason is the cause."""
    room = FAILURE_REASON_CHARACTERS - len(line) - 1
    try:
        with failure_file.open(mode) as file:
            file.write(f"{line}\n{trace[-room:]}" if trace and room > 0 else line)
    except FileExistsError:
        pass


def last_error(stderr: str) -> tuple[str, str]:
    """Return (what to do about it, its traceback) of the error that a program's stderr ends with.

    Of the tracebacks there, that of a launcher, and of a rank that merely lost another one, or of what came of that, is
    the cause of nothing. Without any, what was said last has to do, and nothing at all gives "".
    """
    # "[rank1]: " comes from torch, "  | " and "  +-+---" from an exception group.
    lines = [
        re.sub(r"^\[rank\d+\]:\s?|^ *(\| ?|\+[-+ ]*)+", "", line) for line in stderr.splitlines()
    ]
    starts = [
        number
        for number, line in enumerate(lines)
        if re.match(r"(Exception Group )?Traceback \(most recent", line)
    ]
    found, came_of_it = [], False
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
        if end and not re.search(r"\bChildFailedError\b|SignalException", lines[end]):
            rest = takewhile(lambda line: not NATIVE_LOG.match(line), lines[end + 1 :])
            more = [
                line for line in rest if line.strip()
            ]  # of the message, if not much comes after it
            message = [lines[end], *(more if limit == len(lines) and len(more) <= 10 else [])]
            kind, _, text = "\n".join(message).partition(": ")
            said = found[-1][0] if came_of_it else explain(kind.rpartition(".")[2], text)
            found.append((said, "\n".join([*lines[start:end], *message])))
            came_of_it = said.startswith(LOST) and any(
                line in CAME_OF_IT for line in lines[end:limit]
            )
    found += [
        (explain(native[1], native[2] or ""), native[0])
        for native in NATIVE.finditer("\n".join(lines))
    ]
    causes = [error for error in found if not error[0].startswith(LOST)] or found
    if causes:
        return causes[-1]
    if fatal := FATAL.search(stderr):
        return fatal[1], fatal[2]
    if syntax := SYNTAX.search(stderr):
        return f"{syntax[3]} ({Path(syntax[1]).name}, line {syntax[2]})", syntax[0]
    said = [
        line.strip() for line in lines if line.strip() and not line.startswith("starting: ")
    ]  # process/start_notice.py
    return (_shortened(said[-1], 500), "") if said else ("", "")


def ended_rank(stderr: str) -> tuple[str, int]:
    """Return (a rank, its exit status, -N by signal N) of the one that its launcher tells of; ("", 0) if none is.

    One that was killed by SIGKILL is the cause where others only miss it.
    """
    told = [
        (f"rank {rank}", int(status))
        for rank, status in re.findall(
            r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+) ", stderr
        )
    ]  # by torchrun, the first one last
    told += [
        (f"the rank with PID {rank}", int(status))
        for rank, status in re.findall(
            r"Child process with PID (\d+) terminated with code (-?\d+)\b", stderr
        )
    ]  # by Lightning
    return next((one for one in told if one[1] == -9), told[-1] if told else ("", 0))


def _shortened(line: str, length: int) -> str:
    return line if len(line) <= length else f"{line[: length - 3]}..."
