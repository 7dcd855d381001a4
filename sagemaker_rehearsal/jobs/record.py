"""The record of a job: what happened, and when.

It is written while the job runs. The API, the live view and the report read it. Times are seconds
since the epoch, as `time.time()` gives them.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice
from pathlib import PurePosixPath

from sagemaker_lightning.contract.errors import plain
from sagemaker_rehearsal.jobs.masking import Mask


class Status(StrEnum):
    """TrainingJobStatus."""

    IN_PROGRESS = "InProgress"
    STOPPING = "Stopping"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPED = "Stopped"


class Secondary(StrEnum):
    """SecondaryStatus, those that a job here can have."""

    STARTING = "Starting"
    DOWNLOADING = "Downloading"
    TRAINING = "Training"
    UPLOADING = "Uploading"
    INTERRUPTED = "Interrupted"
    RESTARTING = "Restarting"
    STOPPING = "Stopping"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPED = "Stopped"
    MAX_RUNTIME_EXCEEDED = "MaxRuntimeExceeded"
    MAX_WAIT_TIME_EXCEEDED = "MaxWaitTimeExceeded"


ENDED = (Status.COMPLETED, Status.FAILED, Status.STOPPED)

# A progress line has `step=`; each of its name=value pairs is a point of that name's curve.
RESUMED = re.compile(r"\bresuming from step (\d{1,15})(?!\d)(?:: ([^\s;]{1,500}))?")
SKIPPED = re.compile(r"\bwarning: (checkpoint [^\n]{1,500}; it is skipped)")
PROVED = re.compile(r"\bresumed at step \d{1,15}: ([^\n]{1,1000})")
# A start of the program in the same container after a fault, and what it has cost.
RESTARTS = re.compile(
    r"\brestart (\d{1,6}) in this container \(at most \d{1,6} an hour\)"
    r"(?:, (after step \d{1,15}))?:"
)
RESTARTED = re.compile(
    r"\brestart (\d{1,6}): (continued from step (\d{1,15}) after \d{1,9}\.\d s"
    r"(?:, (\d{1,15}) steps lost)?)"
)
STEP = re.compile(r"(?:^|\s)step=(\d{1,15})(?!\d)")
# A program may print anything: names have 100 characters at most, and a line has 100 pairs.
PAIR = re.compile(
    r"(?:^|\s)([A-Za-z][\w/]{0,99})=(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|nan|-?inf)(?=[\s/,;]|$)"
)
MAX_PAIRS = 100
MAX_SKIPPED = 10
MAX_RESTARTS = 100
# Checkpoints of one instance that are kept in mind: the last ones.
MAX_CHECKPOINTS = 1000
# Names of results that are kept.
MAX_RESULTS = 100
# Files of a model artifact whose digests are kept.
MAX_MODEL_FILES = 10_000


@dataclass
class Point:
    """One progress line: its step, and all its name=value pairs with `step`, `epoch`."""

    time: float
    step: int
    values: dict[str, float]


@dataclass
class Saved:
    """The newest checkpoint in a host's folder when the host ended."""

    step: int
    # For each of its files, why it is not in S3; "" if it is.
    missing: dict[str, str]


@dataclass
class Checkpoint:
    """A checkpoint that a host has saved, and its way to S3."""

    step: int
    # When its first file was seen.
    saved: float
    # When all of its files were in S3; None while they are not.
    in_s3: float | None = None


