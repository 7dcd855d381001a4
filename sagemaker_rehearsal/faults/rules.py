"""Rules for faults, e.g. `freeze rank 1 at step 40 of algo-2 for 30s`, and orders by hand."""

import random
import re
from dataclasses import dataclass

from sagemaker_rehearsal.faults import schedule
from sagemaker_rehearsal.faults.schedule import DueInterruption, Schedule

KINDS = {
    "kill rank": "SIGKILL for one rank",
    "freeze rank": "SIGSTOP for one rank",
    "slow rank": "one rank runs for a tenth of the time",
    "cut network": "all packets of a host are dropped",
    "slow network": "a host sends 1 Mbit/s",
    "lossy network": "a tenth of a host's packets is dropped",
    "fill disk": "a host's checkpoint folder is full",
    "shift clock": "a host's clock is an hour ahead, within a second",
    "halve checkpoint": "the largest file of the newest checkpoint in S3 is cut in half",
    "flip checkpoint": "one bit of that file is changed",
}
"""What each kind of fault does."""
ANY = "any"
# Faults that last, until the end of their attempt without `for`.
LASTING = {
    "freeze rank",
    "slow rank",
    "cut network",
    "slow network",
    "lossy network",
    "fill disk",
    "shift clock",
}
OF_RANKS = {"kill rank", "freeze rank", "slow rank"}
OF_CHECKPOINTS = {"halve checkpoint", "flip checkpoint"}
FAULT = re.compile(
    rf"(?P<kind>{'|'.join(KINDS)}|{ANY})(?: (?P<rank>\d{{1,5}}))?(?: (?P<when>(?:at|every) .*?))?"
    rf"(?: of (?P<hosts>all|any|algo-\d+(?:,algo-\d+)*))?(?: for (?P<time>{schedule.DURATION}))?"
)
ALLOWED = (
    f"one of {', '.join(KINDS)} or {ANY} (drawn), after `rank` a rank's number if wanted; then "
    "a time as for --interrupt ('at 40s', 'at step 120', 'every ~5m'), 'of algo-2', 'of any' "
    "(default) or 'of all', 'for 30s'"
)


@dataclass(frozen=True)
class Fault:
    """What is to happen; `text` says all of it.

    Attributes:
        kind: One of KINDS, or ANY.
        rank: The local rank; None for one that is drawn.
        hosts: `all`, `any` (one, drawn at random) or names, separated by commas.
        seconds: How long it lasts; None to the end of the attempt.
        rule: When; None for now.
    """

    text: str
    kind: str
    rank: int | None
    hosts: str
    seconds: float | None
    rule: schedule.Rule | None


def parse(text: str, by_hand: bool = False) -> Fault:
    """Return the fault that a text stands for; ValueError says what is allowed.

    Args:
        text: The text.
        by_hand: Whether it happens now; then the text has no time.
    """
    name = "FAULT" if by_hand else "--fault"
    wrong = ValueError(f"{name}: found {text[:200]!r}, expected {ALLOWED}")
    match = FAULT.fullmatch(" ".join(text.split()))
    if not match:
        raise wrong
    if by_hand and match["when"]:
        raise ValueError(f"{name}: found {text[:200]!r}, expected no time: it happens at once")
    kind = match["kind"]
    if match["rank"] and kind not in OF_RANKS:
        raise ValueError(f"{name}: found {text[:200]!r}, expected a number after 'rank' alone")
    if match["time"] and kind not in LASTING | {ANY}:
        raise ValueError(
            f"{name}: found {text[:200]!r}, expected 'for' with what lasts: "
            f"{', '.join(sorted(LASTING))}"
        )
    seconds = schedule.seconds(match["time"])
    if seconds is not None and not 0 < seconds <= schedule.LONGEST_SECONDS:
        raise ValueError(
            f"{name}: found {text[:200]!r}, expected after 'for' a time above 0, up to "
            f"{schedule.LONGEST_SECONDS // 3600}h"
        )
    hosts = match["hosts"] or "any"
    rule = None
    if not by_hand:
        if not match["when"] or not schedule.TIME.fullmatch(match["when"]):
            raise wrong
        rule = schedule.parse(f"{match['when']} of {hosts}", "--fault")
    rank = int(match["rank"]) if match["rank"] else None
    return Fault(match[0], kind, rank, hosts, seconds, rule)


class Faults:
    """The faults of one job, by their rules; random choices come from a seed.

    Args:
        faults: Those with a rule.
        hosts: The names of the job's hosts.
        seed: Seed of what is drawn.
    """

    def __init__(self, faults: list[Fault], hosts: list[str], seed: str) -> None:
        self.faults = faults
        self.hosts = hosts
        # Beside those of the interruptions: these draw the same with and without faults.
        self.schedule = Schedule([fault.rule for fault in faults], hosts, f"faults {seed}")

    @property
    def random(self) -> random.Random:
        """The source of what is drawn."""
        return self.schedule.random

    def due(self, now: float, step: int | None) -> tuple[Fault, DueInterruption] | None:
        """Return the fault that is due, and its hosts, and count it; None if none is due."""
        due = self.schedule.due(now, step)
        if due is None:
            return None
        fault = self.faults[due.rule]
        # An interruption ends its attempt, and a fault does not.
        if fault.rule.every is not None:
            self.schedule.set_next(due.rule, now)
        return fault, due

    def now(self, fault: Fault) -> DueInterruption:
        """Return the hosts of a fault by hand."""
        names = schedule.named(fault.hosts)
        if fault.hosts == "any":
            names = [self.random.choice(self.hosts)]
        return DueInterruption(names or self.hosts, False, 0.0, "by hand")

    def never_due(self) -> list[Fault]:
        """Return the faults whose time never came."""
        fired = self.schedule.fired
        return [fault for number, fault in enumerate(self.faults) if number not in fired]
