"""contract/failures.py: what a reason shows of a crash, and of what a program has printed."""

import pytest

from sagemaker_lightning.contract import failures
from sagemaker_lightning.contract.failures import last_error


@pytest.mark.parametrize("first", ["Thread 0x2", "Current thread 0x2"])
def test_a_crash_is_shown_by_the_thread_that_has_crashed(first):
    """faulthandler's other threads come before it; it may not know which one has crashed."""
    _, trace = last_error(
        "Fatal Python error: Aborted\n\n"
        f'{first} (most recent call first):\n  File "watch.py", line 1 in _watch\n\n'
        'Current thread 0x1 (most recent call first):\n  File "own.py", line 2 in step\n'
    )
    assert ("own.py" in trace) == first.startswith("Thread")
    assert ("watch.py" in trace) == first.startswith("Current")
    _, trace = last_error(
        'Fatal Python error: Aborted\n\nThread 0x2 (most recent call first):\n  File "a.py"\n'
    )
    assert "a.py" in trace


def test_what_a_terminal_would_obey_is_no_part_of_a_reason(tmp_path):
    failures.write(tmp_path / "failure", "error: \x1b[31mred\x07\0 é", "Trace\n\tback\x08")
    assert (tmp_path / "failure").read_text() == "error: red\\x07\\x00 é\nTrace\n\tback\\x08"
