"""The metric definitions of a job: what its log says by its own regular expressions."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from rehearsal.api.errors import invalid

MATCHER = Path(__file__).with_name("matcher.py")


class Metrics:
    """The newest value of each metric that a job defines."""

    def __init__(self, definitions: list[dict]) -> None:
        self.patterns = [[one["Name"], one["Regex"]] for one in definitions]
        self.found: dict[str, dict] = {}
        self.lock, self.matcher = threading.Lock(), None
        for name, regex in self.patterns:
            try:
                re.compile(regex)
            except (re.error, OverflowError, RecursionError) as error:
                raise invalid(
                    f"Invalid MetricDefinitions: the Regex of {name!r}: {error}"
                ) from error

    def line(self, text: str) -> str | None:
        """Look at a line of the log; return what the person should know, if the regular expressions take too long."""
        with self.lock:
            if not self.patterns:
                return None
            try:
                values, dropped = self._ask(text)
            except (OSError, ValueError) as error:
                self.patterns = []
                return f"metrics are no longer looked for: {type(error).__name__}: {error}"
        now = time.time()
        for name, value in values.items():
            self.found[name] = {"MetricName": name, "Value": value, "Timestamp": now}
        slow = ", ".join(dropped)
        return (
            f"MetricDefinitions: the Regex of {slow} is too slow for this log, and used no more"
            if slow
            else None
        )

    def close(self) -> None:
        """End the process that looks for them."""
        with self.lock:
            self.patterns = []
            if self.matcher:
                self.matcher.kill()
                self.matcher.communicate()

    def _ask(self, text: str) -> tuple[dict[str, float], list[str]]:
        """Return the values in a line, and which metrics were given up."""
        if self.matcher is None:
            line = [sys.executable, "-I", "-S", MATCHER]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            # Ctrl-C is not for it
            self.matcher = subprocess.Popen(line, **pipes, start_new_session=True)
            self.matcher.stdin.write(json.dumps(self.patterns) + "\n")
        self.matcher.stdin.write(json.dumps(text) + "\n")
        self.matcher.stdin.flush()
        return json.loads(self.matcher.stdout.readline())
