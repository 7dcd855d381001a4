"""process/start_notice.py: a slow start says what it does.

A quick start says nothing, and neither does one that is done.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagemaker_lightning.callbacks.progress import StartProgress
from sagemaker_lightning.process import start_notice

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.slow
def test_it_is_said_again():
    code = (
        "start_notice.begin('one'); time.sleep(1); start_notice.end(); time.sleep(0.3); "
        "print('END', file=sys.stderr)"
    )
    lines = stderr_of(code, first=0.05, later=0.05).splitlines()
    assert len(lines) > 3 and set(lines) <= {
        f"starting: one ({second} s so far)" for second in (0, 1, 2)
    } | {"END"}
    assert lines[-1] == "END"


def test_nothing_is_said_once_it_is_done():
    code = (
        "start_notice.begin('one'); start_notice.end(); start_notice.set_activity('two'); "
        "time.sleep(0.2)"
    )
    assert stderr_of(code, busy=True, first=0.05, later=0.05) == "starting: one (0 s so far)\n"


def test_on_a_busy_machine_it_is_said_at_once():
    assert (
        stderr_of("start_notice.begin('one'); start_notice.end()", busy=True)
        == "starting: one (0 s so far)\n"
    )


def test_one_rank_of_a_node_speaks():
    code = "start_notice.begin('one'); start_notice.set_activity('two')"
    assert stderr_of(code, busy=True, LOCAL_RANK="1") == ""
    assert stderr_of(code, busy=True, LOCAL_RANK="0").count("\n") == 2


def test_whoever_has_not_begun_says_nothing():
    assert stderr_of("start_notice.set_activity('one')", busy=True) == ""


@pytest.mark.parametrize(
    ("text", "busy"), [("1000 2500 3\n", True), ("1000 900 3\n", False), ("", False), (None, False)]
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