@dataclass
class Instance:
    """One host of one attempt.

    It is billed from `started` to `released`; its container runs from `training` to `ended`.
    """

    host: str
    instance_type: str
    started: float
    training: float | None = None
    ended: float | None = None
    released: float | None = None
    exit_status: int | None = None
    reclaimed: bool = False
    # Checkpoints from S3, restored before the container started.
    restored_files: int = 0
    restored_bytes: int = 0
    saved: Saved | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def note_restored(self, files: int, size: int) -> None:
        """Note which checkpoints were restored: how many files, and how many bytes."""
        self.restored_files = files
        self.restored_bytes = size

    def begin_training(self) -> None:
        """Note that its container runs from now on."""
        self.training = time.time()

    def end(self, exit_status: int) -> None:
        """Note that its container has ended."""
        self.exit_status = exit_status
        self.ended = time.time()

    def note_saved(self, saved: Saved | None) -> None:
        """Note the newest checkpoint in its folder, if there is one."""
        self.saved = saved

    def note_checkpoint(self, step: int, is_in_s3: bool) -> None:
        """Note that its folder has a checkpoint, and whether all files of it are in S3."""
        moment = time.time()
        checkpoint = next((each for each in reversed(self.checkpoints) if each.step == step), None)
        if checkpoint is None:
            checkpoint = Checkpoint(step, moment)
            self.checkpoints.append(checkpoint)
            del self.checkpoints[:-MAX_CHECKPOINTS]
        if not is_in_s3:
            checkpoint.in_s3 = None
        elif checkpoint.in_s3 is None:
            checkpoint.in_s3 = moment

    def reclaim(self) -> None:
        """Note that the service takes the instance away."""
        self.reclaimed = True

    def release(self) -> None:
        """Give the instance back now, unless it was given back before."""
        self.released = self.released or time.time()


@dataclass
class Restart:
    """A start of the program in the same containers, as the log says it."""

    # From 1, as in the log. Each host says it.
    number: int
    # What the log says of it.
    words: str
    # The step that it continued from, and when the log had that; None until then.
    step: int | None = None
    time: float | None = None
    # The step that training had reached before, which lines of progress need not say; None if the
    # log does not say it either.
    reached: int | None = None


@dataclass
class Attempt:
    """The time from a start of the instances to their end.

    A job that is never interrupted has one attempt.
    """

    # From 1.
    number: int
    instances: list[Instance] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    # The step at which the log says that the run resumes.
    resumed: int | None = None
    # The checkpoint that the log names for this step.
    resumed_from: str = ""
    # The checkpoints that the log says were skipped, and why.
    skipped: list[str] = field(default_factory=list)
    # What the log says about whether the run resumed exactly.
    proved: str = ""
    # The restarts of the program in its containers.
    restarts: list[Restart] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """The last step in its log."""
        return self.points[-1].step if self.points else None

    def note_resume(self, line: str) -> None:
        """Note what a log line says of the run's resume, if it says anything."""
        known = {each.number: each for each in self.restarts}
        begun = RESTARTS.search(line)
        if begun and int(begun[1]) not in known and len(known) < MAX_RESTARTS:
            words = begun[2] or "before the first step"
            self.restarts.append(Restart(int(begun[1]), words))
        on = RESTARTED.search(line)
        if on and (restart := known.get(int(on[1]))) and restart.step is None:
            restart.words += f", {on[2]}"
            restart.step = int(on[3])
            restart.reached = restart.step + int(on[4]) if on[4] else None
            restart.time = time.time()
        # A restart in the container resumes, too: where the instances continued is said before.
        if not self.restarts and (resumed := RESUMED.search(line)):
            self.resumed = int(resumed[1])
            self.resumed_from = PurePosixPath(resumed[2] or "").name
        if (skipped := SKIPPED.search(line)) and len(self.skipped) < MAX_SKIPPED:
            self.skipped += [skipped[1]] * (skipped[1] not in self.skipped)
        if proved := PROVED.search(line):
            self.proved = proved[1]


@dataclass
class Interruption:
    """The loss of one or several spot instances."""

    time: float
    hosts: list[str]
    # Whether SIGTERM came before SIGKILL.
    warned: bool
    # The rule that caused it, or "by hand".
    why: str
    # Seconds without capacity before the next start.
    gap: float
    # The last step in the log.
    step: int | None


@dataclass
class Fault:
    """A fault that was to happen to a host."""

    time: float
    host: str
    # One of KINDS in faults/rules.py.
    kind: str
    # What it has hit: a rank, a device, a file.
    target: str
    # The last step in the log.
    step: int | None
    # The rule that caused it, or "by hand".
    why: str
    # When it was over, if it ended before its host.
    ended: float | None = None
    # Why it did not happen; "" if it did.
    failed: str = ""

    @property
    def applied(self) -> bool:
        """Whether it happened."""
        return not self.failed

    def end(self) -> None:
        """Note that it is over."""
        self.ended = time.time()


