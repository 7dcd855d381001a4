"""nodes/mesh.py: what strangers send, and hosts that say what is not a message."""

import gc
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from mesh_hosts import (
    ALL_HOSTS,
    Hosts,
    hosts_of_this_process,  # noqa: F401  the fixture hosts
)
from waiting import HANG_SECONDS, becomes_true

from sagemaker_lightning.callbacks.heartbeat import Heartbeat
from sagemaker_lightning.nodes import mesh
from sagemaker_lightning.nodes.mesh import Peer
from sagemaker_lightning.nodes.messages import HostMessage, Suspicion

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
    "a setting that is not a text": greeting(settings={"a": {}}),
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


STATUS = b'{"status": "epoch 1"}\n'
LOST = {
    "it says what is not a message": (
        [STATUS, b"nonsense\n"], {}, 60.0, "its connection broke off; last heard 0 s ago: epoch 1"
    ),
    "it has said no more than who it is": (
        [], {"ends": True}, 60.0,
        "its connection broke off; last heard 0 s ago: it had just started",
    ),
    "it says nothing any more": (
        [STATUS], {}, 0.1, "nothing was heard of it any more; last heard 0 s ago: epoch 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "options", "silence", "why"), LOST.values(), ids=LOST)
def test_why_a_host_is_lost(hosts, answer, lines, options, silence, why):
    hosts.start("algo-2", hosts=ALL_HOSTS[:2], silence_timeout=silence)
    answer(greeting(), *lines, **options)
    assert hosts.reasons("algo-2") == [f"lost algo-1: {why}"]


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


def test_who_does_not_read_what_it_is_sent_is_hung_up_on(hosts, monkeypatch):
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
