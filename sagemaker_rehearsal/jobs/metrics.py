"""The metric definitions of a job, and the values that they find in its log."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from sagemaker_rehearsal.api.errors import invalid

MATCHER = Path(__file__).with_name("matcher.py")


class Metrics:
    """The newest value of each metric that a job defines."""

    def __init__(self, definitions: list[dict]) -> None:
        self.patterns = [[definition["Name"], definition["Regex"]] for definition in definitions]
        self.found: dict[str, dict] = {}
        self.lock = threading.Lock()
        self.matcher = None
        for name, regex in self.patterns:
            try:
                re.compile(regex)
            except (re.error, OverflowError, RecursionError) as error:
                raise invalid(
                    f"Invalid MetricDefinitions: the Regex of {name!r}: {error}"
                ) from error

    def line(self, text: str) -> str | None:
        """Look for values in a log line; return a note if that takes too long."""
        with self.lock:
            if not self.patterns:
                return None
            try:
                values, dropped = self._ask_matcher(text)
            except (OSError, ValueError) as error:
                self.patterns = []
                return f"metrics are no longer looked for: {type(error).__name__}: {error}"
        moment = time.time()
        for name, value in values.items():
            self.found[name] = {"MetricName": name, "Value": value, "Timestamp": moment}
        slow = ", ".join(dropped)
        return (
            f"MetricDefinitions: the Regex of {slow} is too slow for this log, and used no more"
            if slow
            else None
        )

    def close(self) -> None:
        """End the process that looks for values."""
        with self.lock:
            self.patterns = []
            if self.matcher:
                self.matcher.kill()
                self.matcher.communicate()

    def _ask_matcher(self, text: str) -> tuple[dict[str, float], list[str]]:
        """Return the values in a line, and the names of the metrics that were given up."""
        if self.matcher is None:
            command = [sys.executable, "-I", "-S", MATCHER]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            # In a session of its own, Ctrl-C does not reach the process.
            self.matcher = subprocess.Popen(command, **pipes, start_new_session=True)
            self.matcher.stdin.write(json.dumps(self.patterns) + "\n")
        self.matcher.stdin.write(json.dumps(text) + "\n")
        self.matcher.stdin.flush()
        return json.loads(self.matcher.stdout.readline())
