"""A failure that says why: one line for a person, in the log and as the job's FailureReason."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAILURE_REASON_CHARACTERS = 1024  # that much of the failure file SageMaker shows (API reference, FailureReason)


@contextmanager
def reported(failure_file: Path | None) -> Iterator[None]:
    """Turn an exception of the block into one line, `failure_file` and exit status 1.

    A user's mistake, which this application raises as ValueError, is the line alone; for anything else there is the
    traceback, too, of which the failure file gets the end.
    """
    try:
        yield
    except Exception as error:
        line = f"error: {' '.join(str(error).split()) or type(error).__name__}"
        trace = "" if _is_mistake(error) else traceback.format_exc()
        if trace:
            line = line.replace("error:", f"error: {type(error).__name__}:", 1)
        print(trace + line, file=sys.stderr, flush=True)
        if failure_file:
            _write(failure_file, line, trace)
        sys.exit(1)


def _is_mistake(error: Exception) -> bool:
    """Return whether `error` is for the user: raised, on purpose, by this application or Lightning's checks."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(innermost.f_code.co_filename).parent == Path(__file__).parent


def _write(failure_file: Path, line: str, trace: str) -> None:
    room = FAILURE_REASON_CHARACTERS - len(line) - 1
    try:
        with failure_file.open("x") as file:  # the first reason is the cause; what other ranks say comes of it
            file.write(f"{line}\n{trace[-room:]}" if trace and room > 0 else line)
    except FileExistsError:
        pass
    except OSError as error:
        print(f"error: {failure_file} could not be written: {error.strerror}", file=sys.stderr, flush=True)
