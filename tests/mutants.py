"""Changes the code in one place at a time, and prints the changes that no test finds.

    make mutants
    python tests/mutants.py [--n 200] [--seed 1] [--jobs 2]
                            [--only sagemaker_lightning/contract/shutdown.py ...]
                            [--tests tests/test_journal.py ...]
                            [--seconds 120] [--measured FILE]

Each mutant is a copy of the checkout with one operator, constant, condition, return or call
changed. First, all tests but those of containers run once, and coverage finds which of them run
each line, also in the processes that they start. Of these, the quickest run on a mutant until one
fails, then the quickest of each file, the second of each file, and so on. A mutant on which they
pass for so many seconds survives, and is printed. Tests run in a child of a server that has
imported torch and Lightning, so most mutants cost seconds.
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
import lanes
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("app", "sagemaker_lightning")
MEASURED = "not docker and not soak"
MEASURING_SECONDS = 3600
QUICK_SECONDS = 5
"""The quickest tests, which take so long together, run first."""
PASSED = (0, 5)  # exit statuses of pytest; 5: all tests are left out
MIN_HANG_SECONDS, HANG_FACTOR = 60, 5
"""A mutant's tests that take longer than this, and that much longer than usual, find it."""
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


def lines_of_functions(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that run when a function is called."""
    return {
        line
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(function.body[0].lineno, function.end_lineno + 1)
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


COVERAGE_SETTINGS = """\
[run]
source =
    {folder}/app
    {folder}/sagemaker_lightning
data_file = {folder}/coverage
parallel = true
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
"""


class _Recorder:
    """A plugin of pytest: tells coverage which test runs, and records seconds and failures."""

    def __init__(self, measured: coverage.Coverage | None) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.measured:
            self.measured.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def _run_tests(folder: str, tests: list[str], timeout: float, measure: bool) -> None:
    """Run tests on a copy of the checkout, and exit with pytest's status.

    Write the tests that fail into the copy. If `measure`, run all, and write which tests run each
    line, too, here or in a process that a test starts.
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
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={timeout:.0f}"]
    measured = None
    if measure:
        options += ["-m", MEASURED]
        settings = Path(folder, "coveragerc")
        settings.write_text(COVERAGE_SETTINGS.format(folder=folder))
        measured = coverage.Coverage(config_file=str(settings))
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        measured.start()
    else:
        options.append("-x")
    recorder = _Recorder(measured)
    status = pytest.main([*options, *tests], plugins=[recorder])
    lines = {}
    if measured:
        measured.stop()
        measured.save()
        measured.combine()
        lines = _tests_of_lines(measured.get_data(), folder)
    Path(folder, "recorded.json").write_text(json.dumps([recorder.failed, recorder.seconds, lines]))
    os._exit(status)


def _tests_of_lines(data: coverage.CoverageData, folder: str) -> dict[str, dict[str, list[str]]]:
    """Return the tests that run each line of each module."""
    return {
        str(Path(file).relative_to(folder)): {
            # Of a process, the context is PYTEST_CURRENT_TEST: a test and its phase.
            str(line): sorted({re.sub(r" \(\w+\)$", "", test) for test in tests if test})
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


def run_tests(folder: Path, tests: list[str], seconds: float, measure: bool = False) -> list:
    """Run tests on the copy until one fails, or all if `measure`.

    Args:
        folder: The copy.
        tests: Files or tests.
        seconds: How long they take without a change.
        measure: Whether to record which tests run each line.

    Returns:
        What is wrong ([] if all pass), the seconds of each test, the tests that run each line.
    """
    recorded = folder / "recorded.json"
    recorded.unlink(missing_ok=True)
    timeout = MIN_HANG_SECONDS + HANG_FACTOR * seconds
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_tests, args=(str(folder), tests, timeout, measure))
    process.start()
    process.join(MEASURING_SECONDS if measure else 2 * timeout)
    status = process.exitcode
    if status is None:
        os.killpg(process.pid, 9)
        process.join()
    if not recorded.exists():
        return [["it hangs or ends early"], {}, {}]
    result = json.loads(recorded.read_text())
    if status not in PASSED and not result[0]:
        result[0] = [f"pytest ends with {status}"]
    return result


def measure(folders: list[Path], files: list[str]) -> list:
    """Return the tests that fail, the seconds of each test, the tests that run each line.

    Args:
        folders: Copies of the checkout; tests run in all of them at a time.
        files: The files of tests.
    """
    parts: list[list[str]] = [[] for _ in folders]
    part_seconds = [0.0] * len(parts)
    lane_files: dict[str, list[str]] = {}
    for file in files:
        lane_files.setdefault(lanes.lane(file), []).append(file)
    file_seconds = lanes.durations()
    for members in lane_files.values():
        emptiest = part_seconds.index(min(part_seconds))
        parts[emptiest] += members
        part_seconds[emptiest] += sum(file_seconds.get(file, 0.0) for file in members)
    failed: list[str] = []
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[str]]] = {}
    with concurrent.futures.ThreadPoolExecutor(len(folders)) as pool:
        parts = [part for part in parts if part]
        for result in pool.map(lambda *part: run_tests(*part, 600, True), folders, parts):
            failed += result[0]
            seconds |= result[1]
            for module, tests_of_lines in result[2].items():
                of_module = lines.setdefault(module, {})
                for line, tests in tests_of_lines.items():
                    of_module.setdefault(line, []).extend(tests)
    return [failed, seconds, lines]


