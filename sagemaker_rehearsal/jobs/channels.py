"""Brings data from S3 or this machine to a job's hosts, whole or in shards."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.jobs import layout
from sagemaker_rehearsal.jobs.layout import Host, Layout


class JobFailed(Exception):
    """Data or an image cannot be obtained; the message becomes the FailureReason."""


def outside(request: dict, allow: list[Path]) -> str | None:
    """Return what is wrong with the first file:// channel outside of allowed folders.

    Returns None if there is no such channel.
    """
    for channel in request.get("InputDataConfig") or []:
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        if uri.startswith("file://") and not below(local(uri), allow):
            return f"channel {channel['ChannelName']}: found {uri}, {allowed(allow)}"
    return None


def local(uri: str) -> Path:
    """Return the path of a file:// address."""
    return Path(unquote(urlsplit(uri).path))


def below(path: Path, allow: list[Path]) -> bool:
    """Return whether a path, after all its links, is below one of the folders."""
    try:
        return any(path.resolve().is_relative_to(folder) for folder in allow)
    # The name is impossible, or its links form a loop.
    except (OSError, RuntimeError, ValueError):
        return False


def allowed(allow: list[Path]) -> str:
    """Return what to do about a path that is below none of the folders."""
    folders = " or ".join(map(str, allow))
    return (
        f"expected what is below {folders}; start the rehearsal with --allow=FOLDER to allow "
        "another one"
    )


def deliver(
    s3,
    request: dict,
    hosts: dict[Host, Layout],
    shared: Path,
    allow: list[Path],
    check_not_ended: Callable[[], None],
) -> None:
    """Put each channel into the folder of each host that gets it.

    Args:
        s3: The client.
        request: The job's request.
        hosts: The folders of each host.
        shared: A folder for one copy of each channel.
        allow: The folders that file:// channels may be in.
        check_not_ended: Raises Ended if the job must stop.

    Objects of a ShardedByS3Key channel are dealt out in the order of their keys, one after another,
    to the hosts that get the channel; how the service deals them is not documented. The files of a
    FastFile channel are links to one copy, and mounted read-only.
    """
    for channel in request.get("InputDataConfig") or []:
        receivers = [host for host in hosts if channel in layout.channels_of(request, host)]
        folder = shared / channel["ChannelName"]
        names = sorted(
            fetch(
                s3,
                channel["DataSource"]["S3DataSource"],
                folder,
                request["RoleArn"],
                allow,
                check_not_ended,
            )
        )
        sharded = (
            channel["DataSource"]["S3DataSource"].get("S3DataDistributionType") == "ShardedByS3Key"
        )
        copy_or_link = os.link if layout.mode(channel, request) == "FastFile" else shutil.copyfile
        for number, host in enumerate(receivers):
            target = hosts[host].channel(channel["ChannelName"])
            target.mkdir()
            for name in names[number :: len(receivers)] if sharded else names:
                check_not_ended()
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                copy_or_link(folder / name, target / name)
        shutil.rmtree(folder, ignore_errors=True)


def fetch(
    s3,
    source: dict,
    folder: Path,
    role: str,
    allow: list[Path],
    check_not_ended: Callable[[], None],
) -> list[str]:
    """Copy the data at a channel's address into `folder`; return the files' names.

    Raises JobFailed if there are none, or if one cannot be copied.
    """
    uri = source["S3Uri"]
    folder.mkdir(parents=True)
    bucket, prefix = clients.split(uri)
    try:
        if uri.startswith("file://"):
            return fetch_files(local(uri), uri, folder, allow, check_not_ended)
        keys = {relative(key, prefix): key for key, _ in clients.objects(s3, bucket, prefix)}
        for name, key in keys.items():
            check_not_ended()
            path = inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path), Config=clients.ONE_PIECE_TRANSFER)
    except (ClientError, BotoCoreError) as error:
        raise JobFailed(
            missing(uri, bucket, role, f" Error message from S3: {clients.reason(error)}")
        ) from error
    except OSError as error:
        raise JobFailed(
            f"ClientError: Data download failed: {uri}: {clients.reason(error)}"
        ) from error
    if not keys:
        raise JobFailed(missing(uri, bucket, role, ""))
    return list(keys)


def fetch_files(
    source: Path, uri: str, folder: Path, allow: list[Path], check_not_ended: Callable[[], None]
) -> list[str]:
    """Copy a folder of this machine, or one file; return the names of the files.

    A link may lead to what is below an allowed folder.
    """
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    if not files:
        raise JobFailed(
            f"ClientError: Data download failed: {uri} is not a file, nor a folder with files in it"
        )
    base = source.parent if source.is_file() else source
    for path in files:
        check_not_ended()
        if not below(path, allow):
            raise JobFailed(
                f"ClientError: Data download failed: {uri}: found {path}, a link out of it, "
                f"{allowed(allow)}"
            )
        target = folder / path.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return [str(path.relative_to(base)) for path in files]


def relative(key: str, prefix: str) -> str:
    """Return an object's name in the channel: its key below the prefix.

    A prefix may end within a name; then the name begins after the prefix's last /.
    """
    if key.startswith(prefix.rstrip("/") + "/"):
        return key[len(prefix.rstrip("/")) + 1 :].lstrip("/")
    return key[prefix.rfind("/") + 1 :]


def inside(folder: Path, name: str) -> Path:
    """Return the path of `name` below `folder`; JobFailed if no file below it can have the name."""
    if ".." in PurePosixPath(name).parts or name.startswith("/") or "\0" in name:
        raise JobFailed(
            f"ClientError: Data download failed: the S3 key {name!r} is not a name of a file"
        )
    return folder / name


def missing(uri: str, bucket: str, role: str, more: str) -> str:
    """Return the service's message for an address without data."""
    return (
        f'ClientError: Data download failed:No S3 objects found under S3 URL "{uri}" given in '
        "input data source. Please ensure that the bucket exists in the selected region, that "
        f'objects exist under that S3 prefix, and that the role "{role}" has "s3:ListBucket" '
        f'permissions on bucket "{bucket}".{more}'
    )
