"""Python environments of their own, for what the tests need beside the application and must not share packages with."""

import shutil
import subprocess
import sys
from pathlib import Path

from containers import ROOT


def python_of(name: str) -> Path:
    """Return the python of .venvs/NAME, made anew if tests/environments/NAME.txt is not what it was made from."""
    requirements = ROOT / "tests/environments" / f"{name}.txt"
    folder = ROOT / ".venvs" / name
    python, stamp = folder / "bin/python", folder / "made-from.txt"
    if not stamp.is_file() or stamp.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--requirement", str(requirements)], check=True)
        shutil.copy(requirements, stamp)  # last: an environment without it is not whole
    return python
