"""Trains public packages from the index with ExactResume, and interrupts them at random.

    python -m tests.real_projects [NAME ...] [--rounds=N] [--seed=N] [--results=FILE] [--write=PAGE]

Each of tests/projects is the script of a user who has read its package's documentation; the lines
at its top name the package. The scripts of one package get an environment of their own,
.venvs/projects/NAME: it sees the packages of .venv, so that torch is installed once, and has what
the package asks for besides.

A script runs twice to its end, once as `python train.py` and once warm (tests/warm.py). These two
must agree. Then, in each round, it is stopped (SIGTERM) and killed (SIGKILL) up to five times, at
moments drawn from the time that it takes, and run to its end. Its `weights.pt` (all tensors and
numbers that the user kept) is compared bit by bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = ROOT / "tests/projects"
ENVIRONMENTS = Path(os.environ.get("PROJECTS_HOME", ROOT / ".venvs/projects"))
LIMIT = 400  # seconds; what takes longer hangs
PATHS = [str(ROOT)]
"""Where a script finds modules besides those that are installed."""
PINNED = ("torch", "torchvision", "pytorch-lightning", "torchmetrics")
"""The packages of .venv that no project may replace."""

BEGIN, END = "<!-- begin: python -m tests.real_projects -->", "<!-- end -->"

KEPT_ENDS = {signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGKILL: (-signal.SIGKILL,)}
"""The exit statuses after a signal; the second one where no training is going on."""


# Environments -------------------------------------------------------------------------------------


def requirements(name: str) -> list[str]:
    """Return what a script asks for, by the lines at its top (PEP 723)."""
    block = re.search(
        r"^# /// script\n((?:#.*\n)*?)# ///$", (PROJECTS / f"{name}.py").read_text(), re.MULTILINE
    )
    return tomllib.loads(block[1].replace("# ", ""))["dependencies"]


def environment(name: str) -> Path:
    """Return the Python of a project's environment; it is made if it is not there."""
    folder = ENVIRONMENTS / name
    python, ready = folder / "bin/python", folder / "ready"
    if ready.exists() and ready.read_text() == "\n".join(requirements(name)):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The last line is run when this Python starts: it makes `import lightning` and
    # `import pytorch_lightning` one.
    lines = [sysconfig.get_path("purelib"), str(ROOT), "import sagemaker_lightning"]
    (site / "projects.pth").write_text("\n".join(lines) + "\n")
    versions = [f"{package}=={metadata.version(package)}" for package in PINNED]
    versions.append(f"lightning=={metadata.version('pytorch-lightning')}")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(versions) + "\n")
    words = [
        "--quiet",
        "--no-cache-dir",
        "--prefer-binary",
        "--constraint",
        constraints,
        *requirements(name),
    ]
    subprocess.run([python, "-m", "pip", "install", *words], check=True)
    ready.write_text("\n".join(requirements(name)))
    return python


# One project, in its environment ------------------------------------------------------------------


def modules(script: Path) -> list[str]:
    """Return the modules that a script imports."""
    lines = re.findall(r"^(?:import|from) ([\w.]+)", script.read_text(), re.MULTILINE)
    return [name for name in lines if name != "sagemaker_lightning"]


def flat(value: object, name: str = "") -> dict[str, object]:
    """Return the tensors and numbers in a nest of containers, by their places.

    Tensors as their bytes.
    """
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "numpy"):
        return {
            name: (
                str(value.dtype),
                tuple(value.shape),
                value.detach().contiguous().numpy().tobytes(),
            )
        }
    else:
        return {name: repr(value)}
    return {
        place: leaf for key, each in items for place, leaf in flat(each, f"{name}.{key}").items()
    }


def result(folder: Path) -> dict[str, object] | None:
    """Return what a finished job has kept, None if it has kept nothing."""
    import torch

    file = folder / "weights.pt"
    return flat(torch.load(file, weights_only=False)) if file.exists() else None


