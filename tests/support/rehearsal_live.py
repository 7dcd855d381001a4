"""Checks of the rehearsal's live view.

python tests/support/rehearsal_live.py NAME       in the rehearsal's environment: runs `check_NAME`
"""

import io
import random
import re
import sys
import time
from dataclasses import replace

import hostile_texts
from records import attempt, job
from rich.console import Console
from waiting import wait_until

from sagemaker_rehearsal.jobs.record import Interruption, Point, Record, Transition
from sagemaker_rehearsal.report import live_view


def terminal(*, width: int = 120, height: int = 30, is_terminal: bool = True) -> Console:
    """Return a console that records its output."""
    return Console(
        record=True, width=width, height=height, force_terminal=is_terminal, file=io.StringIO()
    )


def shown(jobs: list, **size: int) -> str:
    """Return the text that the view shows."""
    console = terminal(**size)
    console.print(live_view.View(lambda: jobs, console=console).render())
    return console.export_text()


def running(name: str, created: float) -> Record:
    """Return a running job of two hosts, one of them reclaimed."""
    lines = [
        Point(
            created + 9, 40, {"step": 40.0, "epoch": 2.0, "train_loss": 0.4321, "images/s": 512.0}
        )
    ]
    record = job(attempt(1, created, None, lines, hosts=2), status="InProgress")
    record.attempts[0].instances[1].exit_status = 137
    record.attempts[0].instances[1].reclaimed = True
    record.transitions = [
        Transition("Starting", "", created),
        Transition("Training", "in progress", created),
    ]
    return replace(record, name=name, created=created)


def check_view_of_a_job() -> None:
    logs = {"algo-1": ["a [bold]line[/bold]"], "algo-2": []}
    text = shown([(running("[red]digits[/red]", time.time() - 61), logs)], width=160)
    row = text.splitlines()[1]
    for words in (
        "[red]digits[/red]",
        "Training",
        "algo-1 training",
        "algo-2 reclaimed exit 137",
        "step 40 epoch 2",
    ):
        assert words in row
    assert "train_loss 0.4321" in text and "images/s 512" in text and "1:01" in text
    assert "algo-1 a [bold]line[/bold]" in text


def check_view_fits() -> None:
    """Check that 210 jobs fit: no line is too long, and there are not too many lines."""
    for size in (
        {"width": 120, "height": 30},
        {"width": 60, "height": 24},
        {"width": 20, "height": 5},
    ):
        view_fits(size)


def view_fits(size: dict) -> None:
    """Check the view at one size of the terminal."""
    now = time.time()
    logs = {f"algo-{n}": ["x" * 300] * 50 for n in range(8)}
    jobs = [(running(f"run-{k}", now - 100 + k), logs) for k in range(10)]
    jobs += [
        (replace(job(), name=f"old-{k}", created=now - 900 + k, modified=now), {})
        for k in range(200)
    ]
    lines = shown(jobs, **size).splitlines()
    assert len(lines) < size["height"]
    assert max(map(len, lines)) <= size["width"]
    if size["height"] > 20:
        assert "195 more ended" in lines
        old_names = [line.split()[0] for line in lines if line.startswith("old-")]
        assert old_names == [f"old-{k}" for k in (199, 198, 197, 196, 195)]
        # Once in the table, and once above its log lines.
        assert sum(line.startswith("run-9") for line in lines) == 2
        assert sum("xxx" in line for line in lines) >= 3


def check_a_failure_shows_no_secret() -> None:
    """Check that neither the table nor a separate line shows the secret."""
    record = replace(job(status="Failed", failure="the key abcdefgh is wrong"), created=time.time())
    record.request["HyperParameters"] = {"api_key": "abcdefgh"}
    assert "the key ****** is wrong" in shown([(record, {})], width=200)
    console = terminal(is_terminal=False)
    with live_view.View(lambda: [(record, {})], console=console):
        pass
    text = console.export_text()
    assert "the key ****** is wrong" in text and "abcdefgh" not in text


