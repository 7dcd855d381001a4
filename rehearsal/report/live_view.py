"""What goes on: in a terminal a table of the jobs and their last log lines, elsewhere a plain line for each change."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rehearsal.jobs.masking import Mask
from rehearsal.jobs.record import ENDED, Instance, Interruption, Record
from rehearsal.report.goodput import moment
from rehearsal.report.markup import clock

SECONDS = 0.5  # between two looks
NEWEST_ENDED = 5  # jobs that are shown of those that ended
# of a job's log, its title included; where there is no room for as many, it is not shown
LEAST_LINES = 4
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
STYLES = {"Completed": "green", "Failed": "red", "Stopped": "yellow"}

Jobs = Callable[[], Sequence[tuple[Record, Mapping[str, Sequence[str]]]]]
"""Returns each job's record and its last log lines by host, which nobody changes any more."""


class View:
    """Shows the jobs while it is entered."""

    def __init__(self, jobs: Jobs, *, console: Console | None = None) -> None:
        self.jobs, self.console = jobs, console or Console()
        self.shown: Live | Printer = Printer(self)
        if self.console.is_terminal:
            self.shown = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=1 / SECONDS
            )

    def __enter__(self) -> "View":
        self.shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.stop()

    def render(self) -> RenderableType:
        """Return what the terminal shows now, no higher than it is."""
        found = sorted(self.jobs(), key=lambda one: one[0].created, reverse=True)
        ended = [record for record, _ in found if record.status in ENDED]
        running = [one for one in found if one[0].status not in ENDED]
        # the table's head, what is left out, and the line of the cursor
        height = self.console.height - 3
        first = [record for record, _ in running][: max(1, height)]
        last = ended[: max(0, min(NEWEST_ENDED, height - len(first)))]
        parts: list[RenderableType] = (
            [_table(first + last)] if first + last else [Text("No job yet.", style="dim")]
        )
        left_out = {"running": len(running) - len(first), "ended": len(ended) - len(last)}
        if said := ", ".join(f"{count} more {what}" for what, count in left_out.items() if count):
            parts.append(Text(said, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, *_logs(running, height - len(first) - len(last)))


class Printer:
    """Prints a line for each change, from a thread of its own."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.seen: dict[tuple[str, float, str], list[str]] = {}
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to look at the jobs."""
        self.thread.start()

    def stop(self) -> None:
        """Print what changed until now, and no more."""
        self.ending.set()
        self.thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self.ending.wait(SECONDS)
            for record, _ in self.view.jobs():
                for line in self._changes(record):
                    self.view.console.print(Text(line), soft_wrap=True)

    def _changes(self, record: Record) -> Iterator[str]:
        """Yield what is new of a job."""
        for kind, found in (
            ("status", [f"{one.status}: {one.message}" for one in record.transitions]),
            ("interruption", [_interruption(record, one) for one in record.interruptions]),
            ("end", [_end(record)] if record.status in ENDED else []),
        ):
            before = self.seen.get((record.name, record.created, kind), [])
            for place, words in enumerate(found):
                if words not in before[place : place + 1]:  # a message may change, too
                    yield plain(f"{record.name} {Mask(record.request).text(words)}")
            self.seen[record.name, record.created, kind] = found


def plain(text: str) -> str:
    """Return what a line shows at its end, without anything that would steer the terminal."""
    # a progress bar writes over itself
    rest = ESCAPES.sub("", text).rstrip("\r\n").rpartition("\r")[2]
    return "".join(letter if letter.isprintable() else " " for letter in rest)


def _interruption(record: Record, one: Interruption) -> str:
    """Return an interruption in words."""
    warned = "warned" if one.warned else "not warned"
    step = "" if one.step is None else f" at step {one.step}"
    return (
        f"interruption after {clock(one.time - record.created)}{step}: {', '.join(one.hosts)}, "
        f"{warned}, {one.why}"
    )


def _end(record: Record) -> str:
    """Return the end of a job in words."""
    why = f": {record.failure}" if record.failure else ""
    return f"{record.status} after {clock(moment(record) - record.created)}{why}"


def _table(records: Sequence[Record]) -> Table:
    """Return the table of the jobs: one line each."""
    made = Table(box=None, expand=True, header_style="dim", pad_edge=False)
    for name, ratio in (("job", 4), ("status", None), ("hosts", 5), ("progress", 5)):
        made.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    made.add_column("cut", justify="right", no_wrap=True)
    made.add_column("time", justify="right", no_wrap=True)
    for record in records:
        status = (
            record.secondary
            if record.status == "InProgress" and record.transitions
            else record.status
        )
        said = Mask(record.request).text(record.failure) if record.failure else _progress(record)
        cells = [record.name, status, _hosts(record), said, str(len(record.interruptions) or "")]
        elapsed = clock(moment(record) - record.created)
        made.add_row(
            *(Text(plain(cell)) for cell in cells), elapsed, style=STYLES.get(record.status, "")
        )
    return made


def _hosts(record: Record) -> str:
    """Return what the hosts of the last attempt do: how many of them, or which one."""
    groups: dict[str, list[str]] = {}
    for one in record.attempts[-1].instances if record.attempts else []:
        groups.setdefault(_state(one), []).append(one.host)
    return ", ".join(
        f"{names[0] if len(names) == 1 else len(names)} {state}" for state, names in groups.items()
    )


def _state(one: Instance) -> str:
    """Return what an instance does, and how its container ended."""
    status = "" if one.exit_status is None else f"exit {one.exit_status}"
    if one.reclaimed:
        return f"reclaimed {status}".rstrip()
    return status or ("released" if one.released else "training" if one.training else "starting")


def _progress(record: Record) -> str:
    """Return the last line of progress, in short."""
    points = [point for attempt in record.attempts[-1:] for point in attempt.points[-1:]]
    if not points:
        return ""
    values = points[0].values
    shown = [name for name in values if "loss" in name][:1] + [
        name for name in values if name.endswith("/s")
    ][:1]
    parts = [f"epoch {values['epoch']:g}"] if "epoch" in values else []
    return " ".join(
        [f"step {points[0].step}", *parts, *(f"{name} {values[name]:.4g}" for name in shown)]
    )


def _logs(
    running: Sequence[tuple[Record, Mapping[str, Sequence[str]]]], room: int
) -> Iterator[RenderableType]:
    """Yield the last log lines of as many of the newest jobs as there is room for, each line cut to the width."""
    count = min(len(running), max(0, room) // LEAST_LINES)
    for record, hosts in running[:count]:
        yield Rule(Text(plain(record.name)), align="left", style="dim")
        each = room // count - 1
        share = max(1, each // max(1, len(hosts)))
        lines = [
            (host, line) for host, said in sorted(hosts.items()) for line in list(said)[-share:]
        ]
        for host, line in lines[:each]:
            yield Text.assemble(
                (f"{plain(host)} ", "cyan"), plain(line), no_wrap=True, overflow="ellipsis"
            )
