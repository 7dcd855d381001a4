"""A program at a terminal, as a person runs it."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from contextlib import suppress

HANG_SECONDS = 120  # what takes longer hangs


class Terminal:
    """Runs a command at a terminal of its own.

    Args:
        command: The command and its arguments.
    """

    def __init__(self, *command: str) -> None:
        self.unread = ""
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            try:
                os.execvp(command[0], command)
            finally:
                os._exit(127)

    def resize(self, rows: int, columns: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Type something; \\x03 is Ctrl-C."""
        os.write(self.end, text.encode())

    def expect(self, text: str) -> None:
        """Wait until the terminal shows a text that follows the last expected one."""
        deadline = time.monotonic() + HANG_SECONDS
        while text not in self.unread:
            assert self.read() and time.monotonic() < deadline, self.unread
        self.unread = self.unread.partition(text)[2]

    def wait(self) -> int:
        """Return the exit status when the command has ended."""
        while self.read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def hang_up(self) -> int:
        """Close the terminal, and return the exit status when the command has ended."""
        os.close(self.end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End the command if it still runs."""
        os.close(self.end)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def read(self) -> bool:
        """Read what there is, for a second at most; False if the terminal is closed."""
        if select.select([self.end], [], [], 1)[0]:
            with suppress(OSError):
                read = os.read(self.end, 65536)
                self.unread += read.decode(errors="replace")
                return bool(read)
            return False
        return True
