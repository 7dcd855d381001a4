"""Goodput of hand-made examples, the report as a page, and what the terminal shows."""

import math
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from containers import ROOT
from environments import python_of
from records import attempt, interrupted, job, many, points

from sagemaker_rehearsal.jobs.record import (
    MAX_CHECKPOINTS,
    PROVED,
    Checkpoint,
    Record,
    Restart,
    Saved,
)
from sagemaker_rehearsal.report import charts, goodput, markup, summary
from sagemaker_rehearsal.report import page as report
from sagemaker_rehearsal.report.resumes import describe_resume

HOSTILE_TEXT = "</script></style><img src=x onerror=alert(1)> & [red]x[/red]"


# Goodput


@pytest.mark.parametrize("hosts", [1, 3])
def test_goodput_of_an_interruption(hosts: int):
    """Attempt 1 began at 10 s, was at step 30 at 40 s, and lost 10 steps.

    Its pace is one step a second.
    """
    measured = goodput.measure(interrupted(hosts), now=999.0)
    first_row, second_row = measured.rows
    assert first_row.seconds == {
        "start-up": 10 * hosts,
        "kept": 30 * hosts,
        "lost": 10 * hosts,
        "ending": 10 * hosts,
    }
    assert second_row.seconds == {
        "start-up": 10 * hosts,
        "kept": 40 * hosts,
        "lost": 0,
        "ending": 10 * hosts,
    }
    assert (first_row.first_step, first_row.last_step, first_row.kept_step) == (0, 40, 30)
    assert (second_row.first_step, second_row.last_step, second_row.kept_step) == (30, 70, 70)
    assert (measured.steps, measured.steps_lost, measured.steps_redone) == (70, 10, 10)
    assert (measured.instance_seconds, measured.kept_seconds) == (120 * hosts, 70 * hosts)
    assert measured.share == pytest.approx(70 / 120)
    assert measured.caveat is None


def test_goodput_without_the_step_that_the_log_names():
    """Then its first step in the log counts, at most the last one of an earlier attempt."""
    record = interrupted()
    record.attempts[1].resumed = None
    assert goodput.measure(record, now=0.0).rows[1].first_step == 40  # the line says 40
    record.attempts[1].points[0].step = 45
    assert goodput.measure(record, now=0.0).rows[1].first_step == 40  # 41 to 45 are its own work
    assert goodput.measure(record, now=0.0).steps_lost == 0


def test_goodput_of_work_after_the_last_line():
    """A checkpoint newer than the last line shows that the attempt got there.

    The attempt is taken to have continued at its pace, no longer than it ran.
    """
    record = interrupted()
    record.attempts[1].resumed = 44
    assert goodput.measure(record, now=0.0).rows[0].bounds == (10.0, 54.0, 54.0)
    record.attempts[1].resumed = 400  # 58 s at most: the container's end
    assert goodput.measure(record, now=0.0).rows[0].bounds == (10.0, 58.0, 58.0)


def test_goodput_of_an_attempt_that_another_one_undoes():
    """Attempt 3 resumes from before attempt 2 began, so both lose steps."""
    record = interrupted()
    record.attempts.append(attempt(3, 200, 300, points((210, 30), (290, 110)), resumed=20))
    measured = goodput.measure(record, now=0.0)
    assert [row.kept_step for row in measured.rows] == [20, 20, 110]
    # the container of the third attempt runs from 205 s
    assert [row.seconds["kept"] for row in measured.rows] == [20, 0, 85]
    assert measured.steps_lost == 20 + 40
    assert measured.steps_redone == 10 + 50  # 31 to 40, then 21 to 70
    assert measured.steps == 110


def restarted(*restarts: tuple[float, int], hosts: int = 1) -> Record:
    """Return a job of one attempt that was started again in its containers: (time, step)."""
    lines = points((20, 10), (30, 20), (50, 40), (70, 40), (90, 60))
    only = attempt(1, 0, 100, lines, hosts=hosts)
    only.restarts = [
        Restart(number, "", step, time) for number, (time, step) in enumerate(restarts, start=1)
    ]
    return job(only, modified=100.0)


