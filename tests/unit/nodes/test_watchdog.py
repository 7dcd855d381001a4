"""nodes/watchdog.py and callbacks/heartbeat.py on one node.

What a rank says, and what its silence means. Ranks are connections of this process. When a rank
dies the kernel closes its connection; here the test does. test_mesh.py has several hosts.
"""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rank_process import let_run, process
from waiting import HANG_SECONDS, becomes_true

from sagemaker_lightning.callbacks import heartbeat
from sagemaker_lightning.callbacks.heartbeat import Heartbeat
from sagemaker_lightning.contract import deadlines
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import OUT_OF_MEMORY
from sagemaker_lightning.contract.rendezvous import free_port
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.messages import HostMessage, RankMessage
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.parent_process import LAUNCHER_ENDED
from sagemaker_lightning.process.supervisor import adopt_orphans, note_status

RANK_NAME = "host algo-2, local rank 1"
OTHER_RANK_NAME = "host algo-2, local rank 0"
WORDLESS = f"{RANK_NAME} ended without giving a reason"
DEAD = f"{WORDLESS}: it was killed, or it crashed"
AFTER = (
    f"{WORDLESS}, after another process of its host: because of that, or it was killed or crashed"
)
# A copy of the process keeps its connection until it is asked to end.
HOLDS_THE_LINE = "if not os.fork():\n    os.close(1)\n    os.read(0, 1)\n    os._exit(0)\n"
LOST_PEER_ERROR = "error: lost a peer, or never reached it: ..."
# Seconds after which an event that must not come would have come: more than ENDS_BY_ITSELF in these
# tests.
QUIET_SECONDS = 0.45


def watched(hosts: tuple[str, ...] = ("algo-2",), **settings) -> Watchdog:
    """Return a watch on algo-2 with short deadlines.

    `reasons_given` are the reasons that ended its program.
    """
    reasons: list[StopReason] = []
    watchdog = Watchdog(
        "algo-2",
        hosts,
        {},
        on_reason=reasons.append,
        **{"port": free_port(), "connect_timeout": 90.0, "silence_timeout": 90.0} | settings,
    )
    watchdog.reasons_given = reasons
    return watchdog


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watchdog]:
    """A watch on the only host of a job."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 0.2)
    with watched() as watchdog:
        yield watchdog


def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    says = rf"TMPDIR: no socket can be made in {folder}/watch-\w+ \(AF_UNIX path too long\); set"
    with pytest.raises(UserError, match=says):
        watched().__enter__()


def test_the_only_host_listens_on_no_port():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        watched(port=taken.getsockname()[1]) as watch,
    ):
        assert watch.wait_until_all_are_ready() is None


def test_who_waits_for_the_others_hears_why_the_job_ends():
    with watched(("algo-1", "algo-2")) as watch:
        watch.fail("boom", is_request=False)
        assert watch.wait_until_all_are_ready().why == "boom"
        assert watch.mesh.sent.ready and watch.mesh.status == "its program had started"
        assert watch.wait_until_all_are_done().why == "boom"
        assert watch.mesh.sent.done and watch.mesh.status == "its program had ended well"


def test_a_watch_ends_although_a_task_drops_a_cancellation():
    """As `wait_for` of Python 3.11 may do."""

    async def drop_a_cancellation() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    watchdog = watched().__enter__()
    asyncio.run_coroutine_threadsafe(drop_a_cancellation(), watchdog.loop)
    leaving = threading.Thread(target=watchdog.__exit__, daemon=True)
    leaving.start()
    leaving.join(HANG_SECONDS)
    assert not leaving.is_alive()


def rank(watch: Watchdog, name: str = RANK_NAME) -> Heartbeat:
    return Heartbeat(watch.path, name)


def die(rank_heartbeat: Heartbeat) -> None:
    rank_heartbeat.socket.close()


def settle(watch: Watchdog) -> None:
    """Wait until a watch has done what was due when this was called."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), watch.loop).result(HANG_SECONDS)


def test_a_rank_that_raises_is_quoted(watch):
    rank_heartbeat = rank(watch)
    rank_heartbeat.failed(f"error: ValueError: boom [{RANK_NAME}]")
    die(rank_heartbeat)
    assert becomes_true(lambda: watch.reasons_given)
    assert watch.reasons_given == [
        StopReason(f"a rank failed: ValueError: boom [{RANK_NAME}]", is_local=True)
    ]
    assert watch.own_suspicion is None or watch.own_suspicion.why != DEAD  # it has said why


