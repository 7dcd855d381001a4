"""The WSGI application of the endpoint.

`service` answers SageMaker's operations, moto those of S3, STS, IAM, ECR and CloudWatch Logs, and
`web` a browser. Everything else is refused.
"""

import json
import tempfile
import threading
from collections.abc import Callable
from xml.sax.saxutils import escape

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Request, Response

from sagemaker_lightning.contract.errors import printable
from sagemaker_rehearsal.api import gate, sockets
from sagemaker_rehearsal.api.account import Account, peek, with_key
from sagemaker_rehearsal.api.gate import Caller, Closed
from sagemaker_rehearsal.api.job_access import Reach, confine, reach
from sagemaker_rehearsal.api.service import Service, arn_of
from sagemaker_rehearsal.aws.access_keys import Keys
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs.record import ENDED
from sagemaker_rehearsal.web import access
from sagemaker_rehearsal.web.application import WebPage

# The path of our own requests, which are signed for a service of our own.
CONTROL_PATH = "/Rehearsal/"
# Each service is an application of its own. moto's dispatcher, its /moto-api, and its services that
# run programs cannot be reached.
MOTO_SERVICES = ("s3", "sts", "iam", "ecr", "logs")
# What a job's hosts may ask for: nothing that starts or stops a job, and nothing of other jobs.
JOB_SERVICES = ("s3", "sts", "sagemaker")
# Characters of an error that may quote what it refuses.
MAX_MESSAGE_CHARACTERS = 4096


class Handler(sockets.Handler, MotoRequestHandler):
    """Answers requests; moto's handler keeps the names of S3's metadata as they are."""


