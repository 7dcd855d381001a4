"""Connects all hosts of a job, to see which live and whether settings agree.

Each end of a connection first sends a Greeting, and from then on HostMessages (nodes/messages.py).
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from sagemaker_lightning.contract.deadlines import ENDS_BY_ITSELF, status_interval
from sagemaker_lightning.contract.rendezvous import pauses
from sagemaker_lightning.contract.settings import differences
from sagemaker_lightning.nodes.messages import Doubt, Greeting, HostMessage

# Most bytes of a message. 100 hyperparameters of 2,500 characters need a quarter of it.
MAX_MESSAGE_BYTES = 2**20


@dataclass(frozen=True)
class StopReason:
    """Why this node's program has to end."""

    why: str
    is_local: bool
    """Whether the cause is on this node."""
    is_request: bool = False
    """Whether the cause is that a node was told to stop.

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
    done: bool = False
    problem: str = "it never called"
    """Why it cannot be reached, as long as it is not connected."""
    writer: asyncio.StreamWriter | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_connected(self) -> bool:
        """Whether messages can be sent to it."""
        return self.writer is not None and not self.closed.is_set()

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """Note that it is connected now."""
        self.last_heard = time.monotonic()
        self.writer = writer

    def cannot_be_reached(self, problem: str) -> None:
        """Note why the last call failed."""
        self.problem = problem

    def says(self, message: HostMessage) -> None:
        """Note what it says."""
        self.last_heard = time.monotonic()
        self.status = self.status if message.status is None else message.status
        self.ready = self.ready or message.ready
        # A host that knows why the job ends is not lost when its connection ends.
        knows_the_end = message.failed is not None or message.stopped is not None
        self.done = self.done or message.done or knows_the_end


class Mesh:
    """The connections from one host to all other hosts of the job.

    All of its code runs in one event loop.

    Args:
        host: Name of this host.
        hosts: Names of all hosts, this one included, in the same order on all of them.
        settings: Settings of this host: a value for each description. They must be the same on all
            hosts.
        port: TCP port, the same on all hosts.
        connect_timeout: Seconds that a host may take to connect.
        silence_timeout: Seconds without a message after which a host counts as lost.
        on_reason: Called with each StopReason.
        on_suspicion: Called with each StopReason of another host that is uncertain.
    """

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...],
        settings: Mapping,
        *,
        port: int,
        connect_timeout: float,
        silence_timeout: float,
        on_reason: Callable[[StopReason], None],
        on_suspicion: Callable[[StopReason], None],
    ) -> None:
        self.host = host
        self.settings = dict(settings)
        self.port = port
        self.connect_timeout = connect_timeout
        self.silence_timeout = silence_timeout
        self.called_hosts = hosts[: hosts.index(host)]  # the others call this host
        self.others = {name: Peer() for name in hosts if name != host}
        self.on_reason = on_reason
        self.on_suspicion = on_suspicion
        self.status = "it was preparing its program"
        self.sent = HostMessage()  # all that was sent so far
        self.tasks: list[asyncio.Task] = []  # asyncio itself keeps no reference

    async def open(self) -> None:
        """Start to listen, to call other hosts, and to send this host's status.

        Raises OSError if this host cannot listen on the port.
        """
        self.server = await asyncio.start_server(
            self._accept, port=self.port, limit=MAX_MESSAGE_BYTES
        )
        calls = map(self._call, self.called_hosts)
        for coroutine in (self._report_missing_hosts(), self._send_status_repeatedly(), *calls):
            self.tasks.append(asyncio.create_task(coroutine))

    def set_status(self, status: str) -> None:
        """Set what this host does, for the other hosts."""
        self.status = status

    def send(self, message: HostMessage) -> None:
        """Send a message to all hosts.

        A host that connects later gets all that was sent so far, merged into one message.
        """
        self.sent = self.sent.merged_with(message)
        for peer in self.others.values():
            if peer.is_connected:
                _send(peer.writer, message)

    async def close(self) -> None:
        """Close the connections, and wait until the others have read everything.

        It waits for at most ENDS_BY_ITSELF seconds. A container's network disappears with the
        container.
        """
        self.server.close()
        connected = [peer for peer in self.others.values() if peer.is_connected]
        for peer in connected:
            with suppress(OSError, RuntimeError):
                peer.writer.write_eof()
        waits = [peer.closed.wait() for peer in connected]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), ENDS_BY_ITSELF)

    async def _report_missing_hosts(self) -> None:
        """After `connect_timeout` seconds, end the job if a host has not connected."""
        await asyncio.sleep(self.connect_timeout)
        missing = [name for name, peer in self.others.items() if peer.last_heard is None]
        if missing:
            why = await self._describe_missing(missing)
            self.on_reason(StopReason(why, is_local=False))

    async def _describe_missing(self, names: list[str]) -> str:
        """Return in one line which hosts did not appear, why the first did not, and what to do."""
        name = names[0]
        try:
            reason = f"its name is that of {await _resolve(name)}, but {self.others[name].problem}"
        except OSError as error:
            reason = f"its name does not resolve ({error.strerror or 'no answer'})"
        also_missing = f"; nor did {', '.join(names[1:6])}" if names[1:] else ""
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
        """Call a host until it answers; resolve its name again for each call."""
        for pause in pauses():
            try:
                opening = asyncio.open_connection(
                    await _resolve(name), self.port, limit=MAX_MESSAGE_BYTES
                )
                reader, writer = await asyncio.wait_for(opening, ENDS_BY_ITSELF)
                _send(writer, Greeting(self.host, self.settings, calls=name))
                if await self._converse(name, reader, writer):
                    return
            except OSError as error:
                answer = str(error) or "no answer"
                self.others[name].cannot_be_reached(
                    f"it does not answer on port {self.port} ({answer})"
                )
            await asyncio.sleep(pause)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._converse(None, reader, writer)

    async def _converse(
        self, name: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Read a host's messages until it hangs up.

        Return whether the other end was a host of this job, and the one that was called.

        Args:
            name: The host that this host called; None if the other end called.
            reader: The messages of the other end.
            writer: Sends messages to the other end.
        """
        greeting = Greeting.parse(await self._read_line(reader) or b"")
        # If the caller wants another host, this host now has the address that the other one had.
        # Nobody else has this host's own name.
        if not greeting or not (name or greeting.calls == self.host) or greeting.host == self.host:
            writer.close()
            return False
        caller = greeting.host
        if name is None:
            _send(writer, Greeting(self.host, self.settings))
        self._compare_settings(caller, greeting.settings)
        peer = self.others.get(caller)
        # Not a host of this job, one that is connected already, or not the one that we called.
        if not peer or peer.last_heard or caller != (name or caller):
            writer.close()
            return False
        peer.connect(writer)
        _send(writer, self.sent)
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
        if not peer.done:
            self._lost(
                caller,
                "nothing was heard of it any more" if line is None else "its connection broke off",
            )
        writer.close()
        peer.closed.set()
        return True

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
        parts = [
            f"{key} is {str(first)[:80]} on {hosts[0]}, {str(second)[:80]} on {hosts[1]}"
            for key, first, second in sorted(
                differences(*(settings[host] for host in hosts), missing="(none)")
            )
        ]
        if parts:
            why = (
                f"hosts have different settings: {'; '.join(parts)}; start all hosts with the same"
            )
            self.on_reason(StopReason(why, is_local=False))

    def _lost(self, name: str, symptom: str) -> None:
        """End the job because host `name` is lost; `symptom` says why.

        If all of several other hosts are silent, this host's own network is most likely cut.
        """
        now = time.monotonic()
        silent = [
            peer
            for peer in self.others.values()
            if peer.last_heard and now - peer.last_heard > self.silence_timeout / 2
        ]
        peer = self.others[name]
        if len(silent) == len(self.others) > 1:
            name = "every other host"
            symptom = f"{symptom}: the network of this one ({self.host}) is most likely cut"
            peer = max(silent, key=lambda peer: peer.last_heard)
        why = f"lost {name}: {symptom}; last heard {now - peer.last_heard:.0f} s ago: {peer.status}"
        self.on_reason(StopReason(why, is_local=False))


async def _resolve(name: str) -> str:
    """Return a host's IP address from the resolver.

    Raises OSError if the host has none, and TimeoutError if no name server answers within
    ENDS_BY_ITSELF seconds.

    It uses a thread of its own: at its exit, Python waits for the threads of asyncio's getaddrinfo,
    which takes half a minute if the name server does not answer.
    """
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def ask() -> None:
        try:
            result = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits for the answer any more
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

    threading.Thread(target=ask, daemon=True).start()
    result = await asyncio.wait_for(answer, ENDS_BY_ITSELF)
    if isinstance(result, OSError):
        raise result
    return result


def _send(writer: asyncio.StreamWriter, message: Greeting | HostMessage) -> None:
    with suppress(OSError, RuntimeError):  # RuntimeError: this end is closed for writing already
        writer.write(message.line())
