"""Gives what root has written into somebody's mounted folder to that person."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import psutil

BASE = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))


def give_to_owners(base: Path = BASE) -> None:
    """Give what root wrote below a folder of another user's to that user.

    SageMaker runs a container as root, and so does `docker run` by itself. The person whose folders
    are mounted could not delete the folders that the job has made there. Nothing is changed that
    was there before this process, in the input, or where the system does not allow it.
    """
    if os.geteuid() != 0 or not base.is_dir():
        return
    # Linux gives its own start in whole seconds, so a process's start is known no better.
    since = psutil.Process().create_time() - 1
    for folder, folders, files, descriptor in os.fwalk(base):
        if folder == str(base):
            folders[:] = [name for name in folders if name != "input"]
        owner = os.fstat(descriptor)
        if owner.st_uid == 0:
            continue
        # A folder comes before what is in it, which then is in a folder of the user's, too.
        for name in [*folders, *files]:
            with suppress(OSError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                # A file of several names may be another folder's, too.
                is_single = stat.S_ISDIR(status.st_mode) or status.st_nlink == 1
                if status.st_uid == 0 and status.st_ctime >= since and is_single:
                    os.chown(
                        name,
                        owner.st_uid,
                        owner.st_gid,
                        dir_fd=descriptor,
                        follow_symlinks=False,
                    )
