"""Calls in daemon threads: left alone when they stall, and nothing done by them afterwards."""

import threading

import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import threads
from sagemaker_lightning.shards.threads import Attempt, Overdue


def test_an_attempt_returns_or_raises_what_its_call_does():
    assert Attempt(lambda attempt: 7).result(60) == 7
    with pytest.raises(KeyError, match="x"):
        Attempt(lambda attempt: {}["x"]).result(60)


def test_an_attempt_that_is_left_does_nothing_any_more():
    over = threading.Event()
    done = []

    def ask(attempt):
        over.wait()
        with attempt.step():
            done.append(1)

    attempt = Attempt(ask)
    with pytest.raises(Overdue):
        attempt.result(0.01)
    over.set()
    attempt.ended.wait()
    assert not done and isinstance(attempt.error, Overdue)


def test_a_step_begins_the_time_anew(monkeypatch):
    """Each of them takes most of the time, by a clock of the test's."""
    now = [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])

    def ask(attempt):
        for _ in range(5):
            now[0] += 50
            with attempt.step():
                pass
        return "done"

    assert Attempt(ask).result(60) == "done"


def test_items_are_mapped_in_their_order_by_several_threads():
    both = threading.Barrier(2)
    assert threads.mapped(lambda item: both.wait() * 0 + item, range(4), 2) == [0, 1, 2, 3]
    assert threads.mapped(str, [], 2) == []


def test_after_an_error_no_item_is_begun_and_none_is_waited_for():
    over = threading.Event()
    begun = []

    def work(item):
        begun.append(item)
        if item == 0:
            over.wait()
        raise KeyError(item)

    with pytest.raises(KeyError, match="1"):
        threads.mapped(work, range(100), 2)
    over.set()
    assert begun == [0, 1]


def test_all_threads_are_daemons(monkeypatch):
    daemons = []
    threads.mapped(lambda item: daemons.append(threading.current_thread().daemon), range(3), 2)
    Attempt(lambda attempt: daemons.append(threading.current_thread().daemon)).result(60)
    assert daemons == [True] * 4


def test_a_process_that_may_have_no_more_threads_is_one_line(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UserError, match="can't start new thread; expected room for 64 threads"):
        threads.mapped(str, [1], 1)
