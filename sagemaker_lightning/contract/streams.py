"""Stdin, stdout and stderr of a program: they may be closed, or lead to nobody."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import ON_STDERR, log


class _Stream(io.TextIOWrapper):
    """Stdout or stderr. Once it cannot be written to, it leads to nowhere.

    The first failure of stdout is a UserError: a training whose lines nobody reads ends. A terminal
    that is gone is not a failure: SIGHUP says so, or the program was meant to outlive it. Without
    stderr, there is nowhere to say anything.
    """

    def write(self, text: str) -> int:
        with self._to_nowhere_if_broken():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._to_nowhere_if_broken():
            super().flush()

    @contextmanager
    def _to_nowhere_if_broken(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == 1 and error.errno != errno.EIO:
                raise UserError(
                    f"stdout: cannot be written to ({error.strerror}); let somebody read it to its "
                    "end, or send it to a file with room"
                ) from None


def prepare() -> None:
    """Give this program the streams that it was started without, and one line for a broken stdout.

    Without them, the next file that is opened gets the number of a stream, and what is written to
    that stream goes into the file.
    """
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:
        os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free: this one
        os.set_inheritable(number, True)
        if number == 1 and 2 not in closed:
            os.dup2(2, 1)
    if closed[-1:] == [2] and 1 not in closed:
        os.dup2(1, 2)
    if 0 in closed:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        # A notebook and pytest have others, and a program may have sent its own to a file.
        if stream is None or (type(stream) is io.TextIOWrapper and stream.fileno() == number):
            setattr(sys, name, _stream(number, stream))
    if 1 in closed and 2 not in closed:
        log.warning("stdout is closed; what is printed goes to stderr", extra=ON_STDERR)
    elif 2 in closed and 1 not in closed:
        log.warning("stderr is closed; errors go to stdout")


def _stream(number: int, previous: io.TextIOWrapper | None) -> _Stream:
    """Return a stream like the previous one, which whoever has it already may continue using."""
    previous = previous or open(number, "w", closefd=False)  # noqa: SIM115
    previous.flush()
    return _Stream(
        open(number, "wb", closefd=False),  # noqa: SIM115
        encoding=previous.encoding,
        errors="backslashreplace" if number == 2 else previous.errors,
        line_buffering=previous.line_buffering or number == 2,
        write_through=previous.write_through,
    )


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
