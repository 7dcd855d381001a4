"""Says how far something is that has a number of bytes."""

import sys
import time

from sagemaker_lightning.contract.errors import printable

# Seconds from one line to the next.
EVERY_SECONDS = 5.0


class ByteProgress:
    """Prints lines on stderr, one each 5 seconds.

    Args:
        what: What is done, in words.
        total: Its bytes.
        done: Those that were done before.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what = what
        self.total = total
        self.first = done
        self.began = self.said = time.monotonic()

    def reach(self, done: int) -> None:
        """Note that as many bytes are done now."""
        now = time.monotonic()
        if now - self.said < EVERY_SECONDS:
            return
        self.said = now
        rate = (done - self.first) / (now - self.began)
        left = f", {(self.total - done) / rate:,.0f} s left" if rate > 0 else ""
        say(
            f"{self.what}: {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, "
            f"{rate / 1e6:,.1f} MB/s{left}"
        )


def say(line: str) -> None:
    """Print a line on stderr; what it quotes does not steer the terminal."""
    print(printable(line), file=sys.stderr, flush=True)
