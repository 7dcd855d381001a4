"""Hosts of a job, all of them in this process.

Each host has an address, a thread and a loop. This module decides about their names: the name of a
host resolves when `Hosts.names` has its address. A host that is frozen or cut off is one whose loop
does not run.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from waiting import HANG_SECONDS, becomes_true

from sagemaker_lightning.contract.rendezvous import free_port
from sagemaker_lightning.nodes import mesh
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.watchdog import Watchdog

SILENCE_SECONDS = 3.0  # three workers and an image build can stall a host for two
ALL_HOSTS = ("algo-1", "algo-2", "algo-3")


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


@pytest.fixture(name="hosts")
def hosts_of_this_process(monkeypatch) -> Iterator[Hosts]:
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
