"""The command line of a soak, and its rounds: those that are done stay done."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any


def arguments_of(description: str, kinds: Collection[str], results: Path) -> argparse.Namespace:
    """Return what the command line asks for.

    Args:
        description: The first line of the soak's docstring.
        kinds: The kinds of rounds that there are.
        results: The file of results, if no flag names another one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="; ".join(kinds))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=results)
    arguments = parser.parse_args()
    if unknown := {*arguments.kinds} - {*kinds}:
        parser.error(f"KIND: found {min(unknown)!r}, expected one of {'; '.join(kinds)}")
    arguments.kinds = arguments.kinds or [*kinds]
    return arguments


def run(
    arguments: argparse.Namespace,
    row_class: Callable[..., Any],
    play: Callable[[str, int], Any],
    table: Callable[[list[Any]], str],
    said: Callable[[Any], str] = lambda row: row.problem or "identical",
) -> None:
    """Do the rounds, print the table of all, and exit; with 1 if one has a problem.

    Args:
        arguments: What the command line asks for.
        row_class: The dataclass of how a round ended: a line of the file of results.
        play: Does a round of a kind, with a seed, and returns how it ended.
        table: Returns a table of all rounds.
        said: Returns what is printed of a round.
    """
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    earlier = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    rows = [row_class(**json.loads(line)) for line in earlier]
    done = {(row.kind, row.seed) for row in rows}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        for kind in arguments.kinds:
            if (kind, seed) in done:
                continue
            row = play(kind, seed)
            row.commit = commit
            rows.append(row)
            with arguments.results.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{kind}, seed {seed}: {said(row)}", flush=True)
    print(table(rows))
    sys.exit(any(row.problem for row in rows))
