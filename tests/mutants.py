"""Changes the code in one place at a time, and prints the changes that no test finds.

    make mutants
    python tests/mutants.py [--n 200] [--seed 1] [--jobs 2]
                            [--only sagemaker_lightning/contract/shutdown.py ...]

Each mutant is a copy of the checkout with one operator, constant, condition, return or call
changed. Tests run on it until one fails: first the quick tests that run the changed line (coverage
finds them once, before the first mutant), then the files of tests that name its module, and all
that train. A mutant on which all tests pass survives, and is printed. Tests run in a child of a
server that has imported torch and Lightning, so most mutants cost seconds.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import copy
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("app", "sagemaker_lightning")
QUICK = "not slow and not docker and not soak"
SLOW = "slow and not docker and not soak"
PASSED = (0, 5)  # exit statuses of pytest; 5: all tests are left out
HANG_SECONDS = 600  # a mutant whose tests take longer counts as found
SWAPPED_OPERATORS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutations(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield (kind of change, node, node that replaces it) for each possible change."""
    for node in ast.walk(tree):
        changed = copy.deepcopy(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED_OPERATORS:
            changed.ops[0] = SWAPPED_OPERATORS[type(node.ops[0])]()
            yield "comparison", node, changed
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPPED_OPERATORS:
            changed.op = SWAPPED_OPERATORS[type(node.op)]()
            yield "operator", node, changed
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "not", node, node.operand
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant", node, changed
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(
            node.test, ast.Constant
        ):
            yield "condition", node.test, ast.Constant(False)
        elif (
            isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant)
        ):
            yield "return", node.value, ast.Constant(None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "call", node, ast.Pass()


def mutated(source: str, node: ast.AST, replacement: ast.AST) -> str:
    """Return a source with the text of `node` replaced by that of `replacement`."""
    lines = source.encode().splitlines(keepends=True)
    text_before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    text_after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(
        lines[node.end_lineno :]
    )
    text = ast.unparse(ast.fix_missing_locations(replacement))
    return (
        text_before
        + (f"({text})" if isinstance(replacement, ast.expr) else text).encode()
        + text_after
    ).decode()


def tests_of(module: str) -> list[str]:
    """Return the test files that name a module, and all that train.

    The module's own file comes first, then the quick ones.
    """
    files = sorted((ROOT / "tests").glob("test_*.py"))
    naming = []
    dotted = module.removesuffix(".py").replace("/", ".")
    package, _, module_name = dotted.rpartition(".")
    for path in files:
        text = path.read_text()
        imports = rf"from {package} import (\([^)]*|[^\n(]*)\b{module_name}\b"
        if path.stem == f"test_{module_name}" or re.search(
            rf"\b{dotted}\b|{imports}|{module}", text
        ):
            naming.append(path)
    training = [
        ROOT / f"tests/test_{name}.py"
        for name in ("exact_resume", "cli", "train", "interruptions", "interrupted_ranks")
    ]
    naming += [path for path in training if path not in naming]
    chosen = [path for path in naming if "mark.docker" not in path.read_text().partition("def ")[0]]
    slow = [path for path in chosen if "mark.slow" in path.read_text().partition("def ")[0]]
    chosen.sort(key=lambda path: (path.stem != f"test_{module_name}", path in slow))
    return [str(path.relative_to(ROOT)) for path in chosen]


class _Recorder:
    """A plugin of pytest: tells coverage which test runs, and records seconds and failures."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measured.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def _run_tests(folder: str, tests: list[str], markers: str, measure: bool) -> None:
    """Run tests on a copy of the checkout, and exit with pytest's status.

    If `measure`, write which tests run each line, their seconds and failures, into the copy.
    """
    output = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.setsid()
    os.chdir(folder)
    # As in a run of pytest; a child of a fork server would start data workers by one, too.
    multiprocessing.set_start_method("fork", force=True)
    sys.path[:0] = [folder, f"{folder}/tests"]
    # The environment has imported the checkout's own when Python started (scripts/make_env.sh).
    for name in [name for name in sys.modules if name.partition(".")[0] == "sagemaker_lightning"]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = folder
    options = ["-q", "-p", "no:cacheprovider", "-m", markers, f"--timeout={HANG_SECONDS}"]
    if not measure:
        os._exit(pytest.main([*options, "-x", *tests]))
    measured = coverage.Coverage(
        f"{folder}/coverage", source=[f"{folder}/{name}" for name in SOURCES], config_file=False
    )
    recorder = _Recorder(measured)
    measured.start()
    pytest.main([*options, *tests], plugins=[recorder])
    measured.stop()
    data = measured.get_data()
    tests_of_lines = {
        str(Path(file).relative_to(folder)): {
            str(line): [test for test in tests if test]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    Path(folder, "measured.json").write_text(
        json.dumps([tests_of_lines, recorder.seconds, recorder.failed])
    )
    os._exit(0)


def run_tests(folder: Path, tests: list[str], markers: str, measure: bool = False) -> int | None:
    """Run tests on the copy; return pytest's exit status, or None if they hang."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_tests, args=(str(folder), tests, markers, measure))
    process.start()
    process.join(None if measure else HANG_SECONDS)
    status = process.exitcode
    if status is None:
        os.killpg(process.pid, 9)
        process.join()
    return status


class Judge:
    """Says which mutants survive.

    Args:
        folder: A copy of the checkout.
        modules: The modules that will be changed.
    """

    def __init__(self, folder: Path, modules: set[str]) -> None:
        files = sorted({file for module in modules for file in tests_of(module)})
        run_tests(folder, files, QUICK, measure=True)
        measured = json.loads((folder / "measured.json").read_text())
        self.tests_of_lines: dict[str, dict[str, list[str]]] = measured[0]
        self.seconds: dict[str, float] = measured[1]
        self.failed: list[str] = measured[2]
        self.sound: dict[str, bool] = {}
        """For each file of tests that has failed: whether it passes without a change."""

    def quick_tests(self, module: str, node: ast.AST) -> list[str]:
        """Return the quick tests that run a node's lines, the quickest first."""
        lines = self.tests_of_lines.get(module, {})
        tests = {
            test
            for line in range(node.lineno, node.end_lineno + 1)
            for test in lines.get(str(line), ())
        }
        return sorted(tests - set(self.failed), key=lambda test: self.seconds.get(test, 0.0))

    def survives(self, folder: Path, module: str, source: str, node: ast.AST) -> bool:
        """Return whether all tests of a module pass on a changed source of it.

        A file that also fails on the unchanged source proves nothing.
        """
        path = folder / module
        original = path.read_text()

        def passes(tests: list[str], markers: str) -> bool:
            path.write_text(source)
            try:
                return run_tests(folder, tests, markers) in PASSED
            finally:
                path.write_text(original)

        quick = self.quick_tests(module, node)
        if quick and not passes(quick, QUICK):
            return False
        # Without a quick test, what is changed runs when it is imported, or in another process.
        markers = SLOW if quick else "not docker and not soak"
        for file in tests_of(module):
            if passes([file], markers):
                continue
            if file not in self.sound:
                self.sound[file] = run_tests(folder, [file], markers) in PASSED
                if not self.sound[file]:
                    print(f"LEFT OUT {file}: it fails without a change, too", flush=True)
            if self.sound[file]:
                return False
        return True


@contextlib.contextmanager
def checkout() -> Iterator[Path]:
    """Yield the folder of a copy of the checkout's files, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
        yield folder


def main() -> None:
    """Make mutants, and print those that survive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--only", nargs="*", help="files below app/ or sagemaker_lightning/; default: all"
    )
    args = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [
            "torch",
            "torchvision",
            "pytorch_lightning",
            "torchmetrics.classification",
            "jsonargparse",
            "pytest",
        ]
    )
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = args.only or [str(path.relative_to(ROOT)) for path in files]
    candidates = []
    for module in modules:
        source = (ROOT / module).read_text()
        candidates += [(module, source, *mutation) for mutation in mutations(ast.parse(source))]
    chosen = random.Random(args.seed).sample(candidates, min(args.n, len(candidates)))
    survivors = 0
    with contextlib.ExitStack() as stack:
        checkouts = queue.SimpleQueue()
        for _ in range(args.jobs):
            checkouts.put(stack.enter_context(checkout()))
        folder = checkouts.get()
        judge = Judge(folder, {mutant[0] for mutant in chosen})
        checkouts.put(folder)

        def verdict(mutant: tuple) -> tuple[bool, float]:
            module, source, _, node, other = mutant
            folder = checkouts.get()
            began = time.monotonic()
            alive = judge.survives(folder, module, mutated(source, node, other), node)
            checkouts.put(folder)
            return alive, time.monotonic() - began

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(args.jobs))
        verdicts = zip(chosen, pool.map(verdict, chosen), strict=True)
        for number, ((module, source, kind, node, other), (alive, seconds)) in enumerate(
            verdicts, 1
        ):
            survivors += alive
            if alive:
                line = source.splitlines()[node.lineno - 1].strip()
                print(
                    f"SURVIVED {module}:{node.lineno} {kind}: "
                    f"{line}  ->  {ast.unparse(other)[:60]}",
                    flush=True,
                )
            print(
                f"{number}/{len(chosen)} {module} {kind} {seconds:.0f} s, {survivors} survived",
                flush=True,
            )
    print(
        f"{len(chosen)} mutants (seed {args.seed}): {survivors} survived, "
        f"{survivors / max(1, len(chosen)):.1%}"
    )


if __name__ == "__main__":
    main()