def differences(one: dict, other: dict) -> str:
    """Return which places differ, in words; "" if none do."""
    places = [place for place in one.keys() | other.keys() if one.get(place) != other.get(place)]
    return f"{len(places)} of {len(one)} differ, such as {min(places)}" if places else ""


class Job:
    """A script in a folder of its own, started as often as it takes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        shutil.copy(PROJECTS / f"{name}.py", folder / "train.py")
        self.variables = {
            key: value for key, value in os.environ.items() if not key.startswith(("SM_", "PL_"))
        }
        self.variables |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(PATHS),
            "MPLCONFIGDIR": str(folder.parent),
        }
        self.said = ""

    def run_cold(self) -> int:
        """Run it to its end as a person does; return its exit status."""
        words = [sys.executable, "train.py"]
        with (self.folder / "log").open("a") as log:
            return subprocess.run(
                words, cwd=self.folder, env=self.variables, stdout=log, stderr=log
            ).returncode

    def run(self, after: float | None = None, number: int = 0) -> int | None:
        """Run it, with signal `number` after so many seconds.

        Return its exit status, None if it hangs.
        """
        import warm

        log = self.folder / "log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("a") as output:
            process = warm.start(
                ["python", "train.py"], self.folder, self.variables, output.fileno()
            )
        try:
            return process.wait(LIMIT if after is None else after)
        except subprocess.TimeoutExpired:
            if after is None:
                return None
            process.send_signal(number)
            try:
                return process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return None
        finally:
            process.kill()
            self.said = log.read_bytes()[before:].decode(errors="replace")


def one_round(
    name: str, folder: Path, seconds: float, draws: random.Random, expected: dict
) -> dict[str, object]:
    """Run a script with interruptions, and say what came of it."""
    from zoo.rounds import NOT_EXACT

    job = Job(name, folder)
    told: dict[str, object] = {"stops": 0, "kills": 0, "resumed": 0}
    status, said = None, []
    for _ in range(draws.randint(2, 5)):
        number = draws.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL])
        status = job.run(draws.uniform(0, 0.9) * seconds, number)
        said.append(job.said)
        if status == 0:
            break
        told["stops" if number == signal.SIGTERM else "kills"] += 1
        if status not in KEPT_ENDS[number]:
            return told | {
                "outcome": "hung" if status is None else "crashed",
                "why": f"exit status {status}",
            }
    if status != 0:
        status = job.run()
        said.append(job.said)
    told["resumed"] = sum("\nresuming from step " in f"\n{text}" for text in said)
    plainly = NOT_EXACT.search("\n".join(said))
    told["said"] = plainly.group() if plainly else ""
    if status != 0 or (found := result(folder)) is None:
        last = job.said.strip().splitlines()[-1:]
        return told | {
            "outcome": "hung" if status is None else "crashed",
            "why": f"exit status {status}: {last}",
        }
    why = differences(expected, found)
    outcome = "identical" if not why else "said" if plainly else "wrong"
    return told | {"outcome": outcome, "why": why}


def examine(name: str, rounds: int, seed: int, home: Path) -> dict[str, object]:
    """Run a script alone twice and then in rounds; this process is one of its environment."""
    sys.path.insert(0, str(ROOT / "tests"))
    import warm

    warm.SERVER.set_forkserver_preload([*warm.PRELOADED, *modules(PROJECTS / f"{name}.py")])
    package = re.match(r"[\w-]+", requirements(name)[0])[0]
    told = {"name": name, "version": metadata.version(package), "rounds": []}
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    first, second = Job(name, folder / "alone"), Job(name, folder / "again")
    if status := first.run_cold():
        return told | {"failed": f"left alone, it ends with {status}"}
    Job(name, folder / "warm").run(
        0.01, signal.SIGKILL
    )  # now the server is there, and the next start is quick
    started = time.monotonic()
    if status := second.run():
        return told | {"failed": f"left alone and warm, it ends with {status}"}
    seconds = time.monotonic() - started
    expected = result(folder / "alone")
    told["seconds"] = round(seconds, 1)
    if why := differences(expected, result(folder / "again")):
        return told | {"failed": f"two runs that nothing interrupts differ: {why}"}
    for number in range(rounds):
        draws = random.Random(f"{name} {seed} {number}")
        told["rounds"].append(one_round(name, folder / f"round-{number}", seconds, draws, expected))
        print(name, number, told["rounds"][-1], flush=True)
        if told["rounds"][-1]["outcome"] == "identical":
            shutil.rmtree(folder / f"round-{number}")
    return told


# All of them --------------------------------------------------------------------------------------


def table(results: list[dict]) -> str:
    """Return what came of the projects, as a table in Markdown."""
    lines = [
        "| package | what it trains | rounds | stops | kills | resumed | outcome |",
        "| --- | --- " * 3 + "| --- |",
    ]
    lines[1] = "| --- " * 7 + "|"
    for told in sorted(results, key=lambda each: each["name"]):
        about = re.search(
            r'^"""(.*?)"""$',
            (PROJECTS / f"{told['name']}.py").read_text(),
            re.MULTILINE | re.DOTALL,
        )[1]
        rounds = told["rounds"]
        outcomes = [each["outcome"] for each in rounds]
        words = ", ".join(f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes))
        sums = [str(sum(each[name] for each in rounds)) for name in ("stops", "kills", "resumed")]
        cells = [f"{told['name']} {told['version']}", about.rstrip("."), str(len(rounds)), *sums]
        lines.append(f"| {' | '.join(cells)} | {told.get('failed') or words} |")
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """Return a page with its table replaced; ValueError if it has no place for one."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = sorted(path.stem for path in PROJECTS.glob("*.py"))
    made = argparse.ArgumentParser(
        prog="python -m tests.real_projects", description=__doc__.split("\n\n")[0]
    )
    made.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; all if none is given"
    )
    made.add_argument("--rounds", type=int, default=3, help="rounds of each project")
    made.add_argument(
        "--seed", type=int, default=0, help="decides when and how the jobs are interrupted"
    )
    made.add_argument(
        "--home", type=Path, help="folder of the jobs, which are kept; else a temporary one"
    )
    made.add_argument("--results", type=Path, help="file that gets a line of JSON for each project")
    made.add_argument(
        "--write", type=Path, help="page whose table is replaced by that of all lines of --results"
    )
    made.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Examine the projects that are named, or all, and print the table.

    Return 1 if any is not identical.
    """
    names = sorted(path.stem for path in PROJECTS.glob("*.py"))
    asked = parser().parse_args(arguments)
    if unknown := sorted(set(asked.names) - set(names)):
        parser().error(f"NAME: found {', '.join(unknown)}, allowed are {', '.join(names)}")
    home = (asked.home or Path(tempfile.mkdtemp(prefix="projects-"))).resolve()
    if asked.here:
        told = examine(asked.names[0], asked.rounds, asked.seed, home)
        (home / f"{asked.names[0]}.json").write_text(json.dumps(told))
        return 0
    results = []
    for name in asked.names or ([] if asked.write else names):
        words = [
            "-m",
            "tests.real_projects",
            "--here",
            name,
            f"--rounds={asked.rounds}",
            f"--seed={asked.seed}",
        ]
        subprocess.run([environment(name), *words, f"--home={home}"], cwd=ROOT, check=True)
        results.append(json.loads((home / f"{name}.json").read_text()))
        if asked.results:
            with asked.results.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    if asked.write:
        lines = [json.loads(line) for line in asked.results.read_text().splitlines()]
        asked.write.write_text(with_table(asked.write.read_text(), table(lines)))
    if results:
        print(table(results))
    return int(
        any(
            told.get("failed") or any(r["outcome"] != "identical" for r in told["rounds"])
            for told in results
        )
    )


if __name__ == "__main__":
    sys.exit(main())
