"""process/start_notice.py: a slow start says what it does.

A quick start says nothing, and neither does one that is done.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sagemaker_lightning.callbacks.progress import StartProgress
from sagemaker_lightning.process import lightning_import, start, start_notice, threads

from app import train_multi_node

ROOT = Path(__file__).resolve().parents[3]
PREAMBLE = """
import sys, time
from sagemaker_lightning.process import start_notice
start_notice._busy = lambda: {busy}
start_notice.FIRST_LINE_SECONDS, start_notice.LINE_INTERVAL_SECONDS = {first}, {next}
"""


def stderr_of(
    code: str, busy: bool = False, first: float = 100.0, later: float = 100.0, **variables: str
) -> str:
    """Run code in a process, and return what it prints to stderr.

    stdout is for what a user asked for, as --print_config.
    """
    command = [sys.executable, "-c", PREAMBLE.format(busy=busy, first=first, next=later) + code]
    variables = {
        name: value for name, value in os.environ.items() if name != "LOCAL_RANK"
    } | variables
    completed = subprocess.run(
        command,
        env=variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stderr


def test_a_quick_start_says_nothing():
    assert (
        stderr_of("start_notice.begin('one'); start_notice.set_activity('two'); start_notice.end()")
        == ""
    )


def test_a_slow_one_says_what_it_does_and_what_follows():
    code = (
        "start_notice.begin('one')\n"
        "while not start_notice._has_printed: time.sleep(0.01)\n"
        "start_notice.set_activity('two')"
    )
    assert stderr_of(code, first=0.1) == "starting: one (0 s so far)\nstarting: two (0 s so far)\n"


def test_nothing_is_said_once_it_is_done():
    code = (
        "start_notice.begin('one'); start_notice.end(); start_notice.set_activity('two'); "
        "time.sleep(0.2)"
    )
    assert stderr_of(code, busy=True, first=0.05, later=0.05) == "starting: one (0 s so far)\n"


class Clock:
    """Stands for the end of a start, which comes after the fourth wait; no time passes."""

    def __init__(self) -> None:
        self.waits = []
        self.begun = threading.Event()

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.begun.wait()
        self.waits.append(seconds)
        return len(self.waits) == 4


@pytest.mark.parametrize("busy", [False, True])
def test_a_line_comes_after_5_seconds_and_then_every_20(monkeypatch, capfd, busy):
    """On a busy machine the first one comes at once, and not after 5 seconds again."""
    clock = Clock()
    before = {"_ended": clock, "_busy": lambda: busy, "_has_printed": False}
    for name, value in (before | {"_started": None, "_activity": None}).items():
        monkeypatch.setattr(start_notice, name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    start_notice.begin("one")
    assert capfd.readouterr().err == ("starting: one (0 s so far)\n" if busy else "")
    clock.begun.set()
    for thread in threading.enumerate():
        if thread.name == "starting":
            thread.join()
    assert clock.waits == [5.0, 20.0, 20.0, 20.0]
    assert capfd.readouterr().err == "starting: one (0 s so far)\n" * (2 if busy else 3)


@pytest.mark.parametrize(
    ("begin", "steps"),
    [
        (
            start.before_lightning,
            ["signals", "launcher", "importing torch and Lightning", "import"],
        ),
        (start.before_torch, ["signals", "launcher", "importing torch", "threads"]),
    ],
)
def test_what_a_program_does_first(monkeypatch, begin, steps):
    done = []
    monkeypatch.setattr(start, "leave_at_once", lambda: done.append("signals"))
    monkeypatch.setattr(start, "end_with_launcher", lambda variables: done.append("launcher"))
    monkeypatch.setattr(start_notice, "begin", done.append)
    monkeypatch.setattr(threads, "prepare", lambda: done.append("threads"))
    monkeypatch.setattr(lightning_import, "import_lightning", lambda: done.append("import"))
    begin()
    assert done == steps


def test_one_rank_of_a_node_speaks():
    code = "start_notice.begin('one'); start_notice.set_activity('two')"
    assert stderr_of(code, busy=True, LOCAL_RANK="1") == ""
    assert stderr_of(code, busy=True, LOCAL_RANK="0").count("\n") == 2


def test_whoever_has_not_begun_says_nothing():
    assert stderr_of("start_notice.set_activity('one')", busy=True) == ""


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        ("1000 2001 3\n", True),
        ("1000 2000 3\n", False),
        ("1000 900 3\n", False),
        ("", False),
        (None, False),
    ],
)
def test_a_process_that_had_to_wait_is_on_a_busy_machine(tmp_path, text, busy):
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    assert start_notice._busy(tmp_path / "schedstat") is busy


def test_the_first_step_is_the_end(monkeypatch):
    activities = []
    monkeypatch.setattr(start_notice, "set_activity", activities.append)
    monkeypatch.setattr(start_notice, "end", lambda: activities.append(None))
    callback = StartProgress()
    callback.setup(None, None, "fit")
    callback.on_train_start(None, None)
    assert len(activities) == 2 and None not in activities
    callback.on_train_batch_end(None, None, None, None, 0)
    assert activities[-1] is None
    callback.on_exception(None, None, ValueError())
    callback.teardown(None, None, "fit")
    assert activities[2:] == [None] * 3


PROGRAMS = {
    "train.py": "sagemaker_lightning.cli.run.main",
    "train_multi_node.py": "app.train.main",
    "train_torchrun.py": "sagemaker_lightning.launch.torchrun_command.main",
    "split.py": "sagemaker_lightning.rows.job.main",
    "similarity.py": "sagemaker_lightning.rows.job.read",
}


def load(program: str, name: str) -> None:
    """Run the code of a program as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "app" / program)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_announces_its_start_before_it_does_anything(program, monkeypatch):
    did = []
    for name in ("before_lightning", "before_torch"):
        monkeypatch.setattr(start, name, lambda: did.append("start"))
    monkeypatch.setattr(start_notice, "begin", lambda what: did.append("start"))
    monkeypatch.setattr(
        "sagemaker_lightning.contract.shutdown.leave_at_once", lambda: did.append("signals")
    )
    monkeypatch.setattr(PROGRAMS[program], lambda *given: did.append("main") or sys.exit(0))
    monkeypatch.setattr(sys, "argv", [program])
    load(program, "imported")
    assert did == []
    with pytest.raises(SystemExit):
        load(program, "__main__")
    signals = ["signals"] if program == "train_torchrun.py" else []  # else `start` handles them
    assert did == [*signals, "start", "main"]


@pytest.mark.parametrize("hosts", [["algo-1"], ["algo-1", "algo-2"]], ids=len)
def test_a_host_that_is_not_alone_says_that_it_waits_for_the_others(hosts, monkeypatch):
    monkeypatch.setenv("SM_HOSTS", json.dumps(hosts))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    did = []
    monkeypatch.setattr(start_notice, "set_activity", did.append)
    monkeypatch.setattr(
        "sagemaker_lightning.contract.rendezvous.join",
        lambda environment, variables: did.append((environment.hosts, variables is os.environ)),
    )
    monkeypatch.setattr("app.train.main", did.append)
    train_multi_node.main(["--flag"])
    said = ["waiting for the other hosts"] if len(hosts) > 1 else []
    assert did == [*said, (tuple(hosts), True), ["--flag"]]
