"""A process beside a rehearsal: ends what it leaves if it is killed.

python -m sagemaker_rehearsal.guard FOLDER      waits for the end of its standard input, which is
                                                the rehearsal's end; what has been written there
                                                says that nothing is left
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DONE = b"done"


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Have another process end what is left of a rehearsal that never leaves the block.

    Args:
        folder: The rehearsal's (owner.py). What the rehearsal makes, it removes within the block.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and a closed terminal are for the rehearsal
    )
    try:
        yield
    finally:
        process.communicate(DONE)


def main() -> None:
    """Wait for the end of the rehearsal, and end what it has left."""
    folder = Path(sys.argv[1])
    if sys.stdin.buffer.read():
        return
    # Only now: a process that waits is to be small.
    import docker

    from sagemaker_rehearsal import owner

    client = None
    with contextlib.suppress(docker.errors.DockerException):
        client = docker.from_env()
    owner.end(folder, client)


if __name__ == "__main__":
    main()
