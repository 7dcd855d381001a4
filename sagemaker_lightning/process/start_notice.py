"""Prints what a start is doing if it takes long, as on a busy machine.

A quick start prints nothing.

This module imports only the standard library, because it runs before torch is imported.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

FIRST_LINE_SECONDS = 5.0  # seconds until the first line
LINE_INTERVAL_SECONDS = 20.0  # seconds until each further line
# The start is known to take long if this process has waited for a CPU this many times as long as
# it has run.
BUSY_FACTOR = 2
THREAD = "start-notice"
"""The name, for the kernel, of the thread that prints: by it, a watch knows that it only prints."""
PR_SET_NAME = 15  # prctl(2)

_started = 0.0  # in seconds of time.monotonic()
_activity = ""
_has_printed = False
_ended = threading.Event()


def begin(what: str) -> None:
    """Start to print what this process does if it takes long: first, `what`.

    Only the first of a node's ranks prints.
    """
    global _started
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _started = time.monotonic()
        threading.Thread(target=_print_at_intervals, daemon=True, name="starting").start()
        set_activity(what)


def set_activity(what: str) -> None:
    """Note what the start does from now on; print it now if it is slow already.

    Without `begin` before it, nothing is printed.
    """
    global _activity
    _activity = what
    if _started and not _ended.is_set() and (_has_printed or _busy()):
        _print()


def end() -> None:
    """End the start: nothing is printed from now on."""
    _ended.set()


def _print_at_intervals() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, THREAD.encode())
    wait = FIRST_LINE_SECONDS
    while not _ended.wait(wait):
        if wait == LINE_INTERVAL_SECONDS or not _has_printed:
            _print()
        wait = LINE_INTERVAL_SECONDS


def _print() -> None:
    """Write a line to file descriptor 2, without sys.stderr.

    A process that is forked at this moment would inherit the lock of sys.stderr.
    """
    global _has_printed
    _has_printed = True
    with suppress(OSError):  # nobody reads it
        os.write(
            2, f"starting: {_activity} ({time.monotonic() - _started:.0f} s so far)\n".encode()
        )


def _busy(scheduled: Path = Path("/proc/self/schedstat")) -> bool:
    """Return whether the main thread has mostly waited for a CPU.

    Return False if that is unknown.
    """
    try:
        ran, waited, _ = map(int, scheduled.read_text().split())  # ns, of the main thread
    except (OSError, ValueError):
        return False
    return waited > BUSY_FACTOR * ran
