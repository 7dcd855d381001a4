"""One training job, from its creation to its end, under the service's rules: each attempt has new, empty instances."""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from rehearsal.api import rules
from rehearsal.jobs import artifacts, folders, layout
from rehearsal.jobs.attempt import Attempt, Ended, Outcome
from rehearsal.jobs.channels import JobFailed
from rehearsal.jobs.logs import Logs, set_aside
from rehearsal.jobs.metrics import Metrics
from rehearsal.jobs.record import Interruption, Record, Transition
from rehearsal.jobs.schedule import Due, Rule, Schedule, named
from rehearsal.settings import Settings

UPLOADING = "Uploading generated training model"
NOTES = 200  # of a job, at most
FINAL = {
    "Completed": ("Completed", "Training job completed"),
    "Failed": ("Failed", "Training job failed"),
    "Stopped": ("Stopped", "Training job stopped"),
    "MaxRuntimeExceeded": ("Stopped", "Training job runtime exceeded MaxRuntimeInSeconds provided"),
    "MaxWaitTimeExceeded": (
        "Stopped",
        "Training job wait time exceeded MaxWaitTimeInSeconds provided",
    ),
}


@dataclass
class Place:
    """Where a job runs: the engine, the clients of its region, its working folder, the environment of its hosts."""

    engine: object
    clients: Callable  # the name of a service -> its client
    work: Path
    variables: dict[str, str]
    report: Callable[[Record, Path], None]


@dataclass
class Wishes:
    """What others want of a job, and what its hosts have to say: `next` wakes up for each."""

    messages: queue.Queue = field(default_factory=queue.Queue)
    stop: bool = False
    hurry: bool = False  # no time to end by themselves

    def ask_to_stop(self, hurry: bool = False) -> None:
        """StopTrainingJob; in a hurry, hosts get no time after SIGTERM."""
        self.stop, self.hurry = True, hurry
        self.messages.put(None)

    def next(self, until: float | None):
        """Return the next message, or None if there is none until that time (`time.time()`)."""
        try:
            seconds = (
                None if until is None else min(max(0.0, until - time.time()), threading.TIMEOUT_MAX)
            )
            return self.messages.get(timeout=seconds)
        except queue.Empty:
            return None


