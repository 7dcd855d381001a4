"""The messages between hosts, and from a rank to its host, as lines of JSON.

A message is one JSON object on one line. It has only the fields that say something. Its texts are
printable and short, whoever has written them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Self

from sagemaker_lightning.contract.errors import printable
from sagemaker_lightning.contract.failures import FAILURE_REASON_CHARACTERS

HEARD = b"\n"
"""The watch's answer to a rank that says why it fails: the rank may end now."""


class Doubt(IntEnum):
    """How uncertain it is that a rank which ended without a reason is the cause."""

    NONE = 0
    """Nothing else explains its end."""
    OTHER_HOST = 1
    """A rank of another host may have caused it."""
    OWN_HOST = 2
    """Another process of its own host most likely caused it."""


@dataclass(frozen=True)
class _Message:
    """What can be sent."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if type(text := getattr(self, each.name)) is str:  # a StrEnum stays one
                object.__setattr__(self, each.name, _short(text))

    def line(self) -> bytes:
        """Return the message as it is sent."""
        return json.dumps(self.filled()).encode() + b"\n"

    def filled(self) -> dict[str, object]:
        """Return the fields that say something, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.filled() if isinstance(value, _Message) else value
            for name, value in values.items()
            if value is not None and value is not False
        }


@dataclass(frozen=True)
class Greeting(_Message):
    """The first message of a host to whoever calls it.

    Args:
        host: Name of the sender.
        settings: The settings of the sender, which must be the same on all hosts.
        restarts: How often the sender has started its program again.
    """

    host: str
    settings: Mapping[str, str]
    restarts: int = 0

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """Return the greeting in a line; None if the line has something else."""
        fields = _parsed(line)
        host = fields.get("host")
        settings = fields.get("settings")
        if not isinstance(host, str) or not isinstance(settings, dict):
            return None
        if not all(isinstance(value, str) for value in settings.values()):
            return None
        restarts = fields.get("restarts")
        return cls(host, settings, restarts if type(restarts) is int else 0)


@dataclass(frozen=True)
class Suspicion(_Message):
    """A rank that died, which may be the reason to end.

    Args:
        why: How it died, in one line.
        doubt: How uncertain it is that this is the cause.
    """

    why: str
    doubt: Doubt = Doubt.NONE


LONGEST_END_SECONDS = 86400.0
"""Seconds, at most, that are believed to lie between a fault and the end of its program."""


class FaultKind(StrEnum):
    """What has ended a program; of several, the first here is the likeliest cause of the others."""

    STOP = "stop"
    """A request to stop."""
    MISTAKE = "mistake"
    """A mistake of the user: the same would happen again."""
    ERROR = "error"
    """An error that a rank has raised."""
    DEATH = "death"
    """A signal, or an error of a device or of its memory."""
    EFFECT = "effect"
    """The loss of a peer: the cause is elsewhere."""


@dataclass(frozen=True)
class Fault(_Message):
    """How a host's program ended, where it did not end well everywhere.

    Args:
        why: The reason, in one line.
        kind: What it is.
        step: The optimizer step that the host's ranks had reached; None if they had trained none.
        began_with: The optimizer step with which a training had begun; None if none had.
        seconds_ago: How long ago it came, in seconds: hosts have no clock in common.
    """

    why: str
    kind: FaultKind
    step: int | None = None
    began_with: int | None = None
    seconds_ago: float = field(default=0.0, compare=False)

    @classmethod
    def parse(cls, fields: object) -> Self | None:
        """Return the fault in a message; None if the message has something else."""
        if not isinstance(fields, dict) or not isinstance(fields.get("why"), str):
            return None
        kind = fields.get("kind")
        if kind not in list(FaultKind):
            return None
        steps = (fields.get(name) for name in ("step", "began_with"))
        step, began_with = (each if type(each) is int else None for each in steps)
        ago = fields.get("seconds_ago")
        if not isinstance(ago, float) or not 0 <= ago < LONGEST_END_SECONDS:
            ago = 0.0
        return cls(fields["why"], FaultKind(kind), step, began_with, ago)

    def aged(self, seconds: float) -> Self:
        """Return the fault as it is, some seconds later."""
        return replace(self, seconds_ago=self.seconds_ago + seconds)


