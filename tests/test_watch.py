"""app/watch.py and app/lifeline.py on one node: what a rank says, and what it means when it says nothing any more.

Several nodes are in tests/test_nodes.py, as each needs a network of its own.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aws_services import free_port
from conftest import ROOT

from app.watch import Watch

RANK = """
import os, sys
from pathlib import Path
from app.lifeline import Lifeline

pytestmark = pytest.mark.slow
line = Lifeline(Path(sys.argv[1]), "host algo-2, local rank 1")
{act}
"""


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watch]:
    """A watch on the only host of a job, which has little patience."""
    monkeypatch.setattr("app.watch.LAST_WORDS", 0.2)
    told = []
    settings = {"port": 0, "appear": 1.0, "silence": 1.0}
    with Watch("algo-2", ("algo-2",), {}, on_verdict=told.append, **settings) as made:
        made.told = told
        yield made


def rank(watch: Watch, act: str) -> None:
    """Have a rank do something, in a process of its own, and end."""
    code = RANK.format(act=act)
    subprocess.run([sys.executable, "-c", code, str(watch.path)], cwd=ROOT, timeout=120)


def verdict(watch: Watch) -> str | None:
    """Return the verdict, for which there is time enough to come."""
    watch._until(lambda: False, limit=2)
    return watch.verdict.why if watch.verdict else None


def test_a_rank_that_raises_is_quoted(watch):
    rank(watch, "line.failed('error: ValueError: boom [host algo-2, local rank 1]')")
    assert verdict(watch) == "a rank failed: ValueError: boom [host algo-2, local rank 1]"
    assert watch.verdict.here


@pytest.mark.parametrize("act", ["os.kill(os.getpid(), 9)", "os.abort()", "os._exit(0)"])
def test_a_rank_that_dies_without_a_word(watch, act):
    rank(watch, act)
    assert verdict(watch) == "host algo-2, local rank 1 ended without a word: it was killed, or it crashed"


def test_a_forked_worker_does_not_hold_the_line(watch):
    """As a DataLoader's worker is that outlives its rank for a while."""
    rank(watch, "if os.fork() == 0:\n    import time; time.sleep(20); os._exit(0)\nos.kill(os.getpid(), 9)")
    assert "ended without a word" in verdict(watch)


@pytest.mark.parametrize("act", ["line.done()", "line.failed('error: lost a peer, or never reached it: ...')"])
def test_no_reason_to_end(watch, act):
    """A rank that lost another one knows nothing: who does will say so."""
    rank(watch, act)
    assert verdict(watch) is None


def of_two_hosts() -> Watch:
    """Return a watch that never hears of the other host."""
    settings = {"port": free_port(), "appear": 90.0, "silence": 90.0}
    return Watch("algo-2", ("algo-1", "algo-2"), {}, on_verdict=lambda verdict: None, **settings)


def test_a_rank_that_is_ended_with_one_that_lost_a_peer(monkeypatch):
    """Its launcher was that one, or torchrun: another node knows the reason, and gets time to tell."""
    monkeypatch.setattr("app.watch.LAST_WORDS", 1.0)
    with of_two_hosts() as watch:
        rank(watch, "line.failed('error: lost a peer, or never reached it: ...')")
        rank(watch, "os.kill(os.getpid(), 9)")
        watch._until(lambda: watch.dead, limit=0.5)
        assert watch.dead is None and watch.verdict is None
        watch._until(lambda: watch.dead, limit=60)
        assert "ended without a word" in watch.dead.why


def test_a_rank_that_dies_before_the_one_that_misses_it(monkeypatch):
    monkeypatch.setattr("app.watch.LAST_WORDS", 30.0)
    with of_two_hosts() as watch:
        code = RANK.format(act="line.failed('error: lost a peer: ...'); print(flush=True); sys.stdin.read()")
        command = [sys.executable, "-c", code, str(watch.path)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            rank(watch, "os.kill(os.getpid(), 9)")
            watch._until(lambda: watch.dead, limit=60)
            assert watch.dead  # at once: the other one still lives, so it was not ended with it


def test_without_a_watch_nothing_is_said(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", RANK.format(act="line.failed('error: x'); line.done()"), str(tmp_path / "none")],
        cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0
