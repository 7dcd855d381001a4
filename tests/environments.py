"""Python environments for the tests, beside the application's own: clients that must not share packages with it.

`python tests/environments.py` makes all of them: in CI, while the first tests run.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from containers import ROOT


def python_of(name: str) -> Path:
    """Return the python of .venvs/NAME, made on first use, and again when tests/environments/NAME.txt has changed."""
    requirements = ROOT / "tests/environments" / f"{name}.txt"
    folder = ROOT / ".venvs" / name
    python, stamp = folder / "bin/python", folder / "requirements.txt"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != requirements.read_text():
            shutil.rmtree(folder, ignore_errors=True)
            # uv links what it has unpacked once, for .venv or another environment, into the new one.
            uv = [sys.executable, "-m", "uv", "--quiet", "--cache-dir", folder.parent / "cache"]
            subprocess.run([*uv, "venv", "--python", sys.executable, folder], check=True)
            subprocess.run([*uv, "pip", "install", "--python", python, "--requirements", requirements], check=True)
            shutil.copy(requirements, stamp)
    return python


if __name__ == "__main__":
    for requirements in sorted((ROOT / "tests/environments").glob("*.txt")):
        python_of(requirements.stem)
