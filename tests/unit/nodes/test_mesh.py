"""nodes/mesh.py and nodes/watchdog.py between hosts, all of them in this process.

Each host has an address, a thread and a loop. This module decides about their names: the name of a
host resolves when `Hosts.names` has its address. A host that is frozen or cut off is one whose loop
does not run; a host whose network is cut has a network namespace of its own (root only).
"""

import asyncio
import ctypes
import gc
import hashlib
import itertools
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from aws_services import free_port
from rank_process import let_run, process

from sagemaker_lightning.callbacks.heartbeat import Heartbeat
from sagemaker_lightning.contract import deadlines
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.launch import job_watch
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes import mesh
from sagemaker_lightning.nodes.mesh import Mesh, Peer, StopReason
from sagemaker_lightning.nodes.messages import (
    Doubt,
    Fault,
    FaultKind,
    Greeting,
    HostMessage,
    RankMessage,
    Suspicion,
)
from sagemaker_lightning.nodes.watchdog import Watchdog

HANG_SECONDS = 120.0  # what is waited for comes within a few
SILENCE_SECONDS = 3.0  # three workers and an image build can stall a host for two
ALL_HOSTS = ("algo-1", "algo-2", "algo-3")


def becomes_true(condition: Callable[[], object], limit: float = HANG_SECONDS) -> bool:
    """Wait for a condition, and return whether it became true."""
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


class Hosts:
    """The hosts that are up, and the reasons that ended others."""

    def __init__(self, stack: ExitStack, network: str) -> None:
        self.stack = stack
        self.network = network
        self.port = free_port()
        self.names: dict[str, str] = {}
        self.up: dict[str, Watchdog] = {}
        self.ended: dict[str, list[StopReason]] = {}
        self.left: dict[str, bool] = {}
        self.work = stack.enter_context(ThreadPoolExecutor())

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"{self.network}.{int(name.removeprefix('algo-')) + 1}"

    def start(
        self, *names: str, hosts=ALL_HOSTS, settings_of_host: Mapping = {}, first=None, **settings
    ) -> None:
        """Start the watches of hosts, whose names resolve from now on.

        Each host calls `first` in its thread before anything else.
        """
        for name in names:
            self.names.setdefault(name, self.address(name))
            self.ended[name] = []
            settings = {
                "port": self.port,
                "connect_timeout": 60.0,
                "silence_timeout": SILENCE_SECONDS,
            } | settings
            watch = self.up[name] = Watchdog(
                name, hosts, settings_of_host, on_reason=self.ended[name].append, **settings
            )
            if first:
                watch.loop.call_soon(first)
            watch.__enter__()
            self.left[name] = False
            self.stack.callback(self._end, name)

    def leave(self, name: str) -> Future:
        """Have a host leave; return a future that is done when it has left."""
        return self.work.submit(self._end, name)

    def _end(self, name: str) -> None:
        if not self.left[name]:
            self.left[name] = True
            self.up[name].__exit__()

    def meet(self) -> None:
        """Wait until all hosts that are up have heard of one another."""
        everyone = [peer for watch in self.up.values() for peer in watch.mesh.others.values()]
        assert becomes_true(lambda: all(peer.last_heard for peer in everyone))

    def tell_status(self, name: str, status: str) -> None:
        """Set a host's status, and wait until the other hosts have heard of it."""
        self.up[name].mesh.set_status(status)
        copies = [watch.mesh.others[name] for other, watch in self.up.items() if other != name]
        assert becomes_true(lambda: all(peer.status == status for peer in copies))

    def reasons(self, *names: str) -> list[str | None]:
        """Return the reasons of hosts to end, and wait long enough for them."""
        becomes_true(lambda: all(self.up[name].reason for name in names))
        return [self.up[name].reason and self.up[name].reason.why for name in names]

    def freeze(self, name: str) -> threading.Event:
        """Stop a host's loop until the returned event is set."""
        event = threading.Event()
        frozen = threading.Event()
        self.stack.callback(event.set)
        self.up[name].loop.call_soon_threadsafe(lambda: (frozen.set(), event.wait(HANG_SECONDS)))
        assert frozen.wait(HANG_SECONDS)
        return event


@pytest.fixture
def hosts(monkeypatch) -> Iterator[Hosts]:
    """No host is up yet; each will listen on an address of its own of this machine."""
    listen = asyncio.BaseEventLoop.create_server

    def listen_on_its_own(loop, protocol, **options):
        return listen(loop, protocol, running_hosts.address(protocol.args[0].host), **options)

    with ExitStack() as stack:
        running_hosts = Hosts(stack, "127.77.0")
        monkeypatch.setattr(asyncio.BaseEventLoop, "create_server", listen_on_its_own)
        _give_names(monkeypatch, running_hosts)
        yield running_hosts


def _give_names(monkeypatch, hosts: Hosts) -> None:
    resolve = socket.getaddrinfo

    def resolve_ours(name, *args, **options):
        if str(name).startswith("algo-") and name not in hosts.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(hosts.names.get(name, name), *args, **options)

    monkeypatch.setattr(mesh.socket, "getaddrinfo", resolve_ours)


