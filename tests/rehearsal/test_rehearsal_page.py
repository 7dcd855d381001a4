"""The web page of the rehearsal: what it shows and its orders.

The jobs are recorded ones; test_rehearsal_endpoint.py asks a real endpoint.
"""

import json
import queue
import re
import time
from dataclasses import replace
from urllib.parse import quote

import chromium
import pytest
from botocore.exceptions import ClientError
from page_site import (
    ORIGIN,
    TOKEN,
    Site,
    running,
    site_of_jobs,  # noqa: F401  the fixture site
)
from records import interrupted
from test_rehearsal_report import HOSTILE_TEXT, Page, elements_of
from werkzeug.test import TestResponse

from sagemaker_rehearsal.api import sockets
from sagemaker_rehearsal.jobs.record import Comparison, Fault, Verdict
from sagemaker_rehearsal.report.markup import html
from sagemaker_rehearsal.report.page import make_sections
from sagemaker_rehearsal.web import access, documents, log_file, stream
from sagemaker_rehearsal.web.application import WebPage


def test_a_list_leads_to_each_job(site):
    assert "No job yet" in site.get().text
    site.add(interrupted(), "a line")
    site.add(running(), "another line")
    page = Page(site.get().text)
    links = [link["href"] for link in elements_of(page, "a")]
    assert len(links) == 2
    for link, line in zip(links, ("another line", "a line"), strict=True):  # the newest first
        response = site.client.get(link, base_url=ORIGIN, headers={"Accept": "text/html"})
        assert response.status_code == 200 and line in response.text


def test_many_jobs_are_listed_in_part(site, monkeypatch):
    monkeypatch.setattr(documents, "MAX_JOBS", 2)
    for name in ("alpha", "beta", "gamma"):
        site.add(running(name))
    text = Page(site.get().text).text
    assert "alpha" not in text and "gamma" in text and "1 older jobs are left out" in text


def test_a_job_is_shown_as_in_its_report(site):
    record = interrupted(2)
    arn = site.add(record)
    text = site.get(job=arn).text
    for name, section in make_sections(record.masked(), price=72.0, spot_price=36.0).items():
        assert html(section) in text, name
    assert "58.3%" in text


def test_checkpoints_are_in_the_timeline_and_in_its_table(site):
    page = Page(site.get(job=site.add(running())).text)
    assert len(page.having("circle", "saved")) == 2 and len(page.having("circle", "copied")) == 1
    assert "attempt 1, checkpoint of step 30" in page.text and "in S3 after 2 s" in page.text
    assert "not in S3" in page.text


def test_a_job_that_cannot_be_shown_has_its_log_and_its_buttons(site):
    record = running()
    record.interruptions = [None]
    text = Page(site.get(job=site.add(record, "its line")).text).text
    assert "cannot be shown: " in text and "its line" in text and "Stop the job" in text


def test_no_secret_of_the_request_is_shown(site):
    record = running()
    record.request["HyperParameters"] = {"api_key": "abcdefgh"}
    record.failure = "the key abcdefgh is wrong"
    arn = site.add(record)
    assert "abcdefgh" not in site.get(job=arn).text + site.get().text


def test_files_are_listed_and_sent(site):
    arn = site.add(running())
    site.store.objects = {
        ("bucket", "out/digits/output/model.tar.gz"): b"weights",
        ("bucket", "ck/step 40#.ckpt"): b"state",
        ("bucket", "ck-2/secret"): b"treasure",
        ("bucket", "out/other/output/model.tar.gz"): b"treasure",
    }
    page = Page(site.get(job=arn).text)
    links = [link["href"] for link in elements_of(page, "a") if "/file?" in link["href"]]
    contents = []
    for link in links:
        response = site.client.get(link, base_url=ORIGIN)
        contents.append(response.data)
        assert response.headers["Content-Disposition"].startswith("attachment; ")
        assert response.headers["Content-Type"] == "application/octet-stream"
        assert "sandbox" in response.headers["Content-Security-Policy"]
    assert contents == [b"weights", b"state"]


def test_files_are_listed_again_after_a_change(site):
    record = running()
    arn = site.add(record)
    assert "No checkpoints in s3://bucket/ck/" in site.get(job=arn).text
    site.store.objects["bucket", "ck/step-50.ckpt"] = b"state"
    record.attempts[1].instances[0].note_checkpoint(50, True)
    assert "step-50.ckpt" in site.get(job=arn).text


def test_a_bucket_that_is_not_there_is_reported(site, monkeypatch):
    def fail(*_):
        raise ClientError({"Error": {"Code": "NoSuchBucket", "Message": "gone"}}, "ListObjectsV2")

    monkeypatch.setattr(site.store, "get_paginator", fail)
    arn = site.add(running())
    assert "NoSuchBucket: gone" in site.get(job=arn).text


