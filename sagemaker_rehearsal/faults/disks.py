"""Makes a folder's disk full, for a process that has a mount namespace alone.

What is in the folder stays readable. Whatever writes there gets ENOSPC. It needs root, and Linux
with overlayfs.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from sagemaker_rehearsal.faults.errors import CannotInject, check_namespace, run

# Enters the mount namespace of process $1. No program is run in there: in a container, it would be
# one of the image, with the rights of this machine's root.
ENTER = """
import ctypes, os, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    values = [os.fsencode(each) if isinstance(each, str) else each for each in arguments]
    if getattr(libc, name)(*values):
        sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")
CLONE_NEWNS = 0x00020000
MNT_DETACH = 2
call("setns", os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY), CLONE_NEWNS)
"""
# Puts a full file system over the folder $2, and prints the folder that it is made of. It is full
# before a program sees it: a program that had a page of it already could write that page again.
FILL = (
    ENTER
    + """
MS_BIND = 4096
folder = sys.argv[2]
full = ""
try:
    full = tempfile.mkdtemp(prefix=".full-", dir=os.path.dirname(folder))
    call("mount", "full", full, "tmpfs", 0, "size=64k,mode=0755")
    for name in ("upper", "work", "merged"):
        os.mkdir(f"{full}/{name}")
    layers = f"lowerdir={folder},upperdir={full}/upper,workdir={full}/work"
    call("mount", "full", f"{full}/merged", "overlay", 0, layers)
    rest = os.open(f"{full}/rest", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        while os.write(rest, bytes(4096)):
            pass
    except OSError:
        pass
    call("mount", f"{full}/merged", folder, None, MS_BIND, None)
    print(full)
except (OSError, SystemExit) as error:
    if full:
        libc.umount2(os.fsencode(full), MNT_DETACH)
        os.rmdir(full)
    sys.exit(str(error))
"""
)
# Takes it away again: from $2, with what FILL has made at $3. Open files of it may be left.
EMPTY = (
    ENTER
    + """
for folder in sys.argv[2:]:
    call("umount2", folder, MNT_DETACH)
os.rmdir(sys.argv[3])
"""
)


def fill_disk(pid: int, folder: Path) -> Callable[[], None]:
    """Let the disk of a folder be full; return the function that ends it.

    Args:
        pid: A process in the mount namespace.
        folder: The folder, by its path in there, without a colon, a comma or a backslash.
    """
    check_namespace(pid, "mnt", "file systems")
    if set(str(folder)) & set(":,\\"):
        raise CannotInject(f"the path of {folder} has a letter that mount cannot take")
    python = [sys.executable, "-I", "-S", "-c"]
    full = run([*python, FILL, f"{pid}", str(folder)]).strip()

    def empty() -> None:
        try:
            run([*python, EMPTY, f"{pid}", str(folder), full])
        except CannotInject:  # its host has ended, and the namespace with it
            return

    return empty
