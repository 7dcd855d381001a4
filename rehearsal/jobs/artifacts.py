"""What a job leaves: the model and the output of all hosts, gathered, packed and put to S3."""

import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rehearsal.api import clients
from rehearsal.jobs.folders import Folder

# the archive's name, and the folder below /opt/ml
KINDS = {"model": "model", "output": "output/data"}

Found = dict[str, tuple[Folder, os.stat_result]]
"""Files, links and empty folders by their name in the archive: whose folder they are in, and their state."""


def upload(
    s3, request: dict, hosts: dict[str, Path], work: Path, note: Callable[[str], None]
) -> str:
    """Put the model's and the output's files of all hosts to S3, and return the model's address.

    On a clash of names a later host's file replaces an earlier one's, and `note` gets a line; which one wins in the
    service is not documented.
    """
    output = request["OutputDataConfig"]
    bucket, prefix = clients.split(output["S3OutputPath"])
    base = "/".join(filter(None, (prefix.rstrip("/"), request["TrainingJobName"], "output")))
    packed = output.get("CompressionType") != "NONE"
    for kind, below in KINDS.items():
        found = gather(kind, {host: Folder(root, below) for host, root in hosts.items()}, note)
        if packed:
            with tempfile.TemporaryFile(dir=work) as archive:
                pack(found, archive)
                archive.seek(0)
                s3.upload_fileobj(archive, bucket, f"{base}/{kind}.tar.gz", Config=clients.WHOLE)
        else:
            for name, file in opened(found):
                s3.upload_fileobj(file, bucket, f"{base}/{kind}/{name}", Config=clients.WHOLE)
    return f"s3://{bucket}/{base}/model{'.tar.gz' if packed else '/'}"


def gather(kind: str, folders: dict[str, Folder], note: Callable[[str], None]) -> Found:
    """Return what is in the folders of all hosts; `note` is told what is left out, and why."""
    found: Found = {}
    owner: dict[str, str] = {}
    for host, folder in folders.items():

        def failed(name: str, why: str, host: str = host) -> None:
            note(f"{kind}: {name} of {host} is left out: {why}")

        there = dict(_usable(folder, failed))
        filled = {posixpath.dirname(name) for name in there}
        for name, state in there.items():
            if stat.S_ISDIR(state.st_mode) and (name in filled or name in found):
                continue
            if name in owner:
                note(
                    f"{kind}: {name} of {host} replaces that of {owner[name]}; give each host "
                    "names of its own"
                )
            found[name], owner[name] = (folder, state), host
    files = {name for name, (_, state) in found.items() if not stat.S_ISDIR(state.st_mode)}
    for name in [
        name for name in found if not files.isdisjoint(map(str, PurePosixPath(name).parents))
    ]:
        note(f"{kind}: {name} of {owner[name]} is left out: for another host, its folder is a file")
        del found[name]
    return dict(sorted(found.items()))


def _usable(
    folder: Folder, failed: Callable[[str, str], None]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what may leave the machine: folders, regular files, and links that do not lead out of the folder."""
    for name, state in folder.walk(failed):
        if stat.S_ISLNK(state.st_mode):
            try:
                folder.link(name)
            except OSError as error:
                failed(name, error.strerror)
                continue
        elif not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            failed(name, "it is no regular file")
            continue
        yield name, state


def opened(found: Found) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file, open, and in place of a link the file that it leads to."""
    for name, (folder, state) in found.items():
        if stat.S_ISDIR(state.st_mode):
            continue
        try:
            file = folder.open(name)
        except OSError:
            if stat.S_ISLNK(state.st_mode):  # to nothing, or to a folder
                continue
            raise
        with file:
            yield name, file


def pack(found: Found, archive: BinaryIO) -> None:
    """Write a tar.gz; the weights hardly get smaller, so the fastest compression will do."""
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name, (folder, state) in found.items():
            if stat.S_ISREG(state.st_mode):
                with folder.open(name) as file:
                    member = tar.gettarinfo(arcname=name, fileobj=file)
                    # who extracts it as root makes no program that runs as root
                    member.mode &= 0o777
                    tar.addfile(member, file if member.isreg() else None)
                continue
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = state.st_mode & 0o777, state.st_mtime
            member.type = tarfile.DIRTYPE
            if stat.S_ISLNK(state.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, folder.link(name)[0]
            tar.addfile(member)
