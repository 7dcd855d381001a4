"""drill/command.py: when runs are interrupted, in which folder, and how their processes end."""

import contextlib
import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from containers import ROOT
from drilled_files import KILL, STOP, run_positions

from sagemaker_lightning.contract.environment import DRILL_VARIABLE
from sagemaker_lightning.drill import command
from sagemaker_lightning.drill.command import Impossible, RunResult


def test_the_moments_lie_in_the_middle_of_the_run():
    interruptions, lacking = command.planned(run_positions(3, 4, 3, workers=0))
    assert {interruption.name: interruption.moment for interruption in interruptions} == {
        "kill-in-epoch": ("batch", 1, 2),
        "stop-in-epoch": ("batch", 1, 1),
        "kill-at-epoch-end": ("epoch", 0),
        "stop-at-epoch-end": ("epoch", 0),
        "kill-in-validation": ("validation", 1, 4, 1),
        "stop-in-validation": ("validation", 1, 4, 0),
        "workers": ("batch", 1, 1),
    }
    assert (
        not lacking
        and [interruption.name for interruption in interruptions] == command.INTERRUPTION_NAMES
    )
    assert [
        interruption.workers for interruption in interruptions if interruption.workers is not None
    ] == [2]


@pytest.mark.parametrize(
    ("epochs", "batches", "kill", "stop"),
    [
        (1, 1, (0, 0), (0, 0)),
        (2, 4, (1, 2), (1, 1)),
        (5, 5, (2, 2), (2, 2)),
        (7, 8, (3, 4), (3, 3)),
    ],
)
def test_a_run_is_interrupted_within_the_epoch_in_its_middle(epochs, batches, kill, stop):
    interruptions, _ = command.planned(run_positions(epochs, batches, 0, workers=None))
    moments = {interruption.name: interruption.moment for interruption in interruptions}
    assert moments["kill-in-epoch"] == ("batch", *kill)
    assert moments["stop-in-epoch"] == ("batch", *stop)
    assert ("kill-at-epoch-end" in moments) == (epochs > 1)


def test_what_a_run_has_no_moment_for_is_said():
    interruptions, lacking = command.planned(run_positions(1, 4, 0, workers=None))
    assert [interruption.name for interruption in interruptions] == [
        "kill-in-epoch",
        "stop-in-epoch",
    ] and len(lacking) == 3


@pytest.mark.parametrize(("workers", "other"), [(0, 2), (1, 2), (2, 1), (3, 2)])
def test_a_run_continues_with_another_number_of_workers(workers, other):
    interruptions, _ = command.planned(run_positions(2, 3, 1, workers))
    assert interruptions[-1].workers == other
    assert (
        interruptions[-1].words
        == f"stop within an epoch, continue with {other} data workers in place of {workers}"
    )


def test_a_validation_of_another_epoch_is_interrupted():
    positions = [
        position
        for position in run_positions(3, 2, 3, workers=None)
        if position["at"][:2] != ["validation", 1]
    ]
    moments = {
        interruption.name: interruption.moment
        for interruption in command.planned(positions)[0]
        if "validation" in interruption.name
    }
    assert moments == {
        "kill-in-validation": ("validation", 2, 2, 0),
        "stop-in-validation": ("validation", 0, 2, 0),
    }


def test_what_a_run_says_of_itself():
    output = (
        "resuming from step 4: x\nresumed at step 4: the next step is that of before\nerror: no\n"
        "error: a [host b]\n"
    )
    result = command.RunResult(1, True, f"{output}last\n")
    assert (
        result.verdict == "resumed at step 4: the next step is that of before"
        and result.error == "error: a [host b]"
    )
    result = command.RunResult(
        1,
        True,
        f"warning: {output[24:]}Traceback (most recent call last):\n  File x\nKeyError: 'x'\n",
    )
    assert result.verdict.startswith("warning: resumed at step 4: the next")
    assert (
        command.RunResult(
            1, True, "Traceback (most recent call last):\n  File x\nKeyError: 'x'\n"
        ).error
        == "KeyError: 'x'"
    )
    assert command.RunResult(0, True, "").verdict == ""


