"""Wait for a condition, and never for ever."""

import time
from collections.abc import Callable

HANG_SECONDS = 120.0  # what is waited for comes within a few


def becomes_true(condition: Callable[[], object], limit: float = HANG_SECONDS) -> bool:
    """Wait for a condition, and return whether it became true."""
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def wait_until(condition: Callable[[], object], expected: str = "it") -> None:
    """Wait for a condition, and fail if it does not come."""
    assert becomes_true(condition), f"{expected} has not come"
