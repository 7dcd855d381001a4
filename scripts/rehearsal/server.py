"""The endpoint: SageMaker's operations by `service`, all else (S3, STS, IAM, ECR, CloudWatch Logs) by moto."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Request, Response

from .cloud import REGION
from .errors import Refused
from .present import Account
from .service import Service

CONTROL = "/Rehearsal/"  # our own requests, beside AWS's: no bucket has a name with a capital
CREDENTIAL = re.compile(r"Credential=[^/]+/\d{8}/([a-z0-9-]+)/")


class Quiet(MotoRequestHandler):
    """Says nothing of the requests that it answers."""

    def log(self, *_) -> None:
        """Stay quiet."""


class Endpoint:
    """The WSGI application."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.account: Account  # given when the address is known, which its clients need
        self.moto = DomainDispatcherApplication(create_backend_app)
        # moto fails where two requests are at the same object: two hosts that upload a checkpoint of the same name.
        self.locks = [threading.Lock() for _ in range(64)]

    def __call__(self, environ: dict, start_response: Callable):
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if target.startswith("SageMaker."):
            return self._sagemaker(Request(environ), target.partition(".")[2])(environ, start_response)
        if environ["PATH_INFO"].startswith(CONTROL):
            return self._control(Request(environ))(environ, start_response)
        if known := self.account.answer(environ, region_of(environ)):
            return known(environ, start_response)
        with self.locks[hash(environ["PATH_INFO"]) % len(self.locks)]:
            try:
                return self.moto(environ, start_response)
            except NotImplementedError as error:
                return refused(target, f"{error} by moto, which answers for this service")(environ, start_response)

    def _sagemaker(self, request: Request, operation: str) -> Response:
        try:
            try:
                content = json.loads(request.get_data() or b"{}")
            except (ValueError, RecursionError):
                raise Refused("SerializationException", "the request's body is not JSON") from None
            return answered(self.service.answer(operation, content, region_of(request.environ)))
        except Refused as refused:
            return answered({"__type": refused.code, "message": str(refused), "Message": str(refused)}, status=400)

    def _control(self, request: Request) -> Response:
        """Answer `python -m scripts.rehearsal interrupt` and `exec`."""
        name = request.path.removeprefix(CONTROL)
        if name == "":
            return answered({"rehearsal": [job.record.name for job in self.service.jobs.values()]})
        if name != "interrupt" or request.method != "POST":
            return answered({"error": f"{request.path} is not known"}, status=404)
        try:
            return answered({"done": self.service.interrupt(**json.loads(request.get_data()))})
        except (ValueError, TypeError) as error:  # TypeError: it is no order of ours
            return answered({"error": str(error)}, status=409)


def region_of(environ: dict) -> str:
    """Return the region that a request was signed for."""
    found = CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    return found[1] if found else REGION


def refused(target: str, message: str) -> Response:
    """Return an error that says why, in the service's protocol: a client does not try it again."""
    if target:
        return answered({"__type": "NotImplemented", "message": message}, status=400)
    error = f"<Error><Code>NotImplemented</Code><Message>{escape(message)}</Message></Error>"
    return Response(f"<ErrorResponse>{error}</ErrorResponse>", status=400, content_type="text/xml")


def answered(content: dict, status: int = 200) -> Response:
    """Return an answer of the AWS JSON protocol."""
    return Response(json.dumps(content), status=status, content_type="application/x-amz-json-1.1")


@contextlib.contextmanager
def served(application: Callable, port: int, addresses: list[str]) -> Iterator[int]:
    """Serve at `port` (0: a free one) of each address for as long as the block, and yield the port."""
    servers: list[BaseWSGIServer] = []
    try:
        for address in addresses:
            servers.append(make_server(address, port, application, threaded=True, request_handler=Quiet))
            port = servers[0].port
            threading.Thread(target=servers[-1].serve_forever, name=f"endpoint {address}", daemon=True).start()
        yield port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