def test_the_working_folder_is_mirrored_and_not_written_to(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command, "MAX_COPIED_BYTES", (10, 12))
    monkeypatch.setattr(command, "MAX_ENTRIES", 12)
    home, data, large_folder, drill_folder = (
        tmp_path / "home" / name for name in ("", "data", "many", "drill-1")
    )
    for folder in (data, large_folder, drill_folder, home / ".git"):
        folder.mkdir(parents=True)
    (data / "small").write_text("small")
    (data / "large").write_text("larger than ten bytes")
    (data / "tenth").write_text("10 letters")
    (home / "data/link").symlink_to("small")
    for number in range(12):
        (large_folder / str(number)).touch()
    command.mirror(home, tmp_path / "copy", drill_folder)
    copy = tmp_path / "copy"
    assert (copy / "data/small").read_text() == "small" and not (copy / "data/small").is_symlink()
    assert (copy / "data/large").is_symlink() and (
        copy / "data/large"
    ).read_text() == "larger than ten bytes"
    assert (copy / "data/tenth").is_symlink(), "all of them together are too large"
    assert (copy / "data/link").read_text() == "small"
    assert (
        (copy / "many").is_symlink()
        and (copy / ".git").is_symlink()
        and not (copy / "drill-1").exists()
    )
    (copy / "data/small").write_text("other")
    (copy / "data/new").touch()
    assert (data / "small").read_text() == "small" and not (data / "new").exists()


def test_how_much_of_the_working_folder_is_copied(tmp_path: Path, monkeypatch):
    """64 MiB of one file, 256 MiB of all."""
    monkeypatch.setattr(command.shutil, "copy2", lambda source, target: target.touch())
    sizes = dict.fromkeys("acd", 2**26) | {"b": 2**26 + 1, "e": 2**26 - 1, "f": 2, "g": 1}
    (tmp_path / "home").mkdir()
    for name, size in sizes.items():
        (tmp_path / "home" / name).touch()
        os.truncate(tmp_path / "home" / name, size)
    command.mirror(tmp_path / "home", tmp_path / "copy", tmp_path)
    copied = [path.name for path in (tmp_path / "copy").iterdir() if not path.is_symlink()]
    assert sorted(copied) == list("acdeg")


def test_folders_are_copied_up_to_a_number_of_entries(tmp_path: Path, monkeypatch):
    for name in ("home/first/deep", "home/second"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").touch()
    (tmp_path / "home/first/x").touch()
    for limit, linked in (
        (1, ["first", "second"]),
        (4, ["first/deep", "second"]),
        (5, ["first/deep"]),
        (6, []),
    ):
        monkeypatch.setattr(command, "MAX_ENTRIES", limit)
        copy = tmp_path / f"copy{limit}"
        command.mirror(tmp_path / "home", copy, tmp_path)
        assert not copy.is_symlink()
        assert (
            sorted(
                path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_symlink()
            )
            == linked
        )


def test_links_and_what_cannot_be_read_stay_links(tmp_path: Path, monkeypatch):
    home = tmp_path / "home"
    (home / "secret").mkdir(parents=True)
    (home / "key").touch()
    (home / "loop").symlink_to(home)
    (home / "lost").symlink_to("nowhere")
    (tmp_path / "file").touch()
    (home / "file").symlink_to("../file")
    monkeypatch.setattr(os, "access", lambda path, mode: path.name not in ("secret", "key"))
    command.mirror(home, tmp_path / "copy", tmp_path)
    assert {path.name: path.readlink() for path in (tmp_path / "copy").iterdir()} == {
        "secret": home / "secret",
        "key": home / "key",
        "loop": home,
        "lost": home / "nowhere",
        "file": tmp_path / "file",
    }


@pytest.fixture
def bench(tmp_path: Path, monkeypatch):
    """Return a function that makes a bench for a script, in a working folder and a job."""
    desk, base = tmp_path / "desk", tmp_path / "ml"
    for name in ("model", "code", "input/config", "input/data/training", "input/data/validation"):
        (base / name).mkdir(parents=True)
    for folder in (desk, tmp_path / "drill"):
        folder.mkdir()
    monkeypatch.chdir(desk)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(base))

    def make(script: str, timeout: float = 60) -> command.Bench:
        words = ["sh", "-c", script]
        return command.Bench(tmp_path / "drill", words, {"epochs": 3, "steps": 4}, timeout)

    return make


