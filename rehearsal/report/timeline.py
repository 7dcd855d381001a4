"""The timeline of the report: what each host did over wall time, as inline SVG that needs no script."""

from collections.abc import Iterable
from itertools import pairwise
from xml.etree.ElementTree import Element

from rehearsal.jobs.record import Instance, Record
from rehearsal.report.charts import ticks
from rehearsal.report.goodput import Goodput, Row, phases
from rehearsal.report.markup import clock, node

TOP, ROW, BAR = 24, 40, 16  # heights: above the first host, of a host, of its bar
WORDS = {
    "start-up": "start-up",
    "kept": "training that was kept",
    "lost": "training that was lost",
    "ending": "after the last line of progress",
    "gap": "no instance",
    "restored": "checkpoints restored",
    "warned": "interrupted, warned by SIGTERM",
    "unwarned": "interrupted without a warning",
}


class Timeline:
    """Draws one job, from its creation to `now`."""

    def __init__(self, record: Record, goodput: Goodput, *, now: float) -> None:
        self.record, self.goodput, self.now = record, goodput, now
        names = {one.host for attempt in record.attempts for one in attempt.instances}
        self.hosts = sorted(names, key=lambda name: (len(name), name))
        times = [one.released or now for attempt in record.attempts for one in attempt.instances]
        self.start, self.end = record.created, max([*times, now, record.created + 0.1])
        self.bottom = TOP + ROW * len(self.hosts)
        self.used: set[str] = set()  # what the legend explains

    def figure(self) -> Element | None:
        """Return the timeline and its legend; None without an instance."""
        if not self.hosts:
            return None
        title = node("title", f"Timeline of {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}")
        said = (
            f"{len(self.record.attempts)} attempts, {len(self.record.interruptions)} interruptions."
        )
        svg = node("svg", title, node("desc", said), role="img", height=self.bottom + 26)
        svg.append(self._hatch())
        svg.extend(self._axis())
        for host in self.hosts:
            svg.extend(self._host(host))
        svg.extend(self._interruptions())
        svg.extend(
            node("text", host, class_="host", x=0, y=self._y(host) - 5) for host in self.hosts
        )
        keys = [
            node("li", node("i", class_=f"key {name}"), words)
            for name, words in WORDS.items()
            if name in self.used
        ]
        return node(
            "figure", node("ul", *keys, class_="legend"), node("div", svg, class_="timeline")
        )

    def _x(self, time: float) -> str:
        return f"{100 * (time - self.start) / (self.end - self.start):.3f}%"

    def _y(self, host: str) -> int:
        """Return where the bar of a host begins."""
        return TOP + ROW * self.hosts.index(host) + ROW - BAR - 6

    def _bar(self, kind: str, host: str, start: float, end: float, words: str) -> Element:
        self.used.add(kind)
        width = f"{max(0.05, 100 * (end - start) / (self.end - self.start)):.3f}%"
        title = node("title", f"{host}, {words}: {clock(end - start)}")
        return node(
            "rect", title, class_=kind, x=self._x(start), width=width, y=self._y(host), height=BAR
        )

    def _hatch(self) -> Element:
        """Return the pattern that tells lost training from kept without its colour."""
        line = node("path", d="M0 0h3v6h-3z", class_="stripe")
        size = {
            "width": 6,
            "height": 6,
            "patternUnits": "userSpaceOnUse",
            "patternTransform": "rotate(45)",
        }
        return node(
            "defs",
            node(
                "pattern",
                node("rect", width=6, height=6, class_="ground"),
                line,
                id="hatch",
                **size,
            ),
        )

    def _axis(self) -> Iterable[Element]:
        """Yield the times since the job was created."""
        for time in ticks(0.0, self.end - self.start, as_time=True):
            x = self._x(self.start + time)
            yield node("line", class_="grid", x1=x, x2=x, y1=TOP, y2=self.bottom + 4)
            yield node(
                "text",
                clock(time),
                x=x,
                y=self.bottom + 18,
                text_anchor="middle" if time else "start",
            )

    def _host(self, host: str) -> Iterable[Element]:
        """Yield what a host did, attempt after attempt."""
        there = [
            (row, one)
            for row, attempt in zip(self.goodput.rows, self.record.attempts, strict=True)
            for one in attempt.instances
            if one.host == host
        ]
        for (_, one), (row, after) in pairwise(there):
            if one.released and after.started > one.released:
                yield self._bar(
                    "gap",
                    host,
                    one.released,
                    after.started,
                    f"no instance before attempt {row.number}",
                )
        for row, one in there:
            yield from self._instance(row, one)

    def _instance(self, row: Row, instance: Instance) -> Iterable[Element]:
        """Yield the phases of an instance, and a mark where its checkpoints were restored."""
        for kind, start, end in phases(row, instance, self.now):
            yield self._bar(kind, instance.host, start, end, f"attempt {row.number}, {WORDS[kind]}")
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
            yield node("svg", mark, x=self._x(at), y=self._y(instance.host) - 7, width=1, height=7)

    def _interruptions(self) -> Iterable[Element]:
        """Yield a line for each interruption, thick at the hosts that it took, and its number where there is room."""
        free = self.start
        for number, one in enumerate(self.record.interruptions, start=1):
            kind = "warned" if one.warned else "unwarned"
            self.used.add(kind)
            x = self._x(one.time)
            words = f"Interruption {number}: {', '.join(one.hosts)}, {kind}, {one.why}"
            yield node(
                "line", node("title", words), class_=kind, x1=x, x2=x, y1=TOP - 6, y2=self.bottom
            )
            for host in set(one.hosts) & set(self.hosts):
                y = self._y(host)
                yield node("line", class_=f"{kind} taken", x1=x, x2=x, y1=y - 3, y2=y + BAR + 3)
            if one.time >= free:
                yield node(
                    "text",
                    str(number),
                    class_=f"number {kind}",
                    x=x,
                    y=TOP - 10,
                    text_anchor="middle",
                )
                free = one.time + 0.04 * (self.end - self.start)