class Job(threading.Thread):
    """The job's own thread; `record` is what others may read."""

    def __init__(self, record: Record, place: Place, settings: Settings, metrics: Metrics) -> None:
        super().__init__(name=record.name, daemon=True)
        self.record, self.place, self.settings, self.metrics = record, place, settings, metrics
        self.request, self.hosts = record.request, layout.hosts(record.request)
        self.folder, self.work = settings.folder / record.name, place.work / record.name
        set_aside(self.folder)
        self.logs = Logs(place.clients("logs"), record.name, self.folder / "logs")
        self.schedule = Schedule(
            self._rules(), [host.name for host in self.hosts], str(settings.seed)
        )
        self.wishes, self.repairs, self.trained = Wishes(), 0, 0.0
        self.longest = rules.longest(self.request)
        wait = (self.request.get("StoppingCondition") or {}).get("MaxWaitTimeInSeconds")
        self.latest = record.created + wait if wait else None
        self.changed("Starting", "Starting the training job")

    def start(self) -> None:
        """Start the job; where this machine has no thread left for it, it has failed."""
        try:
            super().start()
        except RuntimeError as error:
            self._end(*_failed(error))

    def run(self) -> None:
        """Run the job, and write its record and report; whatever fails, it has an end."""
        try:
            threading.Thread(target=self._send, daemon=True).start()
            ended = self._to_the_end()
        except Exception as error:
            ended = _failed(error)
        self._end(*ended)

    def _end(self, status: str, failure: str | None) -> None:
        """Write the record and the report, and leave nothing else."""
        self.record.training_end = time.time() if self.record.training_start else None
        self.record.failure = failure and failure[:1024]
        for instance in (one for attempt in self.record.attempts for one in attempt.instances):
            instance.release()
        self.last("its files could not be removed", folders.remove, self.work)
        self.last("its metrics could not be ended", self.metrics.close)
        self._send_all()
        self.changed(status, FINAL[status][1])
        self.last(
            "its report could not be written",
            self.place.report,
            replace(self.record, status=FINAL[status][0]),
            self.folder,
        )
        self.record.status = FINAL[status][0]  # last: whoever sees it finds log and report complete

    def last(self, failed: str, step: Callable, *given) -> None:
        """Do one of the last steps; a fault in it is noted, and the job ends as it would without it."""
        try:
            step(*given)
        except Exception as error:
            traceback.print_exc()
            self.note(f"{failed}: {type(error).__name__}: {error}")

    def _rules(self) -> list[Rule]:
        """Return the rules that are for this job: a spot job that has the hosts they name."""
        if not self.record.spot:
            return []
        there = {host.name for host in self.hosts}
        fitting = [rule for rule in self.settings.interrupt if there.issuperset(named(rule.hosts))]
        for rule in self.settings.interrupt:
            if rule not in fitting:
                self.note(
                    f"--interrupt={rule.text!r} is not for this job, whose hosts are "
                    f"{', '.join(sorted(there))}"
                )
        return fitting

    def note(self, line: str) -> None:
        """Remember what the person should know, once; a program may make more of it than anybody reads."""
        if line not in self.record.notes and len(self.record.notes) <= NOTES:
            self.record.notes.append(
                line if len(self.record.notes) < NOTES else "more notes are left out"
            )

    def changed(self, status: str, message: str) -> None:
        """Go over to a secondary status."""
        now = time.time()
        if self.record.transitions:
            self.record.transitions[-1].end = now
        self.record.transitions.append(
            Transition(status, message, now, now if status in FINAL else None)
        )
        self.record.modified = now
        if status == "Stopping":
            self.record.status = "Stopping"

    def _to_the_end(self) -> tuple[str, str | None]:
        """Return the final secondary status and the reason of a failure."""
        try:
            while True:
                outcome = self._attempt()
                if outcome.again is None:
                    return outcome.status, outcome.failure
                self._wait(outcome.again)
        except Ended as ended:
            self.changed("Stopping", "Stopping the training job")
            return ended.status, None
        except JobFailed as failed:
            return "Failed", str(failed)[:1024]

    def check(self) -> None:
        """Raise Ended if the job is to stop, or has waited long enough."""
        if self.wishes.stop:
            raise Ended("Stopped")
        if self.latest is not None and time.time() >= self.latest:
            raise Ended("MaxWaitTimeExceeded")

    def _wait(self, due: Due) -> None:
        """Wait for capacity."""
        until = time.time() + due.gap
        while time.time() < until:
            self.check()
            self.wishes.next(min(until, self.latest or until))

    def _attempt(self) -> Outcome:
        attempt = Attempt(self, len(self.record.attempts) + 1)
        try:
            attempt.prepare()
            self.changed("Training", "Training image download completed. Training in progress.")
            self.record.training_start = self.record.training_start or time.time()
            began = time.time()
            outcome = attempt.watch(until=began + self.longest - self.trained)
            self.trained += time.time() - began
            outcome = self._repaired(outcome)
            return (
                self._uploaded(outcome, attempt)
                if outcome.again is None
                else self._retried(outcome)
            )
        finally:
            self.last("what an attempt has left could not be removed", attempt.close)

    def _repaired(self, outcome: Outcome) -> Outcome:
        """Return a new start in place of a failure, where a GPU may be at fault: --repairs."""
        gpus = any(host.instance_type.startswith(("ml.p", "ml.g")) for host in self.hosts)
        if outcome.status != "Failed" or not gpus or self.repairs >= self.settings.repairs:
            return outcome
        self.repairs += 1
        hosts = [host.name for host in self.hosts]
        due = Due(hosts, True, 0.0, f"repair {self.repairs} after {outcome.failure}")
        self.interrupted(due)
        return Outcome(again=due)

    def _retried(self, outcome: Outcome) -> Outcome:
        """Return a failure in place of a new start, if the request's retries are spent."""
        most = (self.request.get("RetryStrategy") or {}).get("MaximumRetryAttempts")
        if most is None or len(self.record.interruptions) <= most:
            return outcome
        lost = f"instances were lost {most + 1} times, MaximumRetryAttempts is {most}"
        return Outcome("Failed", f"InternalServerError: {lost}")

    def interrupted(self, due: Due) -> None:
        """Write down that instances are taken away, when it begins: their program may go on for a while."""
        self.record.interruptions.append(
            Interruption(time.time(), due.hosts, due.warned, due.why, due.gap, self.record.step)
        )
        if due.why.startswith("repair"):
            self.changed("Restarting", "Restarting the training job")
        else:
            self.changed("Interrupted", "Training job interrupted")

    def _uploaded(self, outcome: Outcome, attempt: Attempt) -> Outcome:
        """Put the artefacts to S3; a job whose artefacts cannot be uploaded has failed."""
        self.changed("Uploading", UPLOADING)
        try:
            self.record.artifacts = artifacts.upload(
                self.place.clients("s3"), self.request, attempt.folders, self.work, self.note
            )
        except (ClientError, BotoCoreError, Boto3Error, OSError) as error:
            if outcome.status == "Completed":
                return Outcome("Failed", f"ClientError: Artifact upload failed: {error}"[:1024])
            self.note(f"the artefacts could not be uploaded: {error}")
        return outcome

    def _send(self) -> None:
        """Send log lines again and again, until the job has ended."""
        while self.record.status in ("InProgress", "Stopping"):
            time.sleep(0.3)
            self._send_all()

    def _send_all(self) -> None:
        try:
            self.logs.send()
        except Exception as error:  # the job goes on
            self.note(f"log lines were lost: {type(error).__name__}: {error}")


def _failed(error: Exception) -> tuple[str, str]:
    """Return the end of a job by a fault of the rehearsal's own, which is told as one of the service's."""
    traceback.print_exception(error)
    return "Failed", f"InternalServerError: the rehearsal failed: {type(error).__name__}: {error}"