# Logs


def test_a_log_is_searched(site):
    arn = site.add(running(), "step=1 loss=2", "Warning: lost", "step=2 loss=1")
    lines = re.compile("<pre id=.*?>(.*?)</pre>", re.DOTALL)
    assert (
        lines.search(site.get(job=arn).text)[1] == "step=1 loss=2\nWarning: lost\nstep=2 loss=1\n"
    )
    assert lines.search(site.get(job=arn, find="wARNING").text)[1] == "Warning: lost\n"
    assert lines.search(site.get(job=arn, host="algo-2").text)[1] == ""
    whole = site.get(f"{access.PATH}log", job=arn, host="algo-1")
    assert whole.data == b"step=1 loss=2\nWarning: lost\nstep=2 loss=1\n"
    assert "attachment" in whole.headers["Content-Disposition"]
    assert site.get(f"{access.PATH}log", job=arn, host="algo-2").status_code == 404


@pytest.mark.parametrize("find", ["", "line"])
def test_the_end_of_a_long_log_is_shown(tmp_path, monkeypatch, find):
    monkeypatch.setattr(log_file, "MAX_SHOWN_BYTES", 100)
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    excerpt = log_file.read(path, 0, find)
    assert sum(len(line) + 1 for line in excerpt.lines) <= 100 and excerpt.is_cut
    assert excerpt.lines[-1] == "line 999" and len(excerpt.lines) == 11
    assert excerpt.end == path.stat().st_size
    assert log_file.read(path, excerpt.end, find) == log_file.Excerpt([], excerpt.end, False)


def test_the_searched_part_of_a_log_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "MAX_SEARCHED_BYTES", 100)
    path = tmp_path / "log"
    path.write_text("needle\n" + "hay\n" * 100)
    assert log_file.read(path, 0, "needle") == log_file.Excerpt([], path.stat().st_size, True)


def test_a_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_bytes("ü=1\nü=".encode())
    excerpt = log_file.read(path, 0)
    assert excerpt.lines == ["ü=1"] and excerpt.end == 5
    path.write_bytes("ü=1\nü=2\n".encode())
    assert log_file.read(path, excerpt.end).lines == ["ü=2"]
    assert log_file.read(path, 10**9).lines == []
    assert log_file.read(tmp_path / "absent", 7) == log_file.Excerpt([], 0, False)


# The stream


