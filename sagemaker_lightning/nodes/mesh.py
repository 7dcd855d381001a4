"""Connects all hosts of a job, to see which live and whether settings agree.

Each host calls all others, by their names, and trusts only what it reads on these connections:
whoever has a host's address is that host. A host sends a Greeting to whoever calls it, and then
HostMessages (nodes/messages.py). It reads nothing that a caller says.
"""

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from sagemaker_lightning.contract.deadlines import ENDS_BY_ITSELF, status_interval
from sagemaker_lightning.contract.errors import printable
from sagemaker_lightning.contract.rendezvous import pauses
from sagemaker_lightning.contract.settings import differences
from sagemaker_lightning.nodes.messages import Doubt, Fault, Greeting, HostMessage

MAX_MESSAGE_BYTES = 2**20
"""Most bytes of a message: room for the settings of a job with 100 hyperparameters."""
MAX_SETTING_CHARACTERS = 80
"""Most characters of a setting's name or value; a hash stands for the rest of a longer one."""
MORE_CALLERS = 8
"""Connections that one address may open beyond one for each host of the job."""
SHORTEST_PAUSE = 0.1
"""Seconds, at least, between two calls of a host."""
MAX_NAMED_SETTINGS = 5
"""Settings that the line on different settings names at most."""


@dataclass(frozen=True)
class StopReason:
    """Why this node's program has to end."""

    why: str
    is_local: bool
    """Whether the cause is on this node."""
    is_request: bool = False
    """Whether the cause is that a node was asked to stop.

    Its ranks may then be saving a checkpoint, and so may the ranks of this node.
    """
    doubt: Doubt = Doubt.NONE
    """How uncertain it is, for a rank that ended without a reason."""


@dataclass
class Peer:
    """What this host knows of another host."""

    last_heard: float | None = None
    """When its last message came, in seconds of time.monotonic(); None before the first one."""
    status: str = "it had just started"
    ready: bool = False
    forks: bool = False
    is_idle: bool = False
    """Whether its program does nothing at its start."""
    done: bool = False
    fault: Fault | None = None
    """How its program ended, once it has said so."""
    fault_heard_at: float = 0.0
    """When it has said so, in seconds of time.monotonic()."""
    is_gone: bool = False
    """Whether it was heard, and will not be heard any more."""
    problem: str = "nobody has called it yet"
    """Why it cannot be heard, as long as it was not."""

    def says(self, message: HostMessage) -> None:
        """Note what it says."""
        self.last_heard = time.monotonic()
        self.status = self.status if message.status is None else message.status
        self.ready = self.ready or message.ready
        self.forks = self.forks or message.forks
        self.is_idle = self.is_idle if message.idle is None else bool(message.idle)
        # A host that knows why the job ends is not lost when its connection ends.
        knows_the_end = message.failed is not None or message.stopped is not None
        self.done = self.done or message.done or knows_the_end
        if message.fault:
            self.fault, self.fault_heard_at = message.fault, self.last_heard

    @property
    def has_said_all(self) -> bool:
        """Whether nothing more is to be heard of how its program ended."""
        return self.fault is not None or self.is_gone or self.last_heard is None


