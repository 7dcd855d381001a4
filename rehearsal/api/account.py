"""What an account has before its first job, and a new rehearsal has not: a role of any name, the local images in ECR.

Each is made in moto when a client first asks for it.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

from rehearsal.api.access_keys import Key
from rehearsal.api.gate import Caller

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
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
ECR_TARGET = "AmazonEC2ContainerRegistry_V20150921."


class Account:
    """`clients` gives a client of a region and a service; `engine` knows the local images."""

    def __init__(self, clients: Callable, engine) -> None:
        self.clients, self.engine = clients, engine

    def answer(self, environ: dict, caller: Caller) -> Response | None:
        """Make what a request asks for; return an answer only to what moto has not."""
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if caller.service == "iam":
            asked = parse_qs(peek(environ).decode(errors="replace"))
            if asked.get("Action") == ["SimulatePrincipalPolicy"]:
                return allowed(
                    [values[0] for key, values in asked.items() if key.startswith("ActionNames.")]
                )
            if asked.get("Action") == ["GetRole"]:
                self._role(asked.get("RoleName", [""])[0])
        elif (
            caller.service == "ecr"
            and target == f"{ECR_TARGET}DescribeImages"
            and self.engine.name == "docker"
        ):
            asked = json.loads(peek(environ))
            for wanted in asked.get("imageIds") or []:
                self._image(caller.region, asked["repositoryName"], wanted.get("imageTag"))
        return None

    def _role(self, name: str) -> None:
        iam = self.clients(region="us-east-1", service="iam")
        with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))

    def _image(self, region: str, repository: str, tag: str | None) -> None:
        found = self.engine.local(f"{repository}:{tag}") if tag else None
        if found is None:
            return
        ecr = self.clients(region=region, service="ecr")
        layer = {"digest": f"sha256:{hashlib.sha256(found.encode()).hexdigest()}"}
        manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST, "config": layer, "layers": []}
        )
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        with contextlib.suppress(ecr.exceptions.ImageAlreadyExistsException):
            ecr.put_image(repositoryName=repository, imageManifest=manifest, imageTag=tag)


def peek(environ: dict) -> bytes:
    """Return a request's body, which `gate` has brought to memory, and leave it there for moto."""
    body = environ["wsgi.input"].read()
    environ["wsgi.input"].seek(0)
    return body


def with_key(answer: Response, key: Key) -> Response:
    """Return an answer of STS with the caller's own key in place of one that moto made up, which nobody knows."""
    for name, value in (("AccessKeyId", key.id), ("SecretAccessKey", key.secret)):
        element = f"<{name}>{value}</{name}>".encode()
        answer.data = re.sub(
            rf"<{name}>[^<]*</{name}>".encode(), lambda _, new=element: new, answer.data
        )
    return answer


def allowed(names: list[str]) -> Response:
    """Return SimulatePrincipalPolicy's answer, which SDK 3 asks for: nothing here is forbidden."""
    members = "".join(
        f"<member><EvalActionName>{escape(name)}</EvalActionName><EvalDecision>allowed</EvalDecision></member>"
        for name in names
    )
    found = f"<IsTruncated>false</IsTruncated><EvaluationResults>{members}</EvaluationResults>"
    name = "SimulatePrincipalPolicy"
    return Response(
        f"<{name}Response><{name}Result>{found}</{name}Result></{name}Response>",
        content_type="text/xml",
    )
