"""contract/streams.py: streams that are closed, or lead to nobody."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from containers import ROOT

PROGRAM = """
import subprocess, sys
from sagemaker_lightning.contract import streams
from sagemaker_lightning.contract.failures import reported
streams.prepare()
with reported(None):
    for number in range(int(sys.argv[1])):
        print("line", number, flush=True)
    first = open(sys.argv[2], "w")
    print("an error", file=sys.stderr)
    subprocess.run(["sh", "-c", "cat; echo a child >&2"], check=True)
    assert first.fileno() > 2
"""
NOBODY_READS = (
    "error: stdout: cannot be written to (Broken pipe); let somebody read it to its end, or send "
    "it to a file with room\n"
)
LINES = "line 0\nline 1\n"


def run(folder: Path, redirections: str, lines: int = 2) -> tuple[int, str, str]:
    """Run the program with these redirections of bash; return its status, stdout and stderr."""
    command = [sys.executable, "-c", PROGRAM, str(lines), str(folder / "first")]
    ended = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}; exit ${{PIPESTATUS[0]}}', "bash", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert not (folder / "first").exists() or (folder / "first").read_text() == ""
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "stdout", "stderr"),
    [
        ("", LINES, "an error\na child\n"),
        ("<&-", LINES, "an error\na child\n"),
        (
            ">&-",
            "",
            "warning: stdout is closed; what is printed goes to stderr\n"
            f"{LINES}an error\na child\n",
        ),
        (
            "2>&-",
            f"warning: stderr is closed; errors go to stdout\n{LINES}an error\na child\n",
            "",
        ),
        (">&- 2>&-", "", ""),
        ("<&- >&- 2>&-", "", ""),
        ("2>/dev/full", LINES, ""),
    ],
)
def test_a_stream_that_is_closed_is_not_a_failure(tmp_path, redirections, stdout, stderr):
    """What the program opens does not take its place."""
    assert run(tmp_path, redirections) == (0, stdout, stderr)


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_program_in_one_line(tmp_path):
    assert run(tmp_path, "| head -1", lines=100000) == (1, "line 0\n", NOBODY_READS)
    assert run(tmp_path, "2>&1 | head -1", lines=100000) == (1, "line 0\n", "")
    full = NOBODY_READS.replace("Broken pipe", "No space left on device")
    assert run(tmp_path, ">/dev/full") == (1, "", full)


@pytest.mark.slow
def test_a_terminal_that_is_gone_is_not_a_failure(tmp_path):
    """SIGHUP says so, or the program ignores it."""
    ours, theirs = pty.openpty()
    program = f"import sys; sys.stdin.read()\n{PROGRAM}open(sys.argv[2] + '.end', 'w')"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "2", str(tmp_path / "first")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.close(ours)
    process.stdin.close()
    process.wait(60)
    assert (tmp_path / "first").exists()
