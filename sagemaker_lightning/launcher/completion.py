"""Prints what completes the flags of a command in a shell, by shtab."""

import argparse
import sys
from pathlib import Path

SHELLS = ("bash", "zsh")
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}
"""shtab.FILE, for the attribute `complete` of a flag: no command needs shtab but completion."""


def show(parser: argparse.ArgumentParser, program: str, shell: str) -> None:
    """Print the script that completes a command's flags.

    Args:
        parser: The command's parser, with all its commands.
        program: The name by which it is typed.
        shell: One of SHELLS.

    Raises ValueError if there is no shtab.
    """
    try:
        import shtab
    except ImportError:
        raise ValueError(
            f"completion: {sys.executable} has no shtab; pip install shtab, or install the extra "
            "`completion` of this package"
        ) from None
    parser.prog = program
    print(shtab.complete(parser, shell))


def program_name(installed: str) -> str:
    """Return the name of the program that runs: a script's of a checkout, or `installed`."""
    name = Path(sys.argv[0]).name
    return name if name == "launch.py" else installed
