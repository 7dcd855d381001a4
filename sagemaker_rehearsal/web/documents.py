"""The documents of the page: the list of jobs, and one job."""

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode
from xml.etree.ElementTree import Element

from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.jobs.job import Job
from sagemaker_rehearsal.jobs.record import ENDED, Record, Status
from sagemaker_rehearsal.report.markup import clock, document, html, make_table, node
from sagemaker_rehearsal.report.page import STYLE, make_sections
from sagemaker_rehearsal.report.summary import (
    cells_of,
    describe_end,
    describe_fault,
    describe_interruption,
    describe_outcome,
)
from sagemaker_rehearsal.settings import prices_of_job
from sagemaker_rehearsal.web import log_file, objects
from sagemaker_rehearsal.web.access import PATH, TOKEN

FOLDER = Path(__file__).parent
CSS = STYLE.read_text() + (FOLDER / "page.css").read_text()
SCRIPT = (FOLDER / "page.js").read_text()
# Jobs that are listed: the last ones.
MAX_JOBS = 200
FIRST_SECTIONS = (
    "about",
    "news",
    "figures",
    "outcome",
    "orders",
    "log-end",
    "results",
    "comparison",
    "faults",
    "timeline",
    "curves",
)
COLUMNS = ["job", "status", "hosts", "progress", "interruptions", "time", "goodput", "verdict"]