@pytest.fixture
def fast(monkeypatch) -> None:
    """No wait between two looks."""
    monkeypatch.setattr(stream, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(stream, "REST_FACTOR", 0.0)


def events_of(response: TestResponse):
    """Yield name, number and content of each event."""
    for chunk in response.iter_encoded():
        for text in filter(None, chunk.decode().split("\n\n")):
            fields = dict(line.split(": ", 1) for line in text.splitlines() if line[0] != ":")
            if fields:
                yield fields["event"], fields.get("id"), json.loads(fields["data"])


def test_a_job_is_followed_to_its_end(site, fast):
    record = running()
    arn = site.add(record, "old line")
    page = Page(site.get(job=arn).text)
    (body,) = elements_of(page, "body")
    address = f"{body['data-stream']}&start={body['data-start']}"
    response = site.client.get(address, base_url=ORIGIN, buffered=False)
    assert response.content_type == "text/event-stream"
    events = events_of(response)
    name, _, parts = next(events)
    assert name == "parts" and "InProgress" in parts["about"] and "old line" not in str(parts)
    site.service.jobs[arn].logs.write("algo-1", "new line")
    name, number, lines = next(event for event in events if event[0] == "lines")
    assert lines == "new line\n" and number == str(len("old line\nnew line\n"))
    record.modified = time.time()
    record.status = "Completed"
    rest = list(events)
    assert rest[-1][0] == "end"
    parts = {
        id: part for name, _, content in rest if name == "parts" for id, part in content.items()
    }
    assert "Completed" in parts["about"]
    assert "Stop the job" not in parts["orders"] and "Interrupt" not in parts["orders"]
    # A browser that connects again continues after what it has.
    again = site.get(f"{access.PATH}stream", headers={"Last-Event-ID": number}, job=arn, start="0")
    assert [name for name, _, _ in events_of(again)] == ["parts", "end"]


def test_a_list_is_followed(site, fast):
    response = site.client.get(
        f"{access.PATH}stream", base_url=ORIGIN, query_string={"token": TOKEN}, buffered=False
    )
    events = events_of(response)
    assert "No job yet" in next(events)[2]["jobs"]
    site.add(running())
    assert "digits" in next(events)[2]["jobs"]
    response.close()


def test_streams_are_limited_and_freed(site, fast, monkeypatch):
    def follow() -> TestResponse:
        return site.client.get(
            f"{access.PATH}stream", base_url=ORIGIN, query_string={"token": TOKEN}, buffered=False
        )

    monkeypatch.setattr(stream, "MAX_STREAMS", 3)
    site.page = WebPage(site.service, TOKEN)
    open_streams = [follow() for _ in range(3)]
    assert [each.status_code for each in open_streams] == [200] * 3
    assert follow().status_code == 503
    open_streams[0].close()
    next(open_streams[1].iter_encoded())
    open_streams[1].close()
    assert [follow().status_code for _ in range(3)] == [200, 200, 503]


@pytest.mark.parametrize("start", ["", "x", "-1", "1e3", "²", "9" * 30])
def test_a_stream_begins_anywhere(site, start):
    record = interrupted()
    arn = site.add(record, "a line")
    response = site.get(f"{access.PATH}stream", job=arn, start=start)
    names = [name for name, _, _ in events_of(response)]
    assert names == (["parts", "end"] if start == "9" * 30 else ["parts", "lines", "end"])


# Orders


def test_hosts_are_interrupted(site):
    record = running()
    arn = site.add(record)
    form = {"host": "algo-2", "gap": "1.5"}
    response = site.post(f"{access.PATH}interrupt", form, job=arn)
    due = site.service.jobs[arn].control.messages.get_nowait()
    assert (due.hosts, due.warned, due.gap, due.why) == (["algo-2"], False, 1.5, "by hand")
    assert response.status_code == 303
    assert response.headers["Location"].startswith("/?")
    assert "algo-2 of digits taken away, not warned" in site.get(job=arn).text
    site.post(f"{access.PATH}interrupt", {"warned": "on"}, job=arn)
    due = site.service.jobs[arn].control.messages.get_nowait()
    assert (due.hosts, due.warned, due.gap) == (["algo-1", "algo-2"], True, 0.0)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"host": "algo-9"}, "found algo-9"),
        ({"gap": "nan"}, "gap: found nan"),
        ({"gap": "-1"}, "gap: found -1"),
        ({"gap": "soon"}, "gap: found &#x27;soon&#x27;"),
        ({"gap": HOSTILE_TEXT}, "gap: found"),
    ],
)
def test_a_wrong_order_of_an_interruption_is_reported(site, form, words):
    arn = site.add(running())
    site.post(f"{access.PATH}interrupt", form, job=arn)
    assert site.service.jobs[arn].control.messages.empty()
    page = Page(site.get(job=arn).text)
    assert words.replace("&#x27;", "'") in page.text and not elements_of(page, "img")


def test_a_job_is_stopped(site):
    arn = site.add(running())
    assert site.post(f"{access.PATH}stop", {}, job=arn).status_code == 303
    assert site.service.jobs[arn].control.stop
    assert "digits is asked to stop" in site.get(job=arn).text


def test_an_ended_job_has_no_buttons(site):
    arn = site.add(interrupted())
    assert "Stop the job" not in site.get(job=arn).text
    site.post(f"{access.PATH}stop", {}, job=arn)
    assert "You can only stop a training job in status InProgress" in site.get(job=arn).text


def test_a_job_that_has_completed_is_compared(site, monkeypatch):
    """The page shows the comparison once it is made, and follows until then."""
    record = interrupted()
    arn = site.add(record)
    asked = []
    monkeypatch.setattr(site.service, "compare", lambda order: asked.append(order) or "job-2")
    assert "Compare with an uninterrupted run" in site.get(job=arn).text
    assert site.post(f"{access.PATH}compare", {}, job=arn).status_code == 303
    assert asked == [{"name": "job"}]
    site.service.comparing[arn] = None
    text = site.get(job=arn).text
    assert "job-2 runs; the comparison is here once it has ended" in text
    assert "Compare with an uninterrupted run" not in text
    del site.service.comparing[arn]
    record.comparison = Comparison("job-2", Verdict.SAME_BITS, "of model.pt", 1.0, 1.0, {})
    text = site.get(job=arn).text
    assert "<strong>same bits</strong>: of model.pt" in text
    assert "Compare with an uninterrupted run" not in text
    record.comparison, record.status = None, "Failed"
    assert "Compare with an uninterrupted run" not in site.get(job=arn).text
    site.service.comparing.clear()
    monkeypatch.undo()
    site.post(f"{access.PATH}compare", {}, job=arn)
    assert "found job, which is Failed; expected one that has completed" in site.get(job=arn).text


def test_a_job_on_demand_is_not_interrupted(site):
    record = running()
    record.request["EnableManagedSpotTraining"] = False
    text = site.get(job=site.add(record)).text
    assert "Interrupt</button>" not in text and "Stop the job" in text


# In a browser