@dataclass(frozen=True)
class HostMessage(_Message):
    """What a host tells the others after its greeting.

    Args:
        status: Sent every few seconds: the sender lives, and this is what it does.
        ready: Whether the sender is ready for the programs to start.
        forks: Whether it can start its program without the imports; said with `ready`.
        idle: Whether the sender's program does nothing at its start, as 1 or 0: what is False is
            not sent.
        done: Whether the sender's program has ended well.
        dead: A rank of the sender that died.
        failed: Why the sender's program failed, or that of a host that the sender knows of.
        stopped: The same, where the cause is a request to stop.
        fault: How the sender's program ended. It is the last that the sender says.
    """

    status: str | None = None
    ready: bool = False
    forks: bool = False
    idle: int | None = None
    done: bool = False
    dead: Suspicion | None = None
    failed: str | None = None
    stopped: str | None = None
    fault: Fault | None = None

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """Return the message in a line; None if the line has something else."""
        fields = _parsed(line)
        if not fields:
            return None
        dead = fields.get("dead")
        suspicion = None
        if isinstance(dead, dict) and isinstance(dead.get("why"), str):
            doubt = dead.get("doubt")
            suspicion = Suspicion(
                dead["why"], Doubt(doubt) if doubt in list(Doubt) else Doubt.OWN_HOST
            )
        return cls(
            status=_text(fields, "status"),
            ready="ready" in fields,
            forks="forks" in fields,
            idle=int(bool(fields["idle"])) if "idle" in fields else None,
            done="done" in fields,
            dead=suspicion,
            failed=_text(fields, "failed"),
            stopped=_text(fields, "stopped"),
            fault=Fault.parse(fields.get("fault")),
        )

    def merged_with(self, newer: "HostMessage") -> "HostMessage":
        """Return what both messages say; where both say something, what the newer one says."""
        values = {name: getattr(newer, name) for name in newer.filled()}
        return replace(self, **values)


@dataclass(frozen=True)
class RankMessage(_Message):
    """What a rank tells the toolkit's process of its host.

    Args:
        rank: Name of the rank, sent once.
        status: What it does.
        done: Whether it is complete: its end is not a failure.
        failed: Why it fails.
        stopped: Why it ends, where the cause is a request to stop.
    """

    rank: str | None = None
    status: str | None = None
    done: bool = False
    failed: str | None = None
    stopped: str | None = None

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Return the message in a line."""
        fields = _parsed(line)
        return cls(
            rank=_text(fields, "rank"),
            status=_text(fields, "status"),
            done="done" in fields,
            failed=_text(fields, "failed"),
            stopped=_text(fields, "stopped"),
        )

    @property
    def explains_end(self) -> bool:
        """Whether the rank has said why it ends."""
        return self.done or self.failed is not None or self.stopped is not None


def _parsed(line: bytes) -> dict[str, object]:
    """Return the JSON object in a line; {} if it has none."""
    try:
        fields = json.loads(line or b"{}")
    except (ValueError, RecursionError):  # the other end speaks another protocol
        return {}
    return fields if isinstance(fields, dict) else {}


def _short(text: str) -> str:
    """Return a text as it may be shown: in one line that is no longer than a job's reason."""
    return printable(text[:FAILURE_REASON_CHARACTERS])[:FAILURE_REASON_CHARACTERS]


def _text(fields: Mapping[str, object], name: str) -> str | None:
    """Return a field that has to be a text; None if it is absent or something else."""
    value = fields.get(name)
    return value if isinstance(value, str) else None
