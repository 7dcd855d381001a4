"""What an AWS account has before its first job: roles, and images in ECR.

A new rehearsal does not have them. So a role of any name, and an ECR entry for a local image, are
made in moto when a client first asks for them.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from botocore.exceptions import ClientError
from werkzeug.wrappers import Response

from sagemaker_rehearsal.api.gate import Caller
from sagemaker_rehearsal.aws.access_keys import Key

TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        },
    ],
}
ROLE_NAME = re.compile(r"[\w+=,.@-]{1,64}", re.ASCII)
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
ECR_TARGET = "AmazonEC2ContainerRegistry_V20150921."


class Account:
    """Makes roles and images when they are asked for.

    Args:
        clients: Returns a client, given a region and a service.
        engine: Knows the local images.
    """

    def __init__(self, clients: Callable, engine) -> None:
        self.clients = clients
        self.engine = engine

    def answer(self, environ: dict, caller: Caller) -> Response | None:
        """Make what a request asks for; return an answer only to what moto does not have."""
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if caller.service == "iam":
            request = parse_qs(peek(environ).decode(errors="replace"))
            if request.get("Action") == ["SimulatePrincipalPolicy"]:
                return allowed(
                    [values[0] for key, values in request.items() if key.startswith("ActionNames.")]
                )
            name = request.get("RoleName", [""])[0]
            if request.get("Action") == ["GetRole"] and ROLE_NAME.fullmatch(name):
                self._make_role(name)
        elif (
            caller.service == "ecr"
            and target == f"{ECR_TARGET}DescribeImages"
            and self.engine.name == "docker"
        ):
            for repository, tag in images_in(peek(environ)):
                self._make_image(caller.region, repository, tag)
        return None

    def _make_role(self, name: str) -> None:
        iam = self.clients(region="us-east-1", service="iam")
        with _suppressed("EntityAlreadyExists"):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))

    def _make_image(self, region: str, repository: str, tag: str) -> None:
        if (image_id := self.engine.local(f"{repository}:{tag}")) is None:
            return
        ecr = self.clients(region=region, service="ecr")
        layer = {"digest": f"sha256:{hashlib.sha256(image_id.encode()).hexdigest()}"}
        manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST, "config": layer, "layers": []}
        )
        with _suppressed("RepositoryAlreadyExistsException"):
            ecr.create_repository(repositoryName=repository)
        with _suppressed("ImageAlreadyExistsException"):
            ecr.put_image(repositoryName=repository, imageManifest=manifest, imageTag=tag)


@contextlib.contextmanager
def _suppressed(code: str) -> Iterator[None]:
    """Suppress an error of AWS's by its code.

    A client makes its own classes of errors when they are first asked for, and two threads at once
    may each have made one.
    """
    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != code:
            raise


def images_in(body: bytes) -> list[tuple[str, str]]:
    """Return repository and tag of each image that DescribeImages asks for, none if it is wrong."""
    try:
        request = json.loads(body)
        names = [
            (request["repositoryName"], image["imageTag"])
            for image in request["imageIds"]
            if "imageTag" in image
        ]
    # moto will say so.
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [pair for pair in names if all(isinstance(text, str) for text in pair)]


def peek(environ: dict) -> bytes:
    """Return a request's body, which `gate` has read, and leave it there for moto."""
    body = environ["wsgi.input"].read()
    environ["wsgi.input"].seek(0)
    return body


def with_key(answer: Response, key: Key) -> Response:
    """Return an answer of STS with the caller's own key in place of moto's.

    moto makes up a key, which nobody knows.
    """
    for name, value in (("AccessKeyId", key.id), ("SecretAccessKey", key.secret)):
        element = f"<{name}>{value}</{name}>".encode()
        answer.data = re.sub(
            rf"<{name}>[^<]*</{name}>".encode(), lambda _, new=element: new, answer.data
        )
    return answer


def allowed(names: list[str]) -> Response:
    """Return the answer to SDK 3's SimulatePrincipalPolicy: everything is allowed."""
    members = "".join(
        f"<member><EvalActionName>{escape(name)}</EvalActionName>"
        "<EvalDecision>allowed</EvalDecision></member>"
        for name in names
    )
    result = f"<IsTruncated>false</IsTruncated><EvaluationResults>{members}</EvaluationResults>"
    name = "SimulatePrincipalPolicy"
    return Response(
        f"<{name}Response><{name}Result>{result}</{name}Result></{name}Response>",
        content_type="text/xml",
    )