class Mesh:
    """The connections from one host to all other hosts of the job.

    All of its code runs in one event loop.

    Args:
        host: Name of this host.
        hosts: Names of all hosts, this one included.
        settings: Settings of this host: a value for each description. They must be the same on all
            hosts.
        port: TCP port, the same on all hosts.
        connect_timeout: Seconds that a host may take to answer.
        silence_timeout: Seconds without a message after which a host counts as lost.
        on_reason: Called with each StopReason.
        on_suspicion: Called with each StopReason of another host that is uncertain.
        restarts: How often this host has started its program again. Only hosts that have done so
            equally often talk to each other.
    """

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...],
        settings: Mapping[str, str],
        *,
        port: int,
        connect_timeout: float,
        silence_timeout: float,
        on_reason: Callable[[StopReason], None],
        on_suspicion: Callable[[StopReason], None],
        restarts: int = 0,
    ) -> None:
        self.host = host
        self.restarts = restarts
        self.settings = {_abbreviated(name): _abbreviated(settings[name]) for name in settings}
        self.port = port
        self.connect_timeout = connect_timeout
        self.silence_timeout = silence_timeout
        self.others = {name: Peer() for name in hosts if name != host}
        self.on_reason = on_reason
        self.on_suspicion = on_suspicion
        self.status = "it was preparing its program"
        self.sent = HostMessage(status=self.status)  # all that was sent so far
        self.callers: dict[asyncio.Transport, str] = {}  # who calls this host, and from where
        self.calls_received = 0
        self.has_said_all = False
        self.tasks: list[asyncio.Task[None]] = []  # asyncio itself keeps no reference

    async def open(self) -> None:
        """Start to listen, to call other hosts, and to send this host's status.

        Raises OSError if this host cannot listen on the port.
        """
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(partial(_Caller, self), port=self.port)
        calls = map(self._call, self.others)
        for coroutine in (self._report_missing_hosts(), self._send_status_repeatedly(), *calls):
            self.tasks.append(loop.create_task(coroutine))

    def set_status(self, status: str) -> None:
        """Set what this host does, for the other hosts."""
        self.status = status

    def send(self, message: HostMessage) -> None:
        """Send a message to all hosts.

        A host that calls later gets all that was sent so far, merged into one message.
        """
        self.sent = self.sent.merged_with(message)
        for caller in list(self.callers):
            if caller.get_write_buffer_size() > MAX_MESSAGE_BYTES:  # nobody reads there
                caller.abort()
            elif not self.has_said_all:
                caller.write(message.line())

    def welcome(self, caller: asyncio.Transport) -> None:
        """Tell a caller, whoever it is, what this host says; hang up if it calls too often."""
        address, *_ = caller.get_extra_info("peername") or [""]
        calls = list(self.callers.values()).count(address)
        if self.has_said_all or calls >= len(self.others) + MORE_CALLERS:
            caller.abort()
            return
        self.callers[caller] = address
        self.calls_received += 1
        greeting = Greeting(self.host, self.settings, self.restarts)
        caller.write(greeting.line() + self.sent.line())

    def forget(self, caller: asyncio.Transport) -> None:
        """Note that a caller has hung up."""
        self.callers.pop(caller, None)

    async def close(self) -> None:
        """Close the connections, and wait until the others have read everything.

        It waits for at most ENDS_BY_ITSELF seconds. A container's network disappears with the
        container.
        """
        self.server.close()
        self.has_said_all = True
        for caller in list(self.callers):
            with suppress(OSError):
                caller.write_eof()

        async def all_have_hung_up() -> None:
            while self.callers:
                await asyncio.sleep(0.05)

        with suppress(TimeoutError):
            await asyncio.wait_for(all_have_hung_up(), ENDS_BY_ITSELF)
        for caller in list(self.callers):
            caller.abort()

    async def _report_missing_hosts(self) -> None:
        """After `connect_timeout` seconds, end the job if a host has not answered."""
        await asyncio.sleep(self.connect_timeout)
        missing = [name for name, peer in self.others.items() if peer.last_heard is None]
        if missing:
            why = await self._describe_missing(missing)
            self.on_reason(StopReason(why, is_local=False))

    async def _describe_missing(self, names: list[str]) -> str:
        """Return in one line which hosts did not appear, why the first did not, and what to do."""
        name = names[0]
        try:
            reason = f"its name resolves to {await _resolve(name)}, but {self.others[name].problem}"
        except OSError as error:
            reason = f"its name does not resolve ({error.strerror or 'no answer'})"
        also_missing = f"; neither did {', '.join(names[1:6])}" if names[1:] else ""
        return (
            f"host {name} did not appear within {self.connect_timeout:.0f} s: "
            f"{reason}{also_missing}; see whether it started, or give it more time by "
            "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT (seconds)"
        )

    async def _send_status_repeatedly(self) -> None:
        while True:
            self.send(HostMessage(status=self.status))
            await asyncio.sleep(status_interval(self.silence_timeout))

    async def _call(self, name: str) -> None:
        """Call a host until it answers, and listen to it until it hangs up.

        Its name is resolved again for each call.
        """
        for pause in pauses():
            calls_before = self.calls_received
            try:
                address = await _resolve(name)
                opening = asyncio.open_connection(address, self.port, limit=MAX_MESSAGE_BYTES)
                reader, writer = await asyncio.wait_for(opening, ENDS_BY_ITSELF)
            except OSError as error:
                answer = str(error) or "no answer"
                problem = f"it does not answer on port {self.port} ({answer})"
            else:
                with closing(writer):
                    greeting = Greeting.parse(await self._read_line(reader) or b"")
                    if greeting and greeting.host != name:
                        greeting = None  # the address is still the one that another host had
                    if greeting and greeting.restarts == self.restarts:
                        self._compare_settings(name, greeting.settings)
                        await self._listen(name, reader)
                        self._hang_up_on(address)
                        return
                problem = (
                    f"its program was started again {greeting.restarts} times, and here "
                    f"{self.restarts} times"
                    if greeting
                    else f"what answers on port {self.port} is not {name}"
                )
            self.others[name].problem = problem
            # A host that is up calls this one: then the next try is due.
            calls_again_at = time.monotonic() + pause
            await asyncio.sleep(SHORTEST_PAUSE)
            while time.monotonic() < calls_again_at and self.calls_received == calls_before:
                await asyncio.sleep(SHORTEST_PAUSE)

    async def _listen(self, name: str, reader: asyncio.StreamReader) -> None:
        """Act on what host `name` says, until it hangs up."""
        peer = self.others[name]
        peer.last_heard = time.monotonic()  # its greeting
        while line := await self._read_line(reader):
            if not (message := HostMessage.parse(line)):
                break
            peer.says(message)
            if message.dead:
                self.on_suspicion(
                    StopReason(message.dead.why, is_local=False, doubt=message.dead.doubt)
                )
            if message.failed is not None:
                self.on_reason(StopReason(message.failed, is_local=False))
            if message.stopped is not None:
                self.on_reason(StopReason(message.stopped, is_local=False, is_request=True))
        peer.is_gone = True
        if not peer.done:
            symptom = (
                "nothing was heard of it any more" if line is None else "its connection broke off"
            )
            self._lost(name, symptom)

    def _hang_up_on(self, address: str) -> None:
        """Hang up on a host that is gone: it may never hang up itself."""
        for caller, its_address in list(self.callers.items()):
            if its_address == address:
                caller.close()

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes | None:
        """Return the next line; b"" at the end; None after too long a silence."""
        try:
            return await asyncio.wait_for(reader.readline(), self.silence_timeout)
        except TimeoutError:
            return None
        # The connection was reset, or the other end speaks another protocol.
        except (OSError, ValueError):
            return b""

    def _compare_settings(self, name: str, their_settings: Mapping[str, str]) -> None:
        """End the job if the settings of host `name` differ from this host's."""
        # In the order of their names, so that both hosts write the same line.
        settings = {self.host: self.settings, name: their_settings}
        hosts = sorted(settings)
        first_host, second_host = hosts
        differing = sorted(
            differences(settings[first_host], settings[second_host], missing="(none)")
        )
        if not differing:
            return
        parts = [
            f"{key} is {first} on {hosts[0]}, {second} on {hosts[1]}"
            for key, first, second in (
                [text[:MAX_SETTING_CHARACTERS] for text in each]
                for each in differing[:MAX_NAMED_SETTINGS]
            )
        ]
        if more := len(differing) - len(parts):
            parts.append(f"{more} more differ")
        why = printable(f"hosts have different settings: {'; '.join(parts)}")
        self.on_reason(StopReason(f"{why}; start all hosts with the same", is_local=False))

    def _lost(self, name: str, symptom: str) -> None:
        """End the job because host `name` is lost; `symptom` says why.

        If all of several other hosts are silent, this host's own network is most likely cut.
        """
        now = time.monotonic()
        silent = [
            (peer.last_heard, peer.status)
            for peer in self.others.values()
            if peer.last_heard and now - peer.last_heard > self.silence_timeout / 2
        ]
        last_heard, status = self.others[name].last_heard or now, self.others[name].status
        if len(silent) == len(self.others) > 1:
            name = "every other host"
            symptom = f"{symptom}: the network of this one ({self.host}) is most likely cut"
            last_heard, status = max(silent)
        why = f"lost {name}: {symptom}; last heard {now - last_heard:.0f} s ago: {status}"
        self.on_reason(StopReason(why, is_local=False))


