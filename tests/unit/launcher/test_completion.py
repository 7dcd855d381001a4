"""What a shell completes of the launcher's flags and commands."""

import subprocess
import sys

import pytest

from sagemaker_lightning.launcher import command

PROGRAM = "sagemaker-lightning-launch"
# As bash does after a TAB: the words so far, and the function that `complete` has been given.
ASK = f"""
eval "$SCRIPT"
COMP_WORDS=({PROGRAM} "$@")
COMP_CWORD=$#
function=$(complete -p {PROGRAM} | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


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
    answer = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", *words],
        check=True,
        capture_output=True,
        text=True,
        env={"SCRIPT": script, "PATH": "/usr/bin:/bin"},
    )
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == completed


def test_bash_completes_files(script, tmp_path):
    (tmp_path / "job.toml").touch()
    answer = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", "--defaults", f"{tmp_path}/j"],
        check=True,
        capture_output=True,
        text=True,
        env={"SCRIPT": script, "PATH": "/usr/bin:/bin"},
    )
    assert answer.stdout.splitlines() == [f"{tmp_path}/job.toml"]


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
