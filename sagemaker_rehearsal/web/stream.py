"""Sends what changes in a page, as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sagemaker_rehearsal.web import log_file

# Seconds between two looks, and how many times as long as the last look took.
REFRESH_SECONDS = 1.0
REST_FACTOR = 4.0
# Seconds after which something is sent in any case: only so is it noticed that a client has left.
PULSE_SECONDS = 10.0
# Pages that follow at the same time.
MAX_STREAMS = 20


@dataclass
class Follower:
    """What comes to a log from `start` on, in bytes, with the text `find` in it."""

    path: Path
    start: int
    find: str

    def event(self) -> bytes:
        """Return an event with the lines that have come; nothing without any."""
        excerpt = log_file.read(self.path, self.start, self.find)
        self.start = excerpt.end
        if not excerpt.lines:
            return b""
        lines = (["[lines left out]"] if excerpt.is_cut else []) + excerpt.lines
        return event("lines", "".join(f"{line}\n" for line in lines), excerpt.end)


def event(name: str, content: object, number: int | None = None) -> bytes:
    """Return an event; a browser that connects again says its last one's number."""
    identity = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{identity}data: {json.dumps(content)}\n\n".encode()


def events(
    parts: Callable[[], dict[str, str]], has_ended: Callable[[], bool], log: Follower | None = None
) -> Iterator[bytes]:
    """Yield the events of a page until nothing changes any more.

    Args:
        parts: Returns the parts of the page, as HTML, by their ids.
        has_ended: Returns whether they are the last ones.
        log: The log to follow.
    """
    sent: dict[str, str] = {}
    pulse = time.monotonic()
    while True:
        began = time.monotonic()
        # Before the parts are made: what they have then is the last.
        ended = has_ended()
        now = parts()
        changed = {name: html for name, html in now.items() if sent.get(name) != html}
        sent |= changed
        message = (event("parts", changed) if changed else b"") + (log.event() if log else b"")
        if ended:
            yield message + event("end", None)
            return
        if message or began - pulse >= PULSE_SECONDS:
            pulse = began
            yield message or b":\n\n"
        time.sleep(max(REFRESH_SECONDS, REST_FACTOR * (time.monotonic() - began)))
