"""Rules for the loss of spot instances, e.g. `every ~5m of algo-2 unwarned`."""

import random
import re
from dataclasses import dataclass, field

# Seconds of a time in a rule, at most: the maximum of MaxWaitTimeInSeconds.
LONGEST_SECONDS = 28 * 86400
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
DURATION = r"\d+(?:\.\d+)?[smh]"
TIME = re.compile(
    rf"(?:at (?P<at>{DURATION})|at step (?P<step>\d+)"
    rf"|every (?P<about>~?)(?P<every>{DURATION})(?: (?P<times>[1-9]\d*) times)?)"
)
RULE = re.compile(
    rf"{TIME.pattern}"
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
    """One rule; `text` says all of it.

    Attributes:
        at: Seconds after the first attempt's training began.
        step: The step that triggers the rule, when a log line has it.
        every: Seconds from one interruption to the next. In each attempt they count from the time
            when training began or continued.
        about: Whether `every` is the mean of an exponential distribution, as if each instant were
            equally likely.
        times: How often at most; None for no limit.
        hosts: `all`, `any` (one, drawn at random) or names, separated by commas.
        warned: Whether SIGTERM comes before SIGKILL: `warned`, `unwarned` or `either` (drawn).
        gap: Seconds without capacity before the next start.
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


def parse(text: str, flag: str = "--interrupt") -> Rule:
    """Return the rule that a text stands for; ValueError names the flag and what is allowed."""
    match = RULE.fullmatch(" ".join(text.split()))
    if not match:
        raise ValueError(f"{flag}: found {text!r}, expected {ALLOWED}")
    if match["every"] and seconds(match["every"]) == 0:
        raise ValueError(f"{flag}: found {text!r}, expected a time above 0 after 'every'")
    if max(seconds(match[name]) or 0 for name in ("at", "every", "gap")) > LONGEST_SECONDS:
        raise ValueError(f"{flag}: found {text!r}, expected times up to {LONGEST_SECONDS // 3600}h")
    return Rule(
        text=match[0],
        at=seconds(match["at"]),
        step=int(match["step"]) if match["step"] else None,
        every=seconds(match["every"]),
        about=bool(match["about"]),
        times=1 if not match["every"] else int(match["times"]) if match["times"] else None,
        hosts=match["hosts"] or "all",
        warned=match["warned"] or "warned",
        gap=seconds(match["gap"]) or 0.0,
    )


def seconds(text: str | None) -> float | None:
    """Return a duration like `1.5m` in seconds."""
    return None if text is None else float(text[:-1]) * UNIT_SECONDS[text[-1]]


@dataclass(frozen=True)
class DueInterruption:
    """An interruption whose time has come."""

    hosts: list[str]
    warned: bool
    gap: float
    why: str
    # The number of the rule in its schedule; None without one.
    rule: int | None = field(default=None, compare=False)


def ordered(order: object) -> tuple[str, list[str], bool, float]:
    """Return job, hosts, whether warned, and gap of an interruption by hand.

    Raises ValueError if `order` is not a valid order.
    """
    names = ("name", "hosts", "warned", "gap")
    if not isinstance(order, dict) or set(order) != set(names):
        raise ValueError(
            f"interrupt: found {ascii(order)[:100]}, expected an object of {', '.join(names)}"
        )
    name, hosts, warned, gap = (order[each] for each in names)
    hosts_are_names = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    gap_is_number = (
        isinstance(gap, int | float) and not isinstance(gap, bool) and 0 <= gap <= LONGEST_SECONDS
    )
    for field_name, is_valid, allowed in (
        ("name", isinstance(name, str), "a job's name"),
        ("hosts", hosts_are_names, "a list of names"),
        ("warned", isinstance(warned, bool), "true or false"),
        ("gap", gap_is_number, f"seconds, 0 to {LONGEST_SECONDS}"),
    ):
        if not is_valid:
            raise ValueError(
                f"{field_name}: found {ascii(order[field_name])[:100]}, expected {allowed}"
            )
    return name, list(dict.fromkeys(hosts)), warned, gap


@dataclass
class Schedule:
    """The rules of one job; random choices come from a seed."""

    rules: list[Rule]
    hosts: list[str]
    seed: str
    # How often each rule was applied, by its number.
    fired: dict[int, int] = field(default_factory=dict)
    # The next time of each rule that goes by the clock.
    due_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for rule in self.rules:
            if unknown := set(named(rule.hosts)) - set(self.hosts):
                host_names = ", ".join(self.hosts)
                raise ValueError(
                    f"{rule.text!r} is of {', '.join(sorted(unknown))}; the job has {host_names}"
                )

    def begin(self, now: float, first: bool) -> None:
        """Note that an attempt's training begins."""
        for number, rule in enumerate(self.rules):
            if rule.every is not None:
                self.set_next(number, now)
            elif rule.at is not None and first:
                self.due_at[number] = now + rule.at

    def set_next(self, number: int, now: float) -> None:
        """Set when a rule with `every` is due next."""
        rule = self.rules[number]
        self.due_at[number] = now + (
            self.random.expovariate(1 / rule.every) if rule.about else rule.every
        )

    def next(self) -> float | None:
        """Return when the next rule by the clock is due, None if there is none."""
        return min(
            (moment for number, moment in self.due_at.items() if self._has_left(number)),
            default=None,
        )

    def due(self, now: float, step: int | None) -> DueInterruption | None:
        """Return the interruption that is due, and count it; None if none is due."""
        for number, rule in enumerate(self.rules):
            by_clock = number in self.due_at and now >= self.due_at[number]
            by_step = rule.step is not None and step is not None and step >= rule.step
            if self._has_left(number) and (by_clock or by_step):
                self.fired[number] = self.fired.get(number, 0) + 1
                self.due_at.pop(number, None)
                return DueInterruption(
                    self._draw_hosts(rule.hosts),
                    self._draw_warned(rule.warned),
                    rule.gap,
                    rule.text,
                    number,
                )
        return None

    def never_due(self) -> list[Rule]:
        """Return the rules that never came due."""
        return [rule for number, rule in enumerate(self.rules) if number not in self.fired]

    def _has_left(self, number: int) -> bool:
        times = self.rules[number].times
        return times is None or self.fired.get(number, 0) < times

    def _draw_hosts(self, hosts: str) -> list[str]:
        if hosts == "any":
            return [self.random.choice(self.hosts)]
        return named(hosts) or self.hosts

    def _draw_warned(self, warned: str) -> bool:
        return self.random.random() < 0.5 if warned == "either" else warned == "warned"


def named(hosts: str) -> list[str]:
    """Return the hosts that a rule names; none for `all` and `any`."""
    return [] if hosts in ("all", "any") else hosts.split(",")
