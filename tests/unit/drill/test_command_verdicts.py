"""drill/command.py: what a drill says of its runs, and its flags."""

import argparse
import importlib
import itertools
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from containers import ROOT
from drilled_files import KILL, STOP, run_of, run_positions

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_lightning.drill import command, comparison
from sagemaker_lightning.drill.command import Drill, Impossible, Interruption, RunResult


class Stage:
    """A bench whose processes end with these results, in runs that `run_of` writes.

    Each item of `runs` has the changes of a run.
    """

    timeout = 600

    def __init__(self, folder: Path, results: list, *runs: dict) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.results = results
        self.runs = list(runs)

    def prepare(self) -> None:
        run_of(self.run, **self.runs.pop(0))

    def keep(self, name: str) -> Path:
        return self.run.rename(self.folder / name)

    def start(self, interruption=None, workers=None) -> RunResult:
        return self.results.pop(0)


DONE = RunResult(0, False, "")


def test_a_run_that_is_left_alone(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=itertools.count(90, 7).__next__))
    drill = Drill(Stage(tmp_path, [DONE], {}), keeps=False)
    assert drill.left_alone() == comparison.steps(tmp_path / "alone") != []
    assert capsys.readouterr().out == "left alone: 2 steps in 1 epochs, 7 s\n"


@pytest.mark.parametrize(
    ("result", "lacks", "reason"),
    [
        (RunResult(None, False, ""), "", "had not ended after 600 s; give a larger --timeout"),
        (RunResult(3, False, "error: x\n"), "", "fails with exit status 3: error: x$"),
        (DONE, "steps-0.jsonl", "trained nothing with ExactResume"),
        (DONE, "ml/checkpoints/step-000000002.ckpt", "trains without checkpoints to continue from"),
    ],
)
def test_what_cannot_be_drilled(tmp_path: Path, capsys, result, lacks, reason):
    stage = Stage(tmp_path, [result], {})
    stage.prepare()
    stage.prepare = lambda: (stage.run / lacks).unlink() if lacks else None
    with pytest.raises(Impossible, match=reason):
        Drill(stage, keeps=False).left_alone()
    assert capsys.readouterr().out == result.output


def test_a_run_without_a_batch_has_trained_nothing(tmp_path: Path):
    stage = Stage(tmp_path, [DONE], {})
    stage.prepare()
    (start, *_) = (stage.run / "steps-0.jsonl").read_text().splitlines()
    assert json.loads(start)["at"][0] == "start"
    (stage.run / "steps-0.jsonl").write_text(start)
    stage.prepare = lambda: None
    with pytest.raises(Impossible, match="trained nothing with ExactResume"):
        Drill(stage, keeps=False).left_alone()


