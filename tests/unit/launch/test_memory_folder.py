"""launch/memory_folder.py: a job's folder in memory lasts as long as its first process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from containers import ROOT

from sagemaker_lightning.launch import memory_folder as module
from sagemaker_lightning.launch.memory_folder import PREFIX, memory_folder

HOLDS = """
import sys
from pathlib import Path
from sagemaker_lightning.launch import memory_folder
memory_folder.ROOT = Path(sys.argv[1])
with memory_folder.memory_folder() as folder:
    (folder / "copy").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """A folder in the place of /dev/shm."""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def holder(root: Path) -> tuple[subprocess.Popen, Path]:
    """Return a process that holds a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return process, Path(process.stdout.readline().strip())


def test_only_this_user_can_enter_it_and_it_is_gone_at_the_end(root):
    with memory_folder() as folder:
        assert folder.parent == root and folder.stat().st_mode & 0o777 == 0o700
        (folder / "training").mkdir()
        (folder / "training/copy").write_bytes(b"x")
    assert not list(root.iterdir())
    with pytest.raises(KeyError), memory_folder():
        raise KeyError
    assert not list(root.iterdir())


def test_what_a_killed_job_has_left_is_removed_at_the_next_start_and_a_living_ones_stays(root):
    killed, left = holder(root)
    living, used = holder(root)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "copy").exists()
    with memory_folder() as folder:
        assert set(root.iterdir()) == {used, folder} and (used / "copy").exists()
    living.communicate("")
    assert living.returncode == 0 and not list(root.iterdir())


def test_what_is_not_of_this_kind_stays(root, monkeypatch):
    (root / "torch_1").mkdir()
    (root / f"{PREFIX}file").write_bytes(b"x")
    (root / "elsewhere").mkdir()
    (root / f"{PREFIX}link").symlink_to(root / "elsewhere")
    mine = root / f"{PREFIX}another-users"
    mine.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
        module.remove_left_ones()
        assert len(list(root.iterdir())) == 5
    module.remove_left_ones()
    assert not mine.exists() and len(list(root.iterdir())) == 4


def test_without_such_a_file_system_a_line_says_so(root, monkeypatch, capsys):
    monkeypatch.setattr(module, "ROOT", root / "none")
    with memory_folder() as folder:
        assert folder is None
    assert capsys.readouterr().out == (
        f"warning: no copies of the state are kept in memory: {root}/none: No such file or "
        "directory; ranks that die continue from a checkpoint\n"
    )
