"""Says what a start is doing that takes long, as on a busy machine; a quick one says nothing.

Only the standard library is imported here: it is what runs before torch is imported.
"""

import os
import threading
import time
from pathlib import Path

FIRST, NEXT = 5.0, 20.0  # seconds until the first line, and until each further one
BUSY = 2  # times as long as this process ran, it waited for a CPU: then the start is known to take long

_started = _doing = None
_said = False
_ended = threading.Event()


def begin(what: str) -> None:
    """Start to say what this process does, if that takes long. Of the ranks on a node, the first one speaks."""
    global _started
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _started = time.monotonic()
        threading.Thread(target=_watch, daemon=True, name="starting").start()
        doing(what)


def doing(what: str) -> None:
    """Note what the start does from now on; said at once if it is slow already. Nothing where there was no `begin`."""
    global _doing
    _doing = what
    if _started and not _ended.is_set() and (_said or _busy()):
        _say()


def done() -> None:
    """End it: from now on nothing is said."""
    _ended.set()


def _watch() -> None:
    wait = FIRST
    while not _ended.wait(wait):
        if wait == NEXT or not _said:
            _say()
        wait = NEXT


def _say() -> None:
    """Write a line past sys.stderr, whose lock a process that is forked at this moment would inherit."""
    global _said
    _said = True
    os.write(2, f"starting: {_doing} ({time.monotonic() - _started:.0f} s so far)\n".encode())


def _busy(scheduled: Path = Path("/proc/self/schedstat")) -> bool:
    try:
        ran, waited, _ = map(int, scheduled.read_text().split())  # ns, of the main thread
    except (OSError, ValueError):
        return False
    return waited > BUSY * ran
