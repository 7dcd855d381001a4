"""Interrupts a training on each of the loaders of public libraries, at random.

    python -m tests.foreign_loaders [LIBRARY ...] [--only=TEXT] [--rounds=N] [--seed=N]
        [--results=FILE] [--write=PAGE]

Each of tests/foreign_loaders/libraries has the loaders of a library, as its documentation makes
them; the lines at its top name the library. It gets an environment of its own, as the projects of
real_projects.py do.

A loader is trained from with no data workers, with two, with two that stay, and with another number
of them after an interruption. In each of these ways, it is trained from as Lightning does, and with
ExactResume, uninterrupted: both must have epochs of the same lengths. Then, in each round, it is
interrupted (SIGTERM or SIGKILL) twice within an epoch and once at an epoch's edge. What each step
got is compared, and the weights bit by bit.

Outcomes are: "identical"; "said", if they differ and a line says so; "refused", if a line asks for
the number of workers of before, and the run is identical with it. All others are wrong: "silent",
"crashed", "hung".
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tests.tools import real_projects
from tests.tools.real_projects import ROOT, Job, environment, requirements

LIBRARIES = ROOT / "tests/foreign_loaders/libraries"
WAYS = {
    "0": (0, False, False),
    "2": (2, False, False),
    "2, stay": (2, True, False),
    "changed": (2, False, True),
}
"""The number of data workers, whether they stay, and whether there are others after each
interruption, by the column of the table."""
OTHER_NUMBERS = (0, 3, 1)
"""The numbers of data workers after the interruptions, if it changes."""
RIGHT = ("identical", "said", "refused")
BEGIN = "<!-- begin: python -m tests.foreign_loaders -->"
SAYS = re.compile(
    r"^.*(not that of the interrupted run|cannot be saved|no checkpoint saves it|a resumed "
    r"run has other|batches each time, perhaps also in a resumed run|has other batches).*$",
    re.MULTILINE,
)
"""Lines in which a run says that it is not exact."""
REFUSES = re.compile(r"^.*UserError: .*num_workers=.*$", re.MULTILINE)


def names_of(library: str) -> list[str]:
    """Return the names of a library's loaders, which are the keys of its LOADERS."""
    text = (LIBRARIES / f"{library}.py").read_text()
    return re.findall(r'^    "(.*?)":', text.split("\nLOADERS = {")[1], re.MULTILINE)


def seen(folder: Path) -> dict[int, dict]:
    """Return what each step of a run got, by the step's number."""
    return {line["step"]: line for line in json_lines(folder / "seen.jsonl")}