def test_a_rank_that_says_why_at_length_is_quoted_as_far_as_a_line_goes(watch):
    rank(watch).failed(f"error: \x1b[2J{'x' * 2**21}")
    assert becomes_true(lambda: watch.reason)
    says = r"\x1b[2J"
    assert watch.reason.why == f"a rank failed: {says}{'x' * (1024 - len('error: ' + says))}"


def test_a_rank_that_writes_a_line_without_an_end_is_not_listened_to(watch, caplog):
    connection = socket.socket(socket.AF_UNIX)
    with connection, suppress(OSError):
        connection.connect(str(watch.path))
        connection.sendall(b"x" * 2**22)
    assert becomes_true(lambda: watch.reason) and caplog.records == []


def test_a_rank_that_is_asked_to_stop(watch):
    rank(watch).stopped("interrupted, resume from step 7")
    assert becomes_true(lambda: watch.reasons_given)
    assert watch.reasons_given == [
        StopReason("interrupted, resume from step 7", is_local=True, is_request=True)
    ]


@pytest.mark.slow
def test_a_rank_that_dies_without_a_word(watch):
    die(rank(watch))
    assert becomes_true(lambda: watch.reasons_given)
    assert watch.reasons_given == [StopReason(DEAD, is_local=True, doubt=1)]
    assert watch.own_suspicion == watch.reason


def test_a_rank_whose_launcher_has_ended_is_no_reason(watch):
    """The launcher's exit status says more: the toolkit reads it in the time that is left."""
    watch.program_ended()
    die(rank(watch))
    assert becomes_true(lambda: watch.has_waited)
    settle(watch)
    assert watch.own_suspicion and watch.reason is None
    assert watch.wait_for_reason().why == DEAD


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGABRT])
def test_a_forked_worker_does_not_hold_the_line_of_a_rank(watch, number):
    """A DataLoader's worker outlives a rank for a while, whether the rank left or was killed."""
    gate = os.pipe()
    held = os.pipe()
    if not (worker_pid := os.fork()):
        rank(watch)
        os.close(held[1])
        if not os.fork():
            os.write(gate[1], b"x")
            os.read(held[0], 1)  # until the test is over
            os._exit(0)
        os.read(gate[0], 1)
        if number:
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(0)
    try:
        assert os.waitpid(worker_pid, 0)[1] & 0x7F == number
        assert becomes_true(lambda: watch.reason) and watch.reason.why.startswith(WORDLESS)
    finally:
        for descriptor in (*gate, *held):
            os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [lambda connection: connection.done(), lambda connection: connection.failed(LOST_PEER_ERROR)],
    ids=["done", "lost a peer"],
)
def test_no_reason_to_end(watch, act):
    """A rank that lost a peer does not know why; another process will say it."""
    rank_heartbeat = rank(watch)
    act(rank_heartbeat)
    die(rank_heartbeat)
    assert not becomes_true(
        lambda: watch.reason or watch.own_suspicion or watch.reasons_given, QUIET_SECONDS
    )


def test_a_rank_of_whose_launcher_nothing_is_known_may_have_been_the_first(watch):
    """Here it has ended before the loop hears of it."""
    gone = threading.Event()
    watch.loop.call_soon_threadsafe(gone.wait, HANG_SECONDS)
    if not (rank_pid := os.fork()):
        rank(watch)
        os._exit(0)
    os.waitpid(rank_pid, 0)
    gone.set()
    assert becomes_true(lambda: watch.reason)
    assert watch.reason == StopReason(DEAD, is_local=True, doubt=1)


ENDS = {
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        f"{WORDLESS}: it was killed by SIGKILL: {OUT_OF_MEMORY}",
        0,
    ),
    "a crash": ("os.kill(os.getpid(), signal.SIGSEGV)", f"{WORDLESS}: it was killed by SIGSEGV", 0),
    "aborted, as by NCCL": ("os.abort()", f"{WORDLESS}: it was killed by SIGABRT", 1),
    "left": ("os._exit(3)", f"{WORDLESS}: its exit status was 3", 1),
    "left as if all were well": ("os._exit(0)", f"{WORDLESS}: its exit status was 0", 1),
    "a line that is closed": ("line.close(); signal.pause()", DEAD, 1),
}