def _hash(text: str) -> str:
    """Return the source expression of an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Nothing but this one script, this one style, and the endpoint itself.
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash(SCRIPT)}",
        f"style-src {_hash(CSS)}",
        "img-src data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)


class Documents:
    """Makes the documents.

    Args:
        service: Has the jobs.
        token: Is in every address of the page.
    """

    def __init__(self, service: Service, token: str) -> None:
        self.service = service
        self.token = token
        # What the last order to a job has brought, by the job's ARN.
        self.outcomes: dict[str, str] = {}
        # The table of a job's objects, and of what it was made, by the job's ARN.
        self.tables: dict[str, tuple[object, list[Element]]] = {}
        # The goodput and the verdict of jobs that are over, by their ARN.
        self.ends: dict[str, list[str]] = {}

    def address(self, path: str, **query: object) -> str:
        """Return an address of the page."""
        return f"{path}?{urlencode({TOKEN: self.token} | query)}"

    def job_list(self) -> str:
        """Return the list of jobs as a document."""
        main = node("main", node("h1", "Rehearsal"), *self._list_sections().values())
        return self._document("Rehearsal", [main], stream=self.address(f"{PATH}stream"))

    def job(self, arn: str, host: str, find: str) -> str:
        """Return a job as a document, with the log of a host, or what is found in it."""
        job = self.service.jobs[arn]
        sections = self._job_sections(arn)
        log, end = self._log(arn, job, host, find)
        first = [sections.pop(name) for name in FIRST_SECTIONS]
        main = node("main", *first, log, sections.pop("files"), *sections.values())
        stream = self.address(f"{PATH}stream", job=arn, host=host, find=find)
        nav = node("nav", node("a", "All jobs", href=self.address("/")))
        title = f"{job.record.name} – rehearsal"
        return self._document(title, [nav, main], stream=stream, start=end)

    def list_parts(self) -> dict[str, str]:
        """Return the parts of the list of jobs that change, as HTML, by their ids."""
        return _inner(self._list_sections())

    def job_parts(self, arn: str) -> dict[str, str]:
        """Return the parts of a job's document that change, as HTML, by their ids."""
        return _inner(self._job_sections(arn))

    def _document(self, title: str, content: Sequence[Element], **data: object) -> str:
        attributes = {f"data-{name}": value for name, value in data.items()}
        lost = node("p", id="lost", role="status")
        icon = node("link", rel="icon", href="data:,")
        body = node("body", lost, *content, node("script", SCRIPT), **attributes)
        return document(title, body, CSS, icon)

    def _list_sections(self) -> dict[str, Element]:
        jobs = list(self.service.jobs.items())
        rows = [
            [node("a", name, href=self.address("/", job=arn)), *cells, *self._end(arn, job.record)]
            for arn, job in reversed(jobs[-MAX_JOBS:])
            for name, *cells in [cells_of(job.record)]
        ]
        content = make_table(
            "Jobs, the newest first.",
            COLUMNS,
            rows,
            words=["job", "status", "hosts", "progress", "verdict"],
        )
        if len(jobs) > MAX_JOBS:
            content.append(node("p", f"{len(jobs) - MAX_JOBS} older jobs are left out."))
        content = content or [node("p", "No job yet: create one with any client of SageMaker.")]
        return {"jobs": node("section", *content, id="jobs")}

    def _end(self, arn: str, record: Record) -> list[str]:
        """Return the goodput and the verdict of a job; of one that is not over, they are empty."""
        if not self.service.is_over(arn):
            return ["", ""]
        known = self.ends.get(arn)
        # A comparison may be ordered after the end.
        if known is None or (record.comparison and known[1] != record.comparison.verdict):
            self.ends[arn] = known = describe_outcome(record)
        return known

    def _job_sections(self, arn: str) -> dict[str, Element]:
        """Return the sections of a job's document, those of its report among them."""
        job = self.service.jobs[arn]
        settings = self.service.settings
        try:
            record = job.record.masked()
            prices = prices_of_job(settings, record.instance_types, record.spot)
            sections = make_sections(record, **prices)
            news = _news(record)
        # The log and the buttons are still there.
        except Exception as error:
            sections = {name: node("section", id=name) for name in FIRST_SECTIONS}
            sections["about"].append(node("h1", job.record.name))
            news = describe_fault(error)
        sections["news"] = node("section", node("p", news), id="news", role="status")
        outcome = self.outcomes.get(arn)
        said = node("section", id="outcome", role="status")
        said.extend([node("p", outcome)] if outcome else [])
        files = node("section", node("h2", "Files in S3"), *self._files(arn, job), id="files")
        return sections | {"outcome": said, "orders": self._orders(arn, job), "files": files}

    def _files(self, arn: str, job: Job) -> list[Element]:
        """Return the tables of what a job has in S3; S3 is asked after each change."""
        state = (
            job.record.status,
            [
                checkpoint.in_s3
                for attempt in list(job.record.attempts)
                for instance in list(attempt.instances)
                for checkpoint in list(instance.checkpoints)
            ],
        )
        made, content = self.tables.get(arn, (None, []))
        if made != state:
            content = self._list_files(arn, job)
            self.tables[arn] = state, content
        return content

    def _list_files(self, arn: str, job: Job) -> list[Element]:
        content = []
        for kind, (bucket, prefix) in objects.places(job.record.request).items():
            place = f"s3://{bucket}/{prefix}"
            try:
                found = objects.listed(job.place.clients("s3"), bucket, prefix)
            except (ClientError, BotoCoreError) as error:
                content.append(node("p", f"{kind}: {place}: {clients.reason(error)}"))
                continue
            rows = [
                [
                    node(
                        "a",
                        name,
                        href=self.address(f"{PATH}file", job=arn, kind=kind, name=name),
                        download="",
                    ),
                    f"{size:,}",
                ]
                for name, size in found
            ]
            more = f", the first {len(rows)}" if len(rows) == objects.MAX_OBJECTS else ""
            caption = f"{kind.capitalize()}, in {place}{more}"
            content += make_table(caption, ["file", "bytes"], rows, words=["file"]) or [
                node("p", f"No {kind} in {place}.", class_="soft")
            ]
        return content

    def _orders(self, arn: str, job: Job) -> Element:
        """Return the buttons that interrupt and stop a job, or compare one that has completed."""
        orders = node("section", class_="orders", id="orders")
        if job.record.status in ENDED:
            is_complete = job.record.status == Status.COMPLETED
            if is_complete and not job.record.comparison and self.service.is_over(arn):
                button = node("button", "Compare with an uninterrupted run", type="submit")
                action = self.address(f"{PATH}compare", job=arn)
                orders.append(node("form", button, method="post", action=action))
            return orders
        orders.append(node("h2", "Interrupt or stop"))
        if job.record.spot:
            hosts = [
                node(
                    "label", node("input", type="checkbox", name="host", value=host.name), host.name
                )
                for host in job.hosts
            ]
            orders.append(
                node(
                    "form",
                    node("fieldset", node("legend", "Hosts (none: all)"), *hosts),
                    node(
                        "label",
                        node("input", type="checkbox", name="warned", checked=""),
                        "warned by SIGTERM",
                    ),
                    node(
                        "label",
                        "no capacity for ",
                        node("input", type="number", name="gap", value="0", min="0", step="any"),
                        " s",
                    ),
                    node("button", "Interrupt", type="submit"),
                    method="post",
                    action=self.address(f"{PATH}interrupt", job=arn),
                )
            )
        stop = node("button", "Stop the job", type="submit", data_confirm="Stop this job for good?")
        action = self.address(f"{PATH}stop", job=arn)
        orders.append(node("form", stop, method="post", action=action))
        return orders

    def _log(self, arn: str, job: Job, host: str, find: str) -> tuple[Element, int]:
        """Return the section of the log, and the offset of what is not yet in it."""
        excerpt = log_file.read(job.logs.path(host), 0, find)
        hosts = [
            node("option", each.name, value=each.name, selected="" if each.name == host else None)
            for each in job.hosts
        ]
        hidden = [
            node("input", type="hidden", name=name, value=value)
            for name, value in ((TOKEN, self.token), ("job", arn))
        ]
        form = node(
            "form",
            *hidden,
            node("label", "host ", node("select", *hosts, name="host")),
            node(
                "label",
                "with the text ",
                node("input", type="search", name="find", value=find),
            ),
            node("button", "Show", type="submit"),
            node(
                "label",
                node("input", type="checkbox", id="follow", checked=""),
                "follow",
                class_="scripted",
            ),
            action="/#log",
        )
        whole = self.address(f"{PATH}log", job=arn, host=host)
        cut = f"The last {log_file.MAX_SHOWN_BYTES // 1024} KiB. " if excerpt.is_cut else ""
        about = node("p", cut, node("a", "The whole log", href=whole, download=""))
        text = "".join(f"{line}\n" for line in excerpt.lines)
        label = f"Log of {host}" + (f", lines with “{find}”" if find else "")
        lines = node("pre", text, id="lines", tabindex=0, role="region", aria_label=label)
        return node("section", node("h2", label), form, about, lines, id="log"), excerpt.end


def _inner(sections: Mapping[str, Element]) -> dict[str, str]:
    """Return what is in each section, as HTML."""
    return {name: "".join(map(html, section)) for name, section in sections.items()}


def _news(record: Record) -> str:
    """Return what has happened last, for those who do not see the timeline."""
    if record.status in ENDED:
        return describe_end(record)
    happened = [(event.start, f"{event.status}: {event.message}") for event in record.transitions]
    happened += [
        (event.time, describe_interruption(record.created, event)) for event in record.interruptions
    ]
    moment, words = max(happened, default=(time.time(), ""))
    return f"+{clock(moment - record.created)} {words}"