def test_the_folder_of_a_run_is_that_of_the_job(bench, tmp_path: Path):
    (tmp_path / "desk/train.py").touch()
    (tmp_path / "ml/code/mine.py").touch()
    (tmp_path / "ml/input/config/hyperparameters.json").touch()
    (tmp_path / "ml/model/model.pt").touch()
    for _ in range(2):
        this_bench = bench("")
        this_bench.prepare()
        kept = this_bench.keep("first")
        assert {
            path.relative_to(kept).as_posix(): path.is_symlink()
            for path in kept.rglob("*")
            if path.is_symlink() or path.is_file()
        } == {
            "work/train.py": False,
            "ml/code/mine.py": False,
            "ml/input/config/hyperparameters.json": False,
            "ml/input/data/training": True,
            "ml/input/data/validation": True,
        }
        command.shutil.rmtree(kept)


def test_a_job_may_have_channels_and_no_settings(bench, tmp_path: Path):
    command.shutil.rmtree(tmp_path / "ml/input/config")
    command.shutil.rmtree(tmp_path / "ml/code")
    this_bench = bench("")
    this_bench.prepare()
    channels = (this_bench.run / "ml/input/data").iterdir()
    assert sorted(path.name for path in channels) == ["training", "validation"]


def test_a_program_that_is_not_there_is_named(bench):
    this_bench = bench("")
    this_bench.command = ["./nowhere", "x"]
    this_bench.prepare()
    with pytest.raises(Impossible, match=r"^./nowhere: cannot be started \(No such file or dir"):
        this_bench.start()


def test_a_process_gets_its_folders_and_limits_and_its_output_is_its_own(bench, tmp_path: Path):
    this_bench = bench(
        f"cat; echo error: $(pwd) $(command -v python) $SM_MODEL_DIR; "
        f"printenv {DRILL_VARIABLE} >&2; exit 3"
    )
    this_bench.prepare()
    run = tmp_path / "drill/run"
    python = Path(sys.executable).with_name("python")
    for workers in (2, None):
        result = this_bench.start(workers=workers)
        assert (result.status, result.interrupted) == (3, False)
        assert result.error == f"error: {run}/work {python} {run}/ml/model"
        _, asked = result.output.splitlines()
        assert json.loads(asked) == {
            "epochs": 3,
            "steps": 4,
            "folder": str(run),
            "reached": f"{run}/reached",
            "moment": None,
            "workers": workers,
        }
    assert (run / "log").read_text().count("error: ") == 2


WAITING = "exec 2>/dev/null; touch ../reached; while :; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("script", "interruption", "expected"),
    [
        # It takes longer than the drill waits before it looks again.
        (f"trap 'sleep 0.04; echo stopped; exit 7' TERM; {WAITING}", STOP, (7, True, "stopped\n")),
        (f"trap 'echo stopped; exit 7' TERM; {WAITING}", KILL, (-9, True, "")),
        ("echo done", STOP, (0, False, "done\n")),
        ("echo done; ls ..; exit 1", None, (1, False, "done\nlog\nml\nwork\n")),
    ],
)
def test_a_process_is_interrupted_at_its_moment(
    bench, tmp_path: Path, script, interruption, expected
):
    this_bench = bench(script)
    this_bench.prepare()
    (tmp_path / "drill/run/reached").touch()  # by the run before
    assert this_bench.start(interruption) == RunResult(*expected)
    assert not (tmp_path / "drill/run/reached").exists() or interruption == KILL


def test_a_process_that_hangs_is_ended_with_all_that_it_started(bench, tmp_path: Path, monkeypatch):
    this_bench = bench("sleep 100 & echo $!; sleep 100", timeout=0.1)
    this_bench.prepare()
    result = this_bench.start()
    assert (result.status, result.interrupted) == (None, False)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(result.output)).status() == psutil.STATUS_ZOMBIE
    # It is not a zombie of this process either.
    assert {child.pid for child in psutil.Process().children()} <= this_bench.others
    # SageMaker does not wait as long after SIGTERM as the drill does for a run.
    monkeypatch.setattr(command, "SAGEMAKER_KILLS", 0.05)
    this_bench = bench("trap '' TERM; touch ../reached; sleep 0.5")
    result = this_bench.start(STOP)
    assert (result.status, result.interrupted) == (None, True)


def test_the_toolkits_program_is_started_by_the_entry_point(tmp_path: Path):
    (program, argument) = command.Bench(tmp_path, ["train"], {}, 1).command
    assert program == str((ROOT / "entrypoint.sh").resolve()) and argument == "train"
    assert command.Bench(tmp_path, ["train", "x"], {}, 1).command == ["train", "x"]
