"""Shows what the jobs do, in the terminal.

A terminal gets a table of the jobs and their last log lines; another output gets a plain line for
each change.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sagemaker_lightning.contract.errors import plain
from sagemaker_rehearsal.jobs.masking import Mask
from sagemaker_rehearsal.jobs.record import ENDED, Record, Status
from sagemaker_rehearsal.report.fault_verdict import describe_injection
from sagemaker_rehearsal.report.summary import (
    cells_of,
    describe_end,
    describe_fault,
    describe_interruption,
)

# Seconds between two looks.
REFRESH_SECONDS = 0.5
# The number of ended jobs that are shown.
SHOWN_ENDED_JOBS = 5
# Lines of a job's log, its title included. Without room for them, the log is not shown.
LEAST_LOG_LINES = 4
STYLES = {Status.COMPLETED: "green", Status.FAILED: "red", Status.STOPPED: "yellow"}

Jobs = Callable[[], Sequence[tuple[Record, Mapping[str, Sequence[str]]]]]
"""Returns each job's record and its last log lines by host, which do not change any more."""


class View:
    """Shows the jobs inside a `with` block."""

    def __init__(self, jobs: Jobs, *, console: Console | None = None) -> None:
        self.jobs = jobs
        self.console = console or Console()
        self.shown: Live | Printer = Printer(self)
        if self.console.is_terminal:
            self.shown = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=1 / REFRESH_SECONDS,
            )

    def __enter__(self) -> "View":
        self.shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.stop()

    def render(self) -> RenderableType:
        """Return what the terminal shows now, no higher than the terminal."""
        jobs = sorted(self.jobs(), key=lambda job: job[0].created, reverse=True)
        ended = [record for record, _ in jobs if record.status in ENDED]
        running = [job for job in jobs if job[0].status not in ENDED]
        # Room for the table's head, the line about jobs that are left out, and the cursor's line.
        height = self.console.height - 3
        first = [record for record, _ in running][: max(1, height)]
        last = ended[: max(0, min(SHOWN_ENDED_JOBS, height - len(first)))]
        parts: list[RenderableType] = (
            [_make_table(first + last)] if first + last else [Text("No job yet.", style="dim")]
        )
        left_out = {"running": len(running) - len(first), "ended": len(ended) - len(last)}
        if summary := ", ".join(
            f"{count} more {state}" for state, count in left_out.items() if count
        ):
            parts.append(Text(summary, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, *_show_logs(running, height - len(first) - len(last)))


class Printer:
    """Prints a line for each change, from a thread of its own."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.seen: dict[tuple[str, float, str], list[str]] = {}
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start to watch the jobs."""
        self.thread.start()

    def stop(self) -> None:
        """Print the changes until now, and stop."""
        self.ending.set()
        self.thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self.ending.wait(REFRESH_SECONDS)
            for record, _ in self.view.jobs():
                for line in self._lines(record):
                    self.view.console.print(Text(line), soft_wrap=True)

    def _lines(self, record: Record) -> list[str]:
        """Return the lines to print of a job; of one that cannot be shown, why, once."""
        try:
            return [*self._changes(record)]
        # The other jobs are still shown.
        except Exception as error:
            line = f"{record.name} {describe_fault(error)}"
            lines_before = self.seen.setdefault((record.name, record.created, "fault"), [])
            if line in lines_before:
                return []
            lines_before.append(line)
            return [line]

    def _changes(self, record: Record) -> Iterator[str]:
        """Yield a line for each change of a job since the last call."""
        for kind, lines in (
            ("status", [f"{event.status}: {event.message}" for event in record.transitions]),
            ("injection", [describe_injection(record.created, event) for event in record.faults]),
            (
                "interruption",
                [describe_interruption(record.created, event) for event in record.interruptions],
            ),
            ("end", [describe_end(record), *record.never_due] if record.status in ENDED else []),
        ):
            lines_before = self.seen.get((record.name, record.created, kind), [])
            for place, words in enumerate(lines):
                # A message may change, too.
                if words not in lines_before[place : place + 1]:
                    yield f"{record.name} {plain(Mask(record.request).text(words))}"
            self.seen[record.name, record.created, kind] = lines


def _make_table(records: Sequence[Record]) -> Table:
    """Return the table of the jobs, one line each."""
    table = Table(box=None, expand=True, header_style="dim", pad_edge=False)
    for name, ratio in (("job", 4), ("status", None), ("hosts", 5), ("progress", 5)):
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    table.add_column("cut", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for record in records:
        cells = (Text(cell) for cell in cells_of(record))
        table.add_row(*cells, style=STYLES.get(record.status, ""))
    return table


def _show_logs(
    running: Sequence[tuple[Record, Mapping[str, Sequence[str]]]], room: int
) -> Iterator[RenderableType]:
    """Yield the last log lines of the newest jobs, as far as there is room.

    Each line is cut to the width of the terminal.
    """
    count = min(len(running), max(0, room) // LEAST_LOG_LINES)
    for record, hosts in running[:count]:
        yield Rule(Text(plain(record.name)), align="left", style="dim")
        lines_of_job = room // count - 1
        share = max(1, lines_of_job // max(1, len(hosts)))
        lines = [
            (host, line)
            for host, host_lines in sorted(hosts.items())
            for line in list(host_lines)[-share:]
        ]
        for host, line in lines[:lines_of_job]:
            yield Text.assemble(
                (f"{plain(host)} ", "cyan"), plain(line), no_wrap=True, overflow="ellipsis"
            )
