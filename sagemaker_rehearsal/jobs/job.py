"""One training job by the service's rules, from its creation to its end.

Each attempt has new, empty instances.
"""

import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_lightning.contract.errors import printable
from sagemaker_rehearsal.aws import rules
from sagemaker_rehearsal.faults.rules import Fault, Faults
from sagemaker_rehearsal.faults.schedule import DueInterruption, Rule, Schedule, named
from sagemaker_rehearsal.jobs import artifacts, folders, layout, record, warm_pools
from sagemaker_rehearsal.jobs.attempt import Attempt, Ended, Outcome
from sagemaker_rehearsal.jobs.channels import JobFailed
from sagemaker_rehearsal.jobs.logs import Logs, make_folder
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import ENDED, Interruption, Record, Secondary, Status
from sagemaker_rehearsal.settings import Settings

NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity due to "
    "InsufficientInstanceCapacity error"
)
UPLOADING = "Uploading generated training model"
# Notes of a job, and characters of each, at most.
MAX_NOTES = 200
MAX_NOTE_CHARACTERS = 1000
FINAL = {
    Secondary.COMPLETED: (Status.COMPLETED, "Training job completed"),
    Secondary.FAILED: (Status.FAILED, "Training job failed"),
    Secondary.STOPPED: (Status.STOPPED, "Training job stopped"),
    Secondary.MAX_RUNTIME_EXCEEDED: (
        Status.STOPPED,
        "Training job runtime exceeded MaxRuntimeInSeconds provided",
    ),
    Secondary.MAX_WAIT_TIME_EXCEEDED: (
        Status.STOPPED,
        "Training job wait time exceeded MaxWaitTimeInSeconds provided",
    ),
}


@dataclass
class JobContext:
    """What a job runs in: engine, clients, working folder, environment of its hosts."""

    engine: object
    # Returns a service's client, given the service's name.
    clients: Callable
    work: Path
    variables: dict[str, str]
    report: Callable[[Record, Path], None]


@dataclass
class Control:
    """The queue of a job: requests of others, and news of its hosts."""

    messages: queue.Queue = field(default_factory=queue.Queue)
    stop: bool = False
    # Give the hosts no time to end by themselves.
    immediately: bool = False

    def ask_to_stop(self, immediately: bool = False) -> None:
        """Request a stop (StopTrainingJob); `immediately`: by SIGTERM and SIGKILL together."""
        self.stop = True
        self.immediately = immediately
        self.messages.put(None)

    def next(self, until: float | None):
        """Wait for the next message; None if none comes until `until` (`time.time()`)."""
        try:
            seconds = (
                None if until is None else min(max(0.0, until - time.time()), threading.TIMEOUT_MAX)
            )
            return self.messages.get(timeout=seconds)
        except queue.Empty:
            return None


