"""What happened to a job, and when: written while it runs, read by the API, the live view and the report.

Times are seconds since the epoch, as `time.time()` gives them.
"""

import re
import time
from dataclasses import asdict, dataclass, field, replace

from rehearsal.jobs.masking import Mask

ENDED = ("Completed", "Failed", "Stopped")

# A line of progress is one with `step=`; each of its name=value pairs is a point of that name's curve.
RESUMED = re.compile(r"\bresuming from step (\d{1,15})(?!\d)")
PROVED = re.compile(r"\bresumed at step \d{1,15}: ([^\n]{1,1000})")
STEP = re.compile(r"(?:^|\s)step=(\d{1,15})(?!\d)")
PAIR = re.compile(
    r"(?:^|\s)([A-Za-z][\w/]*)=(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|nan|-?inf)(?=[\s/,;]|$)"
)


@dataclass
class Point:
    """What one line of progress said: the global step, and its name=value pairs, `step` and `epoch` among them."""

    time: float
    step: int
    values: dict[str, float]


@dataclass
class Instance:
    """One host of one attempt: billed from `started` to `released`, its container runs from `training` to `ended`."""

    host: str
    instance_type: str
    started: float
    training: float | None = None
    ended: float | None = None
    released: float | None = None
    exit_status: int | None = None
    reclaimed: bool = False
    restored_files: int = 0  # of checkpoints, from S3, before its container started
    restored_bytes: int = 0

    def release(self) -> None:
        """It is given back: now, unless it was before."""
        self.released = self.released or time.time()


@dataclass
class Attempt:
    """The time from a start of the instances to their end; a job that is never interrupted has one."""

    number: int  # from 1
    instances: list[Instance] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    resumed: int | None = None  # the step that its log says it went on from
    proved: str = ""  # what its log says of how it went on


@dataclass
class Interruption:
    """A spot instance, or several, taken away."""

    time: float
    hosts: list[str]
    warned: bool  # whether SIGTERM came before SIGKILL
    why: str  # the rule that it comes from, or "by hand"
    gap: float  # seconds without capacity, before the next start
    step: int | None  # the last step seen in the log


@dataclass
class Transition:
    """One of SecondaryStatusTransitions."""

    status: str
    message: str
    start: float
    end: float | None = None


@dataclass
class Record:
    """All of one job."""

    name: str
    request: dict  # CreateTrainingJob's
    created: float
    status: str = "InProgress"  # TrainingJobStatus
    transitions: list[Transition] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    # what differs from the service, clashes of files, failing copies
    notes: list[str] = field(default_factory=list)
    failure: str | None = None  # FailureReason
    artifacts: str | None = None  # the address of model.tar.gz
    training_start: float | None = None
    training_end: float | None = None
    modified: float = 0.0

    @property
    def secondary(self) -> str:
        """SecondaryStatus."""
        return self.transitions[-1].status

    @property
    def spot(self) -> bool:
        """Whether its instances can be taken away."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def step(self) -> int | None:
        """The last step seen in the log of this attempt."""
        points = self.attempts[-1].points if self.attempts else []
        return points[-1].step if points else None

    def billable(self, now: float) -> float:
        """Return the seconds that an instance was there, of the longest in each attempt: what the service bills."""
        spans = [
            [(one.released or now) - one.started for one in attempt.instances]
            for attempt in self.attempts
        ]
        return sum(max(found, default=0.0) for found in spans)

    def masked(self) -> "Record":
        """Return it without the secrets of its request, as it may be kept and shown."""
        mask = Mask(self.request)
        return replace(
            self,
            request=mask.request,
            transitions=[replace(one, message=mask.text(one.message)) for one in self.transitions],
            interruptions=[replace(one, why=mask.text(one.why)) for one in self.interruptions],
            attempts=[replace(one, proved=mask.text(one.proved)) for one in self.attempts],
            notes=[mask.text(one) for one in self.notes],
            failure=self.failure and mask.text(self.failure),
        )

    def as_json(self) -> dict:
        """Return it as JSON has it, without secrets."""
        return asdict(self.masked())


def point(line: str, now: float) -> Point | None:
    """Return what a log line says of the progress, if it does: see STEP."""
    if not (found := STEP.search(line)):
        return None
    return Point(now, int(found[1]), {name: float(value) for name, value in PAIR.findall(line)})
