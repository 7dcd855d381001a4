"""The runtime as a package of its own: installed without the rest, and imported without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning  # noqa: F401  (it sets a variable when it is imported)
from containers import ROOT, copy_checkout

import sagemaker_lightning

ALONE = """
import sys
import sagemaker_lightning
from sagemaker_lightning import UserError
from sagemaker_lightning.launch import torchrun_command
from sagemaker_lightning.nodes import watchdog
assert issubclass(UserError, ValueError) and not {"torch", "numpy", "pytorch_lightning", "app"} & set(sys.modules)
print(sagemaker_lightning.__version__)
"""


def test_each_public_name_is_there():
    for name in sagemaker_lightning.__all__:
        assert getattr(sagemaker_lightning, name) is not None and name in dir(sagemaker_lightning)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        sagemaker_lightning.Nothing  # noqa: B018


def test_it_is_imported_without_any_package():
    """Isolated, without site-packages: the standard library alone."""
    line = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{ALONE}"]
    assert subprocess.check_output(line, text=True).strip() == sagemaker_lightning.__version__


@pytest.mark.slow
def test_a_wheel_installs_into_an_empty_environment(tmp_path: Path):
    """It has the runtime, the launcher and the rehearsal, and neither the example nor the tests."""
    copy_checkout(tmp_path / "source")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
    ]
    subprocess.run([*build, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("sagemaker_lightning-*.whl")
    assert wheel.name.split("-")[1] == sagemaker_lightning.__version__
    python = tmp_path / "empty/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    assert subprocess.check_output([python, "-I", "-c", ALONE], text=True).strip() == sagemaker_lightning.__version__
    listed = subprocess.check_output([python, "-m", "pip", "show", "--files", "sagemaker-lightning"], text=True)
    packages = {line.strip().partition("/")[0] for line in listed.partition("Files:")[2].splitlines() if ".py" in line}
    assert packages == {"sagemaker_lightning", "launcher", "rehearsal"}
    assert "rehearsal/report/report.css" in listed
    launched = subprocess.run([python.with_name("sagemaker-lightning-launch")], capture_output=True, text=True)
    assert launched.returncode == 1 and launched.stderr.startswith("error: ") and "has no boto3" in launched.stderr
