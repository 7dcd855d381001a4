"""Python environments for tests of clients; they share no package with the runtime.

`python tests/support/environments.py` makes all of them. CI does so while the first tests run.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from containers import ROOT


def python_of(name: str) -> Path:
    """Return the python of .venvs/NAME, which is made on first use.

    It is made again when locks/NAME.txt has changed.
    """
    locked = ROOT / "locks" / f"{name}.txt"
    folder = ROOT / ".venvs" / name
    python = folder / "bin/python"
    stamp = folder / "locked.txt"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != locked.read_text():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
            # uv links packages that it has unpacked before, for .venv or another environment.
            script = ROOT / "scripts/install_locked.sh"
            subprocess.run(
                [script, python, "sync", locked],
                check=True,
                env=os.environ | {"UV_INSTALLER": sys.executable},
            )
            shutil.copy(locked, stamp)
    return python


def packages_of(name: str) -> Path:
    """Return the folder of the packages of .venvs/NAME, which is made on first use."""
    (folder,) = python_of(name).parent.parent.glob("lib/python*/site-packages")
    return folder


if __name__ == "__main__":
    for requirements in sorted((ROOT / "tests/environments").glob("*.txt")):
        python_of(requirements.stem)