OPEN_DETAILS = "for (const each of document.querySelectorAll('details')) each.open = true"
# Texts with a contrast below 4.5, and shapes and fields below 3, each with its colour.
CONTRASTS = """
(() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  const parts = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [red, green, blue] = parts(colour).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (parts(colour)[3]) return colour;
    }
    return "white";
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ignored = ".grid, .stretch, .ground, .stripe, .bar, .restored";
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const style = getComputedStyle(element);
    const check = (colour, behind, least) => {
      if (contrast(colour, ground(behind)) < least) {
        found.push([element.outerHTML.slice(0, 80), colour]);
      }
    };
    const name = element.tagName.toUpperCase();
    const has_text = [...element.childNodes].some((each) => each.nodeType == 3 && each.data.trim());
    if (has_text && !["TITLE", "DESC", "SCRIPT"].includes(name)) {
      check(element instanceof SVGElement ? style.fill : style.color, element, 4.5);
    }
    if (["RECT", "PATH", "CIRCLE", "LINE"].includes(name) && !element.matches(ignored)) {
      check(style.stroke, element, 3);
    }
    if (["INPUT", "BUTTON", "SELECT"].includes(name) && element.type != "hidden") {
      check(style.borderTopColor, element.parentElement, 3);
    }
  }
  return found;
})()
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium is installed")
def test_in_chromium(tmp_path):
    """In all widths and colours: nothing is cut off or pale, live, without an error."""
    site = Site(tmp_path)
    record = running(hosts=3)
    arn = site.add(record, *(f"step={n} a line that says something" for n in range(300)), "x" * 900)
    ended = replace(
        interrupted(),
        comparison=Comparison(
            "job-left-alone", Verdict.SAME_BITS, "of model.pt", 90.0, 180.0, {"ml.m5.large": 180.0}
        ),
        faults=[
            Fault(20.0, "algo-1", "freeze rank", "rank 1", 10, "freeze rank at step 10", 25.0),
            Fault(30.0, "algo-1", "cut network", "", None, "by hand", failed="it needs root"),
        ],
    )
    ended_arn = site.add(ended)
    site.store.objects = {
        ("bucket", f"ck/epoch={n}-{'long-' * 20}step={n}.ckpt"): b"" for n in range(30)
    }
    with (
        sockets.served(lambda port: site, 0, ["127.0.0.1"]) as port,
        chromium.Chromium() as browser,
    ):
        address = f"http://127.0.0.1:{port}"
        job_address = f"{address}{site.page.documents.address('/', job=arn)}"
        for width in (1280, 768, 390):
            for scheme in ("light", "dark"):
                browser.view(width, scheme)
                for name, opened in (
                    ("list", f"{address}/?token={TOKEN}"),
                    ("job", job_address),
                    ("ended", f"{address}{site.page.documents.address('/', job=ended_arn)}"),
                ):
                    browser.open(opened)
                    browser.evaluate(OPEN_DETAILS)
                    scrolled = "document.documentElement.scrollWidth <= innerWidth"
                    assert browser.evaluate(scrolled), (width, name)
                    assert browser.evaluate(CONTRASTS) == [], (width, scheme, name)
                    browser.screenshot(tmp_path / f"{name}-{width}-{scheme}.png")
                    assert all(words for _, words in browser.controls()), browser.controls()
        # What changes comes by itself; what one has opened stays open.
        summary = "document.querySelector('#timeline summary')"
        browser.open(job_address)
        browser.evaluate(f"{summary}.click(), {summary}.focus()")
        site.service.jobs[arn].logs.write("algo-1", "a line <b>that</b> came later")
        browser.wait_for("document.getElementById('lines').textContent.includes('<b>that</b>')")
        record.attempts[1].instances[0].note_checkpoint(60, True)
        browser.wait_for("document.querySelectorAll('circle.copied').length == 2")
        assert browser.evaluate("document.querySelector('#timeline details').open")
        assert browser.evaluate(f"document.activeElement === {summary}")
        # A form of the page is obeyed, that of another page is not.
        form = "document.querySelector('form[action*=interrupt]')"
        browser.load(lambda: browser.evaluate(f"{form}.requestSubmit()"))
        assert "taken away, warned" in browser.evaluate("document.body.textContent")
        assert site.service.jobs[arn].control.messages.get_nowait().why == "by hand"
        assert browser.errors == []
        action = f"{address}{site.page.documents.address(f'{access.PATH}stop', job=arn)}"
        browser.open(f"data:text/html,<form method=post action='{quote(action, safe='')}'>")
        browser.load(lambda: browser.evaluate("document.forms[0].submit()"))
        assert "found a request of another web page" in browser.evaluate("document.body.innerText")
        with pytest.raises(queue.Empty):
            site.service.jobs[arn].control.messages.get_nowait()
