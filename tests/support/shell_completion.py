"""Asks bash what it completes, as it does after a TAB."""

import subprocess

# The words so far, and the function that `complete` has been given.
ASK = """
eval "$SCRIPT"
COMP_WORDS=("$PROGRAM" "$@")
COMP_CWORD=$#
function=$(complete -p "$PROGRAM" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed_by_bash(script: str, program: str, words: list[str]) -> list[str]:
    """Return what bash offers for the last word, given a program's script of completion."""
    answer = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", *words],
        check=True,
        capture_output=True,
        text=True,
        env={"SCRIPT": script, "PROGRAM": program, "PATH": "/usr/bin:/bin"},
    )
    assert answer.stderr == ""
    return answer.stdout.splitlines()
