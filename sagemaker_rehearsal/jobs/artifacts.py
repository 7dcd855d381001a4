"""Gathers, packs and uploads the model and the output of all hosts of a job."""

import hashlib
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.jobs.folders import Folder
from sagemaker_rehearsal.jobs.record import MAX_MODEL_FILES

# The archive's name, and its folder below /opt/ml.
KINDS = {"model": "model", "output": "output/data"}

Found = dict[str, tuple[Folder, os.stat_result]]
"""Files, links and empty folders by name in the archive: their folder, and their state."""


def upload(
    s3, request: dict, hosts: dict[str, Path], work: Path, note: Callable[[str], None]
) -> tuple[str, dict[str, str]]:
    """Upload the model and the output of all hosts.

    Returns the model's address, and the SHA-256 of each of its files by its name, of
    MAX_MODEL_FILES at most.

    If two hosts have a file of the same name, the later host's file replaces the earlier one's, and
    `note` gets a line. Which file wins in the service is not documented.
    """
    bucket, folder = output_folder(request)
    base = f"{folder}/output"
    packed = request["OutputDataConfig"].get("CompressionType") != "NONE"
    digests: dict[str, str] = {}
    for kind, folder_below in KINDS.items():
        files = gather(
            kind, {host: Folder(root, folder_below) for host, root in hosts.items()}, note
        )
        if kind == "model":
            digests = {
                name: hashlib.file_digest(file, "sha256").hexdigest()
                for name, file in islice(opened(files), MAX_MODEL_FILES)
            }
        if packed:
            with tempfile.TemporaryFile(dir=work) as archive:
                pack(files, archive)
                archive.seek(0)
                s3.upload_fileobj(
                    archive, bucket, f"{base}/{kind}.tar.gz", Config=clients.ONE_PIECE_TRANSFER
                )
        else:
            for name, file in opened(files):
                s3.upload_fileobj(
                    file, bucket, f"{base}/{kind}/{name}", Config=clients.ONE_PIECE_TRANSFER
                )
    return f"s3://{bucket}/{base}/model{'.tar.gz' if packed else '/'}", digests


def output_folder(request: dict) -> tuple[str, str]:
    """Return the bucket and the folder in it that get what a job leaves."""
    bucket, prefix = clients.split(request["OutputDataConfig"]["S3OutputPath"])
    return bucket, "/".join(filter(None, (prefix.rstrip("/"), request["TrainingJobName"])))


def gather(kind: str, folders: dict[str, Folder], note: Callable[[str], None]) -> Found:
    """Return the content of all hosts' folders; tell `note` what is left out, and why."""
    files_found: Found = {}
    owner: dict[str, str] = {}
    for host, folder in folders.items():

        def note_left_out(name: str, why: str, host: str = host) -> None:
            note(f"{kind}: {name} of {host} is left out: {why}")

        usable = dict(_usable(folder, note_left_out))
        nonempty_folders = {posixpath.dirname(name) for name in usable}
        for name, state in usable.items():
            if stat.S_ISDIR(state.st_mode) and (name in nonempty_folders or name in files_found):
                continue
            if name in owner:
                note(
                    f"{kind}: {name} of {host} replaces that of {owner[name]}; give each host "
                    "names of its own"
                )
            files_found[name] = (folder, state)
            owner[name] = host
    file_names = {
        name for name, (_, state) in files_found.items() if not stat.S_ISDIR(state.st_mode)
    }
    for name in [
        name
        for name in files_found
        if not file_names.isdisjoint(map(str, PurePosixPath(name).parents))
    ]:
        note(f"{kind}: {name} of {owner[name]} is left out: for another host, its folder is a file")
        del files_found[name]
    return dict(sorted(files_found.items()))


def _usable(
    folder: Folder, failed: Callable[[str, str], None]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what may leave the machine.

    That is folders, regular files, and links that do not lead out of the folder.
    """
    for name, state in folder.walk(failed):
        if stat.S_ISLNK(state.st_mode):
            try:
                folder.link(name)
            except OSError as error:
                failed(name, error.strerror)
                continue
        elif not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            failed(name, "it is not a regular file")
            continue
        yield name, state


def opened(files: Found) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file, open; for a link, the file that it leads to."""
    for name, (folder, state) in files.items():
        if stat.S_ISDIR(state.st_mode):
            continue
        try:
            file = folder.open(name)
        except OSError:
            # The link leads to nothing, or to a folder.
            if stat.S_ISLNK(state.st_mode):
                continue
            raise
        with file:
            yield name, file


def pack(files: Found, archive: BinaryIO) -> None:
    """Write a tar.gz, with the fastest compression: weights hardly get smaller."""
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name, (folder, state) in files.items():
            if stat.S_ISREG(state.st_mode):
                with folder.open(name) as file:
                    member = tar.gettarinfo(arcname=name, fileobj=file)
                    # Nobody who extracts the archive as root gets a program that runs as root.
                    member.mode &= 0o777
                    tar.addfile(member, file if member.isreg() else None)
                continue
            member = tarfile.TarInfo(name)
            member.mode = state.st_mode & 0o777
            member.mtime = state.st_mtime
            member.type = tarfile.DIRTYPE
            if stat.S_ISLNK(state.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = folder.link(name)[0]
            tar.addfile(member)
