"""Finds the first process of a container, by what its engine says."""

from pathlib import Path


def process_of_container(pid: int, container: str) -> int | None:
    """Return the number of a container's first process, if it is one of this machine.

    An engine may be on another machine, or in a virtual one. There, the number that it gives is
    that of another process here.

    Args:
        pid: The number that the engine gives; 0 if the container has ended.
        container: The container's id, which is in the names of its control groups.
    """
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    return pid if container in groups else None