def json_lines(file: Path) -> list[dict]:
    """Return the values in a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lengths(steps: dict[int, dict]) -> list[int]:
    """Return the number of batches of each epoch."""
    epochs = [line["epoch"] for line in steps.values()]
    return [epochs.count(epoch) for epoch in sorted(set(epochs))]


def difference(expected: Path, actual: Path) -> str:
    """Say what differs between two runs; "" if nothing does."""
    before, after = seen(expected), seen(actual)
    for step in sorted(before.keys() | after.keys()):
        first, second = before.get(step), after.get(step)
        if first != second:
            shown = [
                line and (line["epoch"], line["batch"], line["first"]) for line in (first, second)
            ]
            return f"step {step} had {shown[1]}, not {shown[0]}"
    return real_projects.differences(real_projects.result(expected), real_projects.result(actual))


def moments(draws: random.Random, sizes: list[int]) -> list[str]:
    """Return two moments within an epoch, and one at the edge of one, in their order."""
    epoch = draws.randrange(len(sizes))
    places = range(sizes[epoch] - 1) if sizes[epoch] > 2 else [0, 0]
    within = [(epoch, place) for place in sorted(draws.sample(places, 2))]
    edge = draws.randrange(1, len(sizes))
    at_edge = draws.choice([(edge - 1, sizes[edge - 1] - 1), (edge - 1, "end"), (edge, "begin")])
    rank = {"begin": -1, "end": sizes[0] + max(sizes)}
    ordered = sorted([*within, at_edge], key=lambda at: (at[0], rank.get(at[1], at[1])))
    return [f"{at[0]}:{at[1]}:{draws.choice(['SIGTERM', 'SIGKILL'])}" for at in ordered]


class Trial:
    """A loader, trained from with a number of data workers, uninterrupted and in rounds.

    Args:
        script: The library's script.
        name: The loader's name.
        workers: The number of data workers.
        stays: Whether they stay from epoch to epoch.
        folder: Where its jobs are.
    """

    def __init__(self, script: Path, name: str, workers: int, stays: bool, folder: Path) -> None:
        self.script = script
        self.name = name
        self.workers = workers
        self.stays = stays
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)

    def arguments(self, workers: int, *more: str) -> list[str]:
        """Return the command line of a run."""
        stays = ["--persistent"] if self.stays and workers else []
        return [self.name, f"--workers={workers}", *stays, *more]

    def uninterrupted(self, name: str, *more: str) -> str:
        """Train without an interruption; return what is wrong."""
        job = Job(self.script, self.folder / name)
        job.arguments = self.arguments(self.workers, *more)
        status = job.run()
        return f"{name}: exit status {status}: {last_line(job.output)}" if status != 0 else ""

    def alone(self) -> str:
        """Train uninterrupted, as Lightning does and with ExactResume; return what is wrong."""
        if wrong := self.uninterrupted("plain", "--plain") or self.uninterrupted("alone"):
            return wrong
        plain, ours = (lengths(seen(self.folder / name)) for name in ("plain", "alone"))
        if plain != ours and len(set(plain)) == 1:  # else they follow from what is drawn
            return f"epochs of {ours} batches, with Lightning of {plain}"
        return ""

    def round(self, name: str, changes: bool, draws: random.Random) -> dict[str, str]:
        """Train with interruptions, and return the outcome and its reason.

        Args:
            name: The folder's name.
            changes: Whether there is another number of data workers after an interruption.
            draws: Decides when and how it is interrupted.
        """
        job = Job(self.script, self.folder / name)
        others = draws.sample(OTHER_NUMBERS, len(OTHER_NUMBERS))
        workers = self.workers
        every = draws.choice([1, 2, 3, 1000])
        refused = ""
        log = f"--every={every}"
        outputs = []
        for moment in [*moments(draws, lengths(seen(self.folder / "alone"))), ""]:
            options = [f"--every={every}", *([f"--interrupt={moment}"] if moment else [])]
            expected = (143, -15, -9) if moment else (0,)
            log += f"; {workers} workers, {moment}"
            job.arguments = self.arguments(workers, *options)
            status = job.run()
            outputs.append(job.output)
            if status == 1 and (refusal := REFUSES.search(job.output)):
                refused = refusal.group()
                workers = int(re.findall(r"num_workers=(\d+)", refused)[-1])
                job.arguments = self.arguments(workers, *options)
                status = job.run()
                outputs.append(job.output)
            if status not in expected and status != 0:
                outcome = "hung" if status is None else "crashed"
                return {"outcome": outcome, "why": f"{log}: {status}: {last_line(job.output)}"}
            if status == 0:  # the moment has not come, as the run continued after it
                break
            if changes:
                workers = others.pop()
        said = SAYS.search("\n".join(outputs))
        differs = difference(self.folder / "alone", job.folder)
        if differs and said:
            return {"outcome": "said", "why": said.group(), "differs": differs}
        if differs:
            return {"outcome": "silent", "why": f"{log}: {differs}"}
        if refused:
            return {"outcome": "refused", "why": refused}
        return {"outcome": "identical", "why": said.group() if said else ""}


def last_line(output: str) -> str:
    """Return the last lines of an output, as one line."""
    return " / ".join(output.strip().splitlines()[-2:])[-600:]


def examine(library: str, only: str, rounds: int, seed: int, home: Path, ways: list[str]) -> None:
    """Examine the loaders of a library, in this process's environment.

    Each loader adds a line to LIBRARY.jsonl in `home`.
    """
    sys.path.insert(0, str(ROOT / "tests/support"))
    import warm

    script = LIBRARIES / f"{library}.py"
    preloaded = ["pytorch_lightning", "sagemaker_lightning", "warm"]
    warm.FORK_SERVER.set_forkserver_preload([*preloaded, *real_projects.modules(script)])
    package = re.match(r"[\w-]+", requirements(script)[0])[0]
    for name in names_of(library):
        if only not in name:
            continue
        report = {
            "library": library,
            "version": f"{package} {metadata.version(package)}",
            "name": name,
            "ways": {},
        }
        trials: dict[tuple, tuple[Trial, str]] = {}
        for way in ways:
            workers, stays, changes = WAYS[way]
            if (workers, stays) not in trials:
                folder = home / library / re.sub(r"\W+", "-", f"{name} {workers} {stays}")
                trial = Trial(script, name, workers, stays, folder)
                trials[workers, stays] = trial, trial.alone()
            trial, wrong = trials[workers, stays]
            report["ways"][way] = outcomes = []
            for number in range(rounds):
                draws = random.Random(f"{library} {name} {way} {seed} {number}")
                folder_name = f"{way} {number}"
                outcomes.append(
                    {"outcome": "failed", "why": wrong}
                    if wrong
                    else trial.round(folder_name, changes, draws)
                )
                print(library, name, way, outcomes[-1], sep=" | ", flush=True)
                if outcomes[-1]["outcome"] in RIGHT:
                    shutil.rmtree(trial.folder / folder_name)
        with (home / f"{library}.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")


def table(reports: list[dict]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = [
        f"| loader | {' | '.join(f'workers: {way}' for way in WAYS)} |",
        "| --- " * (1 + len(WAYS)) + "|",
    ]
    version = ""
    for report in reports:
        if report["version"] != version:
            version = report["version"]
            lines.append(f"| **{version}** |" + " |" * len(WAYS))
        cells = [report["name"]]
        for way in WAYS:
            outcomes = [entry["outcome"] for entry in report["ways"].get(way, [])]
            cells.append(
                ", ".join(f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes))
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = sorted(path.stem for path in LIBRARIES.glob("*.py"))
    arguments = argparse.ArgumentParser(
        prog="python -m tests.foreign_loaders", description=__doc__.split("\n\n")[0]
    )
    arguments.add_argument(
        "libraries",
        nargs="*",
        metavar="LIBRARY",
        help=f"of {', '.join(names)}; all if none is given",
    )
    arguments.add_argument("--only", default="", help="loaders whose name has this text")
    arguments.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each loader and way")
    arguments.add_argument("--seed", type=int, default=0, help="decides the interruptions")
    arguments.add_argument("--home", type=Path, help="folder of the jobs; else a temporary one")
    arguments.add_argument("--results", type=Path, help="file that gets a line for each loader")
    arguments.add_argument(
        "--write", type=Path, help="page whose table is replaced by that of all lines of --results"
    )
    arguments.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return arguments


def newest(lines: list[dict]) -> list[dict]:
    """Return the last report of each loader, sorted by library."""
    reports = {(line["library"], line["name"]): line for line in lines}
    return sorted(reports.values(), key=lambda report: report["library"])


def main(arguments: list[str] | None = None) -> int:
    """Examine the libraries that are named, or all, and print the table.

    Return 1 if any outcome is wrong.
    """
    names = sorted(path.stem for path in LIBRARIES.glob("*.py"))
    args = parser().parse_args(arguments)
    if unknown := sorted(set(args.libraries) - set(names)):
        parser().error(f"LIBRARY: found {', '.join(unknown)}, expected {', '.join(names)}")
    home = (args.home or Path(tempfile.mkdtemp(prefix="loaders-"))).resolve()
    home.mkdir(parents=True, exist_ok=True)
    if args.here:
        examine(args.libraries[0], args.only, args.rounds, args.seed, home, args.ways)
        return 0
    reports = []
    for name in args.libraries or ([] if args.write else names):
        command = ["-m", "tests.foreign_loaders", "--here", name, f"--only={args.only}"]
        command += [f"--rounds={args.rounds}", f"--seed={args.seed}", f"--home={home}"]
        command += ["--ways", *args.ways]
        subprocess.run([environment(LIBRARIES / f"{name}.py"), *command], cwd=ROOT, check=True)
        reports += json_lines(home / f"{name}.jsonl")
    if args.results and reports:
        with args.results.open("a") as file:
            file.writelines(json.dumps(report) + "\n" for report in reports)
    if args.write:
        lines = json_lines(args.results)
        page = real_projects.with_table(args.write.read_text(), table(newest(lines)), BEGIN)
        args.write.write_text(page)
    if reports:
        print(table(reports))
    return int(
        any(
            entry["outcome"] not in RIGHT
            for report in reports
            for entries in report["ways"].values()
            for entry in entries
        )
    )


if __name__ == "__main__":
    sys.exit(main())
