"""Makes a folder's disk full, for a process that has a mount namespace alone.

What is in the folder stays readable. Whatever writes there gets ENOSPC. It needs root, and Linux
with overlayfs.
"""

from collections.abc import Callable
from pathlib import Path

from sagemaker_rehearsal.faults.errors import CannotInject, check_namespace, run

# Puts a full file system over a folder: $1.
FILL = """
set -e
full=$(mktemp -d "$(dirname "$1")/.full-XXXXXX")
mount -t tmpfs -o size=64k,mode=0755 full "$full"
mkdir "$full/upper" "$full/work"
mount -t overlay -o "lowerdir=$1,upperdir=$full/upper,workdir=$full/work" full "$1"
dd if=/dev/zero of="$full/rest" bs=4096 count=64 2>/dev/null || true
echo "$full"
"""
# Takes it away again: from $1, with what FILL has made at $2. Open files of it may be left.
EMPTY = 'umount -l "$1"; umount -l "$2"; rmdir "$2"'


def fill_disk(pid: int, folder: Path) -> Callable[[], None]:
    """Let the disk of a folder be full; return the function that ends it.

    Args:
        pid: A process in the mount namespace.
        folder: The folder, by its path in there, without a colon, a comma or a backslash.
    """
    check_namespace(pid, "mnt", "file systems")
    if set(str(folder)) & set(":,\\"):
        raise CannotInject(f"the path of {folder} has a letter that mount cannot take")
    shell = ["nsenter", f"--mount=/proc/{pid}/ns/mnt", "sh", "-c"]
    full = run([*shell, FILL, "sh", str(folder)]).strip()

    def empty() -> None:
        try:
            run([*shell, EMPTY, "sh", str(folder), full])
        except CannotInject:  # its host has ended, and the namespace with it
            return

    return empty
