"""What a job leaves: the model and the output of all hosts, gathered, packed and put to S3."""

import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from . import cloud

KINDS = {"model": "model", "output": "output/data"}  # the archive's name, and the folder below /opt/ml


def upload(s3, request: dict, hosts: dict[str, Path], work: Path, note: Callable[[str], None]) -> str:
    """Put the model's and the output's files of all hosts to S3, and return the model's address.

    On a clash of names a later host's file replaces an earlier one's, and `note` gets a line; which one wins in the
    service is not documented.
    """
    output = request["OutputDataConfig"]
    bucket, prefix = cloud.split(output["S3OutputPath"])
    base = "/".join(filter(None, (prefix.rstrip("/"), request["TrainingJobName"], "output")))
    packed = output.get("CompressionType") != "NONE"
    for kind, folder in KINDS.items():
        files = gather(kind, {host: root / folder for host, root in hosts.items()}, note)
        if packed:
            with tempfile.NamedTemporaryFile(dir=work) as archive:
                pack(files, Path(archive.name))
                s3.upload_file(archive.name, bucket, f"{base}/{kind}.tar.gz", Config=cloud.WHOLE)
        else:
            for name, path in files.items():
                if path.is_file():
                    s3.upload_file(str(path), bucket, f"{base}/{kind}/{name}", Config=cloud.WHOLE)
    return f"s3://{bucket}/{base}/model{'.tar.gz' if packed else '/'}"


def gather(kind: str, folders: dict[str, Path], note: Callable[[str], None]) -> dict[str, Path]:
    """Return the files of all hosts, and the links and empty folders, by their name in the archive."""
    found: dict[str, Path] = {}
    owner: dict[str, str] = {}
    for host, folder in folders.items():
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink() and (any(path.iterdir()) or name in found):
                continue
            if name in owner:
                note(f"{kind}: {name} of {host} replaces that of {owner[name]}; give each host names of its own")
            found[name], owner[name] = path, host
    files = {name for name, path in found.items() if path.is_symlink() or not path.is_dir()}
    for name in [name for name in found if not files.isdisjoint(map(str, PurePosixPath(name).parents))]:
        note(f"{kind}: {name} of {owner[name]} is left out: for another host, its folder is a file")
        del found[name]
    return found


def pack(files: dict[str, Path], archive: Path) -> None:
    """Write a tar.gz; the weights hardly get smaller, so the fastest compression will do."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, path in files.items():
            tar.add(path, arcname=name, recursive=False)