@dataclass
class Transition:
    """One of SecondaryStatusTransitions."""

    status: Secondary
    message: str
    start: float
    end: float | None = None


class Verdict(StrEnum):
    """What a comparison with an uninterrupted run has shown of the model's bits."""

    SAME_BITS = "same bits"
    OTHER_BITS = "other bits"
    NONE = "no verdict"


@dataclass
class Comparison:
    """How a job compares with an uninterrupted run of the same request."""

    # The name of that run.
    other: str
    verdict: Verdict
    # Which files the verdict is of, or why there is none.
    explanation: str
    # The time of that run: from its creation to its end, of all its instances, of those by type.
    seconds: float
    instance_seconds: float
    seconds_by_type: dict[str, float]

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        other = "" if self.verdict == Verdict.NONE else f", compared with {self.other}"
        return f"{self.verdict}{other}: {self.explanation}"


@dataclass
class WarmPool:
    """What has become of a job's instances after its end: see warm_pools.py."""

    # The job from whose pool the job has them; empty if they are new.
    inherited_from: str = ""
    # The job that took them over, if one did.
    reused_by: str = ""
    # When that was, or when they were given back before their time.
    over: float | None = None


@dataclass
class Record:
    """Everything about one job."""

    name: str
    # The request of CreateTrainingJob.
    request: dict
    created: float
    status: Status = Status.IN_PROGRESS
    transitions: list[Transition] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    # Those that were to happen, and whether the job hung after them.
    faults: list[Fault] = field(default_factory=list)
    hung: bool = False
    # What differs from the service, name clashes of files, failed copies.
    notes: list[str] = field(default_factory=list)
    # The rules of --interrupt and --fault that never came due, each with the reason.
    never_due: list[str] = field(default_factory=list)
    # FailureReason.
    failure: str | None = None
    # The newest value that the log has of each name that begins with `test`.
    results: dict[str, float] = field(default_factory=dict)
    # The host that failed first, and the last lines of its log; empty if the job did not fail.
    failed_host: str = ""
    log_end: list[str] = field(default_factory=list)
    # The address of model.tar.gz.
    artifacts: str | None = None
    # The SHA-256 of each file in it, in hexadecimal digits, by its name.
    model_files: dict[str, str] = field(default_factory=dict)
    # With an uninterrupted run, if there was one.
    comparison: Comparison | None = None
    training_start: float | None = None
    training_end: float | None = None
    modified: float = 0.0
    warm_pool: WarmPool = field(default_factory=WarmPool)

    @property
    def secondary(self) -> Secondary:
        """The job's secondary status now."""
        return self.transitions[-1].status

    @property
    def instance_types(self) -> set[str]:
        """The types of all instances that the job has had."""
        return {
            instance.instance_type for attempt in self.attempts for instance in attempt.instances
        }

    @property
    def disturbed(self) -> bool:
        """Whether an instance was taken away, or a fault has happened."""
        return bool(self.interruptions or any(fault.applied for fault in self.faults))

    @property
    def spot(self) -> bool:
        """Whether the job's instances can be taken away."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def step(self) -> int | None:
        """The last step in the log of the latest attempt."""
        return self.attempts[-1].step if self.attempts else None

    def change(self, status: Secondary, message: str, is_final: bool) -> None:
        """Begin a secondary status; a final one ends at once."""
        moment = time.time()
        if self.transitions:
            self.transitions[-1].end = moment
        self.transitions.append(Transition(status, message, moment, moment if is_final else None))
        self.modified = moment
        if status == Secondary.STOPPING:
            self.status = Status.STOPPING

    def begin_training(self) -> None:
        """Note that the training begins now, unless it has begun before."""
        self.training_start = self.training_start or time.time()

    def end_training(self, failure: str | None) -> None:
        """Note that the training, if it has begun, ends now, and why it failed, if it did."""
        self.training_end = time.time() if self.training_start else None
        self.failure = failure and failure[:1024]

    def note_results(self, line: str) -> None:
        """Note what a log line says of a test: name=value pairs whose names begin with `test`."""
        if "test" not in line:
            return
        for pair in islice(PAIR.finditer(line), MAX_PAIRS):
            is_known = pair[1] in self.results
            if pair[1].startswith("test") and (is_known or len(self.results) < MAX_RESULTS):
                self.results[pair[1]] = float(pair[2])

    def note_log_end(self, shown: Mapping[str, list[str]]) -> None:
        """Note the end of the log of the host that failed first, given each host's last lines."""
        failed = [
            instance
            for attempt in self.attempts[-1:]
            for instance in attempt.instances
            if instance.exit_status and instance.ended
        ]
        if failed:
            self.failed_host = min(failed, key=lambda instance: instance.ended).host
            self.log_end = [plain(line) for line in shown.get(self.failed_host, [])]

    def set_artifacts(self, address: str, files: dict[str, str]) -> None:
        """Set the address of model.tar.gz, and the SHA-256 of each file in it by its name."""
        self.artifacts = address
        self.model_files = files

    def set_comparison(self, comparison: Comparison) -> None:
        """Set what a comparison with an uninterrupted run has shown."""
        self.comparison = comparison

    def note_never_due(self, flag: str, rules: list[str], reason: str) -> None:
        """Note which rules of a flag never came due, and why."""
        self.never_due += [f"{flag}={rule!r} never came due: {reason}" for rule in rules]

    def note_hung(self) -> None:
        """Note that the job has hung after a fault."""
        self.hung = True

    def finish(self, status: Status) -> None:
        """Set the status that the job ends with."""
        self.status = status

    def billable(self, now: float) -> float:
        """Return the billed seconds: in each attempt, those of the longest-lived instance."""
        spans = [
            [(instance.released or now) - instance.started for instance in attempt.instances]
            for attempt in self.attempts
        ]
        return sum(max(durations, default=0.0) for durations in spans)

    def masked(self) -> "Record":
        """Return the record without the secrets of its request, to be kept and shown."""
        mask = Mask(self.request)
        return replace(
            self,
            request=mask.request,
            transitions=[
                replace(item, message=mask.text(item.message)) for item in self.transitions
            ],
            interruptions=[replace(item, why=mask.text(item.why)) for item in self.interruptions],
            faults=[
                replace(item, target=mask.text(item.target), failed=mask.text(item.failed))
                for item in self.faults
            ],
            attempts=[_masked_attempt(item, mask) for item in self.attempts],
            notes=[mask.text(item) for item in self.notes],
            failure=self.failure and mask.text(self.failure),
            log_end=[mask.text(line) for line in self.log_end],
            model_files={mask.text(name): digest for name, digest in self.model_files.items()},
            comparison=self.comparison
            and replace(self.comparison, explanation=mask.text(self.comparison.explanation)),
        )

    def as_json(self) -> dict:
        """Return the record for JSON, without secrets."""
        return asdict(self.masked())


def _masked_attempt(attempt: Attempt, mask: Mask) -> Attempt:
    """Return an attempt without secrets in what its program has printed or written."""
    return replace(
        attempt,
        proved=mask.text(attempt.proved),
        resumed_from=mask.text(attempt.resumed_from),
        skipped=[mask.text(line) for line in attempt.skipped],
        instances=[
            replace(item, saved=_masked_saved(item.saved, mask)) for item in attempt.instances
        ],
    )


def _masked_saved(saved: Saved | None, mask: Mask) -> Saved | None:
    return saved and Saved(
        saved.step, {mask.text(name): why for name, why in saved.missing.items()}
    )


def point(line: str, now: float) -> Point | None:
    """Return the progress that a log line reports, None if it reports none: see STEP."""
    if not (match := STEP.search(line)):
        return None
    pairs = islice(PAIR.finditer(line), MAX_PAIRS)
    return Point(now, int(match[1]), {pair[1]: float(pair[2]) for pair in pairs})
