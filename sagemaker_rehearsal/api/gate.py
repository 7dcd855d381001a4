"""Decides which requests may pass.

A request must be for the endpoint's own address, must not come from a web page, and must be signed
with one of the rehearsal's keys; the rehearsal's own page has other rules (web/access.py). The
signature is AWS's, version 4
(https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html).
"""

import hashlib
import hmac
import io
import re
import shutil
import time
from calendar import timegm
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import BinaryIO
from urllib.parse import quote, unquote_to_bytes

from botocore.auth import SigV4Auth
from botocore.credentials import Credentials
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wrappers import Request
from werkzeug.wsgi import get_input_stream

from sagemaker_rehearsal.api.access_keys import Key

# The service that our own requests are signed for, beside AWS's services.
OWN_SERVICE = "rehearsal"
MIB = 2**20
# The largest request in bytes. Those of S3 go to a file, and are not limited.
MAX_REQUEST_BYTES = {"sagemaker": MIB, OWN_SERVICE: MIB}
# PutLogEvents, the largest one, has at most 1 MiB on AWS.
MAX_OTHER_REQUEST_BYTES = 8 * MIB
# Seconds that the time of a signature may be off, as on AWS.
MAX_SKEW_SECONDS = 15 * 60
SCOPE = r"([\w.-]{1,128})/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request"
SIGNED_NAMES = r"([a-z0-9;_.-]+)"
SIGNATURE = r"([0-9a-f]{64})"
HEADER = re.compile(
    rf"AWS4-HMAC-SHA256 Credential={SCOPE}, *SignedHeaders={SIGNED_NAMES}, *Signature={SIGNATURE}",
    re.ASCII,
)
SIGN_IT = (
    "run the client by `python -m sagemaker_rehearsal exec`, or export what the rehearsal has "
    "printed at its start"
)


class Closed(Exception):
    """A request that is not let in.

    `code` is the error's name for an AWS client, None where no such client asks.
    """

    def __init__(self, message: str, code: str | None = None, status: int = 403) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True)
class Caller:
    """Who signed a request, for which service and region."""

    key: Key
    service: str
    region: str


@dataclass(frozen=True)
class Claim:
    """What a request says about its own signature."""

    id: str
    date: str
    region: str
    service: str
    # Those of the signed headers.
    names: list[str]
    signature: str
    time: str
    # For how many seconds the signature is valid.
    seconds: float
    # The part of the query that is signed.
    query: list[tuple[bytes, bytes]]


def keep_pages_out(environ: dict) -> None:
    """Raise Closed for a web page's request: another host's name, origin, preflight."""
    check_host(environ)
    is_cross_site = environ.get("HTTP_SEC_FETCH_SITE", "none") not in ("none", "same-origin")
    if is_cross_site or "HTTP_ORIGIN" in environ or environ["REQUEST_METHOD"].upper() == "OPTIONS":
        raise Closed("found a request of a web page, expected none")


def check_host(environ: dict) -> None:
    """Raise Closed unless a request is for the endpoint's own address: see DNS rebinding."""
    address = environ["SERVER_NAME"]
    port = environ["SERVER_PORT"]
    names = [address, *(["localhost"] if address == "127.0.0.1" else [])]
    allowed_hosts = [f"{name}:{port}" for name in names] + (names if port == "80" else [])
    host = environ.get("HTTP_HOST")
    # A request target with a host in it would override the Host header.
    if (
        host is None
        or host.lower() not in allowed_hosts
        or not environ["REQUEST_URI"].startswith("/")
    ):
        raise Closed(f"found a request for {host or 'no host'}, expected {allowed_hosts[0]}")


def caller(environ: dict, find: Callable[[str], Key | None]) -> Caller:
    """Return who signed a request; Closed if the signature is missing or wrong.

    Except for S3, the request's body is in memory afterwards.
    """
    claim = claimed(environ)
    key = find(claim.id)
    if key is None:
        raise Closed(
            f"found the access key {claim.id}, which is not this rehearsal's; {SIGN_IT}",
            "InvalidAccessKeyId",
        )
    signed_at = time.strptime(claim.time, "%Y%m%dT%H%M%SZ")
    if not -MAX_SKEW_SECONDS <= time.time() - timegm(
        signed_at
    ) <= claim.seconds or not claim.time.startswith(claim.date):
        raise Closed(
            f"found a signature of {claim.time}, which is over; is the clock right?",
            "RequestExpired",
        )
    if missing := unsigned(environ, claim.names):
        raise Closed(f"found {missing}, which is not signed", "SignatureDoesNotMatch")
    if claim.service == "s3":
        payload = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "UNSIGNED-PAYLOAD")
    else:
        payload = hashlib.sha256(
            read(environ, MAX_REQUEST_BYTES.get(claim.service, MAX_OTHER_REQUEST_BYTES))
        ).hexdigest()
    if not hmac.compare_digest(signature(environ, claim, key, payload), claim.signature):
        raise Closed(
            f"found a signature that the secret of {key.id} does not make; {SIGN_IT}",
            "SignatureDoesNotMatch",
        )
    environ.get("rehearsal.welcome", lambda: None)()
    return Caller(key, claim.service, claim.region)


