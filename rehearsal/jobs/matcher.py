"""Finds the values of metrics in the lines of a log: a process of its own, as a regular expression may take for ever.

Its input is JSON lines: first a list of names and regular expressions, then texts. To each text it answers with the
newest value of each metric in it, and with the names of those that it gave up, as they were too slow.
"""

import json
import math
import re
import signal
import sys
import time
from dataclasses import dataclass

TICK = 0.001  # seconds: a timer of 0 is none
BURST = 0.25  # seconds that an expression may compute at once
SHARE = 0.2  # of the time gone by: what all of them together may compute for long


class Slow(Exception):
    """An expression has used up its time."""


@dataclass
class Metric:
    """A metric, and the seconds that its expression may still compute."""

    name: str
    pattern: re.Pattern
    left: float = BURST


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGVTALRM, _slow)
    metrics = [Metric(name, re.compile(regex)) for name, regex in json.loads(sys.stdin.readline())]
    share, looked = SHARE / len(metrics), time.monotonic()
    for line in sys.stdin:
        text, values, dropped = json.loads(line), {}, []
        before, looked = looked, time.monotonic()
        for metric in list(metrics):
            metric.left, start = (
                min(BURST, metric.left + share * (looked - before)),
                time.process_time(),
            )
            try:
                if (value := _limited(metric.pattern, text, metric.left)) is not None:
                    values[metric.name] = value
                metric.left = max(TICK, metric.left - (time.process_time() - start))
            except Slow:
                metrics.remove(metric)
                dropped.append(metric.name)
        print(json.dumps([values, dropped]), flush=True)


def _slow(*_: object) -> None:
    raise Slow


def _limited(pattern: re.Pattern, text: str, seconds: float) -> float | None:
    """Return the last number that a pattern finds in a text; Slow if that takes more than some seconds to compute."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        return _value(pattern, text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _value(pattern: re.Pattern, text: str) -> float | None:
    found = None
    for match in pattern.finditer(text):
        try:
            value = float(match[1] if pattern.groups else match[0])
        except (TypeError, ValueError):  # no group took part, or it is no number
            continue
        found = value if math.isfinite(value) else found  # JSON has no other numbers
    return found


if __name__ == "__main__":
    main()
