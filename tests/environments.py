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
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            # --no-compile: most of what the SDKs bring is never imported; it saves a third of the time.
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", "-r", requirements], check=True)
            shutil.copy(requirements, stamp)
    return python


if __name__ == "__main__":
    for requirements in sorted((ROOT / "tests/environments").glob("*.txt")):
        python_of(requirements.stem)
