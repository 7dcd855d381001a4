"""Shifts the clock of processes that were started with libfaketime.

Nothing can put another wall clock under a process that runs: the library is loaded as it starts,
and reads the shift from a file, once a second. Monotonic clocks stay as they are, as on a machine
whose clock is set. The package libfaketime builds the library when it is installed.
"""

import os
from collections.abc import Callable
from pathlib import Path

from sagemaker_rehearsal.faults.errors import CannotInject

# In seconds: longer than any timeout of a training that reads the wall clock by mistake.
SHIFT_SECONDS = 3600


def preload_clock(file: Path) -> dict[str, str]:
    """Return the variables with which processes start so that their clock can be shifted.

    Args:
        file: Will have the shift. It must stay as long as the processes.

    Raises CannotInject where libfaketime is not installed.
    """
    try:
        import libfaketime
    except ImportError:
        raise CannotInject("it needs libfaketime, which is not installed") from None
    library = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"
    if not library.exists():
        raise CannotInject(f"it needs {library}, which is not there")
    _write(file, 0)
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def shift_clock(file: Path, seconds: int = SHIFT_SECONDS) -> Callable[[], None]:
    """Shift the clock of the processes of `preload_clock`; return what sets it right again.

    Args:
        file: As given to `preload_clock`.
        seconds: The shift; below 0, the clock is behind.
    """
    _write(file, seconds)
    return lambda: _write(file, 0)


def _write(file: Path, seconds: int) -> None:
    """Write the shift so that no process reads a part of it."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(f"{seconds:+d}\n")
    os.replace(aside, file)
