"""contract/failures.py: what a reason shows of a crash, and of what a program has printed."""

import pytest

from sagemaker_lightning.contract import failures
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import has_known_cause, is_of_torchrun, last_error


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


def test_a_long_message_leaves_room_for_its_place(tmp_path):
    line = f"error: ValueError: {'a' * 690}..."
    trace = (
        'Traceback (most recent call last):\n  File "first.py", line 1, in <module>\n    f()\n'
        f'  File "own.py", line 2, in f\n    raise ValueError(text)\nValueError: {"a" * 5000}\n'
    )
    failures.write(tmp_path / "failure", line, trace)
    written = (tmp_path / "failure").read_text()
    assert written.startswith(f'{line}\n  File "own.py", line 2, in f\n')
    assert len(written) == failures.FAILURE_REASON_CHARACTERS


def test_only_what_is_missing_in_a_channel_is_said_to_be():
    path = "/opt/ml/input/data/train"
    assert failures.explain("FileNotFoundError", path).startswith("missing in the input channels")
    assert failures.explain("IsADirectoryError", path) == f"IsADirectoryError: {path}"


@pytest.mark.parametrize(
    ("error", "is_mistake"),
    [(UserError("--a: found 1"), True), (ImportError("no mine"), True), (ValueError("x"), False)],
)
def test_what_would_fail_again_is_noted_for_the_watch(tmp_path, monkeypatch, error, is_mistake):
    """A program is not started again to fail in the same way."""
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_WATCH", str(tmp_path / "watch"))
    with pytest.raises(SystemExit), failures.reported(None):
        raise error
    assert (tmp_path / failures.MISTAKE_FILE).exists() is is_mistake


@pytest.mark.parametrize(
    ("file", "is_torchruns"),
    [
        ("torch/distributed/elastic/agent/server/api.py", True),
        ("torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", True),
        ("torch/distributed/elastic/multiprocessing/errors/__init__.py", False),  # a rank's
        ("torch/distributed/distributed_c10d.py", False),
    ],
)
def test_an_error_of_torchruns_own(file, is_torchruns):
    trace = f'  File "/x/site-packages/{file}", line 5, in wrapper\nRuntimeError: gloo'
    assert is_of_torchrun(trace) == is_torchruns
    assert not is_of_torchrun(f"{trace}\ntorch.distributed.elastic.ChildFailedError: ")


def test_a_lost_peer_is_known_by_any_line_of_a_text():
    assert has_known_cause("RuntimeError", "step 5 failed:\n[gloo/x.cc] Connection closed by peer")
