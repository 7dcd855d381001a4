"""Shifts the clock of processes that were started with libfaketime.

Nothing can put another wall clock under a process that runs: the library is loaded as it starts,
and reads the shift from a file, once a second. Monotonic clocks stay as they are, as on a machine
whose clock is set. The package libfaketime builds the library when it is installed.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath

from sagemaker_rehearsal.faults.errors import CannotInject

# In seconds: longer than any timeout of a training that reads the wall clock by mistake.
SHIFT_SECONDS = 3600
LIBRARY = "libfaketime.so.1"


def preload_clock(file: Path, inside: PurePath | None = None) -> dict[str, str]:
    """Return the variables with which processes start so that their clock can be shifted.

    Args:
        file: Will have the shift. It must stay as long as the processes.
        inside: Where a container finds the file's folder, which then gets a copy of the library,
            too; None for processes of this machine.

    Raises CannotInject where libfaketime is not installed.
    """
    try:
        import libfaketime
    except ImportError:
        raise CannotInject("it needs libfaketime (the extra `clock`), which is not here") from None
    library: PurePath = Path(libfaketime.__file__).parent / "vendor/libfaketime/src" / LIBRARY
    if not Path(library).exists():
        raise CannotInject(f"it needs {library}, which is not there")
    seen = file if inside is None else inside / file.name
    if inside is not None:
        shutil.copy(library, file.with_name(LIBRARY))
        library = inside / LIBRARY
    _write(file, 0)
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(seen),
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


def check_shifted(said: bytes, now: float) -> None:
    """Raise CannotInject unless `date +%s` has said the time of a clock that is shifted.

    The library is built for the C library of this machine; an image may have another, or none.

    Args:
        said: What it has printed, an error included.
        now: The time before that, by this machine's clock.
    """
    last = (said.decode(errors="replace").strip().splitlines() or [""])[-1]
    if not (last.isdecimal() and int(last) >= now + SHIFT_SECONDS - 1):
        raise CannotInject(f"libfaketime does not shift the clock of this image: {last[:200]}")


def _write(file: Path, seconds: int) -> None:
    """Write the shift so that no process reads a part of it."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(f"{seconds:+d}\n")
    os.replace(aside, file)