@pytest.mark.parametrize(
    ("restarts", "lost_spans", "steps_lost"),
    [
        # 31 to 40 were lost at 50 s, and again done from 60 s on
        ([(60, 30)], [(40, 60)], 10),
        ([(60, 40)], [(50, 60)], 0),  # back to the step that was reached last
        # two at the same place, and a later one that goes back further
        ([(55, 30), (60, 30)], [(40, 60)], 10),
        ([(55, 30), (60, 20)], [(30, 60)], 20 + 0),
        ([(60, 0)], [(10, 60)], 40),  # back to the beginning, which was before the first line
        ([(15, 0)], [], 0),  # before the first line: start-up
    ],
)
def test_what_a_restart_in_the_container_has_cost_is_lost(restarts, lost_spans, steps_lost):
    """Training is 1 step a second, from 10 s on."""
    record = restarted(*restarts, hosts=2)
    measured = goodput.measure(record, now=100.0)
    (row,) = measured.rows
    lost = [
        span[1:]
        for span in goodput.phases(row, record.attempts[0].instances[0], 100.0)
        if span[0] == "lost"
    ]
    assert lost == [pytest.approx(span) for span in lost_spans]
    assert sum(row.seconds.values()) == pytest.approx(200) == measured.instance_seconds
    assert row.seconds["lost"] == pytest.approx(2 * sum(end - start for start, end in lost_spans))
    assert (measured.steps_lost, measured.steps_redone) == (steps_lost, steps_lost)
    assert measured.steps == 60
    if restarts == [(60, 30)]:  # its line has steps that no line of progress has
        record.attempts[0].restarts[0].reached = 43
        assert goodput.measure(record, now=100.0).steps_lost == 13


def test_a_restart_after_the_step_that_a_later_attempt_continued_from():
    """Attempt 2 resumes from step 20, so all after 30 s is lost in any case."""
    record = restarted((60, 30))
    record.attempts.append(attempt(2, 200, 260, points((220, 30), (250, 60)), resumed=20))
    measured = goodput.measure(record, now=300.0)
    assert measured.rows[0].seconds["kept"] == pytest.approx(20)
    assert measured.rows[0].seconds["lost"] == pytest.approx(60)
    # 21 to 40, and once more 31 to 60
    assert measured.steps_lost == 20 + 30


def test_steps_done_again_over_attempts():
    """Each time that a step is done counts, except the first, in any order of the attempts."""
    for spans, redone_steps in (
        ([(0, 40), (10, 30), (20, 50)], 20 + 20),
        # 16 to 20 for the third time, up to 40 for the second time
        ([(0, 40), (10, 20), (15, 60)], 10 + 25),
        ([(20, 50), (0, 40)], 20),
        ([(0, 10), (20, 30), (20, 30)], 10),  # a gap is nothing done again
        ([(0, 10), (10, 20), (20, 30)], 0),
        ([(0, 30)] * 3, 60),
    ):
        assert goodput._overlap(spans) == redone_steps, spans


@pytest.mark.parametrize("longest_host", [0, 1, 2])
def test_the_host_that_is_there_longest_is_billed(longest_host: int):
    """This holds for each attempt and any host; a host that still runs counts, too."""
    record = interrupted(3)
    record.attempts[0].instances[longest_host].started -= 7.0
    assert record.billable(999.0) == 60 + 7 + 60
    record.attempts[1].instances[longest_host].released = None
    assert record.billable(200.0) == 60 + 7 + 100


def test_goodput_of_an_attempt_without_progress():
    """An attempt without progress is all start-up.

    It was over before its first line, and takes nothing from the attempt before it.
    """
    record = job(
        attempt(1, 0, 60, points((20, 10), (50, 40))), attempt(2, 100, 130, []), modified=130.0
    )
    measured = goodput.measure(record, now=0.0)
    assert measured.rows[1].seconds == {"start-up": 30, "kept": 0, "lost": 0, "ending": 0}
    assert (measured.rows[1].first_step, measured.rows[1].bounds) == (None, None)
    assert (measured.steps, measured.steps_lost, measured.kept_seconds) == (40, 0, 40)


def test_goodput_of_a_running_job():
    """Instances that are not released are billed until now, and the figures say "so far"."""
    record = job(attempt(1, 0, None, points((20, 10), (50, 40))), status="InProgress")
    measured = goodput.measure(record, now=100.0)
    assert (measured.instance_seconds, measured.kept_seconds) == (100, 40)
    assert "so far" in measured.caveat


def test_goodput_of_nothing():
    """Without billed time there is no share; one line of progress is not enough to measure."""
    assert goodput.measure(job(status="Failed"), now=5.0, price=1.0).share is None
    single = goodput.measure(job(attempt(1, 0, 60, points((20, 10)))), now=5.0)
    assert (single.kept_seconds, single.steps) == (0, 10)
    assert goodput.measure(job(attempt(1, 0, 60, points()), status="Completed")).share is None
    assert single.rows[0].seconds["start-up"] == 20