@pytest.mark.parametrize(("code", "reason", "doubt"), ENDS.values(), ids=ENDS)
def test_how_a_rank_ended(watch, code, reason, doubt):
    with process(watch.path, RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: watch.own_suspicion)
        assert watch.own_suspicion == StopReason(reason, is_local=True, doubt=doubt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["os.kill(os.getpid(), signal.SIGTERM)", "os._exit(143)", "os._exit(130)"]
)
def test_a_rank_that_was_asked_to_stop_before_it_could_say_so_is_not_the_reason(watch, code):
    with process(watch.path, RANK_NAME, code) as started:
        let_run(started)
        assert not becomes_true(lambda: watch.own_suspicion or watch.reason, QUIET_SECONDS)


@pytest.mark.parametrize(
    "way_to_end", ["os.abort()", "os._exit(0)", "say(failed='error: lost a peer'); os._exit(1)"]
)
def test_a_rank_that_its_launcher_takes_with_it(watch, way_to_end):
    """The kernel kills a rank with its launcher.

    The rank's connection may break before the launcher's, because other threads of the launcher
    live a moment longer.
    """
    code = f"launch({RANK_NAME!r})\ninput()\n{HOLDS_THE_LINE}{way_to_end}"
    with process(watch.path, OTHER_RANK_NAME, code) as started:
        let_run(started)
        # The loop knows which launcher the rank has.
        assert becomes_true(lambda: watch.mesh.status == f"{RANK_NAME} is there")
        let_run(started)
        assert becomes_true(lambda: watch.own_suspicion)
        assert watch.own_suspicion == StopReason(AFTER, is_local=True, doubt=2)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_rank_that_was_killed_before_its_launcher_ended_is_the_reason(is_reaped):
    """Both have ended when a busy watch asks; this process, their new parent, may have reaped."""
    adopt_orphans()
    statuses: dict[int, int] = {}
    busy = threading.Event()
    code = f"rank = launch({RANK_NAME!r})\ninput()\nrank.kill()\nos.abort()"
    with watched(reaped=statuses) as watch, process(watch.path, OTHER_RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: watch.mesh.status == f"{RANK_NAME} is there")
        (rank_pid,) = (child.pid for child in psutil.Process(started.pid).children())
        watch.loop.call_soon_threadsafe(busy.wait, HANG_SECONDS)
        let_run(started)
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        note_status(rank_pid, statuses)
        if is_reaped:
            os.waitpid(rank_pid, 0)
        busy.set()
        try:
            watch.program_ended()
            assert watch.wait_for_reason().why == ENDS["killed"][1]
        finally:
            if not is_reaped:
                os.waitpid(rank_pid, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, LAUNCHER_ENDED])
def test_what_lightnings_launcher_kills_is_not_the_reason(watch, number):
    """Where a rank has ended, it kills the others, and itself; ours ends them by its own signal."""
    code = f"launch({RANK_NAME!r})\ninput()\nos.kill(os.getpid(), {int(number)})"
    with process(watch.path, OTHER_RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: watch.mesh.status == f"{RANK_NAME} is there")
        (other,) = psutil.Process(started.pid).children()
        first = rank(watch, "host algo-2, local rank 2")
        die(first)
        assert becomes_true(lambda: watch.own_suspicion)
        other.send_signal(number)
        let_run(started)
        watch.program_ended()
        assert [each.why for each in watch.suspicions] == [DEAD.replace("rank 1", "rank 2")]


def test_the_rank_of_a_host_that_ended_first_is_the_reason(watch):
    die(rank(watch))
    assert becomes_true(lambda: watch.own_suspicion)
    first_suspicion = watch.own_suspicion
    for number in (0, 2, 3):
        die(rank(watch, f"host algo-2, local rank {number}"))
    assert becomes_true(lambda: watch.reason)
    assert (
        watch.reason
        == watch.own_suspicion
        == first_suspicion
        == StopReason(DEAD, is_local=True, doubt=1)
    )


def test_a_launcher_that_ends_after_a_rank_that_it_took_with_it_is_the_reason(watch):
    watch.loop.call_soon_threadsafe(watch._suspect, RANK_NAME, None, False)
    assert becomes_true(lambda: watch.own_suspicion)
    die(rank(watch, OTHER_RANK_NAME))
    assert becomes_true(lambda: watch.reason)
    assert watch.reason.why == DEAD.replace(RANK_NAME, OTHER_RANK_NAME)


def test_the_end_of_a_rank_that_lost_a_peer_is_not_the_one_that_is_waited_for(watch):
    code = f"say(failed={LOST_PEER_ERROR!r}); os._exit(1)"
    with process(watch.path, RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: watch.lost_peer)