class Endpoint:
    """The WSGI application of the endpoint.

    Args:
        service: Answers SageMaker's operations.
        keys: The keys that are valid.
        account: Makes what an account has before anybody asks for it.
    """

    def __init__(self, service: Service, keys: Keys, account: Account) -> None:
        self.service = service
        self.keys = keys
        self.account = account
        self.page = WebPage(service, keys.page_token)
        self.reaches: dict[str, Reach] = {}
        self.moto = {}
        self.making = threading.Lock()
        # moto fails if two requests reach the same object at once, for example if two hosts upload
        # a checkpoint of the same name.
        self.locks = [threading.Lock() for _ in range(64)]

    def __call__(self, environ: dict, start_response: Callable):
        def without_cors(status: str, headers: list, *more):
            kept_headers = [
                (name, value)
                for name, value in headers
                if not name.lower().startswith("access-control-")
            ]
            return start_response(status, kept_headers, *more)

        try:
            if access.is_for_page(environ):
                answer = self.page.answer(environ)
            else:
                gate.keep_pages_out(environ)
                answer = self._answer_to(environ, gate.caller(environ, self._find_valid_key))
        except Closed as closed:
            answer = refused(environ, closed.code, str(closed), closed.status)
        return answer(environ, without_cors)

    def _find_valid_key(self, name: str):
        """Return the key with an id if it is valid: a job's key only until the job's end."""
        key = self.keys.find(name)
        if key and key.job:
            job = self.service.jobs.get(key.job)
            return key if job and job.record.status not in ENDED else None
        return key

    def _answer_to(self, environ: dict, caller: Caller) -> Callable:
        """Return the WSGI application for a request; Closed if a job may not send it."""
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        service = caller.service
        prefix, _, operation = target.partition(".")
        if caller.key.job:
            self._confine(environ, caller, operation)
        if service == "sagemaker" and prefix == "SageMaker":
            return self._answer_sagemaker(Request(environ), operation, caller.region)
        if service == gate.OWN_SERVICE:
            return self._answer_control(Request(environ))
        if service in MOTO_SERVICES:
            return self.account.answer(environ, caller) or self._moto_application(caller)
        return refused(
            environ,
            "NotImplemented",
            f"the rehearsal does not emulate {service}; it has {', '.join(MOTO_SERVICES)}",
        )

    def _confine(self, environ: dict, caller: Caller, operation: str) -> None:
        """Raise Closed if a request of a job's hosts reaches beyond their own job."""
        arn = caller.key.job
        if caller.service == "s3":
            if arn not in self.reaches:
                self.reaches[arn] = reach(self.service.jobs[arn].record.request)
            confine(environ, self.reaches[arn])
        elif caller.service == "sagemaker":
            if job_named(operation, peek(environ), caller.region) != arn:
                raise Closed(
                    f"found {operation}, expected from a job's hosts DescribeTrainingJob or "
                    f"ListTags of {arn}",
                    "AccessDeniedException",
                )
        elif caller.service not in JOB_SERVICES:
            raise Closed(
                f"found {caller.service}, expected from a job's hosts {', '.join(JOB_SERVICES)}",
                "AccessDeniedException",
            )

    def _moto_application(self, caller: Caller) -> Callable:
        with self.making:
            if caller.service not in self.moto:
                self.moto[caller.service] = create_backend_app(caller.service)
        application = self.moto[caller.service]

        def answer(environ: dict, start_response: Callable):
            # A slow client must not hold a lock while it sends.
            with tempfile.SpooledTemporaryFile(gate.MIB) as body:
                try:
                    gate.read_to(body, environ)
                except HTTPException as error:
                    return error(environ, start_response)
                if gate.overstates_size(environ):
                    message = "found less than X-Amz-Decoded-Content-Length says"
                    return refused(environ, "IncompleteBody", message)(environ, start_response)
                return answer_whole(environ, start_response)

        def answer_whole(environ: dict, start_response: Callable):
            with self.locks[hash(environ["PATH_INFO"]) % len(self.locks)]:
                try:
                    if caller.service == "sts":
                        moto_answer = Response.from_app(application, environ, buffered=True)
                        return with_key(moto_answer, caller.key)(environ, start_response)
                    return application(environ, start_response)
                except NotImplementedError as error:
                    message = f"{error} by moto, which answers for this service"
                    return refused(environ, "NotImplemented", message)(environ, start_response)
                # moto takes many requests to be well-formed, and a job may send anything.
                except Exception as error:
                    message = f"moto, which answers for this service, failed: {error!r}"
                    return refused(environ, "InternalFailure", message)(environ, start_response)

        return answer

    def _answer_sagemaker(self, request: Request, operation: str, region: str) -> Response:
        try:
            try:
                content = json.loads(request.get_data() or b"{}")
            except (ValueError, RecursionError):
                raise Refused("SerializationException", "the request's body is not JSON") from None
            try:
                return answered(self.service.answer(operation, content, region))
            # The client gets one line, as of every other service here.
            except OSError as error:
                raise Refused("InternalFailure", f"the rehearsal failed: {error}") from error
        except Refused as refused:
            return answered(
                {"__type": refused.code, "message": str(refused), "Message": str(refused)},
                status=400,
            )

    def _answer_control(self, request: Request) -> Response:
        """Answer the requests of `python -m sagemaker_rehearsal interrupt` and `exec`."""
        if request.path == CONTROL_PATH:
            return answered(
                {"rehearsal": [job.record.name for job in list(self.service.jobs.values())]}
            )
        orders = {
            "interrupt": self.service.interrupt,
            "fault": self.service.inject,
            "compare": self.service.compare,
        }
        order = orders.get(request.path.removeprefix(CONTROL_PATH))
        if order is None or request.method != "POST":
            return answered({"error": f"{request.path} is not known"}, status=404)
        try:
            return answered({"done": order(json.loads(request.get_data()))})
        # RecursionError: the JSON is nested too deeply.
        except (ValueError, RecursionError) as error:
            return answered({"error": str(error)}, status=409)


def job_named(operation: str, body: bytes, region: str) -> str | None:
    """Return the ARN of the job that a request wants to read; None if it wants something else."""
    try:
        content = json.loads(body)
        if operation == "DescribeTrainingJob":
            return arn_of(content["TrainingJobName"], region)
        return content["ResourceArn"] if operation == "ListTags" else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def refused(environ: dict, code: str | None, message: str, status: int = 400) -> Response:
    """Return an error with its reason, in the service's protocol or as text.

    Its status is one after which a client does not try again.
    """
    message = printable(message[:MAX_MESSAGE_CHARACTERS])
    if code is None:
        return Response(f"{message}\n", status=status, content_type="text/plain; charset=utf-8")
    if "HTTP_X_AMZ_TARGET" in environ:
        return answered({"__type": code, "message": message}, status=status)
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return Response(
        f"<ErrorResponse>{error}</ErrorResponse>", status=status, content_type="text/xml"
    )


def answered(content: dict, status: int = 200) -> Response:
    """Return an answer in the AWS JSON protocol."""
    return Response(json.dumps(content), status=status, content_type="application/x-amz-json-1.1")
