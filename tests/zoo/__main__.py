"""Runs the conformance zoo, and makes the table of the documentation.

    python -m tests.zoo run --rounds=4 --seed=1 --jobs=2 --results=results/zoo.jsonl
        [--only TEXT] [--interruptions=3 | --placed]
    python -m tests.zoo report results/zoo.jsonl [--write results/zoo.md]
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

RIGHT_OUTCOMES = ("identical", "said")


def launchers(configuration) -> list[str]:
    """Return the ways to launch a configuration, the cheapest first."""
    from zoo.rounds import LAUNCHERS

    return [name for name, ranks in LAUNCHERS.items() if ranks in configuration.ranks]


def planned(
    launcher_names: list[str], configuration, rounds: int, seed: int, rounds_done: set[tuple]
) -> dict[str, list[int]]:
    """Return the seeds of the rounds to do, by launcher; the launchers take turns."""
    plan: dict[str, list[int]] = {}
    for number in range(rounds if launcher_names else 0):
        launcher = launcher_names[number % len(launcher_names)]
        if (configuration.name, launcher, seed + number) not in rounds_done:
            plan.setdefault(launcher, []).append(seed + number)
    return plan


def run(arguments: argparse.Namespace) -> int:
    """Do the rounds; return the exit status."""
    from zoo import rounds
    from zoo.table import CONFIGURATIONS

    results = Path(arguments.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    earlier_rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    rounds_done = {(row["configuration"], row["launcher"], row["seed"]) for row in earlier_rows}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    lock = Lock()
    outcomes = Counter()
    interruptions = Counter()
    rounds.warm.ensure_server()

    def add(round: rounds.Round, folder: Path) -> None:
        round.commit = commit.stdout.strip()
        if round.outcome not in RIGHT_OUTCOMES and arguments.keep:
            name = f"{round.configuration}-{round.launcher}-{round.seed}".replace("/", "-")
            shutil.copytree(folder, Path(arguments.keep, name), dirs_exist_ok=True)
        with lock:
            outcomes[round.outcome] += 1
            interruptions[round.outcome] += len(round.interruptions)
            with results.open("a") as file:
                file.write(json.dumps(round.row()) + "\n")
            about = (
                f"{round.launcher}, seed {round.seed}, {len(round.interruptions)} "
                f"interruptions, {round.seconds:.1f} s"
            )
            print(
                f"{round.outcome:10}{round.configuration} [{about}] {round.detail[:400]}",
                flush=True,
            )

    def do_rounds(work: tuple) -> None:
        configuration, launcher, seeds = work
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            try:
                reference = rounds.uninterrupted_run(Path(folder, "alone"), configuration, launcher)
            except Exception as error:
                failed = rounds.Round(configuration.name, launcher, seeds[0], 0, *failure(error))
                add(failed, Path(folder, "alone"))
                return
            for seed in seeds:
                job_folder = Path(folder, str(seed))
                round = rounds.Round(configuration.name, launcher, seed)
                moments = (
                    rounds.placed(round)
                    if arguments.placed
                    else rounds.draws(round, reference, arguments.interruptions)
                )
                add(rounds.interrupted(job_folder, reference, round, moments), job_folder)
                shutil.rmtree(job_folder, ignore_errors=True)

    chosen = [
        candidate
        for candidate in CONFIGURATIONS.values()
        if re.search(arguments.only, candidate.name) and arguments.subject in candidate.subject
    ]
    work = []
    for configuration in chosen:
        launcher_names = [
            launcher
            for launcher in launchers(configuration)
            if re.search(arguments.launcher, launcher)
        ]
        seeds_by_launcher = planned(
            launcher_names, configuration, arguments.rounds, arguments.seed, rounds_done
        )
        work += [(configuration, launcher, seeds) for launcher, seeds in seeds_by_launcher.items()]
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(do_rounds, work):
            pass
    print(
        f"{sum(outcomes.values())} rounds with {sum(interruptions.values())} interruptions: "
        f"{dict(outcomes)}",
        flush=True,
    )
    return int(any(outcome not in RIGHT_OUTCOMES for outcome in outcomes))


def failure(error: Exception) -> tuple[str, str]:
    """Return outcome and detail of a configuration whose uninterrupted run fails."""
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
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--rounds", type=int, default=1, help="rounds of each configuration")
    run_parser.add_argument("--interruptions", type=int, default=3, help="of a round, at most")
    run_parser.add_argument(
        "--placed",
        action="store_true",
        help="interrupt twice within an epoch and once at its end, not at random",
    )
    run_parser.add_argument("--seed", type=int, default=1)
    run_parser.add_argument("--jobs", type=int, default=2, help="jobs side by side")
    run_parser.add_argument("--results", default="results/zoo.jsonl")
    run_parser.add_argument(
        "--only",
        default="",
        help="configurations in whose name this is found, a regular expression",
    )
    run_parser.add_argument("--subject", default="")
    run_parser.add_argument("--launcher", default="", help="which launchers, a regular expression")
    run_parser.add_argument("--folder", default=None, help="where the jobs' folders are made")
    run_parser.add_argument("--keep", default=None, help="a folder for the jobs that ended wrong")
    commands.add_parser("list")
    report_parser = commands.add_parser("report")
    report_parser.add_argument("results", nargs="+")
    report_parser.add_argument("--write", default=None, help="the page whose table is replaced")
    arguments = parser.parse_args()
    if arguments.command == "run":
        sys.exit(run(arguments))
    if arguments.command == "report":
        from zoo import report

        text = report.markdown(
            json.loads(line)
            for file in arguments.results
            for line in Path(file).read_text().splitlines()
        )
        print(text)
        if arguments.write:
            report.write(Path(arguments.write), text)
        return
    from zoo.table import CONFIGURATIONS

    for configuration in CONFIGURATIONS.values():
        print(f"{configuration.subject}: {configuration.name} {' '.join(launchers(configuration))}")


if __name__ == "__main__":
    main()