def test_a_rank_that_lost_a_peer_lives_until_it_is_heard(watch, monkeypatch):
    """Until then, whoever has begun to end did so before the rank, which may be its launcher."""
    monkeypatch.setattr(deadlines, "ENDS_BY_ITSELF", HANG_SECONDS)
    rank(watch).failed(LOST_PEER_ERROR)
    assert watch.lost_peer


def test_how_all_ranks_have_ended_is_known_once_the_program_has(watch):
    code, reason, _ = ENDS["killed"]
    busy = threading.Event()
    with process(watch.path, RANK_NAME, code) as started:
        assert becomes_true(lambda: watch.connected)
        watch.loop.call_soon_threadsafe(busy.wait, HANG_SECONDS)
        let_run(started)
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        busy.set()
        watch.program_ended()
        assert watch.wait_for_reason().why == reason


def test_a_rank_that_has_said_all_is_hung_up_on(watch):
    """A connection that stays open would be one more for each start of the ranks."""
    rank_heartbeat = rank(watch)
    rank_heartbeat.done()
    rank_heartbeat.socket.settimeout(HANG_SECONDS)
    rank_heartbeat.socket.shutdown(socket.SHUT_WR)
    assert rank_heartbeat.socket.recv(1) == b""


def test_a_rank_that_dies_before_the_one_that_misses_it(watch):
    """A rank dies before the one that misses it.

    The loop may hear of both at once. It may hear of the second one first if the last status of the
    first one is unread.
    """
    first_heartbeat = rank(watch)
    second = rank(watch, OTHER_RANK_NAME)
    handled = threading.Event()
    watch.loop.call_soon_threadsafe(handled.wait)
    first_heartbeat._send(RankMessage(status="step 7"))
    die(first_heartbeat)
    second.failed(LOST_PEER_ERROR)
    handled.set()
    assert becomes_true(lambda: watch.reason) and watch.lost_peer
    assert watch.reason == StopReason(DEAD, is_local=True, doubt=1)


@pytest.mark.parametrize("launcher_lives", [True, False])
def test_a_rank_whose_death_is_heard_late_died_before_the_one_that_misses_it(
    watch, monkeypatch, launcher_lives
):
    """The kernel closes its connections one after another, and may take its time for the last.

    The rank that misses it has then ended, too, and may be its launcher. If the launcher has ended
    before anybody looks, it may have taken the rank with it.
    """
    code = f"{HOLDS_THE_LINE}os.abort()"
    with process(watch.path, RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: psutil.Process(started.pid).status() == psutil.STATUS_ZOMBIE)
        monkeypatch.setattr(
            "sagemaker_lightning.nodes.watchdog._is_running", lambda launcher_pid: launcher_lives
        )
        rank(watch, OTHER_RANK_NAME).failed(LOST_PEER_ERROR)
        assert becomes_true(lambda: watch.lost_peer)
        monkeypatch.setattr(
            "sagemaker_lightning.nodes.watchdog._is_running", lambda launcher_pid: False
        )
        let_run(started)
        assert becomes_true(lambda: watch.reason)
        if not launcher_lives:
            assert watch.reason.why == AFTER
            return
        assert watch.reason.why == f"{WORDLESS}: it was killed by SIGABRT"


def test_a_rank_that_dies_after_one_has_lost_a_peer(watch):
    """The one that lost a peer was its launcher, or torchrun ended it."""
    first_heartbeat = rank(watch)
    second = rank(watch, OTHER_RANK_NAME)
    second.failed(LOST_PEER_ERROR)
    assert becomes_true(lambda: watch.lost_peer)
    die(first_heartbeat)
    assert becomes_true(lambda: watch.own_suspicion)
    die(rank(watch, "host algo-2, local rank 2"))
    assert becomes_true(lambda: watch.reason)
    assert watch.reason == StopReason(AFTER, is_local=True, doubt=2)
    assert watch.suspicions == [watch.reason]  # two may be its effects; it is the first