def claimed(environ: dict) -> Claim:
    """Return what a request claims, in its header or in its presigned address."""
    query = pairs(environ["REQUEST_URI"].partition("?")[2])
    if "HTTP_AUTHORIZATION" in environ:
        match = HEADER.fullmatch(environ["HTTP_AUTHORIZATION"])
        parts = match and match.groups()
        moment = environ.get("HTTP_X_AMZ_DATE", "")
        seconds = MAX_SKEW_SECONDS
    else:
        parameters = {name.decode("latin-1"): value.decode("latin-1") for name, value in query}
        query = [(name, value) for name, value in query if name != b"X-Amz-Signature"]
        text = "\n".join(
            parameters.get(f"X-Amz-{name}", "")
            for name in ("Credential", "SignedHeaders", "Signature")
        )
        match = re.fullmatch(rf"{SCOPE}\n{SIGNED_NAMES}\n{SIGNATURE}", text, re.ASCII)
        parts = match and match.groups()
        moment = parameters.get("X-Amz-Date", "")
        expires = parameters.get("X-Amz-Expires", "")
        seconds = int(expires) if re.fullmatch(r"\d{1,6}", expires, re.ASCII) else 0
    if parts is None:
        hint = (
            "; for a presigned URL: Config(signature_version='s3v4')"
            if b"Signature" in dict(query)
            else ""
        )
        raise Closed(
            f"found no signature of version 4{hint}; {SIGN_IT}", "MissingAuthenticationToken"
        )
    try:
        time.strptime(moment, "%Y%m%dT%H%M%SZ")
    except ValueError:
        raise Closed("found no X-Amz-Date", "MissingAuthenticationToken") from None
    return Claim(*parts[:4], parts[4].split(";"), parts[5], moment, seconds, query)


def unsigned(environ: dict, names: list[str]) -> str | None:
    """Return the name of a header that must be signed and is not, None if all are."""
    signed = {variable(name) for name in names}
    needed = ["HTTP_HOST", *(name for name in environ if name.startswith("HTTP_X_AMZ_"))]
    return next((name.removeprefix("HTTP_") for name in needed if name not in signed), None)


def signature(environ: dict, claim: Claim, key: Key, payload: str) -> str:
    """Return the signature `key` makes of a request; `payload` is its body's hash."""
    path = unquote_to_bytes(environ["REQUEST_URI"].partition("?")[0].encode("latin-1"))
    query = sorted(tuple(quote(part, safe="-_.~") for part in pair) for pair in claim.query)
    headers = [(name, " ".join(environ.get(variable(name), "").split())) for name in claim.names]
    canonical = [
        environ["REQUEST_METHOD"],
        quote(path, safe="/-_.~"),
        "&".join("=".join(pair) for pair in query),
        *(f"{name}:{value}" for name, value in headers),
        "",
        ";".join(claim.names),
        payload,
    ]
    hashed = hashlib.sha256("\n".join(canonical).encode("latin-1")).hexdigest()
    scope = f"{claim.date}/{claim.region}/{claim.service}/aws4_request"
    signer = SigV4Auth(Credentials(key.id, key.secret), claim.service, claim.region)
    signed_at = SimpleNamespace(context={"timestamp": claim.time})
    return signer.signature(f"AWS4-HMAC-SHA256\n{claim.time}\n{scope}\n{hashed}", signed_at)


def pairs(query: str) -> list[tuple[bytes, bytes]]:
    """Return the names and values of a query, decoded."""
    parts = (part.encode("latin-1").partition(b"=") for part in query.split("&") if part)
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in parts]


def variable(header: str) -> str:
    """Return the name of a header's WSGI variable."""
    name = header.upper().replace("-", "_")
    return name if name in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{name}"


def read(environ: dict, most: int) -> bytes:
    """Return a request's body, and leave it there for whoever answers.

    Raises Closed if it has more than `most` bytes.
    """
    request = Request(environ, populate_request=False)
    # werkzeug drops chunks beyond this length silently.
    request.max_content_length = most + 1
    try:
        body = request.get_data(cache=False)
    except RequestEntityTooLarge:
        body = bytes(most + 1)
    if len(body) > most:
        raise Closed(
            f"found a request of more than {most} bytes, which is the most",
            "RequestEntityTooLarge",
            413,
        )
    set_body(environ, io.BytesIO(body), len(body))
    return body


def read_to(file: BinaryIO, environ: dict) -> None:
    """Read a request's body into a file, which becomes the body for whoever answers.

    Raises HTTPException if the client leaves before it has sent all of it.
    """
    shutil.copyfileobj(get_input_stream(environ), file, MIB)
    size = file.tell()
    file.seek(0)
    set_body(environ, file, size)


def overstates_size(environ: dict) -> bool:
    """Return whether a request in chunks claims more content than it has bytes in all.

    moto makes room for what it claims.
    """
    claimed_size = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH", "0")
    size = int(environ["CONTENT_LENGTH"])
    return not re.fullmatch(r"\d{1,18}", claimed_size, re.ASCII) or int(claimed_size) > size


def set_body(environ: dict, file: BinaryIO, size: int) -> None:
    """Make a file a request's body."""
    environ.pop("HTTP_TRANSFER_ENCODING", None)
    environ.pop("wsgi.input_terminated", None)
    environ.update({"wsgi.input": file, "CONTENT_LENGTH": str(size)})