def test_goodput_of_a_failed_job_says_so():
    record = interrupted()
    record.status = "Failed"
    measured = goodput.measure(record, now=0.0, price=3600.0, spot_price=3600.0)
    assert "failed" in measured.caveat
    assert measured.cost.saving is None


def test_cost():
    """On demand only 90 of 120 s are needed, at twice the price of spot.

    They are 70 s kept, 10 s of start-up and 10 s of ending; on spot all 120 s are paid.
    """
    cost = goodput.measure(interrupted(), now=0.0, price=72.0, spot_price=36.0).cost
    assert cost.on_demand == pytest.approx(90 * 72 / 3600)
    assert cost.spot == pytest.approx(120 * 36 / 3600)
    assert cost.saving == pytest.approx(100 * (1 - 1.2 / 1.8))
    assert goodput.measure(interrupted(), now=0.0, price=72.0).cost.spot is None
    assert goodput.measure(interrupted(), now=0.0, spot_price=72.0).cost is None
    free = goodput.measure(interrupted(), now=0.0, price=0.0, spot_price=36.0).cost
    assert (free.on_demand, free.saving) == (0.0, None)
    dearer = goodput.measure(interrupted(), now=0.0, price=36.0, spot_price=36.0).cost
    assert dearer.saving == pytest.approx(-100 / 3)
    started = job(attempt(1, 0, 60, []), modified=60.0)
    cost = goodput.measure(started, now=0.0, price=36.0, spot_price=36.0).cost
    assert (cost.on_demand, cost.spot, cost.saving) == (0.0, pytest.approx(0.6), None)


@pytest.mark.parametrize("hosts", [1, 2])
def test_phases_add_up(hosts: int):
    """The phases of an instance fill its time without gaps.

    So they do if an instance came late or left early.
    """
    record = interrupted(hosts)
    record.attempts[0].instances[0].released = 25.0
    record.attempts[1].instances[-1].started = 140.0
    measured = goodput.measure(record, now=0.0)
    for row, record_attempt in zip(measured.rows, record.attempts, strict=True):
        for instance in record_attempt.instances:
            spans = goodput.phases(row, instance, 0.0)
            assert (spans[0][1], spans[-1][2]) == (instance.started, instance.released)
            assert all(
                earlier[2] == later[1] for earlier, later in zip(spans, spans[1:], strict=False)
            )
    assert measured.instance_seconds == sum(
        instance.released - instance.started
        for record_attempt in record.attempts
        for instance in record_attempt.instances
    )


# The report


class Page(HTMLParser):
    """Reads a page: its elements, attributes and text.

    It raises ValueError if an element is not closed where it should be.
    """

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"never closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes something else")

    def handle_data(self, data):
        self.text += data

    def having(self, tag: str, css_class: str = "") -> list[dict]:
        """Return the attributes of the elements with this tag and class."""
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and css_class in (attributes.get("class") or "").split(" ")
        ]


def write_page(record: Record, folder: Path, **prices: float) -> Page:
    """Write a job's report, and return it as a Page."""
    report.write(record, folder / "report.html", **prices)
    return Page((folder / "report.html").read_text())


def elements_of(page: Page, tag: str) -> list[dict]:
    return [attributes for name, attributes in page.elements if name == tag]


