"""The metric definitions of a job: what its log says by its own regular expressions."""

import math
import re
import time

from .errors import invalid


class Metrics:
    """The newest value of each metric that a job defines."""

    def __init__(self, definitions: list[dict]) -> None:
        self.patterns: list[tuple[str, re.Pattern]] = []
        self.found: dict[str, dict] = {}
        for one in definitions:
            try:
                self.patterns.append((one["Name"], re.compile(one["Regex"])))
            except (re.error, OverflowError) as error:
                raise invalid(f"Invalid MetricDefinitions: the Regex of {one['Name']!r}: {error}") from error

    def line(self, text: str) -> None:
        """Look at a line of the log."""
        for name, pattern in self.patterns:
            for match in pattern.finditer(text):
                try:
                    value = float(match[1] if pattern.groups else match[0])
                except (TypeError, ValueError):  # no group took part, or it is no number
                    continue
                if math.isfinite(value):  # JSON has no other numbers
                    self.found[name] = {"MetricName": name, "Value": value, "Timestamp": time.time()}