@pytest.mark.slow
def test_hosts_wait_for_the_last_one_at_the_start_and_at_the_end(hosts):
    """All hosts wait for the last one, at the start and at the end.

    The first host that starts cannot resolve the names of the others.
    """
    hosts.start("algo-2")
    first_ready = hosts.work.submit(hosts.up["algo-2"].wait_until_all_are_ready)
    hosts.start("algo-3")
    ready = [first_ready, hosts.work.submit(hosts.up["algo-3"].wait_until_all_are_ready)]
    assert becomes_true(lambda: hosts.up["algo-2"].mesh.others["algo-3"].ready)
    # And a host that waits is not taken for lost.
    assert not becomes_true(lambda: any(future.done() for future in ready), SILENCE_SECONDS * 1.3)
    assert "Name or service not known" in hosts.up["algo-2"].mesh.others["algo-1"].problem
    hosts.start("algo-1")
    assert hosts.up["algo-1"].wait_until_all_are_ready() is None
    assert hosts.up["algo-1"].mesh.status == "its program had just started"
    assert [future.result(HANG_SECONDS) for future in ready] == [None, None]

    ended = hosts.work.submit(hosts.up["algo-1"].wait_until_all_are_done)
    second = hosts.work.submit(hosts.up["algo-2"].wait_until_all_are_done)
    assert becomes_true(lambda: hosts.up["algo-3"].mesh.others["algo-1"].done)
    assert not becomes_true(lambda: ended.done() or second.done(), 0.3)
    first = hosts.up["algo-3"].mesh.others["algo-1"]
    assert becomes_true(lambda: first.status == "its program had ended well")
    assert hosts.up["algo-3"].wait_until_all_are_done() is None
    leaving = hosts.leave("algo-3")
    assert (ended.result(HANG_SECONDS), second.result(HANG_SECONDS)) == (None, None)
    for future in (leaving, hosts.leave("algo-1")):
        future.result(HANG_SECONDS)
    assert all(watch.reason is None for watch in hosts.up.values()) and not any(
        hosts.ended.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_a_host_that_never_appears(hosts, known):
    """Each host says why."""
    if known:
        hosts.names["algo-2"] = hosts.address("algo-2")  # where nothing listens
    hosts.start("algo-1", "algo-3", hosts=(*ALL_HOSTS, "algo-4"), connect_timeout=0.6)
    first_reason, third_reason = hosts.reasons("algo-1", "algo-3")
    assert first_reason.startswith("host algo-2 did not appear within 1 s: ")
    assert third_reason.startswith("host algo-2 did not appear within 1 s: ")
    details = {
        reason.partition("within 1 s: ")[2].partition(
            "; neither did algo-4; see whether it started"
        )[0]
        for reason in (first_reason, third_reason)
    }
    refused = f"but it does not answer on port {hosts.port} ("
    if known:
        assert all(
            f"its name resolves to {hosts.address('algo-2')}, {refused}" in detail
            for detail in details
        )
    else:
        assert details == {"its name does not resolve (Name or service not known)"}
    assert "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT" in first_reason
    assert hosts.up["algo-1"].reason.is_local is hosts.up["algo-1"].reason.is_request is False
    assert becomes_true(lambda: len(hosts.ended["algo-1"]) == 1)  # at once: nobody waits for it


@pytest.mark.parametrize(
    ("missing", "others"),
    [
        (1, ""),
        (2, "; neither did algo-3"),
        (8, "; neither did algo-3, algo-4, algo-5, algo-6, algo-7"),
    ],
)
def test_of_many_hosts_that_are_missing_six_are_named(hosts, missing, others):
    all_hosts = tuple(f"algo-{number}" for number in range(1, missing + 2))
    hosts.start("algo-1", hosts=all_hosts, connect_timeout=0.01)
    (reason,) = hosts.reasons("algo-1")
    says = "its name does not resolve (Name or service not known)"
    assert f": {says}{others}; see whether it started" in reason
    assert not hosts.up["algo-1"].reason.is_local


def test_a_name_server_that_does_not_answer_is_not_waited_for(hosts, monkeypatch, caplog):
    """And its answer may come when nobody waits for it any more."""
    monkeypatch.setattr("sagemaker_lightning.nodes.mesh.ENDS_BY_ITSELF", 0.05)
    answers = threading.Event()
    threads = []
    resolve = mesh.socket.getaddrinfo

    def resolve_late(name, *args, **options):
        if name == "algo-2":
            threads.append(threading.current_thread())
            answers.wait(HANG_SECONDS)
            name = hosts.address("algo-2")
        return resolve(name, *args, **options)

    monkeypatch.setattr(mesh.socket, "getaddrinfo", resolve_late)
    hosts.start("algo-1", hosts=ALL_HOSTS[:2], connect_timeout=0.01)
    assert "its name does not resolve (no answer); see" in hosts.reasons("algo-1")[0]
    answers.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert thread.daemon  # Python does not wait for it at its exit
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), hosts.up["algo-1"].loop).result()
    assert threads and caplog.records == []


