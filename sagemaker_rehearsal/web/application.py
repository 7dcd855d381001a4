"""The WSGI application of the web page."""

import threading
from collections.abc import Callable, Iterable
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response
from werkzeug.wsgi import FileWrapper

from sagemaker_rehearsal.api import clients, gate
from sagemaker_rehearsal.api.errors import Refused
from sagemaker_rehearsal.api.gate import Closed
from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.web import access, documents, log_file, objects, stream
from sagemaker_rehearsal.web.access import PATH

MAX_FORM_BYTES = 64 * 1024
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": documents.POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The page's own POSTs need an Origin; no other site gets an address with the token.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# A file of a job is never a document, whatever is in it.
FILE_HEADERS = {"Content-Security-Policy": "default-src 'none'; sandbox"}


class WebPage:
    """Answers the requests of browsers.

    Args:
        service: Has the jobs.
        token: Is in the printed address, and in every other address of the page.
    """

    def __init__(self, service: Service, token: str) -> None:
        self.service = service
        self.token = token
        self.documents = documents.Documents(service, token)
        self.free_streams = threading.BoundedSemaphore(stream.MAX_STREAMS)

    def answer(self, environ: dict) -> Callable:
        """Return the WSGI application for a request; Closed if it may not pass."""
        access.check(environ, self.token)
        routes = {
            ("GET", "/"): self._show,
            ("GET", f"{PATH}stream"): self._follow,
            ("GET", f"{PATH}log"): self._send_log,
            ("GET", f"{PATH}file"): self._send_file,
            ("POST", f"{PATH}interrupt"): self._interrupt,
            ("POST", f"{PATH}stop"): self._stop,
            ("POST", f"{PATH}compare"): self._compare,
        }
        route = routes.get((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        if route is None:
            raise _missing("page")
        gate.read(environ, MAX_FORM_BYTES)
        response = route(Request(environ))
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _show(self, request: Request) -> Response:
        if "job" not in request.args:
            return Response(self.documents.job_list(), content_type="text/html; charset=utf-8")
        arn = self._arn(request)
        content = self.documents.job(arn, self._host(request, arn), _find(request))
        return Response(content, content_type="text/html; charset=utf-8")

    def _follow(self, request: Request) -> Response:
        """Send what changes, as long as the page is open."""
        if "job" in request.args:
            arn = self._arn(request)
            # A browser that connects again says where it was.
            start = request.headers.get("Last-Event-ID") or request.args.get("start", "")
            log = stream.Follower(
                self.service.jobs[arn].logs.path(self._host(request, arn)),
                int(start) if start.isascii() and start.isdigit() else 0,
                _find(request),
            )
            events = stream.events(
                lambda: self.documents.job_parts(arn), lambda: self.service.is_over(arn), log
            )
        else:
            events = stream.events(self.documents.list_parts, lambda: False)
        if not self.free_streams.acquire(blocking=False):
            raise Closed(f"{stream.MAX_STREAMS} pages follow already", status=503)
        response = Response(events, content_type="text/event-stream")
        response.call_on_close(self.free_streams.release)
        return response

    def _send_log(self, request: Request) -> Response:
        arn = self._arn(request)
        host = self._host(request, arn)
        try:
            file = self.service.jobs[arn].logs.path(host).open("rb")
        except FileNotFoundError:
            raise _missing("log") from None
        return _file(f"{self.service.jobs[arn].record.name}-{host}.log", FileWrapper(file))

    def _send_file(self, request: Request) -> Response:
        """Send an object that a job has left in S3."""
        job = self.service.jobs[self._arn(request)]
        place = objects.places(job.record.request).get(request.args.get("kind", ""))
        name = request.args.get("name", "")
        if place is None or not name:
            raise _missing("file")
        bucket, prefix = place
        try:
            found = objects.content(job.place.clients("s3"), bucket, prefix + name)
        except (ClientError, BotoCoreError) as error:
            raise Closed(
                f"S3 does not give the file: {clients.reason(error)}", status=404
            ) from None
        if found is None:
            raise _missing("file")
        size, content = found
        response = _file(name.rpartition("/")[2], content)
        response.content_length = size
        return response

    def _interrupt(self, request: Request) -> Response:
        """Take the hosts of the form away, or all of them."""
        arn = self._arn(request)
        try:
            gap = float(request.form.get("gap") or 0)
        except ValueError:
            gap = request.form["gap"]
        order = {
            "name": self.service.jobs[arn].record.name,
            "hosts": request.form.getlist("host"),
            "warned": "warned" in request.form,
            "gap": gap,
        }
        try:
            outcome = self.service.interrupt(order)
        except ValueError as error:
            outcome = str(error)
        return self._back(arn, outcome)

    def _stop(self, request: Request) -> Response:
        """Stop a job, as StopTrainingJob does."""
        arn = self._arn(request)
        name = self.service.jobs[arn].record.name
        try:
            self.service.StopTrainingJob({"TrainingJobName": name}, arn.split(":")[3])
            outcome = f"{name} is asked to stop"
        except Refused as refused:
            outcome = str(refused)
        return self._back(arn, outcome)

    def _compare(self, request: Request) -> Response:
        """Run a job that has completed once more, without interruptions."""
        arn = self._arn(request)
        try:
            other = self.service.compare({"name": self.service.jobs[arn].record.name})
            outcome = f"{other} runs; the comparison is here once it has ended"
        except ValueError as error:
            outcome = str(error)
        return self._back(arn, outcome)

    def _back(self, arn: str, outcome: str) -> Response:
        """Return to a job's document, which says what an order has brought."""
        self.documents.outcomes[arn] = outcome
        return redirect(f"{self.documents.address('/', job=arn)}#outcome", 303)

    def _arn(self, request: Request) -> str:
        """Return the ARN of the job that a request is about."""
        arn = request.args.get("job", "")
        if arn not in self.service.jobs:
            raise _missing("job")
        return arn

    def _host(self, request: Request, arn: str) -> str:
        """Return the host whose log a request is about: the job's first one without a name."""
        names = [host.name for host in self.service.jobs[arn].hosts]
        name = request.args.get("host", names[0])
        if name not in names:
            raise _missing("host")
        return name


def _missing(what: str) -> Closed:
    return Closed(f"found no such {what}; the page is at /", status=404)


def _find(request: Request) -> str:
    return request.args.get("find", "")[: log_file.MAX_FIND_CHARACTERS]


def _file(name: str, content: Iterable[bytes]) -> Response:
    """Return a file that a browser saves under its name, and does not open."""
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    headers = FILE_HEADERS | {"Content-Disposition": disposition}
    return Response(
        content, headers=headers, content_type="application/octet-stream", direct_passthrough=True
    )