class Judge:
    """Says which mutants survive.

    Args:
        measured: What `measure` returned.
        seconds: How long tests run on a mutant, about.
    """

    def __init__(self, measured: list, seconds: float) -> None:
        self.failed = set(measured[0])
        self.seconds: dict[str, float] = measured[1]
        self.tests_of_lines: dict[str, dict[str, list[str]]] = measured[2]
        self.limit = seconds
        self.sound: dict[str, bool] = {}
        """For each test that has failed on a mutant: whether it passes without a change."""

    def batches(self, module: str, node: ast.AST, in_function: bool) -> Iterator[list[str]]:
        """Yield the quickest tests that run a node's lines, then the quickest of each file.

        What stands outside of functions runs when the module is imported: then they are the
        module's tests.
        """
        lines = self.tests_of_lines.get(module, {})
        numbers = map(str, range(node.lineno, node.end_lineno + 1)) if in_function else lines
        tests = {test for number in numbers for test in lines.get(number, ())}
        tests = (tests & self.seconds.keys()) - self.failed
        quickest_first = sorted(tests, key=lambda test: (self.seconds[test], test))
        total = 0.0
        batch: list[str] = []
        while quickest_first and total < QUICK_SECONDS:
            batch.append(quickest_first.pop(0))
            total += self.seconds[batch[-1]]
        if batch:
            yield batch
        by_file: dict[str, list[str]] = {}
        for test in quickest_first:
            by_file.setdefault(test.partition("::")[0], []).append(test)
        place = {test: number for names in by_file.values() for number, test in enumerate(names)}
        batch = []
        for test in sorted(quickest_first, key=lambda test: (place[test], self.seconds[test])):
            if total >= self.limit:
                break
            total += self.seconds[test]
            batch.append(test)
        if batch:
            yield batch

    def survives(
        self, folder: Path, module: str, source: str, node: ast.AST, in_function: bool
    ) -> bool:
        """Return whether all tests that run a node pass on a changed source of its module.

        A test that also fails on the unchanged source proves nothing.
        """
        path = folder / module
        original = path.read_text()
        for batch in self.batches(module, node, in_function):
            while batch:
                path.write_text(source)
                try:
                    wrong = run_tests(folder, batch, sum(map(self.seconds.get, batch)))[0]
                finally:
                    path.write_text(original)
                if not wrong:
                    break
                if not set(wrong) <= set(batch) or self._is_sound(folder, wrong[0]):
                    return False
                batch = [test for test in batch if test not in wrong]
        return True

    def _is_sound(self, folder: Path, test: str) -> bool:
        """Return whether a test passes without a change."""
        if test not in self.sound:
            self.sound[test] = not run_tests(folder, [test], self.seconds[test])[0]
            if not self.sound[test]:
                print(f"LEFT OUT {test}: it fails without a change, too", flush=True)
        return self.sound[test]


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
    parser.add_argument("--tests", nargs="*", help="files of tests; default: all")
    parser.add_argument("--seconds", type=float, default=120, help="of tests on a mutant, about")
    parser.add_argument(
        "--measured", type=Path, help="file for what the tests run; it is used if it is there"
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
        tree = ast.parse(source)
        lines = lines_of_functions(tree)
        candidates += [
            (module, source, *mutation, mutation[1].lineno in lines) for mutation in mutations(tree)
        ]
    chosen = random.Random(args.seed).sample(candidates, min(args.n, len(candidates)))
    survivors = 0
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(checkout()) for _ in range(args.jobs)]
        all_files = [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))]
        if args.measured and args.measured.exists():
            measured = json.loads(args.measured.read_text())
        else:
            measured = measure(folders, args.tests or all_files)
            if args.measured:
                args.measured.write_text(json.dumps(measured))
        judge = Judge(measured, args.seconds)
        print(
            f"measured: {len(judge.seconds)} tests, of which {len(judge.failed)} fail "
            f"{sorted(judge.failed)}",
            flush=True,
        )
        checkouts = queue.SimpleQueue()
        for folder in folders:
            checkouts.put(folder)

        def verdict(mutant: tuple) -> tuple[bool, float]:
            module, source, _, node, other, in_function = mutant
            folder = checkouts.get()
            began = time.monotonic()
            alive = judge.survives(folder, module, mutated(source, node, other), node, in_function)
            checkouts.put(folder)
            return alive, time.monotonic() - began

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(args.jobs))
        verdicts = zip(chosen, pool.map(verdict, chosen), strict=True)
        for number, ((module, source, kind, node, other, _), (alive, seconds)) in enumerate(
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
