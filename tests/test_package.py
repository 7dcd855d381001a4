"""The runtime as a package: installed without the rest, and imported without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import environments
import pytest
import pytorch_lightning  # noqa: F401  (it sets a variable when it is imported)
from containers import ROOT, copy_checkout

import sagemaker_lightning
from sagemaker_lightning.compat import versions

ALONE = """
import sys
import sagemaker_lightning
from sagemaker_lightning import UserError
from sagemaker_lightning.launch import torchrun_command
from sagemaker_lightning.nodes import watchdog
assert issubclass(UserError, ValueError)
assert not {"torch", "numpy", "pytorch_lightning", "app"} & set(sys.modules)
print(sagemaker_lightning.__version__)
"""


def test_each_public_name_is_there():
    for name in sagemaker_lightning.__all__:
        assert getattr(sagemaker_lightning, name) is not None and name in dir(sagemaker_lightning)
    for name in ("UserError", "Seeding"):
        first = sagemaker_lightning.__getattr__(name)
        assert first is getattr(sagemaker_lightning, name) and first.__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        sagemaker_lightning.Nothing  # noqa: B018


def test_a_name_that_needs_lightning_is_given_to_a_supported_version_alone(monkeypatch):
    checked = []
    monkeypatch.setattr(versions, "check", lambda: checked.append("version"))
    sagemaker_lightning.__getattr__("UserError")
    assert checked == []  # the toolkit's process has no Lightning
    sagemaker_lightning.__getattr__("Seeding")
    assert checked == ["version"]


def test_it_is_imported_without_any_package():
    """Python runs isolated and without site-packages: only the standard library is there."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{ALONE}",
    ]
    assert subprocess.check_output(command, text=True).strip() == sagemaker_lightning.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that this checkout builds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_checkout(folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, folder / "source"], check=True)
    (built,) = folder.glob("sagemaker_lightning-*.whl")
    return built


FOREIGN = """
{imports}
for name in set(sagemaker_lightning.PUBLIC) - {{"Application", "SageMakerCLI"}}:
    assert getattr(sagemaker_lightning, name)
import autoencoder, lightning.pytorch, pytorch_lightning
assert pytorch_lightning is lightning.pytorch and pytorch_lightning.__name__ == {name!r}
assert issubclass(autoencoder.LitAutoEncoder, pytorch_lightning.LightningModule)
assert "torchvision" not in sys.modules and "jsonargparse" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import sys, lightning as L, sagemaker_lightning", "lightning.pytorch"),
        pytest.param(
            "import sys, sagemaker_lightning, lightning as L",
            "pytorch_lightning",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["after Lightning", "before Lightning"],
)
def test_all_but_the_command_line_needs_torch_and_lightning_alone(
    tmp_path: Path, wheel: Path, imports: str, name: str
):
    """It runs in the environment of `pip install lightning`, which has both distributions."""
    target = tmp_path / "target"
    installed = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
    ]
    subprocess.run([*installed, wheel], check=True)
    shutil.copy(ROOT / "tests/autoencoder.py", target)
    command = [environments.python_of("bare"), "-c", FOREIGN.format(imports=imports, name=name)]
    variables = os.environ | {"PYTHONPATH": str(target)}
    completed = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert completed.returncode == 0 and not completed.stderr, completed.stderr


@pytest.mark.slow
def test_a_wheel_installs_into_an_empty_environment(tmp_path: Path, wheel: Path):
    """It has the runtime, the launcher and the rehearsal, and neither the example nor the tests."""
    assert wheel.name.split("-")[1] == sagemaker_lightning.__version__
    python = tmp_path / "empty/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    assert (
        subprocess.check_output([python, "-I", "-c", ALONE], text=True).strip()
        == sagemaker_lightning.__version__
    )
    shown = subprocess.check_output(
        [python, "-m", "pip", "show", "--files", "sagemaker-lightning"], text=True
    )
    assert "\nRequires: psutil\n" in shown
    packages = {
        line.strip().partition("/")[0]
        for line in shown.partition("Files:")[2].splitlines()
        if ".py" in line
    }
    assert packages == {"sagemaker_lightning", "sagemaker_rehearsal"}
    for name in ("report/report.css", "web/page.css", "web/page.js"):
        assert f"sagemaker_rehearsal/{name}" in shown
    missing = {"drill": "psutil", "launch": "boto3", "merge": "numpy", "rehearsal": "botocore"}
    for command, package in missing.items():
        line = [python.with_name(f"sagemaker-lightning-{command}")]
        completed = subprocess.run(
            line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True
        )
        assert completed.returncode == 1 and completed.stderr.count("\n") == 1, completed.stderr
        assert completed.stderr.startswith("error: ") and f"has no {package}; " in completed.stderr
