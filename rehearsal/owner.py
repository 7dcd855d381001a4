"""What a rehearsal has made on this machine, so that the next one can end what a killed one left behind."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from urllib.parse import urlsplit

from rehearsal.api.access_keys import Key
from rehearsal.engines import bridge, containers

KEY = "key"  # the file with the person's key, which nobody else can read


def root() -> Path:
    """Return the folder of all owners' folders."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "sagemaker-lightning-rehearsal"
    )


class Owner:
    """A folder for the jobs at work, with a lock that the kernel lets go when its rehearsal is gone, however it ended.

    Containers and networks have the folder as their label; the processes are listed in it, each with the time of its
    start, as a number may have come to mean another process.
    """

    def __init__(self) -> None:
        self.root = root()
        self.root.mkdir(parents=True, exist_ok=True)
        self.folder = self.root / uuid.uuid4().hex[:12]
        self.folder.mkdir(mode=0o700)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    @property
    def label(self) -> str:
        """The label's value."""
        return str(self.folder)

    def note_process(self, number: int) -> None:
        """Remember a process that was started."""
        with (self.folder / "processes").open("a") as file:
            file.write(f"{number} {started(number)}\n")

    def keep(self, key: Key, addresses: list[str]) -> None:
        """Keep the person's key where the person's other processes find it: `key_of`."""
        told = {"addresses": addresses, "id": key.id, "secret": key.secret}
        path = self.folder / KEY
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(json.dumps(told))

    def end_orphans(self, client) -> list[str]:
        """End what rehearsals that are gone have left, and return a line for each; `client` is Docker's, or None."""
        said = []
        # The folder of some owner of containers may be elsewhere, or gone.
        folders = set(filter(Path.is_dir, self.root.iterdir()))
        folders |= set(map(Path, containers.owners(client))) if client else set()
        for folder in sorted(folders - {self.folder}):
            if alive(folder):
                continue
            count = containers.remove_all(client, str(folder)) if client else 0
            count += end_processes(folder / "processes") + bridge.remove(folder.name)
            empty(folder, client)
            said.append(
                f"ended what a killed rehearsal had left: {count} containers, networks and "
                f"processes, {folder}"
            )
        return said

    def close(self, client) -> None:
        """Remove the folder, with all that jobs have left in it."""
        if client:
            containers.remove_all(client, self.label)
        bridge.remove(self.folder.name)
        empty(self.folder, client)
        self.lock.close()


def key_of(endpoint: str) -> Key:
    """Return the key of this person's rehearsal at `endpoint`; ValueError if there is none."""
    parts = urlsplit(endpoint)
    address = (
        f"{'127.0.0.1' if parts.hostname == 'localhost' else parts.hostname}:{parts.port or 80}"
    )
    for path in root().glob(f"*/{KEY}"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended since
            told = json.loads(path.read_text())
            if address in told["addresses"] and alive(path.parent):
                return Key(told["id"], told["secret"])
    raise ValueError(
        f"--endpoint: no rehearsal answers at {endpoint}; start one by `make rehearsal`, as this "
        "user"
    )


def alive(folder: Path) -> bool:
    """Return whether the rehearsal of a folder is there."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):  # at work; another user's
        return True
    return False


def started(number: int) -> str:
    """Return when a process was started, in the kernel's ticks; empty if it is not there."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def end_processes(listed: Path) -> int:
    """Kill those of the listed processes that are still there, and return how many."""
    count = 0
    for line in listed.read_text().splitlines() if listed.exists() else []:
        number, _, since = line.partition(" ")
        if since and started(int(number)) == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
                count += 1
    return count


def empty(folder: Path, client) -> None:
    """Remove a folder; files that a container's root has written are removed by one, where this user is not root.

    It sees this folder alone, and ends with an error, as it cannot remove that itself.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and client and (images := client.images.list(filters={"dangling": False})):
        line, volumes = ["rm", "-rf", "--one-file-system", "/folder"], [f"{folder}:/folder"]
        with contextlib.suppress(containers.DockerException):
            client.containers.run(
                images[0].id, entrypoint=line, command=[], volumes=volumes, remove=True, user="root"
            )
        shutil.rmtree(folder, ignore_errors=True)
