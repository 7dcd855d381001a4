"""Finds the values of metrics in log lines.

It is a process of its own, because a regular expression may take for ever. Its input is JSON lines:
first a list of names and regular expressions, then texts. For each text it prints the newest value
of each metric in the text, and the names of metrics that it gave up because they were too slow.

The package regex has a timeout, but a flavour of its own: `loss{e}` is text for re, and for regex a
word that is like `loss`.
"""

import json
import math
import re
import signal
import sys
import time
from dataclasses import dataclass

# Seconds; a timer of 0 would be none.
TICK_SECONDS = 0.001
# Seconds that an expression may compute at once.
BURST_SECONDS = 0.25
# Share of the elapsed time that all expressions together may compute in the long run.
COMPUTING_SHARE = 0.2


class Slow(Exception):
    """An expression has used up its time."""


@dataclass
class Metric:
    """A metric, and the seconds that its expression may still compute."""

    name: str
    pattern: re.Pattern
    left: float = BURST_SECONDS

    def earn(self, seconds: float) -> None:
        """Let it compute for some more seconds, up to BURST_SECONDS."""
        self.left = min(BURST_SECONDS, self.left + seconds)

    def spend(self, seconds: float) -> None:
        """Count seconds that it has computed; it always keeps TICK_SECONDS."""
        self.left = max(TICK_SECONDS, self.left - seconds)


def main() -> None:
    """Answer each line of the input until it ends."""
    signal.signal(signal.SIGVTALRM, _raise_slow)
    metrics = [Metric(name, re.compile(regex)) for name, regex in json.loads(sys.stdin.readline())]
    share = COMPUTING_SHARE / len(metrics)
    looked_at = time.monotonic()
    for line in sys.stdin:
        text = json.loads(line)
        values = {}
        dropped = []
        looked_before = looked_at
        looked_at = time.monotonic()
        for metric in list(metrics):
            metric.earn(share * (looked_at - looked_before))
            start = time.process_time()
            try:
                if (value := _value_in_time(metric.pattern, text, metric.left)) is not None:
                    values[metric.name] = value
                metric.spend(time.process_time() - start)
            except Slow:
                metrics.remove(metric)
                dropped.append(metric.name)
        print(json.dumps([values, dropped]), flush=True)


def _raise_slow(*_: object) -> None:
    raise Slow


def _value_in_time(pattern: re.Pattern, text: str, seconds: float) -> float | None:
    """Return the last number that a pattern finds; Slow if it computes for too long."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        return _last_value(pattern, text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _last_value(pattern: re.Pattern, text: str) -> float | None:
    last_value = None
    for match in pattern.finditer(text):
        try:
            value = float(match[1] if pattern.groups else match[0])
        # No group took part, or it is not a number.
        except (TypeError, ValueError):
            continue
        # JSON has only finite numbers.
        last_value = value if math.isfinite(value) else last_value
    return last_value


if __name__ == "__main__":
    main()
