"""What a shell completes of the launcher's flags and commands."""

import subprocess
import sys

import pytest
from shell_completion import completed_by_bash

from sagemaker_lightning.launcher import command

PROGRAM = "sagemaker-lightning-launch"


@pytest.fixture(scope="module")
def script() -> str:
    """The script for bash, as the command prints it."""
    line = "import sys; from sagemaker_lightning.launcher import command; "
    line += f"sys.argv = ['/usr/bin/{PROGRAM}', 'completion', 'bash']; command.main()"
    return subprocess.run(
        [sys.executable, "-c", line], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["--max"], ["--max-run", "--max-wait"]),
        (["--spot", "--training"], ["--training-plan"]),
        (["lo"], ["logs"]),
        (["logs", "--fol"], ["--follow"]),
        (["resume", "my-job", "--max"], ["--max-run", "--max-wait"]),
        (["list", "--max"], [""]),
        (["--check-hyperparameters", "i"], ["image"]),
        (["completion", ""], ["bash", "zsh"]),
    ],
)
def test_bash_completes(script, words, completed):
    assert completed_by_bash(script, PROGRAM, words) == completed


def test_bash_completes_files(script, tmp_path):
    (tmp_path / "job.toml").touch()
    words = ["--defaults", f"{tmp_path}/j"]
    assert completed_by_bash(script, PROGRAM, words) == [f"{tmp_path}/job.toml"]


def test_zsh_has_a_script(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"/usr/bin/{PROGRAM}", "completion", "zsh"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"#compdef {PROGRAM}\n") and "--training-plan" in printed


def test_without_shtab_a_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ValueError, match="completion: .* has no shtab; pip install shtab, or"):
        command.show_completion("bash")


def test_the_program_is_known_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scripts/launch.py"])
    command.show_completion("bash")
    assert capsys.readouterr().out.rstrip().endswith(" launch.py")
