"""nodes/mesh.py and nodes/watchdog.py between hosts, all of them in this process.

A host whose network is cut has a network namespace of its own (root only).
"""

import asyncio
import ctypes
import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mesh_hosts import (
    ALL_HOSTS,
    SILENCE_SECONDS,
    Hosts,
    _give_names,
    hosts_of_this_process,  # noqa: F401  the fixture hosts
)
from waiting import HANG_SECONDS, becomes_true

from sagemaker_lightning.contract import deadlines
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.launch import job_watch
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes import mesh, watchdog
from sagemaker_lightning.nodes.mesh import Mesh, StopReason
from sagemaker_lightning.nodes.messages import Fault, FaultKind


@pytest.mark.slow
def test_hosts_wait_for_the_last_one_at_the_start_and_at_the_end(hosts):
    """The first host that starts cannot resolve the names of the others."""
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
    assert hosts.up["algo-1"].mesh.status == "its program had started"
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
    assert all(watch.reason is None for watch in hosts.up.values())
    assert not any(hosts.ended.values())


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
def test_six_of_many_missing_hosts_are_named(hosts, missing, others):
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
    time.sleep(SILENCE_SECONDS / 3)  # a short silence is not a failure
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
    assert not hosts.up["algo-1"].reason.is_local
    assert hosts.up["algo-2"].wait_until_all_are_ready().why == reason


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
    assert watch.mesh.port == 29501
    assert watch.mesh.connect_timeout == 40.0
    assert watch.mesh.silence_timeout == 6.0
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
        "algo-1": Fault("host algo-1: boom", FaultKind.DEATH, 7, seconds_ago=50.0),
        "algo-2": Fault("host algo-1: boom", FaultKind.EFFECT),
    }
    for name, other in (ALL_HOSTS[:2], ALL_HOSTS[1::-1]):
        hosts.up[name].tell_fault(faults[name])
        assert hosts.up[other].wait_for_faults(HANG_SECONDS) == {name: faults[name]}
    told = hosts.up["algo-2"].wait_for_faults(HANG_SECONDS)["algo-1"]
    assert told.kind is FaultKind.DEATH  # no text that is equal to it
    assert 50.0 <= told.seconds_ago < 50.0 + HANG_SECONDS


@pytest.mark.parametrize("forks", [(True, True), (True, False)])
def test_hosts_tell_each_other_whether_they_start_without_imports(hosts, forks):
    hosts.start(*ALL_HOSTS[:2], hosts=ALL_HOSTS[:2], silence_timeout=60.0)
    ready = [
        hosts.work.submit(hosts.up[name].wait_until_all_are_ready, each)
        for name, each in zip(ALL_HOSTS[:2], forks, strict=True)
    ]
    assert [future.result(HANG_SECONDS) for future in ready] == [None, None]
    assert {hosts.up[name].all_fork for name in ALL_HOSTS[:2]} == {all(forks)}


def test_a_start_hangs_only_if_the_programs_of_all_hosts_do_nothing(hosts, monkeypatch):
    looks = []

    class Looks:
        def __init__(self, *_) -> None:
            self.why_idle = ""
            self.hangs_since = 0.0
            looks.append(self)

        def look(self, now: float) -> str:
            return ""

    monkeypatch.setattr(watchdog, "HangWatch", Looks)
    for name in ALL_HOSTS[:2]:
        hosts.start(name, hosts=ALL_HOSTS[:2], silence_timeout=60.0, hang_timeout=0.6)
        becomes_true(lambda: len(looks) == len(hosts.up))
    hosts.meet()
    seen = hosts.up["algo-2"].mesh.others["algo-1"]
    for why in ("first", "", "first"):
        looks[0].why_idle = why
        becomes_true(lambda why=why: seen.is_idle == bool(why))
    assert hosts.ended == {"algo-1": [], "algo-2": []}
    looks[1].why_idle = "second"
    becomes_true(lambda: all(hosts.up[name].reason for name in ALL_HOSTS[:2]))
    assert hosts.up["algo-1"].reason.why in ("host algo-1: first", "host algo-2: second")


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