def test_a_call_that_nobody_answers_ends(hosts, monkeypatch):
    """A network that drops packets answers nothing."""
    monkeypatch.setattr("sagemaker_lightning.nodes.mesh.ENDS_BY_ITSELF", 0.05)

    async def hang(*_, **__) -> None:
        await asyncio.sleep(HANG_SECONDS)

    monkeypatch.setattr(mesh.asyncio, "open_connection", hang)
    hosts.names["algo-1"] = hosts.address("algo-1")
    hosts.start("algo-2", hosts=ALL_HOSTS[:2])
    called = hosts.up["algo-2"].mesh.others["algo-1"]
    assert becomes_true(lambda: called.problem != "nobody has called it yet")
    assert called.problem == f"it does not answer on port {hosts.port} (no answer)"


@pytest.mark.slow
def test_a_host_that_goes_quiet(hosts):
    hosts.start(*ALL_HOSTS)
    hosts.meet()
    hosts.tell_status("algo-3", "epoch 2, step 7")
    going_on = hosts.freeze("algo-3")
    time.sleep(SILENCE_SECONDS / 3)  # a short silence is no failure
    going_on.set()
    assert not becomes_true(
        lambda: any(watch.reason for watch in hosts.up.values()), SILENCE_SECONDS
    )
    hosts.freeze("algo-3")
    for reason in hosts.reasons("algo-1", "algo-2"):
        assert reason.startswith("lost algo-3: nothing was heard of it any more; last heard ")
        assert reason.endswith(" s ago: epoch 2, step 7")
    assert becomes_true(lambda: hosts.ended["algo-1"] and hosts.ended["algo-2"])


@pytest.mark.slow
def test_whose_program_waits_for_a_reason_hears_of_the_host_that_is_quiet(hosts, monkeypatch):
    """The wait for a reason is longer than the silence after which there is one."""
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 1.0)
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2])
    hosts.meet()
    assert hosts.up["algo-1"].wait_for_reason() is None  # and the wait ends without one
    hosts.freeze("algo-2")
    assert (
        hosts.up["algo-1"]
        .wait_for_reason()
        .why.startswith("lost algo-2: nothing was heard of it any more")
    )


def test_a_connection_that_breaks_off(hosts):
    """A machine is switched off while its network lives; the hosts notice it at once."""
    hosts.start(*ALL_HOSTS, silence_timeout=60.0)
    hosts.meet()
    lost = hosts.up["algo-2"]
    lost.loop.call_soon_threadsafe(lambda: [caller.abort() for caller in [*lost.mesh.callers]])
    for reason in hosts.reasons("algo-1", "algo-3"):
        assert reason.startswith(
            "lost algo-2: its connection broke off; last heard 0 s ago: it was preparing its "
            "program"
        )


