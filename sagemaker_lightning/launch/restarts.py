"""Whether a program that did not end well is started again in its container: one table.

All hosts tell each other how their programs ended, and each looks the same faults up here. So they
come to the same decision.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import LAST_LINE, LOST_PEER, NO_LINE
from sagemaker_lightning.contract.hyperparameters import MAX_RESTARTS
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.nodes.messages import Fault, FaultKind

MOST = 3
"""How often a program is started again within WINDOW_SECONDS, if the job does not say."""
WINDOW_SECONDS = 3600.0
DEATHS_AT_START = 2
"""After so many, of the same kind in a row and before any step, the next one ends the job."""
VARIABLE = "SAGEMAKER_LIGHTNING_MAX_RESTARTS"
"""The job's variable that sets another number; the hyperparameter `max_restarts` does, too."""


@dataclass
class Restarts:
    """The restarts that a job has taken, and how many it may take."""

    most: int = MOST
    taken: list[ContainerRestart] = field(default_factory=list)
    copies: Path | None = None
    """The folder in memory for copies of the program's state; None if there are none."""

    def why_not(self, faults: Mapping[str, Fault | None], now: float) -> str:
        """Return why the program is not started again; "" if it is.

        Args:
            faults: How the program ended, by host; None for a host that does not say.
            now: The time, in seconds of time.monotonic().
        """
        if not self.most:
            return "restarts are off"
        if silent := [host for host, fault in faults.items() if not fault]:
            return f"{silent[0]} is gone"
        known = {host: fault for host, fault in faults.items() if fault}
        kinds = {fault.kind for fault in known.values()}
        if FaultKind.STOP in kinds:
            return "the job was asked to stop"
        if FaultKind.MISTAKE in kinds:
            return "the same would happen again"
        why = cause(known).why
        reached = step_reached(known.values())
        # The same fault twice at one step is not a coincidence. At a start, which may take a
        # minute, it may be one.
        times = 1 if reached is not None else DEATHS_AT_START
        before = self.taken[-times:]
        if len(before) == times and all(
            each.step == reached and _alike(each.why) == _alike(why) for each in before
        ):
            return "it came back at the same step" if reached is not None else "it came back"
        if last_step(known.values()) is None and FaultKind.DEATH not in kinds:
            return "no step was trained"
        recent = [restart for restart in self.taken if now - restart.at < WINDOW_SECONDS]
        if len(recent) >= self.most:
            return f"the limit within {WINDOW_SECONDS / 60:.0f} minutes is {self.most}"
        return ""

    def summary(self, why_not: str) -> str:
        """Return what a line about the job's end says of its restarts; "" if there were none.

        Args:
            why_not: Why there is no further restart.
        """
        if not self.taken:
            return ""
        count = len(self.taken)
        return f"after {count} restart{'s' if count > 1 else ''} in the container: {why_not}"


VARYING = re.compile(r"""'[^']*'|"[^"]*"|\S*[\d/]\S*|\S*\b(nan|inf)\b\S*""")
"""What may be another one each time in an error that comes back: names, paths and numbers."""


def cause(faults: Mapping[str, Fault]) -> Fault:
    """Return the fault that caused the others: the first of the least doubtful kind."""
    return min(faults.values(), key=lambda fault: list(FaultKind).index(fault.kind))


def last_step(faults: Iterable[Fault]) -> int | None:
    """Return the newest optimizer step that a rank of any host had reached; None if none had."""
    return max((fault.step for fault in faults if fault.step is not None), default=None)


def step_reached(faults: Collection[Fault]) -> int | None:
    """Return the newest step that a rank had reached, or with which it had begun to train.

    None if no rank had begun.
    """
    step = last_step(faults)
    if step is not None:
        return step
    return max((fault.began_with for fault in faults if fault.began_with is not None), default=None)


def most(hyperparameters: Mapping[str, object], variables: Mapping[str, str]) -> int:
    """Return how many restarts the job allows.

    Raises UserError, which names the hyperparameter or the variable, if that is not a number.
    """
    flags = {f"--{name}": hyperparameters[name] for name in MAX_RESTARTS if name in hyperparameters}
    asked = flags or {VARIABLE: variables.get(VARIABLE, MOST)}
    name, value = next(iter(asked.items()))
    text = str(value).strip("'\" ")
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UserError(f"{name}: found {value!r}, expected a number, 0 or more")
    return int(text)


def _alike(why: str) -> str:
    """Return a reason without what differs each time: ranks, PIDs, numbers, names of files.

    torchrun tells of a rank by its number, other launchers by its PID; and whoever tells of a death
    first, the watch or the launcher, has words of its own.
    """
    if death := re.search(r"killed by SIG\w+", why):
        return death[0]
    # Ranks hear of one loss in several ways, as it happens.
    if LOST_PEER in why:
        return LOST_PEER
    # What a program wrote last may be of the step before, or of another rank.
    known = re.split(f"{LAST_LINE}|{NO_LINE}", why)[0]
    known = re.sub(r"^host [^\s:]+: ", "", known)  # a job of several hosts says where it came
    known = re.sub(r"(the rank with PID|rank) \d+", "#", known)
    return VARYING.sub("#", known)
