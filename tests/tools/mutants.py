"""Changes the code in one place at a time, and prints the changes that no test finds.

    make mutants
    python tests/tools/mutants.py [--n 200] [--seed 1] [--jobs 2]
                            [--only sagemaker_lightning/contract/shutdown.py ...]
                            [--tests test_launch.py ...] [--marks "not docker and not soak"]
                            [--seconds 120] [--measured FILE] [--again OUTPUT]

A change is one operator, constant, condition, return or call (mutations.py); none is made
where no test could show it. First, the quick
tests run once, and coverage finds which of them run each line, also in the processes that they
start. Other tests are asked for by `--marks`: all but those of containers take hours.

Then a process that has collected the tests forks for each change, makes it in its memory, and runs
the tests that run the changed lines until one fails: the quickest of each file first, then the
second of each file, and so on. A change survives if those that take `--seconds` together pass.
Processes that a test starts make the change, too.
"""

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import coverage
import pytest
from _pytest.runner import runtestprotocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import lanes
import mutations
import warm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("app", "sagemaker_lightning")
MARKS = "not slow and not docker"
MIN_HANG_SECONDS = 10
HANG_FACTOR = 5
"""A test hangs if it takes longer than this, and that much longer than usual."""
LEAVE = os._exit
"""A test may have put something else in its place when it is interrupted."""
COVERAGE_SETTINGS = """\
[run]
source =
    {root}/app
    {root}/sagemaker_lightning
data_file = {folder}/coverage
parallel = true
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
"""


class Measurement:
    """What the tests do without a change.

    Args:
        failed: The tests that fail.
        seconds: The seconds of each test.
        tests_of_lines: The tests that run each line in each file.
    """

    def __init__(
        self,
        failed: Iterable[str],
        seconds: dict[str, float],
        tests_of_lines: dict[str, dict[str, list[str]]],
    ) -> None:
        self.failed = set(failed)
        self.seconds = seconds
        self.tests_of_lines = tests_of_lines

    def tests_of(self, mutant: mutations.Mutant, seconds: float) -> list[str]:
        """Return the tests that run a change, the quickest of each file first.

        What stands outside of functions runs when the file is imported: then they are all tests of
        the file's lines.

        Args:
            mutant: The change.
            seconds: How long they take together, about.
        """
        lines = self.tests_of_lines.get(str(Path(mutant.path).relative_to(ROOT)), {})
        numbers: Iterable[str] = lines
        if mutant.is_in_function:
            numbers = map(str, range(mutant.first_line, mutant.last_line + 1))
        tests = {test for number in numbers for test in lines.get(number, ())}
        tests = (tests & self.seconds.keys()) - self.failed
        quickest_first = sorted(tests, key=lambda test: (self.seconds[test], test))
        by_file: dict[str, list[str]] = {}
        for test in quickest_first:
            by_file.setdefault(test.partition("::")[0], []).append(test)
        place = {test: number for names in by_file.values() for number, test in enumerate(names)}
        chosen = []
        total = 0.0
        for test in sorted(quickest_first, key=lambda test: (place[test], self.seconds[test])):
            if total >= seconds:
                break
            total += self.seconds[test]
            chosen.append(test)
        return chosen


class Recorder:
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


