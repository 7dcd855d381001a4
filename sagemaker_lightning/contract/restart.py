"""A restart of a job's program in its container, and what it has cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict


class RestartDescription(TypedDict):
    """A ContainerRestart as model.json has it."""

    reason: str
    step: int | None
    resumed_step: int | None
    lost_steps: int | None
    seconds: float | None


@dataclass(frozen=True)
class ContainerRestart:
    """A start of the program after a fault."""

    why: str
    """The fault, in one line."""
    step: int | None
    """The optimizer step at which it came; None if no rank had trained."""
    at: float
    """When it came, in seconds of time.monotonic() of this host."""
    resumed_step: int | None = None
    """The optimizer step with which the training continued; None as long as it has not."""
    seconds: float | None = None
    """From the fault to the end of the first batch after it."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Return the restart that `fields`, its attributes by name, describe."""
        return cls(**fields)

    @property
    def lost_steps(self) -> int | None:
        """How many optimizer steps have to be taken once more."""
        if self.resumed_step is None or self.step is None:
            return None
        return max(self.step - self.resumed_step, 0)

    def continued(self, step: int, at: float) -> Self:
        """Return it with what is known once the training continues.

        Args:
            step: The optimizer step with which it continues.
            at: When its first batch was done, in seconds of time.monotonic().
        """
        return replace(self, resumed_step=step, seconds=at - self.at)

    def described(self) -> RestartDescription:
        """Return it as model.json has it."""
        return {
            "reason": self.why,
            "step": self.step,
            "resumed_step": self.resumed_step,
            "lost_steps": self.lost_steps,
            "seconds": None if self.seconds is None else round(self.seconds, 2),
        }
