"""Trains public packages from the index with ExactResume, and interrupts them at random.

    python -m tests.tools.real_projects [NAME ...] [--rounds=N] [--seed=N] [--results=FILE]
                                        [--write=PAGE]

Each of tests/projects is the script of a user who has read its package's documentation; the lines
at its top name the package. The scripts of one package get an environment of their own,
.venvs/projects/NAME: it sees the packages of .venv, so that torch is installed once, and has what
the package asks for besides.

A script runs twice to its end, once as `python train.py` and once warm (warm.py). These two
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

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "tests/projects"
ENVIRONMENTS = Path(os.environ.get("PROJECTS_HOME", ROOT / ".venvs/projects"))
HANG_SECONDS = 400  # a run that takes longer hangs
EXTRA_PATHS = [str(ROOT)]
"""Where a script finds modules besides those that are installed."""
SAME_VERSIONS = ("torch", "torchvision", "pytorch-lightning", "torchmetrics")
"""The packages of .venv that no project may replace."""

BEGIN = "<!-- begin: python -m tests.tools.real_projects -->"
END = "<!-- end -->"

EXIT_STATUSES = {signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGKILL: (-signal.SIGKILL,)}
"""The exit statuses after a signal; the second one where nothing is training."""


# Environments -------------------------------------------------------------------------------------


def requirements(script: Path) -> list[str]:
    """Return what a script asks for, by the lines at its top (PEP 723)."""
    block = re.search(r"^# /// script\n((?:#.*\n)*?)# ///$", script.read_text(), re.MULTILINE)
    return tomllib.loads(block[1].replace("# ", ""))["dependencies"]


def environment(script: Path) -> Path:
    """Return the Python of a script's environment; it is made if it is not there."""
    folder = ENVIRONMENTS / script.stem
    python = folder / "bin/python"
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == "\n".join(requirements(script)):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # The last line is run when this Python starts: it makes `import lightning` and
    # `import pytorch_lightning` one.
    lines = [sysconfig.get_path("purelib"), str(ROOT), "import sagemaker_lightning"]
    (site / "projects.pth").write_text("\n".join(lines) + "\n")
    versions = [f"{package}=={metadata.version(package)}" for package in SAME_VERSIONS]
    versions.append(f"lightning=={metadata.version('pytorch-lightning')}")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(versions) + "\n")
    pip_arguments = [
        "--quiet",
        "--no-cache-dir",
        "--prefer-binary",
        "--constraint",
        constraints,
        *requirements(script),
    ]
    subprocess.run([python, "-m", "pip", "install", *pip_arguments], check=True)
    ready.write_text("\n".join(requirements(script)))
    return python


# One project, in its environment ------------------------------------------------------------------


def modules(script: Path) -> list[str]:
    lines = re.findall(r"^(?:import|from) ([\w.]+)", script.read_text(), re.MULTILINE)
    return [name for name in lines if name != "sagemaker_lightning"]


def flat(value: object, name: str = "") -> dict[str, object]:
    """Return the tensors (as bytes) and numbers in nested containers, each by its position.

    A position is the keys and indices that lead to the value, such as `.model.0.weight`.
    """
    import numpy as np
    import torch

    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        bits = dense.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {name: (str(value.dtype), tuple(value.shape), bits.tobytes())}
    elif isinstance(value, np.ndarray):
        return {name: (str(value.dtype), value.shape, value.tobytes())}
    else:
        return {name: repr(value)}
    return {
        position: leaf
        for key, child in items
        for position, leaf in flat(child, f"{name}.{key}").items()
    }


def result(folder: Path) -> dict[str, object] | None:
    """Return what a finished job has kept, None if it has kept nothing."""
    import torch

    file = folder / "weights.pt"
    return flat(torch.load(file, weights_only=False)) if file.exists() else None


def differences(first: dict, second: dict) -> str:
    """Say how many values differ, and where one of them is; "" if none differs."""
    positions = [
        position
        for position in first.keys() | second.keys()
        if first.get(position) != second.get(position)
    ]
    return f"{len(positions)} of {len(first)} differ, such as {min(positions)}" if positions else ""