class Judge:
    """A plugin of pytest that runs the tests on one change after another.

    Args:
        args: What the command line gave.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.survivors = 0
        self.children: set[int] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Judge all changes, in place of running the tests once."""
        if session.testsfailed:
            return None
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        if "not slow" not in self.args.marks:  # each change would start a server of its own
            warm.is_slow_test = True
            warm.ensure_server()
        try:
            self.measurement = self._measurement()
            self._print(
                f"measured: {len(self.measurement.seconds)} tests, of which "
                f"{len(self.measurement.failed)} fail {sorted(self.measurement.failed)}"
            )
            mutations.functions_of_files()  # once, before each change's process is forked
            self._judge_all()
        finally:
            for pid in self.children:  # if a signal ends this one
                self._kill(pid)
            shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def _kill(self, pid: int) -> None:
        """Kill a child and its group, which it may not have made yet."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    def _print(self, text: str) -> None:
        reporter = self.session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(text)
        reporter.flush()

    def _judge_all(self) -> None:
        """Judge the changes, as many at a time as there are jobs."""
        chosen = chosen_mutants(self.args)
        running: dict[int, tuple[mutations.Mutant, float, float]] = {}
        remaining = iter(chosen)
        done = 0
        while True:
            while len(running) < self.args.jobs and (mutant := next(remaining, None)):
                tests = self.measurement.tests_of(mutant, self.args.seconds)
                limit = MIN_HANG_SECONDS
                limit += HANG_FACTOR * sum(map(self.measurement.seconds.get, tests))
                pid = self._fork(lambda mutant=mutant, tests=tests: self._judge(mutant, tests))
                running[pid] = mutant, time.monotonic(), limit
            if not running:
                break
            time.sleep(0.01)
            for pid, (mutant, began, limit) in list(running.items()):
                ended = os.waitpid(pid, os.WNOHANG)[0]
                seconds = time.monotonic() - began
                if not ended and seconds < limit:
                    continue
                self.children.discard(pid)
                verdict = self._verdict(pid) if ended else "found: the tests hang"
                if ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                else:
                    self._kill(pid)
                del running[pid]
                done += 1
                self._say(mutant, verdict, f"{done}/{len(chosen)}", seconds)
        self._print(
            f"{len(chosen)} mutants (seed {self.args.seed}): {self.survivors} survived, "
            f"{self.survivors / max(1, len(chosen)):.1%}"
        )

    def _verdict(self, pid: int) -> str:
        path = self.folder / str(pid)
        return path.read_text() if path.exists() else "found: a test hangs or ends early"

    def _say(self, mutant: mutations.Mutant, verdict: str, count: str, seconds: float) -> None:
        """Print what became of a change."""
        path = Path(mutant.path).relative_to(ROOT)
        if not verdict.startswith("found"):
            self.survivors += 1
            changed = description(mutant)[1]
            self._print(f"SURVIVED {path}:{mutant.first_line} {changed}  [{verdict}]")
        self._print(
            f"{count} {path}:{mutant.first_line} {mutant.kind} {seconds:.1f} s, "
            f"{self.survivors} survived"
            + (f", {verdict}" if self.args.verbose and verdict.startswith("found") else "")
        )

    def _fork(self, judge: Callable[[], str]) -> int:
        """Start a process that writes what `judge` returns into a file; return its number."""
        if pid := os.fork():
            self.children.add(pid)
            return pid
        try:
            try:
                text = self._alone(judge)
            except BaseException as error:
                text = f"found: {type(error).__name__}: {error}"
            for number in (signal.SIGINT, signal.SIGTERM):  # a test may have sent one
                signal.signal(number, signal.SIG_IGN)
            # Renamed, as it may be killed while it writes.
            part = self.folder / f"{os.getpid()}.part"
            part.write_text(text)
            part.rename(self.folder / str(os.getpid()))
        finally:
            LEAVE(0)

    def _alone(self, judge: Callable[[], str]) -> str:
        """Return what `judge` returns, in a process that shares no files with the others."""
        os.setsid()
        capture = self.session.config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        log = os.open(self.folder / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        capture.start_global_capturing()
        # A child of a child of the fork server must not look after it.
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None
        multiprocessing.forkserver.ensure_running = lambda: None
        paths = self.session.config._tmp_path_factory
        paths._basetemp = self.folder / f"{os.getpid()}-files"
        paths._basetemp.mkdir()
        text = judge()
        shutil.rmtree(paths._basetemp, ignore_errors=True)
        return text

    def _judge(self, mutant: mutations.Mutant, tests: list[str]) -> str:
        """Make a change in this process, and run tests until one fails."""
        if not tests:
            return "no test runs it"
        os.environ[mutations.MUTANT_VARIABLE] = mutant.name
        mutations.apply(mutant.path, mutant.number, mutant.is_in_function)
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            next_item = self.items[following] if following else None
            limit = MIN_HANG_SECONDS + HANG_FACTOR * self.measurement.seconds[test]
            faulthandler.dump_traceback_later(limit, exit=True)
            reports = runtestprotocol(self.items[test], log=False, nextitem=next_item)
            if any(report.failed for report in reports):
                return f"found by {test}"
        return f"{len(tests)} tests pass"

    def _measurement(self) -> Measurement:
        """Run all tests once without a change, in as many processes as there are jobs."""
        file = self.args.measured
        if file and file.exists():
            return Measurement(*json.loads(file.read_text()))
        parts: list[list[pytest.Item]] = [[] for _ in range(self.args.jobs)]
        part_seconds = [0.0] * len(parts)
        by_lane: dict[str, list[pytest.Item]] = {}
        for item in self.session.items:
            by_lane.setdefault(lanes.lane(item.nodeid), []).append(item)
        file_seconds = lanes.durations()
        for items in by_lane.values():
            emptiest = part_seconds.index(min(part_seconds))
            parts[emptiest] += items
            files = {item.nodeid.partition("::")[0] for item in items}
            part_seconds[emptiest] += sum(file_seconds.get(name, 0.0) for name in files)
        pids = [self._fork(lambda part=part: json.dumps(self._measure(part))) for part in parts]
        failed: list[str] = []
        seconds: dict[str, float] = {}
        lines: dict[str, dict[str, list[str]]] = {}
        for pid in pids:
            os.waitpid(pid, 0)
            self.children.discard(pid)
            text = self._verdict(pid)
            if text.startswith("found"):
                pytest.exit(f"the tests could not be measured: {text}", 1)
            part_failed, of_part, lines_of_part = json.loads(text)
            failed += part_failed
            seconds |= of_part
            for path, tests_of_lines in lines_of_part.items():
                of_file = lines.setdefault(path, {})
                for line, tests in tests_of_lines.items():
                    of_file.setdefault(line, []).extend(tests)
        if file:
            file.write_text(json.dumps([failed, seconds, lines]))
        return Measurement(failed, seconds, lines)

    def _measure(self, items: list[pytest.Item]) -> list:
        """Run tests, and return failures, seconds, and the tests of each line."""
        folder = self.folder / f"{os.getpid()}-measured"
        folder.mkdir()
        settings = folder / "coveragerc"
        settings.write_text(COVERAGE_SETTINGS.format(root=ROOT, folder=folder))
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        measured = coverage.Coverage(config_file=str(settings))
        recorder = Recorder(measured)
        self.session.config.pluginmanager.register(recorder)
        measured.start()
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        measured.stop()
        measured.save()
        measured.combine()
        data = measured.get_data()
        return [
            recorder.failed,
            recorder.seconds,
            {
                str(Path(file).relative_to(ROOT)): {
                    # The context of a process is PYTEST_CURRENT_TEST: a test and its phase.
                    str(line): sorted({re.sub(r" \(\w+\)$", "", test) for test in tests if test})
                    for line, tests in data.contexts_by_lineno(file).items()
                }
                for file in data.measured_files()
            },
        ]


def chosen_mutants(args: argparse.Namespace) -> list[mutations.Mutant]:
    """Return the changes that are asked for, in a random order."""
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    if args.only:
        files = [ROOT / name for name in args.only]
    candidates = [mutant for path in files for mutant in mutations.mutants(path)]
    if args.again:
        survivors = set(re.findall(r"^SURVIVED (\S+?):\d+ (.+)  \[.+\]$", args.again, re.MULTILINE))
        candidates = [mutant for mutant in candidates if description(mutant) in survivors]
    return random.Random(args.seed).sample(candidates, min(args.n, len(candidates)))


def description(mutant: mutations.Mutant) -> tuple[str, str]:
    """Return the path of a change, and what it changes, without the line's number."""
    path = str(Path(mutant.path).relative_to(ROOT))
    return path, f"{mutant.kind}: {mutant.text}  ->  {mutant.replacement[:80]}"


