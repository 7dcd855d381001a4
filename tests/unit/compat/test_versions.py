"""compat/versions.py: which versions are supported, and how another one is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
from containers import ROOT

from sagemaker_lightning.compat import namespaces, versions
from sagemaker_lightning.contract.environment import failure_file, host_and_rank
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.process import lightning_import


def test_a_version_that_is_not_supported_is_one_line(monkeypatch):
    """And none is said of the others, nor where a package has no metadata."""
    has = {}
    monkeypatch.setattr(versions, "version", lambda name: has.get(name, ""))
    monkeypatch.setattr(versions, "TOO_NEW_LIGHTNING", "2.7")  # `make compat-next` has none
    name = namespaces.distribution()
    for installed in ("", "2.5.2", "2.5.10", "2.6", "2.6.0.post0", "2.6.7rc1"):
        has[name] = installed
        lightning_import.check_version()
    for installed in ("1.9.5", "2.5.1.post0", "2.7", "2.7.0", "2.10.1", "3.0.0"):
        has[name] = installed
        says = f"^{name}: found {installed}, expected 2.5.2 or later"
        with pytest.raises(UserError, match=says):
            lightning_import.check_version()
    has[name] = "2.6.6"
    for installed in ("2.11", "2.11.0", "2.15.0+cu130", "3.0"):
        has["torch"] = installed
        lightning_import.check_version()
    has["torch"] = "2.9.1"
    with pytest.raises(UserError, match="^torch: found 2.9.1, expected 2.11 or later"):
        lightning_import.check_version()
    assert not versions.unsupported(name, pytorch_lightning.__version__)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train.py", "train_multi_node.py"])
def test_a_job_that_has_installed_another_version_ends_with_that_line(tmp_path: Path, program):
    """Before Lightning is imported, which may fail, and as the job's FailureReason."""
    name = namespaces.distribution()
    installed = tmp_path / f"installed/{name.replace('-', '_')}-2.4.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.4.0\n")
    variables = os.environ | {
        "PYTHONPATH": f"{installed.parent}:{ROOT}",
        "SM_OUTPUT_DIR": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "app" / program)]
    completed = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # A busy machine prints these lines, too.
    (error_line,) = (
        line for line in completed.stderr.splitlines() if not line.startswith("starting: ")
    )
    expected = (
        f"error: {name}: found 2.4.0, expected 2.5.2 or later and below "
        f"{versions.TOO_NEW_LIGHTNING}; pip install "
    )
    assert completed.returncode == 1 and error_line.startswith(expected)
    assert (tmp_path / "failure").read_text() == error_line


def refuse() -> None:
    raise UserError("a malicious release")


@pytest.mark.parametrize(
    ("name", "returns", "says"),
    [
        ("imported", lambda: [*namespaces.PACKAGES], "^import lightning, import pytorch_lightning"),
        ("distribution", lambda: "", "^Lightning: not installed in "),
        ("refuse_malicious", refuse, "^a malicious release$"),
    ],
)
def test_what_is_wrong_with_an_installation_is_reported_as_a_failure(
    monkeypatch, name, returns, says
):
    """A program imports our names before it can enter report_failures."""
    reported = []
    monkeypatch.setattr(versions, "report_uncaught", lambda *where: reported.append(where))
    versions.check()
    assert not reported
    monkeypatch.setattr(namespaces, name, returns)
    with pytest.raises(UserError, match=says):
        versions.check()
    assert reported == [(failure_file(), host_and_rank())]