def hostile_job(seed: int) -> tuple[Record, dict]:
    """Return a job with hostile texts wherever the view looks, and its log."""
    draw = random.Random(seed)
    record = running("hostile", time.time())
    record.failure = draw.choice((None, hostile_texts.text(draw, 1024)))
    record.transitions[1].message = hostile_texts.text(draw, 1024) + "\rdigits is done"
    record.interruptions.append(
        Interruption(time.time(), ["algo-2"], True, hostile_texts.text(draw, 1024), 1.0, 40)
    )
    names = [f"loss{hostile_texts.text(draw, 100)}", "images/s"]
    record.attempts[0].points[0].values.update(dict.fromkeys(names, draw.choice((1e300, -0.0))))
    record.request["HyperParameters"] = {"token": hostile_texts.text(draw, 2500)}
    return record, {"algo-1": [hostile_texts.text(draw, 2000) for _ in range(9)]}


def check_a_hostile_job_hides_no_other() -> None:
    """Neither its texts nor a fault of ours that they find end the view of the other job."""
    other = (running("digits", time.time() - 9), {"algo-1": ["its line"]})
    for seed in range(60):
        jobs = [hostile_job(seed), other]
        text = shown(jobs, width=160)
        assert "digits" in text and "its line" in text
        console = terminal(is_terminal=False)
        with live_view.View(lambda jobs=jobs: jobs, console=console):
            pass
        text = console.export_text()
        assert "digits Training: in progress\n" in text
        # Its text is not a line of its own, as that of another job.
        assert re.fullmatch(r"((hostile|digits) [^\n]+\n)+", text)
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def check_a_fault_of_the_view_is_that_jobs_alone() -> None:
    faulty = running("faulty", time.time())
    faulty.attempts[0].points = [None]
    faulty.interruptions = [None]
    jobs = [(faulty, {}), (running("digits", time.time()), {"algo-1": ["its line"]})]
    text = shown(jobs, width=160)
    assert "cannot be shown: AttributeError" in text and "digits" in text and "its line" in text
    console = terminal(is_terminal=False)
    times_asked = []

    def ask() -> list:
        times_asked.append(time.monotonic())
        return jobs

    with live_view.View(ask, console=console):
        wait_until(lambda: len(times_asked) >= 3)
    text = console.export_text()
    assert "digits Training" in text and text.count("faulty cannot be shown: AttributeError") == 1


def check_log_cannot_steer_the_terminal() -> None:
    assert live_view.plain("\x1b[2J\x1b[31mred\x1b[0m\x07 a\tb\x1b]0;title\x07c") == "red  a bc"
    assert live_view.plain("10 %\r20 %\r\n") == "20 %"


def check_live_terminal_is_refreshed() -> None:
    """The view asks for the jobs again and again, and once more at its end."""
    console = terminal()
    times_asked = []

    def jobs():
        times_asked.append(time.monotonic())
        return [(running("first", time.time()), {})]

    with live_view.View(jobs, console=console):
        wait_until(lambda: len(times_asked) >= 3)
        asked_in_view = len(times_asked)
    assert len(times_asked) > asked_in_view
    assert "first" in console.export_text()


def check_plain_lines_without_a_terminal() -> None:
    """Each change is printed as one line, once.

    The last changes are printed when the view is left. A message may change, too.
    """
    console = terminal(width=30, is_terminal=False)
    record = running("[b]job[/b]", 100.0)
    with live_view.View(lambda: [(record, {"algo-1": ["not shown"]})], console=console):
        wait_until(lambda: "in progress" in console.file.getvalue())
        record.transitions[1].message = "still in progress"
        wait_until(lambda: "still in progress" in console.file.getvalue())
        record.interruptions.append(Interruption(155.0, ["algo-2"], True, "by hand", 1.0, 40))
        record.status = "Failed"
        record.failure = "why\nnot"
        record.modified = 163.0
    assert console.file.getvalue().splitlines() == [
        "[b]job[/b] Starting: ",
        "[b]job[/b] Training: in progress",
        "[b]job[/b] Training: still in progress",
        "[b]job[/b] interruption after 55 s at step 40: algo-2, warned, by hand",
        "[b]job[/b] Failed after 1:03: why not",
    ]


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