class Job:
    """A script in a folder of its own, started until it has ended."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.folder = folder
        self.arguments: list[str] = []
        folder.mkdir(parents=True)
        shutil.copy(script, folder / "train.py")
        self.variables = {
            key: value for key, value in os.environ.items() if not key.startswith(("SM_", "PL_"))
        }
        self.variables |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(EXTRA_PATHS),
            "MPLCONFIGDIR": str(folder.parent),
        }
        self.output = ""

    def run_cold(self) -> int:
        """Run it to its end as a person does; return its exit status."""
        command = [sys.executable, "train.py", *self.arguments]
        with (self.folder / "log").open("a") as log:
            return subprocess.run(
                command, cwd=self.folder, env=self.variables, stdout=log, stderr=log
            ).returncode

    def run(self, seconds: float | None = None, number: int = 0) -> int | None:
        """Run it; after `seconds`, if they are given, send it signal `number`.

        Return its exit status, None if it hangs.
        """
        import warm

        log = self.folder / "log"
        size_before = log.stat().st_size if log.exists() else 0
        with log.open("a") as output:
            process = warm.start(
                ["python", "train.py", *self.arguments],
                self.folder,
                self.variables,
                output.fileno(),
            )
        try:
            return process.wait(HANG_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            if seconds is None:
                return None
            process.send_signal(number)
            try:
                return process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                return None
        finally:
            process.kill()
            self.output = log.read_bytes()[size_before:].decode(errors="replace")


def one_round(
    name: str, folder: Path, seconds: float, draws: random.Random, expected: dict
) -> dict[str, object]:
    """Run a script with interruptions, and return counts, the outcome and its reason."""
    from zoo.rounds import NOT_EXACT

    job = Job(PROJECTS / f"{name}.py", folder)
    counts: dict[str, object] = {"stops": 0, "kills": 0, "resumed": 0}
    status = None
    outputs = []
    for _ in range(draws.randint(2, 5)):
        number = draws.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL])
        status = job.run(draws.uniform(0, 0.9) * seconds, number)
        outputs.append(job.output)
        if status == 0:
            break
        counts["stops" if number == signal.SIGTERM else "kills"] += 1
        if status not in EXIT_STATUSES[number]:
            return counts | {
                "outcome": "hung" if status is None else "crashed",
                "why": f"exit status {status}",
            }
    if status != 0:
        status = job.run()
        outputs.append(job.output)
    counts["resumed"] = sum("\nresuming from step " in f"\n{text}" for text in outputs)
    plainly = NOT_EXACT.search("\n".join(outputs))
    counts["said"] = plainly.group() if plainly else ""
    if status != 0 or (actual := result(folder)) is None:
        last_lines = job.output.strip().splitlines()[-1:]
        return counts | {
            "outcome": "hung" if status is None else "crashed",
            "why": f"exit status {status}: {last_lines}",
        }
    difference = differences(expected, actual)
    outcome = "identical" if not difference else "said" if plainly else "wrong"
    return counts | {"outcome": outcome, "why": difference}


def examine(name: str, rounds: int, seed: int, home: Path) -> dict[str, object]:
    """Run a script twice without interruptions, then in interrupted rounds.

    It runs in the environment of this process.
    """
    sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests")]
    import warm

    script = PROJECTS / f"{name}.py"
    warm.FORK_SERVER.set_forkserver_preload([*warm.PRELOADED, *modules(script)])
    package = re.match(r"[\w-]+", requirements(script)[0])[0]
    report = {"name": name, "version": metadata.version(package), "rounds": []}
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    reference = Job(script, folder / "alone")
    repetition = Job(script, folder / "again")
    if status := reference.run_cold():
        return report | {"failed": f"left alone, it ends with {status}"}
    Job(script, folder / "warm").run(
        0.01, signal.SIGKILL
    )  # now the server is there, and the next start is quick
    started = time.monotonic()
    if status := repetition.run():
        return report | {"failed": f"left alone and warm, it ends with {status}"}
    seconds = time.monotonic() - started
    expected = result(folder / "alone")
    report["seconds"] = round(seconds, 1)
    if difference := differences(expected, result(folder / "again")):
        return report | {"failed": f"two runs that nothing interrupts differ: {difference}"}
    for number in range(rounds):
        draws = random.Random(f"{name} {seed} {number}")
        report["rounds"].append(
            one_round(name, folder / f"round-{number}", seconds, draws, expected)
        )
        print(name, number, report["rounds"][-1], flush=True)
        if report["rounds"][-1]["outcome"] == "identical":
            shutil.rmtree(folder / f"round-{number}")
    return report


# All of them --------------------------------------------------------------------------------------


def table(results: list[dict]) -> str:
    """Return the results of the projects as a table in Markdown."""
    lines = [
        "| package | what it trains | rounds | stops | kills | resumed | outcome |",
        "| --- " * 7 + "|",
    ]
    for report in sorted(results, key=lambda entry: entry["name"]):
        about = re.search(
            r'^"""(.*?)"""$',
            (PROJECTS / f"{report['name']}.py").read_text(),
            re.MULTILINE | re.DOTALL,
        )[1]
        rounds = report["rounds"]
        outcomes = [entry["outcome"] for entry in rounds]
        outcome_words = ", ".join(
            f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes)
        )
        sums = [str(sum(entry[name] for entry in rounds)) for name in ("stops", "kills", "resumed")]
        cells = [
            f"{report['name']} {report['version']}",
            " ".join(about.split()).rstrip("."),
            str(len(rounds)),
            *sums,
        ]
        lines.append(f"| {' | '.join(cells)} | {report.get('failed') or outcome_words} |")
    return "\n".join(lines)


def with_table(page: str, table_text: str, begin: str = BEGIN) -> str:
    """Return a page with its table replaced; ValueError if it has no place for one."""
    page_start, page_rest = page.split(begin)
    return f"{page_start}{begin}\n\n{table_text}\n\n{END}{page_rest.split(END)[1]}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = sorted(path.stem for path in PROJECTS.glob("*.py"))
    arguments = argparse.ArgumentParser(
        prog="python -m tests.tools.real_projects", description=__doc__.split("\n\n")[0]
    )
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; all if none is given"
    )
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each project")
    arguments.add_argument(
        "--seed", type=int, default=0, help="decides when and how the jobs are interrupted"
    )
    arguments.add_argument(
        "--home", type=Path, help="folder of the jobs, which are kept; else a temporary one"
    )
    arguments.add_argument(
        "--results", type=Path, help="file that gets a line of JSON for each project"
    )
    arguments.add_argument(
        "--write", type=Path, help="page whose table is replaced by that of all lines of --results"
    )
    arguments.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return arguments


def main(arguments: list[str] | None = None) -> int:
    """Examine the projects that are named, or all, and print the table.

    Return 1 if any is not identical.
    """
    names = sorted(path.stem for path in PROJECTS.glob("*.py"))
    args = parser().parse_args(arguments)
    if unknown := sorted(set(args.names) - set(names)):
        parser().error(f"NAME: found {', '.join(unknown)}, expected {', '.join(names)}")
    home = (args.home or Path(tempfile.mkdtemp(prefix="projects-"))).resolve()
    if args.here:
        report = examine(args.names[0], args.rounds, args.seed, home)
        (home / f"{args.names[0]}.json").write_text(json.dumps(report))
        return 0
    results = []
    for name in args.names or ([] if args.write else names):
        command = [
            "-m",
            "tests.tools.real_projects",
            "--here",
            name,
            f"--rounds={args.rounds}",
            f"--seed={args.seed}",
        ]
        subprocess.run(
            [environment(PROJECTS / f"{name}.py"), *command, f"--home={home}"], cwd=ROOT, check=True
        )
        results.append(json.loads((home / f"{name}.json").read_text()))
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    if args.write:
        lines = [json.loads(row) for row in args.results.read_text().splitlines()]
        args.write.write_text(with_table(args.write.read_text(), table(lines)))
    if results:
        print(table(results))
    return int(
        any(
            report.get("failed")
            or any(entry["outcome"] != "identical" for entry in report["rounds"])
            for report in results
        )
    )


if __name__ == "__main__":
    sys.exit(main())
