"""What a rehearsal creates on this machine; its guard or the next one ends what it has left."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import uuid
from pathlib import Path
from urllib.parse import urlsplit

from sagemaker_lightning.contract.process_stat import START_TIME, process_stat
from sagemaker_rehearsal.aws.access_keys import Key
from sagemaker_rehearsal.engines import bridge, containers
from sagemaker_rehearsal.locks import alive, hold, locked

MAX_IMAGES = 5
"""Images of which one, at most, is tried for what only root can remove."""
# The file with the person's key, which only this user can read.
KEY = "key"
FOLDER_NAME = re.compile("[0-9a-f]{12}")


def root() -> Path:
    """Return the folder that has all owners' folders."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "sagemaker-lightning-rehearsal"
    )


class Owner:
    """A rehearsal's folder for its jobs, with a lock that shows whether it still runs.

    The kernel releases the lock when the rehearsal's process ends, however it ends. Containers and
    networks have the folder as their label. The folder lists the processes, each with the time of
    its start, because a number may have come to mean another process.
    """

    def __init__(self) -> None:
        self.root = root()
        self.root.mkdir(parents=True, exist_ok=True)
        self.folder = self.root / uuid.uuid4().hex[:12]
        # A job may be called "lock" or "key": jobs have a folder of their own.
        self.jobs = self.folder / "jobs"
        # Another rehearsal takes a folder whose lock is not held for a killed one's.
        with locked(self.root):
            self.folder.mkdir(mode=0o700)
            self.lock = hold(self.folder)
        self.jobs.mkdir()

    @property
    def label(self) -> str:
        """The value of the label of this rehearsal's containers and networks."""
        return str(self.folder)

    def note_process(self, number: int) -> None:
        """Add a process to the list of processes that were started."""
        with (self.folder / "processes").open("a") as file:
            file.write(f"{number} {started(number)}\n")

    def keep(self, key: Key, addresses: list[str], reports: Path) -> None:
        """Store the person's key, and where reports are, for this person's other processes.

        `key_of` and `reports_of` find them.
        """
        content = {
            "addresses": addresses,
            "id": key.id,
            "secret": key.secret,
            "reports": str(reports),
        }
        path = self.folder / KEY
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(json.dumps(content))

    def end_orphans(self, client) -> list[str]:
        """End what killed rehearsals have left; return a line for each.

        `client` is Docker's, or None.
        """
        lines = []
        with locked(self.root):
            folders = set(self.root.iterdir())
        # An owner of containers may have its folder elsewhere, or the folder may be gone.
        folders |= set(map(Path, containers.owners(client))) if client else set()
        for folder in sorted(filter(is_owner_folder, folders - {self.folder})):
            if alive(folder):
                continue
            was_there = folder.exists()
            count = end(folder, client)
            # A person's own container may have the label of a rehearsal that is gone.
            if count or was_there:
                lines.append(
                    f"ended what a killed rehearsal had left: {count} containers, networks and "
                    f"processes, {folder}"
                )
        return lines

    def close(self, client) -> None:
        """Remove the folder and everything that jobs have left, containers included."""
        if client:
            containers.remove_all(client, self.label)
        bridge.remove(self.folder.name)
        empty(self.folder, client)
        self.lock.close()


def key_of(endpoint: str) -> Key:
    """Return the key of this person's rehearsal at `endpoint`, or raise ValueError."""
    content = _kept(endpoint)
    return Key(content["id"], content["secret"])


def reports_of(endpoint: str) -> Path:
    """Return the folder of reports of this person's rehearsal, or raise ValueError."""
    return Path(_kept(endpoint)["reports"])


def _kept(endpoint: str) -> dict:
    """Return what `Owner.keep` has stored for a rehearsal, or raise ValueError."""
    parts = urlsplit(endpoint)
    address = (
        f"{'127.0.0.1' if parts.hostname == 'localhost' else parts.hostname}:{parts.port or 80}"
    )
    for path in root().glob(f"*/{KEY}"):
        # The rehearsal may have ended in the meantime.
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = json.loads(path.read_text())
            if address in content["addresses"] and alive(path.parent):
                return content
    raise ValueError(
        f"--endpoint: no rehearsal answers at {endpoint}; start one by "
        "`sagemaker-lightning-rehearsal` (`make rehearsal` in a checkout), as this user"
    )


def is_owner_folder(folder: Path) -> bool:
    """Return whether a path is that of an owner's folder, which may be gone.

    What an owner has left is removed, and a label is anybody's text: a container has the labels of
    its image, too.
    """
    if not (folder.is_absolute() and folder.parent.name == root().name):
        return False
    try:
        return bool(FOLDER_NAME.fullmatch(folder.name)) and stat.S_ISDIR(folder.lstat().st_mode)
    except FileNotFoundError:
        return True
    # It cannot be a path, or it is in another user's folder.
    except (OSError, ValueError):
        return False


def started(number: int) -> str:
    """Return a process's start time in the kernel's ticks; "" if it does not exist."""
    fields = process_stat(number)
    return fields[START_TIME] if fields else ""


def end(folder: Path, client) -> int:
    """End what the rehearsal of a folder has left, and remove the folder; return how many.

    Its guard and the next rehearsals may want to, all at the same time.
    """
    with locked(folder.parent) if folder.parent.exists() else contextlib.nullcontext():
        count = containers.remove_all(client, str(folder)) if client else 0
        count += end_processes(folder / "processes") + bridge.remove(folder.name)
        empty(folder, client)
    return count


def end_processes(listed: Path) -> int:
    """Kill the listed processes that still exist; return how many."""
    count = 0
    for line in listed.read_text().splitlines() if listed.exists() else []:
        number, _, since = line.partition(" ")
        if since and started(int(number)) == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
                count += 1
    return count


def empty(folder: Path, client) -> None:
    """Remove a folder, with files that a container's root has written.

    Where this user is not root, a container removes these. It sees this folder alone, and ends with
    an error, because it cannot remove the folder itself.
    """
    shutil.rmtree(folder, ignore_errors=True)
    images = client.images.list(filters={"dangling": False}) if folder.exists() and client else []
    command = ["rm", "-rf", "--one-file-system", "/folder"]
    volumes = [f"{folder}:/folder"]
    for image in images[:MAX_IMAGES]:  # one may have no rm, or be removed at this moment
        with contextlib.suppress(containers.DockerException):
            client.containers.run(
                image.id,
                entrypoint=command,
                command=[],
                volumes=volumes,
                remove=True,
                user="root",
            )
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or not any(folder.iterdir()):
            return