def test_page_is_well_formed_and_needs_nothing_else(tmp_path: Path):
    page = write_page(interrupted(2), tmp_path, price=72.0, spot_price=36.0)
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "use", "image", "base"}
    text = (tmp_path / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=", text)
    assert "prefers-color-scheme: dark" in text
    assert {"58.3%", "3.60", "2.40"} <= set(re.findall(r"\d+\.\d+%?", page.text))
    assert "saves 33 %" in page.text


def test_page_is_accessible(tmp_path: Path):
    page = write_page(interrupted(2), tmp_path)
    tables = len(elements_of(page, "table"))
    assert tables == len(elements_of(page, "caption")) == 4
    drawings = [
        attributes for attributes in elements_of(page, "svg") if attributes.get("role") == "img"
    ]
    assert drawings and len(elements_of(page, "desc")) == len(drawings)
    assert all(attributes.get("scope") == "col" for attributes in elements_of(page, "th"))
    assert elements_of(page, "html")[0]["lang"] == "en"


def test_text_of_jobs_is_escaped(tmp_path: Path):
    """Text of a job is shown as it is wherever it occurs, and never makes an element."""
    record = interrupted()
    record.name = f"name {HOSTILE_TEXT}"
    record.failure = f"failure {HOSTILE_TEXT}"
    record.notes = [f"note {HOSTILE_TEXT}"]
    record.request["HyperParameters"] = {"x": f"request {HOSTILE_TEXT}"}
    record.transitions[0].message = f"message {HOSTILE_TEXT}"
    record.interruptions[0].why = f"why {HOSTILE_TEXT}"
    for record_attempt in record.attempts:
        record_attempt.instances[0].host = f"host {HOSTILE_TEXT}"
        record_attempt.proved = f"proved {HOSTILE_TEXT}"
        record_attempt.resumed_from = f"file {HOSTILE_TEXT}"
        record_attempt.points = [
            replace(point, values={f"loss {HOSTILE_TEXT}": 1.0, f"{HOSTILE_TEXT}/s": 2.0})
            for point in record_attempt.points
        ]
    page = write_page(record, tmp_path)
    assert not elements_of(page, "img") + elements_of(page, "script")
    kinds = [
        "name",
        "failure",
        "note",
        "request",
        "message",
        "why",
        "host",
        "loss",
        "proved",
        "file",
    ]
    for kind in kinds:
        assert f"{kind} {HOSTILE_TEXT}" in page.text, kind


def test_how_an_attempt_continued_is_shown(tmp_path: Path):
    """The report shows how an attempt compares itself with the interrupted one.

    The attempt's log says it (check/verification.py); a program that says nothing gets no column.
    """
    record = interrupted()
    log_line = "warning: resumed at step 30: step 33 is not that of the interrupted run: ..."
    text = write_page(record, tmp_path).text
    assert "continued" not in text and "restarts in the container" not in text
    record.attempts[1].proved = PROVED.search(log_line)[1]
    text = write_page(record, tmp_path).text
    assert "continued" in text and "step 33 is not that of the interrupted run: ..." in text
    words = ["after step 17", "after step 40, continued from step 36 after 9.3 s"]
    record.attempts[1].restarts = [Restart(k + 1, words[k]) for k in range(2)]
    text = write_page(record, tmp_path).text
    assert "restarts in the container" in text
    assert "after step 17; after step 40, continued from step 36 after 9.3 s" in text


def resumed_job(
    saved: list[dict[str, str]], resumed: int | None = 20, step: int = 44, **fields
) -> Record:
    """Return a job whose first attempt had a checkpoint of a step on each of its hosts."""
    record = interrupted(len(saved))
    record.request["CheckpointConfig"] = {"S3Uri": "s3://bucket/ck"}
    for instance, missing in zip(record.attempts[0].instances, saved, strict=True):
        instance.saved = Saved(step, missing) if missing else None
    record.attempts[1].resumed = resumed
    record.attempts[1].instances[0].restored_files = 1
    for name, value in fields.items():
        setattr(record.attempts[1], name, value)
    return record


LATE = "its copy had not begun before the end of its host"
RESUMES = {
    "the newest": (
        resumed_job([{"a": ""}], 44, resumed_from="step-44.ckpt"),
        "step 44, step-44.ckpt",
    ),
    "not copied": (
        resumed_job([{"step-44.ckpt": LATE}], resumed_from="step-20.ckpt"),
        f"step 20, step-20.ckpt; not from step 44: step-44.ckpt was not in S3: {LATE} (algo-1)",
    ),
    "copied by neither host": (
        resumed_job([{"a": LATE}, {"a": "its copy lags"}]),
        f"step 20; not from step 44: a was not in S3: {LATE} (algo-1); its copy lags (algo-2)",
    ),
    "copied by both hosts alike": (
        resumed_job([{"a": LATE, "b": LATE}, {"a": LATE, "b": LATE}]),
        f"step 20; not from step 44: a and 1 more files was not in S3: {LATE} (algo-1, algo-2)",
    ),
    "copied by one host, and skipped": (
        resumed_job([{"a": ""}, {"a": LATE}], skipped=["checkpoint a is damaged; it is skipped"]),
        "step 20; not from step 44: checkpoint a is damaged; it is skipped",
    ),
    "copied, and nobody knows": (
        resumed_job([{"a": ""}]),
        "step 20; not from step 44: it was in S3, the log does not say why",
    ),
    "a log that does not say": (resumed_job([{"a": ""}], None), "its log does not say"),
    "a log that does not say, not copied": (
        resumed_job([{"a": LATE}], None),
        f"its log does not say; not from step 44: a was not in S3: {LATE} (algo-1)",
    ),
    "step 0": (
        resumed_job([{"a": LATE}], None, step=0),
        f"its log does not say; not from step 0: a was not in S3: {LATE} (algo-1)",
    ),
    "no checkpoint": (resumed_job([{}]), "step 20"),
}


@pytest.mark.parametrize("case", RESUMES)
def test_from_which_checkpoint_an_attempt_continued(tmp_path, case):
    record, words = RESUMES[case]
    assert describe_resume(record, 1) == words
    assert describe_resume(record, 0) == ""
    assert words in write_page(record, tmp_path).text


def test_an_attempt_without_a_checkpoint_began_anew():
    record = interrupted()
    record.attempts[1].resumed = None
    assert describe_resume(record, 1) == "the beginning: the job has no CheckpointConfig"
    record.request["CheckpointConfig"] = {"S3Uri": "s3://bucket/ck"}
    assert describe_resume(record, 1) == "the beginning: S3 had no checkpoint"
    for instance in record.attempts[1].instances:
        instance.training, begun = None, instance.training
    assert describe_resume(record, 1) == ""  # its data are still on their way
    for instance in record.attempts[1].instances:
        instance.training = begun
    # An attempt that ended before it had one does not hide that of the attempt before.
    record.attempts[0].instances[0].saved = Saved(4, {"a": LATE})
    record.attempts.append(attempt(3, 200, 260, []))
    assert describe_resume(record, 2) == (
        f"the beginning: S3 had no checkpoint; not from step 4: a was not in S3: {LATE} (algo-1)"
    )


def test_the_values_of_a_timeline_are_in_a_table(tmp_path: Path):
    """It has each bar, each interruption, and each checkpoint with its way to S3."""
    record = interrupted()
    for second, step in ((20, 20), (20.1, 21), (48, 40)):
        record.attempts[0].instances[0].checkpoints.append(Checkpoint(step, second, second + 2))
    record.attempts[0].instances[0].checkpoints[-1].in_s3 = None
    page = write_page(record, tmp_path)
    words = [
        "+10 salgo-1attempt 1, training that was kept30 s",
        "+20 salgo-1attempt 1, checkpoint of step 20in S3 after 2 s",
        "+20.1 salgo-1attempt 1, checkpoint of step 21in S3 after 2 s",
        "+48 salgo-1attempt 1, checkpoint of step 40not in S3",
        "+55 salgo-1interruption 1, unwarned, by hand",
        "+1:00algo-1no instance before attempt 240 s",
    ]
    assert [line for line in words if line not in page.text] == []
    # There is no room for a mark beside that of step 20.
    assert len(page.having("circle", "saved")) == 2
    assert len(page.having("circle", "copied")) == 1


def test_checkpoints_of_an_instance():
    """A file that comes later takes a checkpoint out of S3 again; the last ones are kept."""
    instance = interrupted().attempts[0].instances[0]
    for is_in_s3 in (False, True):
        instance.note_checkpoint(7, is_in_s3)
    (checkpoint,) = instance.checkpoints
    assert checkpoint.saved <= checkpoint.in_s3
    instance.note_checkpoint(7, False)
    assert instance.checkpoints == [Checkpoint(7, checkpoint.saved, None)]
    for step in range(8, 8 + MAX_CHECKPOINTS):
        instance.note_checkpoint(step, True)
    assert [each.step for each in instance.checkpoints[:1]] == [8]
    assert len(instance.checkpoints) == MAX_CHECKPOINTS


@pytest.mark.parametrize("count", [1, 50, 51, 1999])
def test_the_values_of_a_chart_are_in_a_table_and_on_hover(count):
    """For each stretch of steps, each name has its last value; what was done again counts."""
    lines = {
        "loss": [
            charts.Line([(x, 9.0) for x in range(count)], kept=0),
            charts.Line([(x, x / 2) for x in range(count)], kept=count),
        ],
        "val_loss": [charts.Line([(0, 0.25)])],
    }
    drawing = charts.figure(charts.Chart("Loss", lines))
    rows = [[cell.text for cell in row] for row in drawing.iter("tr")]
    assert rows[0] == ["step", "loss", "val_loss"]
    assert len(rows) <= 51 and rows[-1][:2] == [f"{count - 1:,}", f"{(count - 1) / 2:.6g}"]
    assert rows[1][2] == "0.25" and all(row[2] == "–" for row in rows[2:])
    areas = [area for area in drawing.iter("rect") if area.get("class") == "stretch"]
    assert len(areas) == len(rows) - 1
    assert areas[-1][0].text.startswith(f"step {count - 1:,}: loss {(count - 1) / 2:.6g}")


def test_charts_by_name(tmp_path: Path):
    """Losses share a chart, accuracies share one, and rates are drawn over time.

    Step and epoch have no chart.
    """
    record = interrupted()
    values = {
        "epoch": 1.0,
        "train_loss": 2.0,
        "val_loss": 1.0,
        "test_acc": 0.5,
        "lr": 0.1,
        "images/s": 500.0,
    }
    for record_attempt in record.attempts:
        record_attempt.points = [
            replace(point, values=point.values | values) for point in record_attempt.points
        ]
    page = write_page(record, tmp_path)
    assert len(elements_of(page, "figcaption")) == 4
    assert all(
        text in page.text for text in ("Loss", "Accuracy", "lr", "images/s", "time since creation")
    )
    assert "epoch ends" not in page.text and "step ends" not in page.text
    for record_attempt in record.attempts:
        record_attempt.points = [
            replace(point, values=point.values | {f"user{number}": 1.0 for number in range(9)})
            for point in record_attempt.points
        ]
    page = write_page(record, tmp_path)
    assert len(elements_of(page, "figcaption")) == 3
    assert "Not drawn: lr, user0" in page.text


def test_redone_steps_are_drawn_as_such(tmp_path: Path):
    """Attempt 1 after step 30 is drawn as lost, and step 30 is marked as a restart."""
    record = interrupted()
    for record_attempt in record.attempts:
        record_attempt.points = [
            replace(point, values={"train_loss": 1 / point.step}) for point in record_attempt.points
        ]
    page = write_page(record, tmp_path)
    lost = page.having("path", "lost")
    assert [path["d"].count("L") for path in lost if path["d"]] == [1]  # from step 20 to 40
    assert "lost and done again" in page.text
    restarts = page.having("line", "restart")
    assert [float(line["x1"]) for line in restarts] == [pytest.approx(1000 * 30 / 70, abs=0.1)]


@pytest.mark.parametrize(
    ("kept_step", "drawn", "lost"), [(30, 3, []), (29, 2, [2]), (math.inf, 3, []), (0, 0, [3])]
)
def test_the_border_of_kept_and_lost(kept_step, drawn, lost):
    """Kept and lost points meet at the border, so that no gap is seen.

    The point at which a later attempt resumed was kept; what was lost begins there.
    """
    curve = charts.Line([(10, 1.0), (20, 2.0), (30, 3.0)], kept=kept_step)
    drawing = charts.figure(charts.Chart("Loss", {"loss": [curve]}))
    point_counts = {"curve c0": [], "curve lost c0": []}
    for path in drawing.iter("path"):
        if path.get("d"):
            point_counts[path.get("class")].append(len(re.findall("[ML]", path.get("d"))))
    assert (sum(point_counts["curve c0"]), point_counts["curve lost c0"]) == (drawn, lost)
    assert ("lost and done again" in "".join(drawing.itertext())) == bool(lost)


def paths_of(lines: list[charts.Line], **options) -> dict[str, list[list[str]]]:
    """Return the vertices of each path of a chart of one name, by the path's class."""
    drawing = charts.figure(charts.Chart("Loss", {"loss": lines}, **options))
    paths: dict[str, list[list[str]]] = {}
    for path in drawing.iter("path"):
        vertices = re.split("[ML]", path.get("d"))[1:]
        paths.setdefault(path.get("class"), []).append(vertices)
    return paths


def test_attempts_with_a_single_value_each_are_one_line():
    lines = [charts.Line([(20 * k, 1 / k)], kept=20 * k) for k in range(1, 4)]
    (points,) = paths_of(lines)["curve c0"]
    assert len(points) == 3
    # Over time, nothing was there between two attempts.
    assert len(paths_of(lines, as_time=True)["curve c0 dot"]) == 3


def test_an_exact_repetition_lies_on_the_line_whatever_steps_were_logged():
    """Values of steps that only the lost piece has logged are not drawn, but counted."""

    def line(steps: list[int], kept: float) -> charts.Line:
        return charts.Line([(step, math.sin(step)) for step in steps], kept)

    lost = line([10, 20, 31, 42, 50, 53, 60], kept=20)
    again = line([25, 31, 37, 42, 49, 50, 60, 70], kept=70)
    paths = paths_of([lost, again])
    (kept,) = paths["curve c0"]
    assert len(kept) == 10
    pieces = paths["curve lost c0"] + paths["curve lost c0 dot"]
    # Only 50 and 60 follow one another in both.
    assert [len(piece) for piece in pieces] == [2, 1, 1]
    assert {vertex.partition("h")[0] for piece in pieces for vertex in piece} <= set(kept)
    text = "".join(charts.figure(charts.Chart("Loss", {"loss": [lost, again]})).itertext())
    assert "1 lost values not drawn: logged at other steps again" in text
    # What nobody has done again is drawn as it is.
    paths = paths_of([lost, line([25, 31], kept=31)])
    assert [len(piece) for piece in paths["curve lost c0"]] == [5]


def test_a_difference_is_seen_where_both_attempts_have_logged():
    lines = [charts.Line([(1, 1.0), (2, 1.0)], kept=1), charts.Line([(2, 3.0), (3, 1.0)], kept=3)]
    paths = paths_of(lines)
    assert paths["curve lost c0"][0][1] not in paths["curve c0"][0]


def test_a_repetition_is_thinned_out_at_the_same_steps():
    lines = [
        charts.Line([(step, math.sin(step)) for step in range(0, 4000)], kept=1001),
        charts.Line([(step, math.sin(step)) for step in range(1002, 6001)], kept=6000),
    ]
    paths = paths_of(lines)
    ((kept,), (lost,)) = paths["curve c0"], paths["curve lost c0"]
    assert len(kept) == 1501 and len(lost) == 750 and set(lost) <= set(kept)


@pytest.mark.parametrize("value", [4e-323, 5e-324, -4e-323, 1e-300, 1e-31, 1e14, 0.0])
@pytest.mark.parametrize("other", [None, 1.0000001, 2.0])
def test_values_of_any_size_are_drawn(value, other):
    values = [value] if other is None else [value, value * other]
    chart = charts.Chart("Loss", {"loss": [charts.Line(list(enumerate(values)))]})
    assert charts.figure(chart) is not None


@pytest.mark.parametrize(("restarts", "top"), [(25, "0"), (26, "950")])
def test_many_restarts_are_marked_at_the_bottom_only(restarts, top):
    curve = charts.Line([(0, 1.0), (100, 2.0)])
    chart = charts.Chart("Loss", {"loss": [curve]}, [float(x) for x in range(restarts)])
    lines = [line for line in charts.figure(chart).iter("line") if line.get("class") == "restart"]
    assert [line.get("y1") for line in lines] == [top] * restarts


@pytest.mark.parametrize(("points", "drawn"), [(2000, 2000), (2001, 1001), (4001, 1335)])
def test_a_long_curve_is_thinned_out(points, drawn):
    curve = charts.Line([(x, float(x % 7)) for x in range(points)])
    (path,) = (
        path
        for path in charts.figure(charts.Chart("Loss", {"loss": [curve]})).iter("path")
        if path.get("d")
    )
    assert len(re.findall("[ML]", path.get("d"))) == drawn


def test_values_that_cannot_be_drawn_are_counted():
    values = [1.0, math.nan, math.inf, -1e15, 9.9e14, 2.0]
    curve = charts.Line(list(enumerate(values)))
    text = "".join(charts.figure(charts.Chart("Loss", {"loss": [curve]})).itertext())
    assert "3 values are not numbers, or too large" in text and "loss ends at 2" in text
    assert charts.figure(charts.Chart("Loss", {"loss": [charts.Line([(0, math.nan)])]})) is None


def test_the_range_of_values_is_never_empty():
    assert charts._value_range([5.0, 5.0], pad=0.5) == (4.5, 5.5)
    assert charts._value_range([0.0], pad=0.5) == (-1.0, 1.0)
    assert charts._value_range([1.0, 3.0], pad=0.5) == (0.0, 4.0)
    assert charts._value_range([1.0, 3.0], pad=0.0) == (1.0, 3.0)


def test_timeline(tmp_path: Path):
    """The bars of a host fill the wall time of its instances, with a gap between attempts."""
    record = interrupted(2)
    record.attempts[1].instances[1].restored_files = 3
    page = write_page(record, tmp_path)
    bars = {
        css_class: [
            (float(rect["x"].rstrip("%")) * 1.6, float(rect["width"].rstrip("%")) * 1.6)
            for rect in page.having("rect", css_class)
        ]
        for css_class in ("start-up", "kept", "lost", "ending", "gap")
    }
    rounded = {
        css_class: [(round(start), round(width)) for start, width in spans]
        for css_class, spans in bars.items()
    }
    assert rounded["gap"] == [(60, 40)] * 2
    assert rounded["lost"] == [(40, 10)] * 2
    assert rounded["kept"] == [(10, 30), (110, 40)] * 2
    # One for the interruption, and one for its host.
    assert len(page.having("line", "unwarned")) == 2 and not page.having("line", "warned")
    assert len(page.having("path", "restored")) == 1


@pytest.mark.parametrize(
    "record",
    [
        many(),
        job(status="Failed", failure="ClientError: no image", modified=1.0),
        job(status="InProgress"),
        job(attempt(1, 0, 10, []), status="Stopped", modified=10.0),
        job(attempt(1, 0, 10, points((7, 3), loss=1.0)), modified=10.0),
        job(attempt(1, 0, 10, points((7, 3), (8, 3), (8, 1), loss=1.0)), modified=10.0),
        job(attempt(1, 0, 10, points((7, 3), (8, 4), loss=math.nan)), modified=10.0),
        replace(job(), name="name-" * 50, notes=["\udc80 is not a letter"], modified=1.0),
    ],
    ids=[
        "many",
        "failed at start",
        "in progress",
        "no progress",
        "one line",
        "steps back",
        "no number",
        "name",
    ],
)
def test_edges(record: Record, tmp_path: Path):
    """Any job can be drawn, and no number in the drawings is NaN or infinite."""
    page = write_page(record, tmp_path, price=1.0, spot_price=0.5)
    assert record.name in page.text
    for name, attributes in page.elements:
        for key, value in attributes.items():
            assert not re.search(r"\b(nan|inf)\b", value or ""), (name, key, value)


def test_many_interruptions(tmp_path: Path):
    """All are marked and few are numbered; values that are not numbers are counted, not drawn."""
    page = write_page(many(), tmp_path)
    marks = page.having("line", "warned") + page.having("line", "unwarned")
    assert len(marks) == 200  # one for each interruption, and one for its host
    assert 5 <= len(page.having("text", "number")) <= 30
    assert "404 values are not numbers, or too large" in page.text


def test_a_rule_that_never_came_due_is_in_the_row_and_in_the_report(tmp_path: Path):
    line = "--interrupt='at step 99' never came due: the job's training ended after 9 s, at step 40"
    record = replace(interrupted(), never_due=[line])
    assert summary.cells_of(record)[3] == line
    assert summary.cells_of(replace(record, status="InProgress"))[3].startswith("step 70")
    report.write(record, tmp_path / "report.html")
    assert line in (tmp_path / "report.html").read_text()


def test_failed_job_shows_no_goodput(tmp_path: Path):
    record = interrupted()
    record.status = "Failed"
    cells = write_page(record, tmp_path).having("dd", "Failed")
    assert len(cells) == 1
    assert "58.3%" not in write_page(record, tmp_path).text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (3.24, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00"),
        (62, "1:02"),
        (3602, "1:00:02"),
    ],
)
def test_clock(seconds: float, shown: str):
    assert markup.clock(seconds) == shown


@pytest.mark.parametrize(
    ("low", "high", "options", "expected"),
    [
        (0, 100, {}, [0, 20, 40, 60, 80, 100]),
        (0.13, 0.58, {}, [0.2, 0.3, 0.4, 0.5]),
        (0, 650, {"as_time": True}, [0, 120, 240, 360, 480, 600]),
        (
            0,
            10 * 86400,
            {"as_time": True},
            [0, 2 * 86400, 4 * 86400, 6 * 86400, 8 * 86400, 10 * 86400],
        ),
        (9, 11, {"at_least": 1.0}, [9, 10, 11]),
    ],
)
def test_ticks(low: float, high: float, options: dict, expected: list[float]):
    assert charts.ticks(low, high, **options) == pytest.approx(expected)


# The terminal, in the environment that has rich


LIVE_CHECKS = (ROOT / "tests/support/rehearsal_live.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"^def check_(\w+)", LIVE_CHECKS, re.MULTILINE))
def test_terminal(name: str):
    command = [python_of("rehearsal"), "tests/support/rehearsal_live.py", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr
