"""What a job's key reaches in S3: what the job's request names, and no other job's prefixes.

Only requests of known forms pass, and the bucket and the key that were looked at are written again
into the request: who answers it cannot read others out of it.
"""

import io
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from sagemaker_lightning.contract.hyperparameters import is_own
from sagemaker_rehearsal.api import gate
from sagemaker_rehearsal.api.gate import Closed
from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.jobs import artifacts, checkpoint_sync

# The parameters that a request may have, beside those of a presigned address and of its answer.
OBJECT_PARAMETERS = {"x-id", "versionId", "partNumber", "attributes", "uploads", "uploadId"}
OBJECT_PARAMETERS |= {"max-parts", "part-number-marker"}
LIST_PARAMETERS = {"x-id", "list-type", "prefix", "delimiter", "max-keys", "encoding-type"}
LIST_PARAMETERS |= {"continuation-token", "start-after", "fetch-owner", "marker"}
FREE_PARAMETER = re.compile("response-[a-z-]+|X-Amz-[A-Za-z-]+")
READING_METHODS = ("GET", "HEAD")
WRITING_METHODS = ("PUT", "POST", "DELETE")
# DeleteObjects names 1,000 keys of 1,024 bytes at most.
MAX_DELETE_BYTES = 4 * gate.MIB
# moto takes parameters out of a form, too.
FORMS = ("application/x-www-form-urlencoded", "multipart/")
# A parser would read a raw one as another character.
LINE_END = {"\r": "&#13;"}
COPY_SOURCE = "HTTP_X_AMZ_COPY_SOURCE"
# An address of one object or folder: that of a bucket alone would reach all jobs.
ADDRESS = re.compile(r"s3://[^\s\"'\\,;/]+/[^\s\"'\\,;]+")


@dataclass(frozen=True)
class Scope:
    """Objects of a bucket: those whose keys begin with `prefix`, and the one that is `key`."""

    bucket: str
    prefix: str
    key: str | None = None

    def has(self, bucket: str, key: str) -> bool:
        """Return whether an object is in it."""
        return self.has_all(bucket, key) or (bucket, key) == (self.bucket, self.key)

    def has_all(self, bucket: str, prefix: str) -> bool:
        """Return whether all objects whose keys begin with `prefix` are in it."""
        return bucket == self.bucket and prefix.startswith(self.prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True)
class Reach:
    """What the hosts of a job may write and read in S3; they may read what they may write."""

    writes: tuple[Scope, ...]
    reads: tuple[Scope, ...]

    def may_read(self, bucket: str, key: str) -> bool:
        """Return whether the hosts may read an object."""
        return self.may_write(bucket, key) or any(scope.has(bucket, key) for scope in self.reads)

    def may_write(self, bucket: str, key: str) -> bool:
        """Return whether the hosts may write an object."""
        return any(scope.has(bucket, key) for scope in self.writes)

    def listed(self, bucket: str, prefix: str) -> str | None:
        """Return the prefix to list in place of one that hosts ask for; None if they may not.

        Clients look for a folder by its name without the / at its end. The names of other folders
        may begin with it.
        """
        for allowed in (prefix, f"{prefix}/"):
            if any(scope.has_all(bucket, allowed) for scope in (*self.writes, *self.reads)):
                return allowed
        return None

    def may_look_at(self, bucket: str) -> bool:
        """Return whether the hosts may ask whether and where a bucket is."""
        return any(scope.bucket == bucket for scope in (*self.writes, *self.reads))

    def refusal(self, found: str) -> Closed:
        """Return the error for a request that may not pass."""
        written, read = (
            " and ".join(dict.fromkeys(map(str, scopes))) for scopes in (self.writes, self.reads)
        )
        return Closed(
            f"found {found[:1024]}; the hosts of this job may write what begins with {written}"
            + (f", and read what begins with {read}" if read else ""),
            "AccessDenied",
        )


def reach(request: dict) -> Reach:
    """Return what the hosts of a job may reach, given its request.

    They may write where the service puts the job's output and its checkpoints, and below what its
    hyperparameters, environment and arguments name, such as a logger's folder. They may also read
    the job's channels, and what the toolkit's hyperparameters name: its source.
    """
    bucket, folder = artifacts.output_folder(request)
    writes = [Scope(bucket, f"{folder}/")]
    if config := request.get("CheckpointConfig"):
        writes.append(Scope(*checkpoint_sync.below(config["S3Uri"])))
    addresses = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request.get("InputDataConfig") or []
    ]
    reads = [
        Scope(*clients.split(address)) for address in addresses if not address.startswith("file:")
    ]
    hyperparameters = request.get("HyperParameters") or {}
    written = [value for name, value in hyperparameters.items() if is_own(name)]
    written += [request.get("Environment"), request["AlgorithmSpecification"]]
    writes += _named_in(written)
    reads += _named_in([value for name, value in hyperparameters.items() if not is_own(name)])
    return Reach(tuple(writes), tuple(reads))


def confine(environ: dict, allowed: Reach) -> None:
    """Let a request of a job's hosts to S3 pass, or raise Closed.

    Args:
        environ: The request; what it asks for is written again.
        allowed: What the hosts may reach.
    """
    path, _, query = environ["REQUEST_URI"].partition("?")
    try:
        bucket, _, key = unquote_to_bytes(path.encode("latin-1")).decode()[1:].partition("/")
        pairs = [(name.decode(), value.decode()) for name, value in gate.pairs(query)]
    except UnicodeDecodeError:
        raise allowed.refusal("a request that is not UTF-8") from None
    parameters = {name: value for name, value in pairs if not FREE_PARAMETER.fullmatch(name)}
    is_form = environ.get("CONTENT_TYPE", "").strip().lower().startswith(FORMS)
    if is_form or len({name for name, _ in pairs}) < len(pairs):
        raise allowed.refusal("a form, or a parameter that comes twice")
    method = environ["REQUEST_METHOD"]
    if key:
        may_pass = _may_ask_for_object(allowed, method, bucket, key, parameters)
    elif method == "POST" and parameters.keys() - {"x-id"} == {"delete"}:
        may_pass = _confine_deletion(environ, allowed, bucket)
    else:
        may_pass = _may_ask_for_bucket(allowed, method, bucket, parameters)
    if not may_pass:
        words = f" with {', '.join(parameters)}" if parameters else ""
        raise allowed.refusal(f"{method} of s3://{bucket}/{key}{words}")
    if COPY_SOURCE in environ:
        environ[COPY_SOURCE] = _confined_source(environ[COPY_SOURCE], allowed)
    if not key and method == "GET" and "prefix" in parameters:
        narrowed = allowed.listed(bucket, parameters["prefix"])
        pairs = [(name, narrowed if name == "prefix" else value) for name, value in pairs]
    path = f"/{bucket}/{key}" if key else f"/{bucket}"
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in pairs)
    address = f"{quote(path)}?{query}"
    environ.update(
        {
            "PATH_INFO": path.encode().decode("latin-1"),
            "QUERY_STRING": query,
            "REQUEST_URI": address,
            "RAW_URI": address,
        }
    )


def _may_ask_for_object(
    allowed: Reach, method: str, bucket: str, key: str, parameters: dict[str, str]
) -> bool:
    if not parameters.keys() <= OBJECT_PARAMETERS:
        return False
    if method in READING_METHODS:
        return allowed.may_read(bucket, key)
    return method in WRITING_METHODS and allowed.may_write(bucket, key)


def _may_ask_for_bucket(
    allowed: Reach, method: str, bucket: str, parameters: dict[str, str]
) -> bool:
    if method == "HEAD" or parameters.keys() - {"x-id"} == {"location"}:
        return method in READING_METHODS and allowed.may_look_at(bucket)
    return (
        method == "GET"
        and parameters.keys() <= LIST_PARAMETERS
        and allowed.listed(bucket, parameters.get("prefix", "")) is not None
    )


def _confine_deletion(environ: dict, allowed: Reach, bucket: str) -> bool:
    """Return whether all objects of DeleteObjects may be deleted; if so, write its body again."""
    try:
        root = ElementTree.fromstring(gate.read(environ, MAX_DELETE_BYTES))
    except ElementTree.ParseError:
        return False
    entries = [
        {name: element.findtext(f"{{*}}{name}") for name in ("Key", "VersionId")}
        for element in root.iterfind("{*}Object")
    ]
    if not all(entry["Key"] and allowed.may_write(bucket, entry["Key"]) for entry in entries):
        return False
    objects = [
        "".join(
            f"<{name}>{escape(text, LINE_END)}</{name}>" for name, text in entry.items() if text
        )
        for entry in entries
    ]
    body = f"<Delete>{''.join(f'<Object>{each}</Object>' for each in objects)}</Delete>".encode()
    gate.set_body(environ, io.BytesIO(body), len(body))
    environ["HTTP_X_AMZ_CONTENT_SHA256"] = "UNSIGNED-PAYLOAD"
    return True


def _confined_source(header: str, allowed: Reach) -> str:
    """Return the header that names the object to copy, written again."""
    source, _, version = header.partition("?versionId=")
    try:
        name = unquote_to_bytes(source.encode("latin-1")).decode().lstrip("/")
    except UnicodeDecodeError:
        raise allowed.refusal("a source that is not UTF-8") from None
    bucket, _, key = name.partition("/")
    if not allowed.may_read(bucket, key):
        raise allowed.refusal(f"a copy of s3://{bucket}/{key}")
    return f"{bucket}/{quote(key)}" + (f"?versionId={quote(version, safe='')}" if version else "")


def _named_in(values: list) -> list[Scope]:
    """Return what the addresses in the values of a request stand for."""
    return [
        Scope(*checkpoint_sync.below(address), key=clients.split(address)[1])
        for text in clients.texts(values)
        for address in ADDRESS.findall(text)
    ]
