"""When spot instances are taken away: rules that a person writes, as `at 40s` or `every ~5m of algo-2 unwarned`."""

import random
import re
from dataclasses import dataclass, field

LONGEST = 28 * 86400  # seconds of a time in a rule: MaxWaitTimeInSeconds' most
UNITS = {"s": 1, "m": 60, "h": 3600}
DURATION = r"\d+(?:\.\d+)?[smh]"
RULE = re.compile(
    rf"(?:at (?P<at>{DURATION})|at step (?P<step>\d+)"
    rf"|every (?P<about>~?)(?P<every>{DURATION})(?: (?P<times>[1-9]\d*) times)?)"
    rf"(?: of (?P<hosts>all|any|algo-\d+(?:,algo-\d+)*))?"
    rf"(?: (?P<warned>warned|unwarned|either))?(?: gap (?P<gap>{DURATION}))?"
)
ALLOWED = (
    "'at 40s', 'at step 120', 'every 5m', 'every ~5m' (at random, 5 minutes on average) or 'every "
    "~5m 100 times', each with 'of algo-2', 'of any' or 'of all', then 'warned', 'unwarned' or "
    "'either', then 'gap 30s' if wanted"
)


@dataclass(frozen=True)
class Rule:
    """One rule; its text says all of it.

    Attributes:
        at: Seconds after the first attempt's training began.
        step: The step whose line of the log sets it off.
        every: Seconds, after the training began or went on, till the next one: of each attempt.
        about: Whether `every` is the mean of an exponential distribution, as if each instant were equally likely.
        times: How often at most.
        hosts: `all`, `any` (one, drawn) or names, with commas.
        warned: `warned`, `unwarned` or `either` (drawn): whether SIGTERM comes before SIGKILL.
        gap: Seconds without capacity, before the next start.
    """

    text: str
    at: float | None
    step: int | None
    every: float | None
    about: bool
    times: int | None
    hosts: str
    warned: str
    gap: float


def parse(text: str) -> Rule:
    """Return the rule that a text is; ValueError says what is allowed."""
    found = RULE.fullmatch(" ".join(text.split()))
    if not found:
        raise ValueError(f"--interrupt: found {text!r}, allowed is {ALLOWED}")
    if found["every"] and seconds(found["every"]) == 0:
        raise ValueError(f"--interrupt: found {text!r}, allowed is a time above 0 after 'every'")
    if max(seconds(found[name]) or 0 for name in ("at", "every", "gap")) > LONGEST:
        raise ValueError(f"--interrupt: found {text!r}, allowed are times up to {LONGEST // 3600}h")
    return Rule(
        text=found[0],
        at=seconds(found["at"]),
        step=int(found["step"]) if found["step"] else None,
        every=seconds(found["every"]),
        about=bool(found["about"]),
        times=1 if not found["every"] else int(found["times"]) if found["times"] else None,
        hosts=found["hosts"] or "all",
        warned=found["warned"] or "warned",
        gap=seconds(found["gap"]) or 0.0,
    )


def seconds(text: str | None) -> float | None:
    """Return `1.5m` in seconds."""
    return None if text is None else float(text[:-1]) * UNITS[text[-1]]


@dataclass(frozen=True)
class Due:
    """An interruption whose moment has come."""

    hosts: list[str]
    warned: bool
    gap: float
    why: str


def ordered(order: object) -> tuple[str, list[str], bool, float]:
    """Return what an order by hand says: the job, its hosts, whether warned, the gap; ValueError if it does not."""
    names = ("name", "hosts", "warned", "gap")
    if not isinstance(order, dict) or set(order) != set(names):
        raise ValueError(
            f"interrupt: found {ascii(order)[:100]}, allowed is an object of {', '.join(names)}"
        )
    name, hosts, warned, gap = (order[each] for each in names)
    texts = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    number = isinstance(gap, int | float) and not isinstance(gap, bool) and 0 <= gap <= LONGEST
    for what, fits, allowed in (
        ("name", isinstance(name, str), "a job's name"),
        ("hosts", texts, "a list of names"),
        ("warned", isinstance(warned, bool), "true or false"),
        ("gap", number, f"seconds, 0 to {LONGEST}"),
    ):
        if not fits:
            raise ValueError(f"{what}: found {ascii(order[what])[:100]}, allowed is {allowed}")
    return name, list(dict.fromkeys(hosts)), warned, gap


@dataclass
class Schedule:
    """The rules of one job; what they draw comes from a seed."""

    rules: list[Rule]
    hosts: list[str]
    seed: str
    fired: dict[int, int] = field(default_factory=dict)  # how often, by the rule's number
    # when next, for a rule that goes by the clock
    due_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for rule in self.rules:
            if unknown := set(named(rule.hosts)) - set(self.hosts):
                there = ", ".join(self.hosts)
                raise ValueError(
                    f"{rule.text!r} is of {', '.join(sorted(unknown))}; the job has {there}"
                )

    def begin(self, now: float, first: bool) -> None:
        """Take note that an attempt's training begins."""
        for number, rule in enumerate(self.rules):
            if rule.every is not None:
                self.due_at[number] = now + (
                    self.random.expovariate(1 / rule.every) if rule.about else rule.every
                )
            elif rule.at is not None and first:
                self.due_at[number] = now + rule.at

    def next(self) -> float | None:
        """Return when the next one by the clock is due."""
        return min(
            (when for number, when in self.due_at.items() if self._left(number)), default=None
        )

    def due(self, now: float, step: int | None) -> Due | None:
        """Return the interruption that is due, if one is, and count it."""
        for number, rule in enumerate(self.rules):
            by_clock = number in self.due_at and now >= self.due_at[number]
            by_step = rule.step is not None and step is not None and step >= rule.step
            if self._left(number) and (by_clock or by_step):
                self.fired[number] = self.fired.get(number, 0) + 1
                self.due_at.pop(number, None)
                return Due(self._hosts(rule.hosts), self._warned(rule.warned), rule.gap, rule.text)
        return None

    def _left(self, number: int) -> bool:
        times = self.rules[number].times
        return times is None or self.fired.get(number, 0) < times

    def _hosts(self, hosts: str) -> list[str]:
        if hosts == "any":
            return [self.random.choice(self.hosts)]
        return named(hosts) or self.hosts

    def _warned(self, warned: str) -> bool:
        return self.random.random() < 0.5 if warned == "either" else warned == "warned"


def named(hosts: str) -> list[str]:
    """Return the hosts that a rule names."""
    return [] if hosts in ("all", "any") else hosts.split(",")