class Job(threading.Thread):
    """The thread of one job; others may read its `record`."""

    def __init__(
        self, record: Record, place: JobContext, settings: Settings, metrics: Metrics
    ) -> None:
        super().__init__(name=record.name, daemon=True)
        self.record = record
        self.place = place
        self.settings = settings
        self.metrics = metrics
        self.request = record.request
        self.hosts = layout.hosts(record.request)
        self.folder = settings.folder / record.name
        self.work = place.work / record.name
        make_folder(self.folder, place.work.parent)
        self.logs = Logs(place.clients("logs"), record.name, self.folder / "logs")
        self.schedule = Schedule(
            self._rules_for_hosts(), [host.name for host in self.hosts], str(settings.seed)
        )
        self.faults = Faults(
            self._faults_for_hosts(), [host.name for host in self.hosts], str(settings.seed)
        )
        self.control = Control()
        self.repairs = 0
        self.trained = 0.0
        self.longest = rules.longest(self.request)
        wait = (self.request.get("StoppingCondition") or {}).get("MaxWaitTimeInSeconds")
        self.latest = record.created + wait if wait else None
        self.changed(Secondary.STARTING, "Starting the training job")

    def start(self) -> None:
        """Start the job; if this machine has no thread left for it, the job fails."""
        try:
            super().start()
        except RuntimeError as error:
            self._finish(*_internal_error(error))

    def run(self) -> None:
        """Run the job, write its record and report; the job ends whatever fails."""
        try:
            threading.Thread(target=self._send, daemon=True).start()
            outcome = self._run_attempts()
        except Exception as error:
            outcome = _internal_error(error)
        self._finish(*outcome)

    def _finish(self, status: Secondary, failure: str | None) -> None:
        """Write the record and the report, and remove everything else."""
        self.record.end_training(failure)
        if status == Secondary.FAILED:
            self.record.note_log_end(self.logs.shown())
        self._note_rules_never_due()
        for instance in (
            host_instance for attempt in self.record.attempts for host_instance in attempt.instances
        ):
            instance.release()
        self.last("its files could not be removed", folders.remove, self.work)
        if not (warm_pools.seconds_kept(self.record) and warm_pools.leaves_instances(self.record)):
            cache = warm_pools.cache_of(self.record.name, self.place.work)
            self.last("its cache could not be removed", folders.remove, cache)
        self.last("its metrics could not be ended", self.metrics.close)
        self._send_all()
        self.changed(status, FINAL[status][1])
        self.last(
            "its report could not be written",
            self.place.report,
            replace(self.record, status=FINAL[status][0]),
            self.folder,
        )
        # Last: whoever sees this status finds the log and the report complete.
        self.record.finish(FINAL[status][0])

    def last(self, failed: str, step: Callable, *arguments) -> None:
        """Do one of the last steps; an error in it becomes a note and stops nothing."""
        try:
            step(*arguments)
        except Exception as error:
            print_traceback(error)
            self.note(f"{failed}: {type(error).__name__}: {error}")

    def _rules_for_hosts(self) -> list[Rule]:
        """Return the rules for this job: none without spot, else those whose hosts it has."""
        return self._fitting("--interrupt", self.settings.interrupt) if self.record.spot else []

    def _faults_for_hosts(self) -> list[Fault]:
        """Return the faults for this job: those whose hosts it has."""
        return self._fitting("--fault", self.settings.faults)

    def _fitting(self, flag: str, rules: list) -> list:
        """Return the rules whose hosts this job has; note the others."""
        host_names = {host.name for host in self.hosts}
        fitting = [rule for rule in rules if host_names.issuperset(named(rule.hosts))]
        for rule in rules:
            if rule not in fitting:
                self.note(
                    f"{flag}={rule.text!r} is not for this job, whose hosts are "
                    f"{', '.join(sorted(host_names))}"
                )
        return fitting

    def _note_rules_never_due(self) -> None:
        """Note which rules never came due, and why: a test by interruptions was none then."""
        record = self.record
        if record.training_start is None:
            reason = "the job ended before its training began"
        else:
            seconds = record.training_end - record.training_start
            step = "without a line with step="
            if record.step is not None:
                step = f"at step {record.step}"
            reason = f"the job's training ended after {seconds:.0f} s, {step}"
        rules, why = self.schedule.never_due(), reason
        if not record.spot:
            rules = self.settings.interrupt
            why = "the job is not a spot job (EnableManagedSpotTraining)"
        record.note_never_due("--interrupt", [rule.text for rule in rules], why)
        faults = [fault.text for fault in self.faults.never_due()]
        record.note_never_due("--fault", faults, reason)

    def note(self, line: str) -> None:
        """Add a line for the person to the record, once.

        The number of lines is limited to MAX_NOTES, because nobody reads more.
        """
        line = line[:MAX_NOTE_CHARACTERS]
        if line not in self.record.notes and len(self.record.notes) <= MAX_NOTES:
            self.record.notes.append(
                line if len(self.record.notes) < MAX_NOTES else "more notes are left out"
            )

    def changed(self, status: str, message: str) -> None:
        """Change the job to a secondary status."""
        self.record.change(status, message, is_final=status in FINAL)

    def _run_attempts(self) -> tuple[Secondary, str | None]:
        """Run attempts until the job ends; return its final status and the failure."""
        try:
            self._wait_for_instances()
            while True:
                outcome = self._run_attempt()
                if outcome.again is None:
                    return outcome.status, outcome.failure
                self._wait_for_capacity(outcome.again)
        except Ended as ended:
            self.changed(Secondary.STOPPING, "Stopping the training job")
            return ended.status, None
        except JobFailed as failed:
            return Secondary.FAILED, str(failed)[:1024]

    def check(self) -> None:
        """Raise Ended if the job must stop, or has waited for its longest time."""
        if self.control.stop:
            raise Ended(Secondary.STOPPED)
        if self.latest is not None and time.time() >= self.latest:
            raise Ended(Secondary.MAX_WAIT_TIME_EXCEEDED)

    def _wait_for_instances(self) -> None:
        """Wait, as a spot job does, while --no-capacity has one of the types; else JobFailed."""
        types = {host.instance_type for host in self.hosts}
        lacking = sorted(types.intersection(self.settings.no_capacity))
        if not lacking:
            return
        if not self.record.spot:
            raise JobFailed(f"{NO_CAPACITY}: {', '.join(lacking)}")
        names = [host.name for host in self.hosts]
        self._wait_for_capacity(DueInterruption(names, False, math.inf, "--no-capacity"))

    def _wait_for_capacity(self, due: DueInterruption) -> None:
        """Wait until there is capacity again."""
        until = time.time() + due.gap
        while time.time() < until:
            self.check()
            self.control.next(min(until, self.latest or until))

    def _run_attempt(self) -> Outcome:
        attempt = Attempt(self, len(self.record.attempts) + 1)
        try:
            attempt.prepare()
            self.changed(
                Secondary.TRAINING, "Training image download completed. Training in progress."
            )
            self.record.begin_training()
            began = time.time()
            outcome = attempt.watch(until=began + self.longest - self.trained)
            self.trained += time.time() - began
            outcome = self._repair(outcome)
            return (
                self._upload_artifacts(outcome, attempt)
                if outcome.again is None
                else self._check_retries(outcome)
            )
        finally:
            self.last("what an attempt has left could not be removed", attempt.close)

    def _repair(self, outcome: Outcome) -> Outcome:
        """Return a new start instead of a failure that a GPU may have caused (--repairs)."""
        gpus = any(host.instance_type.startswith(("ml.p", "ml.g")) for host in self.hosts)
        if outcome.status != Secondary.FAILED or not gpus or self.repairs >= self.settings.repairs:
            return outcome
        self.repairs += 1
        hosts = [host.name for host in self.hosts]
        due = DueInterruption(hosts, True, 0.0, f"repair {self.repairs} after {outcome.failure}")
        self.interrupted(due)
        return Outcome(again=due)

    def _check_retries(self, outcome: Outcome) -> Outcome:
        """Return a failure instead of a new start, if the request's retries are used up."""
        largest = (self.request.get("RetryStrategy") or {}).get("MaximumRetryAttempts")
        if largest is None or len(self.record.interruptions) <= largest:
            return outcome
        explanation = f"instances were lost {largest + 1} times, MaximumRetryAttempts is {largest}"
        return Outcome(Secondary.FAILED, f"InternalServerError: {explanation}")

    def interrupted(self, due: DueInterruption) -> None:
        """Record an interruption that begins; the hosts' program may continue for a while."""
        self.record.interruptions.append(
            Interruption(time.time(), due.hosts, due.warned, due.why, due.gap, self.record.step)
        )
        if due.why.startswith("repair"):
            self.changed(Secondary.RESTARTING, "Restarting the training job")
        else:
            self.changed(Secondary.INTERRUPTED, "Training job interrupted")

    def injected(self, faults: list[record.Fault]) -> None:
        """Record faults that have happened, or that were not possible."""
        self.record.faults += faults

    def _upload_artifacts(self, outcome: Outcome, attempt: Attempt) -> Outcome:
        """Upload the artifacts; if that fails, a completed job has failed."""
        self.changed(Secondary.UPLOADING, UPLOADING)
        try:
            self.record.set_artifacts(
                *artifacts.upload(
                    self.place.clients("s3"), self.request, attempt.folders, self.work, self.note
                )
            )
        except (ClientError, BotoCoreError, Boto3Error, OSError) as error:
            if outcome.status == Secondary.COMPLETED:
                return Outcome(
                    Secondary.FAILED, f"ClientError: Artifact upload failed: {error}"[:1024]
                )
            self.note(f"the artefacts could not be uploaded: {error}")
        return outcome

    def _send(self) -> None:
        """Send log lines repeatedly, until the job has ended."""
        while self.record.status not in ENDED:
            time.sleep(0.3)
            self._send_all()

    def _send_all(self) -> None:
        try:
            self.logs.send()
        # The job continues.
        except Exception as error:
            self.note(f"log lines were lost: {type(error).__name__}: {error}")


def print_traceback(error: Exception) -> None:
    """Print an error of the rehearsal; what it quotes of a job does not steer the terminal."""
    text = "".join(traceback.format_exception(error))
    print(printable(text, kept="\n"), end="", file=sys.stderr, flush=True)


def _internal_error(error: Exception) -> tuple[Secondary, str]:
    """Return the end of a job that failed by an error of the rehearsal itself.

    The error is reported as one of the service.
    """
    print_traceback(error)
    return (
        Secondary.FAILED,
        f"InternalServerError: the rehearsal failed: {type(error).__name__}: {error}",
    )