@pytest.mark.parametrize(
    "act", [lambda line: line.failed(LOST_PEER_ERROR), die], ids=["lost a peer", "died"]
)
def test_a_rank_that_its_launcher_stops_as_another_one_has_ended_is_not_a_stop(watch, act):
    first_heartbeat = rank(watch)
    act(first_heartbeat)
    assert becomes_true(lambda: watch.lost_peer or watch.own_suspicion)
    stopped_heartbeat = rank(watch, OTHER_RANK_NAME)
    stopped_heartbeat.stopped(
        "interrupted, resume from step 0: SIGTERM; it came while nothing was being trained"
    )
    stopped_heartbeat._send(RankMessage(status="stopped"))
    assert becomes_true(lambda: watch.mesh.status == "stopped")
    assert not (watch.reason and watch.reason.is_request)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.abort()", "a rank failed: boom"),
    ],
)
def test_an_exception_after_a_rank_has_died(watch, code, expected):
    """The death is the reason, unless the death itself may have another cause."""
    with process(watch.path, RANK_NAME, code) as started:
        let_run(started)
        assert becomes_true(lambda: watch.own_suspicion)
        rank(watch, OTHER_RANK_NAME).failed("error: boom")
        assert becomes_true(lambda: watch.reason)
        assert expected in watch.reason.why


@pytest.mark.parametrize(
    ("code", "at_once"), [("os.kill(os.getpid(), 9)", True), ("os.abort()", False)]
)
def test_a_program_that_is_started_again_ends_at_once_if_a_signal_tells_all(code, at_once):
    """Where a rank's death may have another cause, its launcher gets time to end by itself."""
    with watched(ends_by_itself=600.0, may_restart=True) as watch:
        with process(watch.path, RANK_NAME, code) as started:
            let_run(started)
            assert becomes_true(lambda: watch.own_suspicion)
        if at_once:
            assert becomes_true(lambda: watch.reasons_given == [watch.own_suspicion])
        else:
            assert not (watch.reason or watch.reasons_given)


@pytest.mark.slow
def test_a_rank_that_may_have_been_ended_with_another_waits_for_another_node(monkeypatch):
    """The other node knows the reason, and gets time to say it."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 0.5)
    with watched(("algo-1", "algo-2")) as watch:
        first_heartbeat = rank(watch, OTHER_RANK_NAME)
        second = rank(watch)
        first_heartbeat.failed(LOST_PEER_ERROR)
        assert becomes_true(lambda: watch.lost_peer)
        die(second)
        assert becomes_true(lambda: watch.own_suspicion)
        assert not becomes_true(lambda: watch.has_waited or watch.reason, 2 * 0.5)
        assert watch.wait_for_reason().why == AFTER


@pytest.mark.slow
def test_a_dead_rank_is_reported_within_the_wait_for_a_reason(monkeypatch):
    """A waiting program hears of the dead rank in time, even if no better reason comes."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 0.4)
    with watched(("algo-1", "algo-2"), silence_timeout=0.5) as watch:
        watch.program_ended()
        rank(watch).failed(LOST_PEER_ERROR)
        assert becomes_true(lambda: watch.lost_peer)
        die(rank(watch))
        # After 0.5 s of 0.9 s, and not after 3 * 0.4 s.
        assert watch.wait_for_reason() == StopReason(AFTER, is_local=True, doubt=2)
        assert watch.has_waited and watch.known_reason is None


def test_on_the_only_host_nobody_is_waited_for(monkeypatch):
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 60.0)
    with watched() as watch:
        rank_heartbeat = rank(watch)
        rank_heartbeat.failed(LOST_PEER_ERROR)
        die(rank_heartbeat)
        assert becomes_true(lambda: watch.lost_peer)
        assert watch.wait_for_reason() is None  # at once
        die(rank(watch))
        assert becomes_true(lambda: watch.own_suspicion)
        assert watch.wait_for_reason() == watch.own_suspicion


def test_a_rank_that_was_killed_is_named_at_once(monkeypatch):
    """No better reason can come, so that a program that asks need not wait."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 60.0)
    with (
        watched(("algo-1", "algo-2")) as watch,
        process(watch.path, RANK_NAME, ENDS["killed"][0]) as started,
    ):
        let_run(started)
        assert watch.wait_for_reason().why == ENDS["killed"][1]
        assert watch.reason is None and watch.known_reason.why == ENDS["killed"][1]


def test_a_launcher_whose_rank_is_dead_is_left_time_to_end_by_itself(monkeypatch):
    """The other hosts hear it at once; the program here is ended only if its launcher stays."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 60.0)
    with watched(("algo-1", "algo-2")) as watch:
        rank(watch).failed("error: boom")
        assert becomes_true(lambda: watch.mesh.sent.failed)
        assert watch.mesh.sent == HostMessage(
            status=watch.mesh.status, failed="a rank failed: boom"
        )
        settle(watch)
        assert watch.reasons_given == []


