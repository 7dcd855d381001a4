"""A job's log lines: to files, to CloudWatch Logs, to the record of its progress."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from botocore.exceptions import ClientError

from rehearsal.jobs import record

GROUP = "/aws/sagemaker/TrainingJobs"
EVENT = 256 * 1024 - 26  # bytes of one event, at most (AWS: PutLogEvents)
BATCH = 500
SHOWN = 50  # the last lines of each host, for the live view


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield what chunks say line by line, as soon as it is said; what is too long for an event is several lines."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        while len(rest) > EVENT:
            whole, rest = [*whole, rest[:EVENT]], rest[EVENT:]
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace").rstrip("\r")


def set_aside(folder: Path) -> None:
    """Rename the folder that an earlier job of the same name has left: NAME.1, as no job's name has a full stop."""
    if folder.exists():
        number = next(
            number
            for number in count(1)
            if not folder.with_name(f"{folder.name}.{number}").exists()
        )
        folder.rename(folder.with_name(f"{folder.name}.{number}"))


class Logs:
    """The streams of a job, one for each host: JOB/algo-1-1700000000. A restart goes on in the same stream."""

    def __init__(self, client, job: str, folder: Path) -> None:
        self.client, self.job, self.folder, self.made = client, job, folder, int(time.time())
        self.waiting: dict[str, list[dict]] = {}
        self.last: dict[str, deque[str]] = {}
        self.lock, self.sending = threading.Lock(), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, host: str) -> None:
        """Make a host's stream, unless it is there."""
        with self.lock:
            if host in self.last:
                return
            self.last[host], self.waiting[host] = deque(maxlen=SHOWN), []
        stream = {"logStreamName": self._stream(host)}
        for call, more in (
            (self.client.create_log_group, {}),
            (self.client.create_log_stream, stream),
        ):
            try:
                call(logGroupName=GROUP, **more)
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceAlreadyExistsException":
                    raise

    def line(self, host: str, text: str) -> record.Point | None:
        """Take a line, and return what it says of the progress, if it does."""
        now = time.time()
        with self.lock:
            self.last[host].append(text)
            message = text.encode()[:EVENT].decode(errors="ignore")
            if message:  # the service refuses an empty one
                self.waiting[host].append({"timestamp": int(now * 1000), "message": message})
            with (self.folder / f"{host}.log").open("a") as file:
                file.write(text + "\n")
        return record.point(text, now)

    def send(self) -> None:
        """Put the lines that wait to CloudWatch Logs."""
        with self.sending:
            with self.lock:
                waiting = {host: events for host, events in self.waiting.items() if events}
                self.waiting = {host: [] for host in self.last}
            for host, events in waiting.items():
                for start in range(0, len(events), BATCH):
                    self.client.put_log_events(
                        logGroupName=GROUP,
                        logStreamName=self._stream(host),
                        logEvents=events[start : start + BATCH],
                    )

    def shown(self) -> dict[str, list[str]]:
        """Return the last lines of each host."""
        with self.lock:
            return {host: list(lines) for host, lines in self.last.items()}

    def _stream(self, host: str) -> str:
        return f"{self.job}/{host}-{self.made}"
