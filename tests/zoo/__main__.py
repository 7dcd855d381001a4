"""Runs the conformance zoo, and makes the table of the documentation.

    python -m tests.zoo run --rounds=4 --seed=1 --jobs=2 --results=results/zoo.jsonl
        [--only TEXT] [--interruptions=3]
    python -m tests.zoo report results/zoo.jsonl [--write docs/zoo.md]
    python -m tests.zoo list

`run` takes each configuration in turn. It first runs the configuration uninterrupted, once for each
way to launch it. Then it does rounds: it interrupts a job up to so many times, lets it end, and
compares it. Each round adds a line of JSON to the file of results; a round that is in the file
already is not done again. `run` ends with status 1 if an outcome is neither "identical" nor "said".
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

RIGHT = ("identical", "said")


def launchers(configuration) -> list[str]:
    """Return the ways to launch a configuration, the cheapest first."""
    from zoo.rounds import LAUNCHERS

    return [name for name, ranks in LAUNCHERS.items() if ranks in configuration.ranks]


def planned(
    ways: list[str], configuration, rounds: int, seed: int, done: set[tuple]
) -> dict[str, list[int]]:
    """Return the seeds of the rounds that are to be done, by launcher; `ways` take turns."""
    plan: dict[str, list[int]] = {}
    for number in range(rounds if ways else 0):
        way = ways[number % len(ways)]
        if (configuration.name, way, seed + number) not in done:
            plan.setdefault(way, []).append(seed + number)
    return plan


def run(given: argparse.Namespace) -> int:
    """Do the rounds; return the exit status."""
    from zoo import rounds
    from zoo.table import CONFIGURATIONS

    results = Path(given.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    before = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    done = {(row["configuration"], row["launcher"], row["seed"]) for row in before}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    lock = Lock()
    outcomes = Counter()
    interruptions = Counter()
    rounds.warm.ensure_server()

    def add(round: rounds.Round, folder: Path) -> None:
        round.commit = commit.stdout.strip()
        if round.outcome not in RIGHT and given.keep:
            name = f"{round.configuration}-{round.launcher}-{round.seed}".replace("/", "-")
            shutil.copytree(folder, Path(given.keep, name), dirs_exist_ok=True)
        with lock:
            outcomes[round.outcome] += 1
            interruptions[round.outcome] += len(round.interruptions)
            with results.open("a") as file:
                file.write(json.dumps(round.row()) + "\n")
            how = (
                f"{round.launcher}, seed {round.seed}, {len(round.interruptions)} "
                f"interruptions, {round.seconds:.1f} s"
            )
            print(
                f"{round.outcome:10}{round.configuration} [{how}] {round.detail[:400]}", flush=True
            )

    def one(work: tuple) -> None:
        configuration, way, seeds = work
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            try:
                reference = rounds.left_alone(Path(folder, "alone"), configuration, way)
            except Exception as error:
                failed = rounds.Round(configuration.name, way, seeds[0], 0, *failure(error))
                add(failed, Path(folder, "alone"))
                return
            for seed in seeds:
                place = Path(folder, str(seed))
                round = rounds.Round(configuration.name, way, seed)
                moments = rounds.draws(round, reference, given.interruptions)
                add(rounds.interrupted(place, reference, round, moments), place)
                shutil.rmtree(place, ignore_errors=True)

    chosen = [
        c
        for c in CONFIGURATIONS.values()
        if re.search(given.only, c.name) and given.subject in c.subject
    ]
    work = []
    for configuration in chosen:
        ways = [way for way in launchers(configuration) if re.search(given.launcher, way)]
        found = planned(ways, configuration, given.rounds, given.seed, done)
        work += [(configuration, way, seeds) for way, seeds in found.items()]
    if given.folder:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        for _ in pool.map(one, work):
            pass
    print(
        f"{sum(outcomes.values())} rounds with {sum(interruptions.values())} interruptions: "
        f"{dict(outcomes)}",
        flush=True,
    )
    return int(any(outcome not in RIGHT for outcome in outcomes))


def failure(error: Exception) -> tuple[str, str]:
    """Return outcome and detail of a configuration that fails when it is uninterrupted."""
    from zoo.rounds import NOT_EXACT

    plainly = NOT_EXACT.search(str(error))
    return ("said", plainly.group(0)) if plainly else ("crashed", str(error)[-2500:])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doing = commands.add_parser("run")
    doing.add_argument("--rounds", type=int, default=1, help="rounds of each configuration")
    doing.add_argument("--interruptions", type=int, default=3, help="of a round, at most")
    doing.add_argument("--seed", type=int, default=1)
    doing.add_argument("--jobs", type=int, default=2, help="jobs side by side")
    doing.add_argument("--results", default="results/zoo.jsonl")
    doing.add_argument(
        "--only",
        default="",
        help="configurations in whose name this is found, a regular expression",
    )
    doing.add_argument("--subject", default="")
    doing.add_argument("--launcher", default="", help="which launchers, a regular expression")
    doing.add_argument("--folder", default=None, help="where the jobs' folders are made")
    doing.add_argument("--keep", default=None, help="a folder for the jobs that ended wrong")
    commands.add_parser("list")
    reporting = commands.add_parser("report")
    reporting.add_argument("results", nargs="+")
    reporting.add_argument("--write", default=None, help="the page whose table is replaced")
    given = parser.parse_args()
    if given.command == "run":
        sys.exit(run(given))
    if given.command == "report":
        from zoo import report

        text = report.markdown(
            json.loads(line)
            for file in given.results
            for line in Path(file).read_text().splitlines()
        )
        print(text)
        if given.write:
            report.write(Path(given.write), text)
        return
    from zoo.table import CONFIGURATIONS

    for configuration in CONFIGURATIONS.values():
        print(f"{configuration.subject}: {configuration.name} {' '.join(launchers(configuration))}")


if __name__ == "__main__":
    main()
