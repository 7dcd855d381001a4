"""docs/upstream: what is proposed to Lightning applies to it, and passes its own tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
from containers import ROOT
from pages import PAGES

pytestmark = pytest.mark.slow

UPSTREAM = ROOT / "docs/upstream"
HOOKS = "on_batch_committed", "on_epoch_committed"


def own_tests(folder: Path, names: str = "test") -> str:
    """Return what pytest says of the proposal's tests of these names.

    They are run with the Lightning that is in the folder.
    """
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            "-k",
            names,
        ]
        + [folder / "test_committed_hooks.py"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    ).stdout


@pytest.mark.thorough  # of the patch in docs/upstream alone
@pytest.mark.skipif(
    not pytorch_lightning.__version__.startswith("2.6."), reason="the patch is of Lightning 2.6"
)
def test_the_committed_hooks_work_in_a_patched_lightning_alone(tmp_path):
    """The patch is applied to a copy of what is installed; without it, its tests fail."""
    shutil.copytree(Path(pytorch_lightning.__file__).parent, tmp_path / "pytorch_lightning")
    shutil.copy(UPSTREAM / "test_committed_hooks.py", tmp_path)
    assert re.search(r"^1 failed, 7 deselected", own_tests(tmp_path, "come_last"), re.MULTILINE)
    patched = subprocess.run(
        ["patch", "-p1", "--fuzz=0", "--input", UPSTREAM / "committed_hooks.patch"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert patched.returncode == 0, patched.stdout
    assert "offset" not in patched.stdout
    said = own_tests(tmp_path)
    assert re.search(r"^8 passed", said, re.MULTILINE), said


def test_the_page_of_the_hooks_says_what_the_patch_has():
    """The text that is to be sent names the hooks; development.md has the table of all."""
    proposal = (UPSTREAM / "committed_hooks.md").read_text()
    patch = (UPSTREAM / "committed_hooks.patch").read_text()
    for hook in HOOKS:
        assert f"`{hook}`" in proposal
        assert f"+    def {hook}(" in patch
        assert f"`{hook}`" in PAGES["docs/development.md"]