STOPPED = RunResult(143, True, "")
OUTCOMES = {
    "never interrupted": ([DONE], "NOT REPEATED: .* but it ended with status 0: it said nothing"),
    "hangs before": ([RunResult(None, False, "")], "NOT REPEATED: .* interrupted, but it hung"),
    "hangs": ([RunResult(None, True, "")], f"HUNG: {SAGEMAKER_KILLS:.0f} s after SIGTERM it had"),
    "continues": ([RunResult(0, True, "")], "NOT STOPPED: in spite of SIGTERM"),
    "hangs again": ([STOPPED, RunResult(None, False, "")], "HUNG: started again, .* after 600 s"),
    "fails": ([STOPPED, RunResult(2, False, "error: x")], "FAILS .* exit status 2: error: x"),
    "": ([STOPPED, DONE], "identical, started over: it had no checkpoint yet"),
    "alarmed": (
        [STOPPED, RunResult(0, False, "warning: resumed at step 4: x\n")],
        "identical, started over: .* yet; but the run itself said: warning: resumed at step 4: x",
    ),
    "calm": (
        [STOPPED, RunResult(0, False, "resumed at step 4: x\n")],
        "identical, started over: it had no checkpoint yet",
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_how_an_interrupted_run_ends(tmp_path: Path, case):
    results, words = OUTCOMES[case]
    drill = Drill(Stage(tmp_path, list(results), {}), keeps=False)
    drill.alone = run_of(tmp_path / "alone")
    outcome, is_identical = drill.interrupt(STOP)
    assert command.re.fullmatch(f"{words}.*" if words[0] != "i" else words, outcome)
    assert is_identical == (words[0] == "i") and not drill.bench.results
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]


def test_a_run_continues_from_its_checkpoint(tmp_path: Path):
    results = [RunResult(-9, True, "warning: resumed at step 1: x"), DONE]
    drill = Drill(Stage(tmp_path, results, {"starts": [0, 2]}), keeps=True)
    drill.alone = run_of(tmp_path / "alone")
    assert drill.interrupt(KILL) == ("identical, continued from step 2", True)
    assert (tmp_path / "kill-in-epoch").is_dir()


def test_a_stop_needs_a_checkpoint_and_a_kill_does_not(tmp_path: Path):
    for interruption, status, words in ((STOP, 1, "NO CHECKPOINT was there"), (KILL, -9, "FAILS")):
        results = [RunResult(status, True, "error: x"), RunResult(1, False, "")]
        stage = Stage(tmp_path, results, {})
        stage.prepare()
        (stage.run / "ml/checkpoints/step-000000002.ckpt").unlink()
        stage.prepare = lambda: None
        outcome, is_identical = Drill(stage, keeps=False).interrupt(interruption)
        assert outcome.startswith(words) and not is_identical


def described(tmp_path: Path, *runs: dict, workers: int | None = None, again: int = 0) -> list[str]:
    """Return the lines about a run that differs, which is the second of `runs`.

    The first is left alone, and so is the third, if there is one, which ends with status `again`.
    """
    results = [STOPPED, RunResult(0, False, "resumed at step 4: x"), RunResult(again, False, "")]
    alone, other, *more = runs
    drill = Drill(Stage(tmp_path, results, other, *(more or [alone])), keeps=True)
    drill.alone = run_of(tmp_path / "alone", **alone)
    interruption = Interruption("workers", "", signal.SIGTERM, ("batch", 0, 1), workers)
    outcome, is_identical = drill.interrupt(interruption)
    assert not is_identical and drill.repeatable == (not more and not again)
    return outcome.split("\n  ")


@pytest.mark.parametrize(
    ("files", "more"), [(6, []), (7, ["and in 1 more"]), (9, ["and in 3 more"])]
)
def test_six_differences_are_named(tmp_path: Path, files, more):
    first, *others, verdict, cause = described(tmp_path, {}, {"files": files})
    names = [
        f"file{number} in the model folder: the run left alone has none" for number in range(6)
    ]
    assert first == f"DIFFERENT, first in {names[0]}"
    assert others == [*(f"and in {name}" for name in names[1:]), *more]
    assert verdict == "the run itself said: resumed at step 4: x"
    assert cause.startswith(
        "likely cause: every step is the same; the code that writes this file depends on"
    )


CAUSES = {
    "the loss": ([{}, {"loss": 0.75}], {}, "the batch is the same, so something that the step"),
    "two variables": (
        [{"changed": ["a", "b"]}, {"loss": 0.75}],
        {},
        "a, b, which changes while the run trains, and which no checkpoint has; keep it in buffers",
    ),
    "three variables": ([{"changed": list("abc")}, {"batch": "b"}], {}, "a, b, c, which changes"),
    "four variables": (
        [{"changed": list("abcd")}, {"loss": 0.75}],
        {},
        "a, b, c (and 1 more), which changes",
    ),
    "five variables": (
        [{"changed": list("abcde")}, {"loss": 0.75}],
        {"workers": 1},
        "a, b, c (and 2 more), which changes",
    ),
    "two runs left alone": (
        [{}, {"loss": 0.75}, {"loss": 1.0}],
        {},
        "two runs left alone differ, too: the step depends on what no seed decides",
    ),
    "two batches left alone": (
        [{}, {"batch": "bb"}, {"loss": 1.0}],
        {},
        "two runs left alone differ, too: the samples or their order depend on what no seed",
    ),
    "one fails left alone": ([{}, {"loss": 0.75}], {"again": 1}, "two runs left alone differ, too"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_likely_cause_of_a_difference(tmp_path: Path, case):
    runs, settings, words = CAUSES[case]
    cause = described(tmp_path, *runs, **settings)[-1]
    assert cause.startswith(f"likely cause: {words}") and "counted or drawn by" not in cause


def test_with_other_workers_a_worker_may_be_the_cause(tmp_path: Path):
    cause = described(tmp_path, {}, {"loss": 0.75}, workers=2)[-1]
    assert "is not restored" in cause and "; or it is counted or drawn by a data worker" in cause


def test_whether_a_run_repeats_itself_is_asked_once(tmp_path: Path):
    stage = Stage(tmp_path, [STOPPED, DONE, DONE, STOPPED, DONE], {"loss": 0.75}, {}, {"loss": 1.0})
    drill = Drill(stage, keeps=False)
    drill.alone = run_of(tmp_path / "alone")
    for _ in range(2):
        assert drill.interrupt(STOP)[0].startswith("DIFFERENT, first in the loss of step 2")
    assert drill.repeatable and not stage.results


def drill_of(outcomes: dict[str, bool], done: list[dict], repeatable: bool | None = None):
    """Return a drill in which the named interruptions have these outcomes."""
    drill = SimpleNamespace(left_alone=lambda: done, repeatable=None, asked=[])

    def interrupt(interruption):
        drill.asked.append(interruption.name)
        is_identical = outcomes.get(interruption.name, True)
        drill.repeatable = drill.repeatable if is_identical else repeatable
        return "identical" if is_identical else "DIFFERENT", is_identical

    drill.interrupt = interrupt
    return drill


def test_the_interruptions_of_a_drill(capsys):
    names = ["workers", "kill-in-epoch"]
    drill = drill_of({}, run_positions(3, 4, 3, workers=0))
    assert command.run(drill, names) == 0 and drill.asked == names[::-1]
    assert capsys.readouterr().out.splitlines() == [
        "kill within an epoch: identical",
        "stop within an epoch, continue with 2 data workers in place of 0: identical",
        "identical: 2 interruptions; weights, optimizers, metrics, curves, model files",
    ]
    assert command.run(drill_of({}, run_positions(3, 4, 3, workers=0)), ["workers"]) == 0
    assert "\nidentical: 1 interruption; weights" in capsys.readouterr().out


@pytest.mark.parametrize(("repeatable", "asked"), [(True, 4), (False, 2)])
def test_a_drill_that_is_not_identical(capsys, repeatable, asked):
    """If two runs left alone differ, all the others would differ, too."""
    outcomes = {"stop-in-epoch": False, "stop-at-epoch-end": False}
    drill = drill_of(outcomes, run_positions(3, 4, 0, workers=None), repeatable)
    assert command.run(drill, command.INTERRUPTION_NAMES) == 1 and len(drill.asked) == asked
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not drilled: a validation: there is none"
    assert lines[1].startswith("not drilled: another number of data workers: ")
    failed = "stop-in-epoch, stop-at-epoch-end" if repeatable else "stop-in-epoch"
    assert lines[-1] == f"NOT identical: {failed}"


def test_interruptions_that_a_run_has_no_moment_for():
    drill = drill_of({}, run_positions(1, 4, 0, workers=None))
    with pytest.raises(
        Impossible, match="^--only: found workers, kill-at-epoch-end, for which this run has no mom"
    ):
        command.run(drill, ["workers", "kill-at-epoch-end"])


@pytest.fixture
def started(tmp_path: Path, monkeypatch):
    """Have `main` change nothing of this process, and return what it asks for."""
    asked = SimpleNamespace(handlers={}, adopted=0, result=0, removes=False)

    def run(drill, names):
        asked.drill, asked.names, asked.folder = drill, names, drill.bench.folder
        assert asked.folder.is_dir()
        if asked.removes:
            asked.folder.rmdir()
        if isinstance(asked.result, BaseException):
            raise asked.result
        return asked.result

    def adopt() -> None:
        asked.adopted += 1

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "adopt_orphans", adopt)
    monkeypatch.setattr(command.signal, "signal", asked.handlers.__setitem__)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    return asked


def test_the_flags_of_the_drill(started, capsys, monkeypatch):
    started.result = 5
    flags = ["--steps=10", "--epochs=4", "--timeout=7", "--keep", "--only=workers"]
    assert command.main([*flags, "--only=kill-in-epoch", "--", "python", "a b", "--", "x"]) == 5
    bench = started.drill.bench
    assert bench.command == ["python", "a b", "--", "x"] and bench.timeout == 7
    assert bench.limits == {"epochs": 4, "steps": 3} and started.drill.keeps
    assert started.names == ["workers", "kill-in-epoch"] and started.adopted
    assert started.folder.is_dir()
    assert capsys.readouterr().out.splitlines() == [
        "drill: python 'a b' -- x",
        f"kept: {started.folder}",
    ]
    monkeypatch.setattr(sys, "argv", ["drill", "--steps=1", "--", "x"])
    assert command.main() == 5 and started.drill.bench.limits == {"epochs": 3, "steps": 1}
    assert not started.drill.keeps and started.names == command.INTERRUPTION_NAMES
    assert not started.folder.exists() and "kept" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--steps=0", "--", "x"], "argument --steps: found '0', expected a whole number above"),
        (["--step=3", "--", "x"], "unrecognized arguments: --step=3"),
        (["python", "x.py"], "unrecognized arguments: python x.py"),
        (["--"], "found no command; expected one after --, e.g. -- python app/train.py"),
        ([], "found no command; expected one after --, e.g. -- python app/train.py"),
    ],
)
def test_a_mistake_in_the_flags_of_the_drill_is_one_line(started, capsys, args, line):
    with pytest.raises(SystemExit) as leaving:
        command.main(args)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
    assert error.endswith("; python -m sagemaker_lightning.drill --help\n")