def test_the_first_reason_counts(watch):
    first_heartbeat = rank(watch)
    first_heartbeat.failed("error: boom")
    stopped_heartbeat = rank(watch)
    assert becomes_true(lambda: watch.reason)
    stopped_heartbeat.stopped("interrupted")
    die(rank(watch))
    assert becomes_true(lambda: watch.has_waited)
    settle(watch)
    assert watch.reason.why == "a rank failed: boom" and len(watch.reasons_given) == 1


def test_who_fails_by_itself_is_not_asked_to_end(watch, monkeypatch):
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 0.0)
    watch.fail("the program cannot be had", is_request=False)
    assert becomes_true(lambda: watch.reason)
    settle(watch)
    assert watch.reason == StopReason("the program cannot be had", is_local=True)
    assert watch.reasons_given == []


TWO_HOSTS = ("algo-1", "algo-2")


@pytest.mark.parametrize(
    ("hosts", "lost_peer", "waits"),
    [
        (TWO_HOSTS, True, "for a better reason"),  # another host may know it
        (TWO_HOSTS, False, "for its launcher"),
        (("algo-2",), True, "for its launcher"),
    ],
    ids=["lost a peer", "died first", "lost a peer of the only host"],
)
def test_what_is_waited_for_after_a_rank_has_died(monkeypatch, hosts, lost_peer, waits):
    wait = {"for a better reason": 60.0, "for its launcher": 60.0} | {waits: 0.0}
    monkeypatch.setattr(deadlines, "better_reason", lambda silence: wait["for a better reason"])
    monkeypatch.setattr(deadlines, "ENDS_BY_ITSELF", wait["for its launcher"])
    with watched(hosts) as watch:
        watch.program_ended()
        missing_heartbeat = rank(watch, OTHER_RANK_NAME)
        if lost_peer:
            missing_heartbeat.failed(LOST_PEER_ERROR)
            assert becomes_true(lambda: watch.lost_peer)
        die(rank(watch))
        assert becomes_true(lambda: watch.has_waited)


def test_the_step_is_said_once_a_second(watch, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rank_heartbeat = rank(watch)
    trainer = SimpleNamespace(current_epoch=1, global_step=7)
    rank_heartbeat.on_train_batch_start(trainer, None, None, 0)
    assert becomes_true(lambda: watch.mesh.status == "epoch 2, step 7")
    output = []
    monkeypatch.setattr(
        rank_heartbeat, "_send", lambda message: output.append((clock.now, message.status))
    )
    for clock.now in (100.5, 100.99, 101.0, 101.5, 102.5):
        trainer.global_step += 1
        rank_heartbeat.on_train_batch_start(trainer, None, None, 0)
    assert output == [(101.0, "epoch 2, step 10"), (102.5, "epoch 2, step 12")]


def test_each_thing_that_a_rank_says_is_a_message(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(deadlines, "ENDS_BY_ITSELF", 0.01)  # nobody answers here
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "watch"))
        server.listen()
        rank_heartbeat = Heartbeat(tmp_path / "watch", RANK_NAME)
        rank_heartbeat.stopped("interrupted")
        rank_heartbeat.failed("error: x")
        rank_heartbeat.done()
        die(rank_heartbeat)
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            messages = [json.loads(line) for line in lines]
    assert messages == [
        {"rank": RANK_NAME}, {"stopped": "interrupted"}, {"failed": "error: x"}, {"done": True}
    ]  # fmt: skip


def test_a_copy_of_the_process_does_not_keep_the_connection_open(tmp_path: Path, monkeypatch):
    """A data worker is one: the watchdog would not see that the rank has died."""
    in_copies = []
    monkeypatch.setattr(
        os, "register_at_fork", lambda after_in_child: in_copies.append(after_in_child)
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "watch"))
        server.listen()
        rank_heartbeat = Heartbeat(tmp_path / "watch", RANK_NAME)
        assert rank_heartbeat.socket.fileno() >= 0
        for act in in_copies:
            act()
        assert rank_heartbeat.socket.fileno() == -1


def test_without_a_watch_nothing_is_said(tmp_path: Path):
    for path in (None, tmp_path / "none"):
        rank_heartbeat = Heartbeat(path, RANK_NAME)
        rank_heartbeat.failed("error: x")
        rank_heartbeat.done()
        assert rank_heartbeat.socket is None


def test_a_watch_that_is_gone_harms_no_rank():
    with watched() as watch:
        rank_heartbeat = rank(watch)
    rank_heartbeat.done()
    rank_heartbeat.failed("error: x")
    assert not watch.path.exists() and not watch.thread.is_alive() and watch.loop.is_closed()
    assert not watch.path.parent.exists() and not watch.server.is_serving()