class _Caller(asyncio.Protocol):
    """The end of a connection that somebody else has opened: it sends and does not read.

    Args:
        mesh: The mesh of this host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the caller."""
        self.transport = cast(asyncio.Transport, transport)
        self.mesh.welcome(self.transport)

    def data_received(self, data: bytes) -> None:
        """Hang up: no host says anything to one that it has called."""
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the caller."""
        self.mesh.forget(self.transport)


def _abbreviated(text: str) -> str:
    """Return a text that fits into a line: a long one is cut, and a hash stands for the rest."""
    if len(text) <= MAX_SETTING_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
    end = f"... (SHA-256 {digest})"
    return f"{text[: MAX_SETTING_CHARACTERS - len(end)]}{end}"


async def _resolve(name: str) -> str:
    """Return a host's IP address from the resolver.

    Raises OSError if the host has none, and TimeoutError if no name server answers within
    ENDS_BY_ITSELF seconds.

    It uses a thread of its own: at its exit, Python waits for the threads of asyncio's getaddrinfo,
    which takes half a minute if the name server does not answer.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | OSError] = loop.create_future()

    def give(result: str | OSError) -> None:
        if not answer.done():
            answer.set_result(result)

    def ask() -> None:
        result: str | OSError
        try:
            result = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits for the answer any more
            loop.call_soon_threadsafe(give, result)

    threading.Thread(target=ask, daemon=True).start()
    result = await asyncio.wait_for(answer, ENDS_BY_ITSELF)
    if isinstance(result, OSError):
        raise result
    return result
