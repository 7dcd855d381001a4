"""The report's timeline: what each host did, as inline SVG without a script."""

from collections.abc import Iterable
from itertools import pairwise
from xml.etree.ElementTree import Element

from sagemaker_rehearsal.jobs.record import Checkpoint, Instance, Record
from sagemaker_rehearsal.report.charts import ticks
from sagemaker_rehearsal.report.goodput import Goodput, Row, phases
from sagemaker_rehearsal.report.markup import clock, make_table, node

# Heights: above the first host, of a host, of its bar.
TOP_HEIGHT = 24
ROW_HEIGHT = 40
BAR_HEIGHT = 16
# Checkpoints of a host that are drawn are this far apart, in shares of the timeline.
CHECKPOINT_ROOM = 0.008
# Rows of the table, at most: the last ones.
MAX_ROWS = 500
WORDS = {
    "start-up": "start-up",
    "kept": "training that was kept",
    "lost": "training that was lost",
    "ending": "after the last line of progress",
    "gap": "no instance",
    "restored": "checkpoints restored",
    "saved": "checkpoint saved",
    "copied": "checkpoint in S3",
    "warned": "interrupted, warned by SIGTERM",
    "unwarned": "interrupted without a warning",
    "fault": "fault",
}


class Timeline:
    """Draws one job, from its creation to `now`."""

    def __init__(self, record: Record, goodput: Goodput, *, now: float) -> None:
        self.record = record
        self.goodput = goodput
        self.now = now
        names = {instance.host for attempt in record.attempts for instance in attempt.instances}
        self.hosts = sorted(names, key=lambda name: (len(name), name))
        times = [
            instance.released or now
            for attempt in record.attempts
            for instance in attempt.instances
        ]
        self.start = record.created
        self.end = max([*times, now, record.created + 0.1])
        self.bottom = TOP_HEIGHT + ROW_HEIGHT * len(self.hosts)
        # The kinds of marks that were drawn, which the legend explains.
        self.used: set[str] = set()
        # What was drawn: its time, host, words, and how long it took.
        self.rows: list[tuple[float, str, str, str]] = []

    def figure(self) -> Element | None:
        """Return the timeline with its legend; None if there was no instance."""
        if not self.hosts:
            return None
        title = node("title", f"Timeline of {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}")
        summary = (
            f"{len(self.record.attempts)} attempts, {len(self.record.interruptions)} interruptions."
        )
        svg = node("svg", title, node("desc", summary), role="img", height=self.bottom + 26)
        svg.append(self._draw_patterns())
        svg.extend(self._draw_axis())
        for host in self.hosts:
            svg.extend(self._draw_host(host))
        svg.extend(self._draw_interruptions())
        svg.extend(self._draw_faults())
        svg.extend(
            node("text", host, class_="host", x=0, y=self._y(host) - 5) for host in self.hosts
        )
        keys = [
            node("li", node("i", class_=f"key {name}"), words)
            for name, words in WORDS.items()
            if name in self.used
        ]
        return node(
            "figure",
            node("ul", *keys, class_="legend"),
            node("div", svg, class_="timeline"),
            node("details", node("summary", "The values"), *self._table()),
        )

    def _table(self) -> list[Element]:
        """Return what is drawn as a table, by time."""
        rows = [
            [f"+{clock(time - self.start)}", host, words, duration]
            for time, host, words, duration in sorted(self.rows)[-MAX_ROWS:]
        ]
        return make_table(
            "The timeline; times since the job was created.",
            ["from", "host", "what", "for"],
            rows,
            words=["host", "what", "for"],
        )

    def _x(self, time: float) -> str:
        return f"{100 * (time - self.start) / (self.end - self.start):.3f}%"

    def _y(self, host: str) -> int:
        """Return the y at which the bar of a host begins."""
        return TOP_HEIGHT + ROW_HEIGHT * self.hosts.index(host) + ROW_HEIGHT - BAR_HEIGHT - 6

    def _draw_bar(self, kind: str, host: str, start: float, end: float, words: str) -> Element:
        self.used.add(kind)
        self.rows.append((start, host, words, clock(end - start)))
        width = f"{max(0.05, 100 * (end - start) / (self.end - self.start)):.3f}%"
        title = node("title", f"{host}, {words}: {clock(end - start)}")
        return node(
            "rect",
            title,
            class_=kind,
            x=self._x(start),
            width=width,
            y=self._y(host),
            height=BAR_HEIGHT,
        )

    def _draw_patterns(self) -> Element:
        """Return the patterns that mark the start-up and lost training without colour."""
        size = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
        return node(
            "defs",
            node(
                "pattern",
                node("rect", width=6, height=6, class_="ground"),
                node("path", d="M0 0h3v6h-3z", class_="stripe"),
                id="hatch",
                patternTransform="rotate(45)",
                **size,
            ),
            node(
                "pattern",
                node("path", d="M0 0h2v6h-2zM4 0h2v6h-2z", class_="bar"),
                id="bars",
                **size,
            ),
        )

    def _draw_axis(self) -> Iterable[Element]:
        """Yield the times since the job was created."""
        for time in ticks(0.0, self.end - self.start, as_time=True):
            x = self._x(self.start + time)
            yield node("line", class_="grid", x1=x, x2=x, y1=TOP_HEIGHT, y2=self.bottom + 4)
            yield node(
                "text",
                clock(time),
                x=x,
                y=self.bottom + 18,
                text_anchor="middle" if time else "start",
            )

    def _draw_host(self, host: str) -> Iterable[Element]:
        """Yield what a host did, attempt after attempt."""
        instances = [
            (row, instance)
            for row, attempt in zip(self.goodput.rows, self.record.attempts, strict=True)
            for instance in attempt.instances
            if instance.host == host
        ]
        for (_, instance), (row, next_instance) in pairwise(instances):
            if instance.released and next_instance.started > instance.released:
                yield self._draw_bar(
                    "gap",
                    host,
                    instance.released,
                    next_instance.started,
                    f"no instance before attempt {row.number}",
                )
        for row, instance in instances:
            yield from self._draw_instance(row, instance)

    def _draw_instance(self, row: Row, instance: Instance) -> Iterable[Element]:
        """Yield the phases of an instance, and a mark where its checkpoints were restored."""
        for kind, start, end in phases(row, instance, self.now):
            yield self._draw_bar(
                kind, instance.host, start, end, f"attempt {row.number}, {WORDS[kind]}"
            )
        if instance.restored_files:
            self.used.add("restored")
            words = (
                f"{instance.restored_files} files, {instance.restored_bytes / 1e6:.1f} MB restored "
                "from S3"
            )
            mark = node(
                "path",
                node("title", f"{instance.host}, {words}"),
                class_="restored",
                d="M-4 0h8l-4 6z",
            )
            at = instance.training or instance.started
            self.rows.append((at, instance.host, words, ""))
            yield node("svg", mark, x=self._x(at), y=self._y(instance.host) - 7, width=1, height=7)
        yield from self._draw_checkpoints(row, instance)

    def _draw_checkpoints(self, row: Row, instance: Instance) -> Iterable[Element]:
        """Yield where checkpoints were saved and where S3 had them, as far as there is room."""
        free = self.start
        for checkpoint in list(instance.checkpoints):
            name = f"attempt {row.number}, checkpoint of step {checkpoint.step:,}"
            words = _describe_copy(checkpoint)
            self.rows.append((checkpoint.saved, instance.host, name, words))
            if checkpoint.saved < free:
                continue
            free = checkpoint.saved + CHECKPOINT_ROOM * (self.end - self.start)
            for kind, time in (("saved", checkpoint.saved), ("copied", checkpoint.in_s3)):
                if time is not None:
                    self.used.add(kind)
                    yield node(
                        "circle",
                        node("title", f"{instance.host}, {name}: {words}"),
                        class_=kind,
                        cx=self._x(time),
                        cy=self._y(instance.host) + BAR_HEIGHT + 5,
                        r=3,
                    )

    def _draw_faults(self) -> Iterable[Element]:
        """Yield a mark above the host's bar for each fault that has happened."""
        for fault in self.record.faults:
            if not fault.applied or fault.host not in self.hosts:
                continue
            self.used.add("fault")
            x = self._x(fault.time)
            y = self._y(fault.host)
            what = ", ".join(filter(None, ["fault", fault.kind, fault.target, fault.why]))
            duration = "" if fault.ended is None else clock(fault.ended - fault.time)
            self.rows.append((fault.time, fault.host, what, duration))
            title = node("title", f"{fault.host}, {what}")
            yield node("line", title, class_="fault", x1=x, x2=x, y1=y - 9, y2=y - 1)

    def _draw_interruptions(self) -> Iterable[Element]:
        """Yield a line for each interruption, and its number where there is room.

        The line is thick at the hosts that were interrupted.
        """
        free = self.start
        for number, interruption in enumerate(self.record.interruptions, start=1):
            warning = "warned" if interruption.warned else "unwarned"
            self.used.add(warning)
            x = self._x(interruption.time)
            words = (
                f"Interruption {number}: {', '.join(interruption.hosts)}, {warning}, "
                f"{interruption.why}"
            )
            hosts = ", ".join(interruption.hosts)
            what = f"interruption {number}, {warning}, {interruption.why}"
            self.rows.append((interruption.time, hosts, what, ""))
            yield node(
                "line",
                node("title", words),
                class_=warning,
                x1=x,
                x2=x,
                y1=TOP_HEIGHT - 6,
                y2=self.bottom,
            )
            for host in set(interruption.hosts) & set(self.hosts):
                y = self._y(host)
                yield node(
                    "line", class_=f"{warning} taken", x1=x, x2=x, y1=y - 3, y2=y + BAR_HEIGHT + 3
                )
            if interruption.time >= free:
                yield node(
                    "text",
                    str(number),
                    class_=f"number {warning}",
                    x=x,
                    y=TOP_HEIGHT - 10,
                    text_anchor="middle",
                )
                free = interruption.time + 0.04 * (self.end - self.start)


def _describe_copy(checkpoint: Checkpoint) -> str:
    """Return when S3 had a checkpoint, in words."""
    if checkpoint.in_s3 is None:
        return "not in S3"
    return f"in S3 after {clock(checkpoint.in_s3 - checkpoint.saved)}"
