"""A job's log lines: written to files and CloudWatch Logs, and read for progress."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from botocore.exceptions import ClientError

from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs import record
from sagemaker_rehearsal.locks import alive, locked

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
# Limits of AWS's PutLogEvents: bytes of one event, and of a request's events; each event counts
# 26 bytes more than its message.
EVENT_OVERHEAD_BYTES = 26
MAX_EVENT_BYTES = 256 * 1024 - EVENT_OVERHEAD_BYTES
MAX_BATCH_BYTES = 1024 * 1024
MAX_BATCH_EVENTS = 500
# How many last lines of each host the live view shows, and how many last characters of each.
SHOWN_LINES = 50
SHOWN_CHARACTERS = 2000
# The file in a job's folder of reports that says which rehearsal writes there.
OWNER = ".rehearsal"


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a stream of chunks, each as soon as it is complete.

    What is too long for an event becomes several lines.
    """
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        while len(rest) > MAX_EVENT_BYTES:
            whole = [*whole, rest[:MAX_EVENT_BYTES]]
            rest = rest[MAX_EVENT_BYTES:]
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest:
        yield rest.decode(errors="replace").rstrip("\r")


def batches(events: Iterable[dict]) -> Iterator[list[dict]]:
    """Yield events in groups that one request can have."""
    batch: list[dict] = []
    size = 0
    for event in events:
        event_size = len(event["message"].encode()) + EVENT_OVERHEAD_BYTES
        if batch and (len(batch) == MAX_BATCH_EVENTS or size + event_size > MAX_BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(event)
        size += event_size
    if batch:
        yield batch


def make_folder(folder: Path, owner: Path) -> None:
    """Make the folder of a job's reports.

    That of an earlier job of the same name is renamed to NAME.1, NAME.2, ... No job's name has a
    full stop, so the new name is free.

    Args:
        folder: The folder.
        owner: The folder that the job's rehearsal has for its jobs (owner.py).

    Raises Refused if it is that of another rehearsal, which still runs and writes there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        if folder.exists():
            # Without a file, nobody writes there any more.
            with contextlib.suppress(OSError, ValueError):
                other = Path((folder / OWNER).read_text())
                if other != owner and alive(other):
                    raise Refused(
                        "ResourceInUse",
                        f"Another rehearsal that runs has its reports of a job of this name in "
                        f"{folder}; give the job another name, or the rehearsal another --folder",
                    )
            number = next(
                number
                for number in count(1)
                if not folder.with_name(f"{folder.name}.{number}").exists()
            )
            folder.rename(folder.with_name(f"{folder.name}.{number}"))
        folder.mkdir()
        (folder / OWNER).write_text(str(owner))


class Logs:
    """The log streams of a job, one for each host: JOB/algo-1-1700000000.

    A restart continues the same stream.
    """

    def __init__(self, client, job: str, folder: Path) -> None:
        self.client = client
        self.job = job
        self.folder = folder
        self.made = int(time.time())
        self.waiting: dict[str, list[dict]] = {}
        self.last: dict[str, deque[str]] = {}
        self.lock = threading.Lock()
        self.sending = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, host: str) -> None:
        """Make a host's stream, unless it exists."""
        with self.lock:
            if host in self.last:
                return
            self.last[host] = deque(maxlen=SHOWN_LINES)
            self.waiting[host] = []
        stream = {"logStreamName": self._stream(host)}
        for call, stream_argument in (
            (self.client.create_log_group, {}),
            (self.client.create_log_stream, stream),
        ):
            try:
                call(logGroupName=LOG_GROUP, **stream_argument)
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceAlreadyExistsException":
                    raise

    def line(self, host: str, text: str) -> record.Point | None:
        """Take a line; return the progress that it reports, None if it reports none."""
        moment = time.time()
        with self.lock:
            self.last[host].append(text[-SHOWN_CHARACTERS:])
            message = text.encode()[:MAX_EVENT_BYTES].decode(errors="ignore")
            # The service refuses an empty message.
            if message:
                self.waiting[host].append({"timestamp": int(moment * 1000), "message": message})
        return record.point(text, moment)

    def path(self, host: str) -> Path:
        """Return the file of a host's lines."""
        return self.folder / f"{host}.log"

    def write(self, host: str, text: str) -> None:
        """Write a line to the host's file; OSError if that cannot be done."""
        with self.path(host).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def send(self) -> None:
        """Send the waiting lines to CloudWatch Logs.

        Raises what has kept some of them from being sent; the others are sent all the same.
        """
        problem = None
        with self.sending:
            with self.lock:
                waiting = {host: events for host, events in self.waiting.items() if events}
                self.waiting = {host: [] for host in self.last}
            for host, events in waiting.items():
                for batch in batches(events):
                    try:
                        self.client.put_log_events(
                            logGroupName=LOG_GROUP,
                            logStreamName=self._stream(host),
                            logEvents=batch,
                        )
                    except Exception as error:
                        problem = error
        if problem:
            raise problem

    def shown(self) -> dict[str, list[str]]:
        """Return the last lines of each host."""
        with self.lock:
            return {host: list(lines) for host, lines in self.last.items()}

    def _stream(self, host: str) -> str:
        return f"{self.job}/{host}-{self.made}"