@contextlib.contextmanager
def hook_of_new_processes() -> Iterator[None]:
    """Let each Python process of this environment make the change that its variables name."""
    packages = Path(sysconfig.get_path("purelib"))
    # Its name comes before that of the line that imports the runtime (scripts/make_env.sh).
    line = packages / f"mutants-{os.getpid()}.pth"
    os.environ[mutations.HOOK_VARIABLE] = str(Path(mutations.__file__).parent)
    try:
        line.write_text(mutations.HOOK_LINE)
        yield
    finally:
        line.unlink(missing_ok=True)


def main() -> int:
    """Make changes, print those that survive, and return pytest's status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=200, help="how many changes, or all there are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="changes at a time")
    parser.add_argument(
        "--only", nargs="*", help="files below app/ or sagemaker_lightning/; default: all"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests; default: all")
    parser.add_argument("--marks", default=MARKS, help="of the tests that run, as pytest's -m")
    parser.add_argument("--seconds", type=float, default=120, help="of tests on a change, about")
    parser.add_argument(
        "--measured", type=Path, help="file for what the tests run; it is used if it is there"
    )
    parser.add_argument(
        "--again",
        type=lambda name: Path(name).read_text(),
        metavar="OUTPUT",
        help="file with the output of an earlier run: only what survived in it",
    )
    parser.add_argument("--verbose", action="store_true", help="say which test finds a change")
    args = parser.parse_args()
    if args.measured:
        args.measured = args.measured.absolute()
    # A process that has run several of OpenMP's threads cannot fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as conftest.py, but from now on
    with hook_of_new_processes():
        return pytest.main(
            ["-q", "-p", "no:cacheprovider", "-m", args.marks, *args.tests], plugins=[Judge(args)]
        )


if __name__ == "__main__":
    sys.exit(main())
