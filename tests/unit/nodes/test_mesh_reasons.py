"""nodes/mesh.py and nodes/watchdog.py: which host and which rank is the reason of a failure."""

import pytest
from mesh_hosts import (
    ALL_HOSTS,
    Hosts,
    hosts_of_this_process,  # noqa: F401  the fixture hosts
)
from rank_process import let_run, process
from waiting import HANG_SECONDS, becomes_true

from sagemaker_lightning.callbacks.heartbeat import Heartbeat
from sagemaker_lightning.nodes.watchdog import Watchdog

LOST_PEER_ERROR = "error: lost a peer, or never reached it: ..."
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
ABORT = "os.abort()"


class Ranks:
    """Two ranks on each of two hosts, whose programs have not ended; deadlines are short."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
        hosts.meet()
        self.lines = {}
        for host in hosts.up:
            for number in (0, 1):
                name = f"host {host}, local rank {number}"
                self.lines[host[-1], number] = Heartbeat(hosts.up[host].path, name)

    def lose(self, host: str, number: int) -> None:
        """Have a rank say that it lost a peer."""
        self.lines[host, number].failed(LOST_PEER_ERROR)
        assert becomes_true(lambda: self.hosts.up[f"algo-{host}"].lost_peer)

    def die(self, host: str, number: int) -> None:
        """Break the connection of a rank, as its death does."""
        self.lines[host, number].socket.close()

    def suspected(self, number: int) -> None:
        """Wait until both hosts have heard of this many suspicions."""
        assert becomes_true(
            lambda: all(len(watch.suspicions) == number for watch in self.hosts.up.values())
        )

    def reasons(self) -> list[str]:
        """Have both programs end with a lost peer, and return the reasons that the hosts give."""
        for watch in self.hosts.up.values():
            watch.program_ended()
        waits = [self.hosts.work.submit(self._wait, watch) for watch in self.hosts.up.values()]
        return [wait.result(HANG_SECONDS) for wait in waits]

    def _wait(self, watch: Watchdog) -> str:
        reason = watch.wait_for_reason()
        watch.fail(reason.why, is_request=False)  # as launch/toolkit_hook.py does
        return reason.why


@pytest.fixture
def ranks(hosts, monkeypatch) -> Ranks:
    """Ranks on algo-1 and algo-2."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 1.0)
    return Ranks(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True], ids=["programs that hang", "programs that end"])
def test_a_rank_that_its_launcher_took_with_it_is_not_the_reason(ranks, ended):
    """A rank that its launcher took with it is not named as the reason.

    One rank of algo-2 is killed; Lightning's launcher on algo-1 loses a peer and ends, and its
    other rank ends with it. That rank's connection breaks before the launcher's own, because other
    threads of the launcher live a moment longer.
    """
    ranks.lose("1", 0)  # algo-1 may hear of this before it hears anything of algo-2
    ranks.die("1", 1)
    ranks.die("1", 0)
    ranks.suspected(1)
    ranks.die("2", 1)
    ranks.lose("2", 0)
    ranks.die("2", 0)
    actual = ranks.reasons() if ended else ranks.hosts.reasons(*ALL_HOSTS[:2])
    assert (
        actual
        == ["host algo-2, local rank 1 ended without giving a reason: it was killed, or it crashed"]
        * 2
    )


def test_a_rank_that_was_killed_is_the_reason_and_none_that_aborts_before_that_is_heard_of(
    ranks, monkeypatch
):
    """NCCL ends a process whose peer is gone, and the peer's host is too busy to say so."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 60.0)
    first_path, second_path = (ranks.hosts.up[name].path for name in ALL_HOSTS[:2])
    with (
        process(second_path, "the cause", KILL) as dead,
        process(first_path, "the victim", ABORT) as victim,
    ):
        going_on = ranks.hosts.freeze("algo-2")
        let_run(dead)
        let_run(victim)
        assert becomes_true(lambda: ranks.hosts.up["algo-1"].suspicions)
        assert (
            ranks.hosts.up["algo-1"].own_suspicion.why
            == "the victim ended without giving a reason: it was killed by SIGABRT"
        )
        going_on.set()
        for reason in ranks.reasons():
            assert reason.startswith(
                "the cause ended without giving a reason: it was killed by SIGKILL: most likely"
            )


def test_what_happens_after_a_rank_was_killed_is_an_effect(ranks):
    """What fails after a rank was killed is not the reason, on no host.

    Here a rank raises because it lost a peer, and a host's connection breaks off.
    """
    with process(ranks.hosts.up["algo-2"].path, "the dead one", KILL) as dead:
        let_run(dead)
        ranks.suspected(1)
        ranks.lines["1", 0].failed("error: OSError: no space left")
        lost = ranks.hosts.up["algo-2"]
        lost.loop.call_soon_threadsafe(lambda: [caller.abort() for caller in [*lost.mesh.callers]])
        for reason in ranks.hosts.reasons(*ALL_HOSTS[:2]):
            assert reason.startswith(
                "the dead one ended without giving a reason: it was killed by SIGKILL"
            )
        for name, watch in ranks.hosts.up.items():
            assert watch.reason.is_local is (name == "algo-2")


def test_a_host_that_is_asked_to_stop_stops_whatever_is_suspected(ranks):
    with process(ranks.hosts.up["algo-2"].path, "the dead one", KILL) as dead:
        let_run(dead)
        ranks.suspected(1)
        ranks.hosts.up["algo-1"].fail("interrupted, resume from step 7", is_request=True)
        assert ranks.hosts.reasons(*ALL_HOSTS[:2]) == ["interrupted, resume from step 7"] * 2


@pytest.mark.slow
def test_the_first_of_two_possible_reasons_is_the_reason(ranks):
    ranks.die("2", 0)
    ranks.suspected(1)
    ranks.die("1", 0)
    ranks.suspected(2)
    reason = "host algo-2, local rank 0 ended without giving a reason: it was killed, or it crashed"
    assert ranks.hosts.reasons(*ALL_HOSTS[:2]) == [reason, reason]


def test_an_exception_is_a_better_reason_than_a_rank_that_aborts(ranks):
    """It may come later: a rank that raises lets go of its peers before it says why."""
    with process(ranks.hosts.up["algo-1"].path, "the victim", ABORT) as victim:
        let_run(victim)
        ranks.suspected(1)
        ranks.lines["2", 0].failed("error: ValueError: boom")
        assert ranks.hosts.reasons(*ALL_HOSTS[:2]) == ["a rank failed: ValueError: boom"] * 2