def test_the_drill_needs_the_python_of_the_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SystemExit, match=f"^error: {sys.executable} has no psutil; use the python"):
        importlib.reload(command)


def test_how_a_drill_ends(started, capsys):
    started.result = Impossible("there is no way")
    assert command.main(["--", "x"]) == 1 and not started.folder.exists()
    assert capsys.readouterr().err == "error: there is no way\n"
    started.result = KeyboardInterrupt()
    assert command.main(["--", "x"]) == 130 and not started.folder.exists()
    started.removes = True  # as somebody's cleaning may
    assert command.main(["--", "x"]) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as leaving:
            started.handlers[number](number, None)
        assert leaving.value.code == 128 + number


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", ""]
)
def test_numbers_of_the_flags_are_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number above 0"):
        command.positive(text)
    assert command.positive("1") == 1


def test_the_page_has_the_numbers_of_the_program():
    page = " ".join((ROOT / "docs/drill.md").read_text().split())
    flags = command.parser().parse_args([])
    assert f"`--steps={flags.steps}`, `--epochs={flags.epochs}` |" in page
    assert f"`--timeout={flags.timeout}` |" in page
    assert f"after SIGTERM, {SAGEMAKER_KILLS:.0f} at most" in page
    assert ", ".join(f"`{name}`" for name in command.INTERRUPTION_NAMES) in page
    assert f"the first {command.MAX_ENTRIES:,} files and folders" in page
    one_file, all_files = (size // 2**20 for size in command.MAX_COPIED_BYTES)
    assert f"files above {one_file} MiB, files beyond {all_files} MiB in all" in page