def digest(text: str) -> str:
    """Return what a line has in place of the rest of a long setting."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CONTRADICTIONS = {
    "a value": ({"a": "4", "b": "x"}, {"a": "8", "b": "x"}, "a is 4 on algo-1, 8 on algo-2"),
    "two values": (
        {"b": "1", "a": "1"},
        {"a": "2", "b": "2"},
        "a is 1 on algo-1, 2 on algo-2; b is 1 on algo-1, 2 on algo-2",
    ),
    "one that only one has": (
        {"a": "1", "b": "2"},
        {"a": "1"},
        "b is 2 on algo-1, (none) on algo-2",
    ),
    "long ones with the same beginning": (
        {"a": "x" * 100},
        {"a": "x" * 100 + "y"},
        f"a is {'x' * 50}... (SHA-256 {digest('x' * 100)}) on algo-1, "
        f"{'x' * 50}... (SHA-256 {digest('x' * 100 + 'y')}) on algo-2",
    ),
    "one of just the length that a line shows": (
        {"a": "x" * 80},
        {"a": "y" * 80},
        f"a is {'x' * 80} on algo-1, {'y' * 80} on algo-2",
    ),
    "seven": (
        {f"a{number}": "1" for number in range(7)},
        {},
        "".join(f"a{number} is 1 on algo-1, (none) on algo-2; " for number in range(5))
        + "2 more differ",
    ),
    "what a terminal would obey": (
        {"a": "\x1b[2J"},
        {"a": "b\nc"},
        r"a is \x1b[2J on algo-1, b\nc on algo-2",
    ),
}


@pytest.mark.parametrize(
    ("settings", "other_settings", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS
)
def test_hosts_with_different_settings(hosts, settings, other_settings, says):
    hosts.start("algo-1", settings_of_host=settings, hosts=ALL_HOSTS[:2])
    hosts.start("algo-2", settings_of_host=other_settings, hosts=ALL_HOSTS[:2])
    reason = f"hosts have different settings: {says}; start all hosts with the same"
    assert hosts.reasons("algo-1", "algo-2") == [reason, reason]  # in this order on all hosts
    assert (
        not hosts.up["algo-1"].reason.is_local
        and hosts.up["algo-2"].wait_until_all_are_ready().why == reason
    )


def test_a_job_may_have_a_hundred_long_hyperparameters(hosts):
    dice = "\N{GAME DIE}"  # JSON writes it in twelve bytes
    settings = {f"hyperparameter {dice * 250}{number}": dice * 2500 for number in range(100)}
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], settings_of_host=settings)
    hosts.meet()
    assert hosts.up["algo-1"].reason is hosts.up["algo-2"].reason is None


def test_what_a_job_has_hosts_compare(monkeypatch):
    """Hosts compare all settings of the job, with secrets masked.

    And they compare how long a program may take to end.
    """
    monkeypatch.setenv("MASTER_PORT", "29500")
    here = SageMakerEnvironment(
        hosts=ALL_HOSTS[:2],
        current_host="algo-2",
        revision="1.2",
        peer_timeout=12.0,
        rendezvous_timeout=40.0,
    )
    graces: list[float] = []
    hyperparameters = {"data.batch_size": "4", "api_token": "a"}
    supervisor = SimpleNamespace(terminate=graces.append, statuses={})
    job = ("app/train_torchrun.py", hyperparameters, supervisor, Restarts(most=0))
    watch = job_watch.watchdog(here, *job)
    watch.loop.close()
    assert watch.mesh.settings == {
        "the list of hosts": "algo-1, algo-2",
        "the program's version": "1.2",
        "the program": "app/train_torchrun.py",
        "max_restarts": "0",
        "hyperparameter data.batch_size": "4",
        "hyperparameter api_token": "******",
    }
    assert (watch.mesh.host, set(watch.mesh.others)) == ("algo-2", {"algo-1"})
    assert (watch.mesh.port, watch.mesh.connect_timeout, watch.mesh.silence_timeout) == (
        29501,
        40.0,
        6.0,
    )
    for stopped in (False, True):
        watch.on_reason(StopReason("why", is_local=False, is_request=stopped))
    assert graces == [2.0, deadlines.HOOK_KILLS]
    may_restart = job_watch.watchdog(here, *job[:3], Restarts(most=1))
    may_restart.loop.close()
    may_restart.on_reason(StopReason("why", is_local=False))
    assert graces[2:] == [deadlines.RESTART_KILLS]
    assert may_restart.may_restart and not watch.may_restart
    alone = job_watch.watchdog(replace(here, current_host="algo-9"), *job)
    alone.loop.close()
    assert alone.mesh.others == {}  # it takes no part in the training


def test_hosts_tell_each_other_how_their_programs_ended(hosts):
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    hosts.meet()
    faults = {
        "algo-1": Fault("host algo-1: boom", FaultKind.DEATH, 7),
        "algo-2": Fault("host algo-1: boom", FaultKind.EFFECT),
    }
    for name, other in (ALL_HOSTS[:2], ALL_HOSTS[1::-1]):
        hosts.up[name].tell_fault(faults[name])
        assert hosts.up[other].wait_for_faults(HANG_SECONDS) == {name: faults[name]}
    told = hosts.up["algo-2"].wait_for_faults(HANG_SECONDS)["algo-1"]
    assert told.kind is FaultKind.DEATH  # no text that is equal to it


def test_hosts_tell_each_other_whether_they_start_without_imports(hosts):
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    ready = [
        hosts.work.submit(hosts.up[name].wait_until_all_are_ready, forks)
        for name, forks in zip(ALL_HOSTS[:2], (True, False), strict=True)
    ]
    assert [future.result(HANG_SECONDS) for future in ready] == [None, None]
    assert [hosts.up[name].others_fork for name in ALL_HOSTS[:2]] == [False, True]


def test_a_host_that_is_gone_tells_nothing(hosts):
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    hosts.meet()
    hosts.leave("algo-2").result(HANG_SECONDS)
    assert hosts.up["algo-1"].wait_for_faults(HANG_SECONDS) == {"algo-2": None}


@pytest.mark.parametrize("stopped", [False, True])
def test_the_reason_of_a_host_that_fails(hosts, stopped, monkeypatch):
    """It says why and leaves; hosts that appear later hear the reason from the others.

    The programs of the others are ended at once: they do not end by themselves.
    """
    monkeypatch.setattr("sagemaker_lightning.contract.deadlines.ENDS_BY_ITSELF", 600.0)
    hosts.start(*ALL_HOSTS[:2])
    assert becomes_true(lambda: hosts.up["algo-1"].mesh.others["algo-2"].last_heard)
    hosts.up["algo-2"].fail("host algo-2: boom", is_request=stopped)
    hosts.leave("algo-2").result(HANG_SECONDS)
    assert hosts.reasons("algo-1") == ["host algo-2: boom"]
    assert hosts.up["algo-1"].reason == StopReason(
        "host algo-2: boom", is_local=False, is_request=stopped
    )
    assert becomes_true(lambda: hosts.ended["algo-1"]) and not hosts.ended["algo-2"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((hosts.address("algo-2"), hosts.port), HANG_SECONDS)
    hosts.start("algo-3")
    assert hosts.reasons("algo-3") == ["host algo-2: boom"]
    assert hosts.up["algo-3"].reason.is_request is stopped


@pytest.mark.slow
def test_a_host_that_leaves_waits_until_its_reason_is_read(hosts, monkeypatch):
    """A host that fails stays until its reason was read, but not for ever.

    A container's network is gone when the container ends; so the host waits until those that listen
    have hung up.
    """
    monkeypatch.setattr("sagemaker_lightning.nodes.mesh.ENDS_BY_ITSELF", 60.0)
    hosts.start(*ALL_HOSTS, silence_timeout=60.0)
    hosts.meet()
    going_on = hosts.freeze("algo-1")
    hosts.up["algo-3"].fail("boom", is_request=False)
    leaving = hosts.leave("algo-3")
    assert not becomes_true(leaving.done, 0.4)
    going_on.set()
    leaving.result(30.0)  # less than the time after which it leaves in any case
    assert hosts.reasons("algo-1", "algo-2") == ["boom", "boom"]

    monkeypatch.setattr("sagemaker_lightning.nodes.mesh.ENDS_BY_ITSELF", 0.3)
    hosts.freeze("algo-1")
    hosts.leave("algo-2").result(HANG_SECONDS)


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


def test_what_happens_after_a_rank_was_killed_comes_of_it(ranks):
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


def test_who_is_told_to_stop_is_so_whatever_is_suspected(ranks):
    with process(ranks.hosts.up["algo-2"].path, "the dead one", KILL) as dead:
        let_run(dead)
        ranks.suspected(1)
        ranks.hosts.up["algo-1"].fail("interrupted, resume from step 7", is_request=True)
        assert ranks.hosts.reasons(*ALL_HOSTS[:2]) == ["interrupted, resume from step 7"] * 2


@pytest.mark.slow
def test_of_two_that_may_be_the_reason_the_first_is(ranks):
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


SILENT_SOURCE = ("127.0.0.9", 0)  # the address of a stranger; hosts call from another one


def hostile(hosts: Hosts, name: str, *lines: bytes) -> bytes:
    """Return what a host says to an unknown client until it hangs up."""
    with socket.create_connection(
        (hosts.address(name), hosts.port), HANG_SECONDS, SILENT_SOURCE
    ) as connection:
        received = b""
        with suppress(OSError):
            connection.sendall(b"".join(lines))
            while chunk := connection.recv(2**16):
                received += chunk
    return received


def greeting(host: str = "algo-1", settings: object = {}, restarts: object = 0) -> bytes:
    """Return the first line of a host; one that is forged if the arguments are."""
    message = {"host": host, "settings": settings, "restarts": restarts}
    return json.dumps(message).encode() + b"\n"


STRANGE = {
    "no line": b"x" * 100,
    "a line of two megabytes": b"x" * 2**21,
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"[1]\n",
    "no name": b'{"status": "x"}\n',
    "a host of another job with the same settings": greeting("algo-9"),
    "a name that is a list": greeting(["algo-1"]),
    "settings that are a list": greeting(settings=[1]),
    "a setting that is no text": greeting(settings={"a": {}}),
    "who has the name of the host that it talks to": greeting("algo-2"),
    "nested": b"[" * 100_000 + b"\n",
}
FORGED = {
    "other settings": greeting("algo-1", {"a": "b"}),
    "a reason to end": greeting("algo-1") + HostMessage(failed="mine").line(),
    "a stop": greeting("algo-1") + HostMessage(stopped="mine").line(),
    "a death": greeting("algo-1") + HostMessage(dead=Suspicion("mine")).line(),
    "that all is done": greeting("algo-1") + HostMessage(ready=True, done=True).line(),
}


@pytest.mark.parametrize("sent", [*STRANGE.values(), *FORGED.values()], ids=[*STRANGE, *FORGED])
def test_a_stranger_who_calls_is_hung_up_on_and_not_believed(hosts, sent, caplog):
    """Also one that has the name of another host: it has not that host's address."""
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    watch = hosts.up["algo-2"]
    says = [greeting("algo-2"), watch.mesh.sent.line()]
    assert hostile(hosts, "algo-2", sent) in (b"", b"".join(says)) and caplog.records == []
    assert watch.reason is None and watch.suspicions == []
    assert watch.mesh.others["algo-1"] == Peer(problem=watch.mesh.others["algo-1"].problem)
    hosts.start("algo-1", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    hosts.meet()
    assert watch.reason is None and not watch.mesh.others["algo-1"].ready


@pytest.fixture
def answer(hosts) -> Iterator[Callable[..., bytes]]:
    """A function that answers the next call of algo-1, in its place, with these bytes.

    It returns what it hears until the caller hangs up. The caller is algo-2.
    """
    hosts.names["algo-1"] = hosts.address("algo-1")
    with socket.create_server((hosts.address("algo-1"), hosts.port)) as server:
        server.settimeout(HANG_SECONDS)

        def answer_next_call(*lines: bytes, ends: bool = False) -> bytes:
            heard = b""
            with server.accept()[0] as connection, suppress(OSError):
                connection.settimeout(HANG_SECONDS)
                connection.sendall(b"".join(lines))
                if ends:
                    connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(2**16):
                    heard += chunk
            return heard

        yield answer_next_call


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
def test_what_answers_in_a_hosts_place_is_hung_up_on_and_called_again(hosts, answer, sent, caplog):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    watch = hosts.up["algo-2"]
    assert answer(sent, ends=True) == b"" and caplog.records == []
    says = f"what answers on port {hosts.port} is not algo-1"
    assert becomes_true(lambda: watch.mesh.others["algo-1"].problem == says)
    assert answer(greeting(), b'{"failed": "boom"}\n', ends=True) == b""
    assert hosts.reasons("algo-2") == ["boom"]


def test_a_message_may_have_a_mebibyte_and_no_more(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    rest = 2**20 - len(greeting(settings={"a": ""}))
    answer(greeting(settings={"a": "x" * (rest + 2)}))
    assert hosts.up["algo-2"].reason is None
    answer(greeting(settings={"a": "x" * rest}), ends=True)
    (reason,) = hosts.reasons("algo-2")
    assert f": a is {'x' * 80} on algo-1, (none) on algo-2; start" in reason


def test_a_host_that_says_what_is_no_message_is_lost(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    answer(greeting(), b'{"status": "epoch 1"}\n', b"nonsense\n")
    assert hosts.reasons("algo-2") == [
        "lost algo-1: its connection broke off; last heard 0 s ago: epoch 1"
    ]


def test_a_host_that_has_said_no_more_than_who_it_is_is_lost(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    answer(greeting(), ends=True)
    assert hosts.reasons("algo-2") == [
        "lost algo-1: its connection broke off; last heard 0 s ago: it had just started"
    ]


def test_a_host_that_says_nothing_any_more_is_lost(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=0.1)
    answer(greeting(), b'{"status": "epoch 1"}\n')
    assert hosts.reasons("algo-2") == [
        "lost algo-1: nothing was heard of it any more; last heard 0 s ago: epoch 1"
    ]


def test_a_host_that_has_hung_up_is_not_called_again(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    answer(greeting(), HostMessage(done=True).line(), ends=True)
    *_, call = hosts.up["algo-2"].mesh.tasks
    assert becomes_true(call.done)
    assert hosts.up["algo-2"].reason is None  # it had said that it was done


def test_a_long_reason_with_control_sequences_becomes_one_short_line(hosts, answer):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    reason = "\x1b[2J\nmine" + "x" * 768_984
    answer(greeting(), json.dumps({"failed": reason}).encode() + b"\n", ends=True)
    says = r"\x1b[2J\nmine"
    assert hosts.reasons("algo-2") == [says + "x" * (1024 - len(says))]


def test_a_host_that_fails_with_a_long_text_is_heard(hosts):
    """A message that is too long would end the connection, and the host would count as lost."""
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    hosts.meet()
    hosts.up["algo-2"].fail("x" * 2**21, is_request=False)
    assert hosts.reasons("algo-1") == ["x" * 1024]


def test_many_connections_of_one_address_are_not_kept(hosts):
    """And hosts, which have other addresses, are answered all the same."""
    hosts.start("algo-1", silence_timeout=60.0)
    kept = hosts.up["algo-1"].mesh.callers
    with ExitStack() as stack:
        connections = [
            stack.enter_context(
                socket.create_connection(
                    (hosts.address("algo-1"), hosts.port), HANG_SECONDS, SILENT_SOURCE
                )
            )
            for _ in range(100)
        ]
        hung_up = 0
        for connection in connections[10:]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            hung_up += 1
        assert hung_up == 90 and len(kept) == 10
        hosts.start("algo-2", "algo-3", silence_timeout=60.0)
        hosts.meet()


def test_who_does_not_read_what_it_is_told_is_hung_up_on(hosts, monkeypatch):
    monkeypatch.setattr(mesh, "MAX_MESSAGE_BYTES", 10_000)
    hosts.start("algo-1", silence_timeout=60.0)
    watch = hosts.up["algo-1"]
    with socket.create_connection((hosts.address("algo-1"), hosts.port), HANG_SECONDS):
        assert becomes_true(lambda: watch.mesh.callers)

        def talk() -> None:
            for _ in range(100):
                watch.mesh.send(HostMessage(status="x" * 1000))
            if watch.mesh.callers:
                watch.loop.call_soon(talk)

        watch.loop.call_soon_threadsafe(talk)
        assert becomes_true(lambda: not watch.mesh.callers)


def test_connections_that_are_open_at_the_end_cost_little_time_and_no_line(
    hosts, monkeypatch, caplog
):
    monkeypatch.setattr("sagemaker_lightning.nodes.mesh.ENDS_BY_ITSELF", 0.05)
    hosts.start("algo-1", silence_timeout=60.0)
    with ExitStack() as stack:
        address = hosts.address("algo-1"), hosts.port
        for _ in range(5):
            stack.enter_context(socket.create_connection(address, HANG_SECONDS))
        Heartbeat(hosts.up["algo-1"].path, "rank")
        assert becomes_true(lambda: len(hosts.up["algo-1"].mesh.callers) == 5)
        hosts.leave("algo-1").result(HANG_SECONDS)
    assert caplog.records == []


def test_a_host_that_leaves_may_hear_of_a_reason_then(hosts, monkeypatch, caplog):
    """It has said all, and says no more."""
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    hosts.meet()
    going_on = hosts.freeze("algo-1")
    leaving = hosts.leave("algo-2")
    assert becomes_true(lambda: hosts.up["algo-2"].mesh.has_said_all)
    hosts.up["algo-1"].fail("boom", is_request=False)
    going_on.set()
    leaving.result(HANG_SECONDS)
    del hosts.up["algo-2"].mesh.tasks[:]  # an exception in one of them is logged now
    gc.collect()
    assert caplog.records == []


def test_a_host_that_calls_is_called_at_once(hosts, monkeypatch):
    monkeypatch.setattr(mesh, "pauses", lambda: itertools.repeat(HANG_SECONDS * 2))
    hosts.start("algo-1", silence_timeout=60.0)
    assert becomes_true(lambda: "Name" in hosts.up["algo-1"].mesh.others["algo-2"].problem)
    hosts.start("algo-2", silence_timeout=60.0)
    assert becomes_true(lambda: hosts.up["algo-1"].mesh.others["algo-2"].last_heard)


MESSAGES = {
    b'{"dead": {"why": "x", "doubt": 0}}': HostMessage(dead=Suspicion("x", Doubt.NONE)),
    b'{"dead": {"why": "x", "doubt": 1}}': HostMessage(dead=Suspicion("x", Doubt.OTHER_HOST)),
    b'{"dead": {"why": "x", "doubt": 3}}': HostMessage(dead=Suspicion("x", Doubt.OWN_HOST)),
    b'{"dead": {"why": "x"}}': HostMessage(dead=Suspicion("x", Doubt.OWN_HOST)),
    b'{"dead": {"why": 1}, "done": true}': HostMessage(done=True),
    b'{"dead": "x", "ready": true}': HostMessage(ready=True),
    b'{"ready": true, "forks": true}': HostMessage(ready=True, forks=True),
    b'{"status": 1, "failed": [], "stopped": {}}': HostMessage(),
    b'{"failed": "a", "stopped": "b"}': HostMessage(failed="a", stopped="b"),
    b"{}": None,
    b'["status"]': None,
    b"GET / HTTP/1.1": None,
}


@pytest.mark.parametrize("line", MESSAGES)
def test_of_a_message_what_is_of_another_kind_is_left_out(line):
    assert HostMessage.parse(line) == MESSAGES[line]


GREETINGS = {
    b'{"host": "a", "settings": {"b": "1"}, "more": "c"}': Greeting("a", {"b": "1"}),
    b'{"host": "a", "settings": {"b": 1}}': None,
    b'{"host": ["a"], "settings": {}}': None,
    b'{"host": "a", "settings": []}': None,
    b"GET / HTTP/1.1": None,
}


@pytest.mark.parametrize("line", GREETINGS)
def test_a_greeting_has_a_name_and_settings(line):
    assert Greeting.parse(line) == GREETINGS[line]


def test_a_message_is_read_as_it_was_sent():
    message = HostMessage("", True, True, True, Suspicion("x", Doubt.NONE), "", "b")
    assert HostMessage.parse(message.line()) == message
    assert HostMessage(status="new").merged_with(HostMessage()).status == "new"
    for field in ("ready", "forks", "done"):  # and nothing that the sender has not said
        assert json.loads(HostMessage(**{field: True}).line()) == {field: True}
    for rank_message in (RankMessage("a", "b", True, "c", "d"), RankMessage()):
        assert RankMessage.parse(rank_message.line()) == rank_message


@pytest.mark.parametrize("said", [{"done": True}, {"failed": ""}, {"stopped": ""}], ids=str)
def test_a_rank_that_has_said_so_has_explained_its_end(said):
    assert RankMessage(**said).explains_end
    assert not RankMessage(rank="a", status="epoch 1").explains_end


def test_what_a_host_has_said_once_holds_until_it_says_otherwise():
    peer = Peer()
    assert (peer.ready, peer.done, peer.status) == (False, False, "it had just started")
    for message, known in (
        (HostMessage(status="epoch 1"), (False, False, "epoch 1")),
        (HostMessage(ready=True), (True, False, "epoch 1")),
        (HostMessage(status="epoch 2"), (True, False, "epoch 2")),
        (HostMessage(done=True), (True, True, "epoch 2")),
        (HostMessage(status=""), (True, True, "")),
    ):
        peer.says(message)
        assert (peer.ready, peer.done, peer.status) == known


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_a_host_that_knows_why_the_job_ends_is_done(end):
    """It is not lost when its connection ends."""
    peer = Peer()
    peer.says(HostMessage(**{end: ""}))
    assert peer.done and not peer.ready


@pytest.mark.slow
@pytest.mark.parametrize(("caller", "reached"), [("algo-2", "algo-3"), ("algo-3", "algo-1")])
def test_a_name_that_leads_to_another_host_at_first(hosts, caller, reached):
    """The name's address belonged to another host before; its own host is not up yet."""
    called = "algo-1" if caller == "algo-2" else "algo-2"
    hosts.start(reached)
    hosts.names[called] = hosts.address(reached)
    hosts.start(caller)
    assert not becomes_true(lambda: hosts.up[reached].reason or hosts.up[caller].reason, 0.3)
    hosts.names[called] = hosts.address(called)
    hosts.start(called)
    hosts.meet()
    assert not becomes_true(lambda: any(watch.reason for watch in hosts.up.values()), 0.3)


def test_a_port_that_is_taken(hosts):
    says = rf"port {hosts.port}: this host cannot listen on it .* the one after MASTER_PORT"
    with (
        socket.create_server((hosts.address("algo-1"), hosts.port)),
        pytest.raises(ValueError, match=says),
    ):
        hosts.start("algo-1")
    assert hosts.up["algo-1"].thread.daemon  # the process can end


HEARD = {  # seconds since the others were heard, which of them is lost, and who is named
    "one of two": ({"algo-2": 3.0, "algo-3": 0.1}, "lost algo-2: how; last heard 3 s ago: two"),
    "all": (
        {"algo-2": 3.0, "algo-3": 2.6},
        "lost every other host: how: the network of this one (algo-1) is most "
        "likely cut; last heard 3 s ago: three",
    ),
    "just half the silence": (
        {"algo-2": 3.0, "algo-3": 2.5},
        "lost algo-2: how; last heard 3 s ago: two",
    ),
    "one that never was there": (
        {"algo-2": 3.0, "algo-3": None},
        "lost algo-2: how; last heard 3 s ago: two",
    ),
    "the only one": ({"algo-2": 9.0}, "lost algo-2: how; last heard 9 s ago: two"),
    "two of three": (
        {"algo-2": 3.0, "algo-3": 4.0, "algo-4": 1.0},
        "lost algo-2: how; last heard 3 s ago: two",
    ),
}


@pytest.mark.parametrize(("heard", "says"), HEARD.values(), ids=HEARD)
def test_who_is_named_as_lost(monkeypatch, heard, says):
    """The clock stands still; the allowed silence is 5 s."""
    monkeypatch.setattr(mesh, "time", SimpleNamespace(monotonic=lambda: 100.0))
    reasons = []
    settings = {"port": 1, "connect_timeout": 1.0, "silence_timeout": 5.0, "on_suspicion": None}
    watching_mesh = Mesh("algo-1", ("algo-1", *heard), {}, on_reason=reasons.append, **settings)
    for (name, seconds), status in zip(heard.items(), ("two", "three", "four"), strict=False):
        watching_mesh.others[name].last_heard = seconds and 100.0 - seconds
        watching_mesh.others[name].status = status
    watching_mesh._lost("algo-2", "how")
    assert reasons == [StopReason(says, is_local=False)]


CLONE_NEWNET = 0x40000000  # sched.h


def _own_network() -> None:
    """Give the calling thread a network namespace, which ends with the thread."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, os.strerror(
        ctypes.get_errno()
    )


def _ip(thread: int, *words: str) -> None:
    """Run `ip` in a thread's network namespace."""
    space = f"--net=/proc/{os.getpid()}/task/{thread}/ns/net"
    subprocess.run(["nsenter", space, "ip", *words], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def switch(monkeypatch) -> Iterator["Switch"]:
    """A switch without any hosts."""
    with ExitStack() as stack:
        built_switch = Switch(stack, "10.177.0")
        _give_names(monkeypatch, built_switch)
        yield built_switch


class Switch(Hosts):
    """Hosts with a network namespace each, and a bridge between them in another one."""

    def __init__(self, stack: ExitStack, network: str) -> None:
        super().__init__(stack, network)
        namespace_ready = Future()
        over = threading.Event()
        stack.callback(over.set)

        def hold() -> None:
            _own_network()
            namespace_ready.set_result(threading.get_native_id())
            over.wait()

        threading.Thread(target=hold, daemon=True).start()
        self.bridge = namespace_ready.result(HANG_SECONDS)
        _ip(self.bridge, "link", "add", "switch", "type", "bridge")
        _ip(self.bridge, "link", "set", "switch", "up")

    def plug(self, *names: str) -> None:
        """Start hosts, and connect them with cables."""
        self.start(*names, first=_own_network)
        for name in names:
            host = self.up[name].thread.native_id
            _ip(
                self.bridge,
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(host),
            )
            _ip(self.bridge, "link", "set", name, "master", "switch", "up")
            _ip(host, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip(host, "link", "set", "eth0", "up")

    def cut(self, name: str) -> None:
        """Cut a host's cable: packets are lost, and no connection is closed."""
        _ip(self.bridge, "link", "set", name, "down")


@pytest.mark.slow
@pytest.mark.root
def test_a_network_that_is_cut(switch):
    switch.plug(*ALL_HOSTS)
    switch.meet()
    switch.tell_status("algo-3", "epoch 2, step 7")
    switch.cut("algo-3")
    first_reason, second_reason, third_reason = switch.reasons(*ALL_HOSTS)
    for reason in (first_reason, second_reason):
        assert reason.startswith("lost algo-3: nothing was heard of it any more; last heard ")
        assert reason.endswith(" s ago: epoch 2, step 7")
    assert "the network of this one (algo-3) is most likely cut" in third_reason
    # Nobody waits at the end until the lost one has hung up.
    assert becomes_true(lambda: len(switch.up["algo-1"].mesh.callers) == 1)
    assert becomes_true(lambda: not switch.up["algo-3"].mesh.callers)
    assert becomes_true(lambda: all(len(ended) == 1 for ended in switch.ended.values()))
