"""Connects all hosts of a job, to see which live and whether settings agree.

A message is one JSON object on one line:

    {"host": NAME, "told": {...}}   sent once by each end: the sender's name and its settings; the
                                    end that called adds "calls": NAME, the host it wants to reach
    {"ready": true}                 the sender is ready for the programs to start
    {"status": TEXT}                sent every few seconds: the sender lives, and what it does
    {"done": true}                  the sender's program has ended well
    {"dead": WHY, "doubt": N}       a rank of the sender died, which may be the reason to end
                                    (see Verdict.doubt)
    {"failed": WHY}                 the sender's program failed, or the sender knows of a host whose
                                    program failed
    {"stopped": WHY}                the same, where the cause is a request to stop
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from sagemaker_lightning.contract.deadlines import ENDS_BY_ITSELF, status_interval
from sagemaker_lightning.contract.rendezvous import pauses
from sagemaker_lightning.contract.settings import differences

# Most bytes of a message. 100 hyperparameters of 2,500 characters need a quarter of it.
LINE = 2**20


@dataclass(frozen=True)
class Verdict:
    """Why this node's program has to end."""

    why: str
    here: bool
    """Whether the cause is on this node."""
    stopped: bool = False
    """Whether the cause is that a node was told to stop.

    Its ranks may then be saving a checkpoint, and so may the ranks of this node.
    """
    doubt: int = 0
    """How uncertain it is that a rank which ended without a reason is the cause.

    0: nothing else explains its end. 1: a rank of another host may have caused it. 2: another
    process of its own host most likely caused it.
    """


@dataclass
class Peer:
    """What this host knows of another host."""

    heard: float | None = None
    status: str = "it had just started"
    ready: bool = False
    done: bool = False
    problem: str = "it never called"
    writer: asyncio.StreamWriter | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Peers:
    """The connections from one host to all other hosts of the job.

    All of its code runs in one event loop.

    Args:
        host: Name of this host.
        hosts: Names of all hosts, this one included, in the same order on all of them.
        told: Settings of this host: a value for each description. They must be the same on all
            hosts.
        port: TCP port, the same on all hosts.
        appear: Seconds that a host may take to connect.
        silence: Seconds without a message after which a host counts as lost.
        decide: Called with each Verdict that is a reason to end.
        suspect: Called with each Verdict on another host that may be a reason to end.
    """

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...],
        told: Mapping,
        *,
        port: int,
        appear: float,
        silence: float,
        decide: Callable[[Verdict], None],
        suspect: Callable[[Verdict], None],
    ) -> None:
        self.host = host
        self.told = dict(told)
        self.port = port
        self.appear = appear
        self.silence = silence
        self.before = hosts[: hosts.index(host)]  # this host calls these; the others call it
        self.others = {name: Peer() for name in hosts if name != host}
        self.decide = decide
        self.suspect = suspect
        self.status = "it was preparing its program"
        self.last = {}
        self.tasks: list[asyncio.Task] = []  # asyncio itself keeps no reference

    async def open(self) -> None:
        """Start to listen, to call other hosts, and to send this host's status.

        Raises OSError if this host cannot listen on the port.
        """
        self.server = await asyncio.start_server(self._accept, port=self.port, limit=LINE)
        calls = map(self._call, self.before)
        for coroutine in (self._report_missing_hosts(), self._send_status_repeatedly(), *calls):
            self.tasks.append(asyncio.create_task(coroutine))

    def tell(self, message: Mapping) -> None:
        """Send a message to all hosts.

        A host that connects later gets all that was sent so far, merged into one message.
        """
        self.last |= message
        for peer in self.others.values():
            if peer.writer and not peer.gone.is_set():
                _send(peer.writer, message)

    async def leave(self) -> None:
        """Close the connections, and wait until the others have read everything.

        It waits for at most ENDS_BY_ITSELF seconds. A container's network disappears with the
        container.
        """
        self.server.close()
        connected = [
            peer for peer in self.others.values() if peer.writer and not peer.gone.is_set()
        ]
        for peer in connected:
            with suppress(OSError, RuntimeError):
                peer.writer.write_eof()
        waits = [peer.gone.wait() for peer in connected]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), ENDS_BY_ITSELF)

    async def _report_missing_hosts(self) -> None:
        """After `appear` seconds, decide that the job ends if a host has not connected."""
        await asyncio.sleep(self.appear)
        missing = [name for name, peer in self.others.items() if peer.heard is None]
        for name in missing[:1]:
            try:
                reason = (
                    f"its name is that of {await _resolve(name)}, but {self.others[name].problem}"
                )
            except OSError as error:
                reason = f"its name does not resolve ({error.strerror or 'no answer'})"
            also_missing = f"; nor did {', '.join(missing[1:6])}" if missing[1:] else ""
            advice = (
                "see whether it started, or give it more time by "
                "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT (seconds)"
            )
            why = (
                f"host {name} did not appear within {self.appear:.0f} s: {reason}{also_missing}; "
                f"{advice}"
            )
            self.decide(Verdict(why, here=False))

    async def _send_status_repeatedly(self) -> None:
        while True:
            self.tell({"status": self.status})
            await asyncio.sleep(status_interval(self.silence))

    async def _call(self, name: str) -> None:
        """Call a host until it answers; resolve its name again for each call."""
        for pause in pauses():
            try:
                opening = asyncio.open_connection(await _resolve(name), self.port, limit=LINE)
                reader, writer = await asyncio.wait_for(opening, ENDS_BY_ITSELF)
                _send(writer, {"host": self.host, "told": self.told, "calls": name})
                if await self._converse(name, reader, writer):
                    return
            except OSError as error:
                answer = str(error) or "no answer"
                problem = f"it does not answer on port {self.port} ({answer})"
                self.others[name].problem = problem
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
        greeting = await self._read_message(reader) or {}
        caller = greeting.get("host")
        their_settings = greeting.get("told")
        # If the caller wants another host, this host now has the address that the other one had.
        is_meant = name or greeting.get("calls") == self.host
        if not is_meant or not isinstance(caller, str) or not isinstance(their_settings, dict):
            writer.close()
            return False
        if name is None:
            _send(writer, {"host": self.host, "told": self.told})
        self._compare_settings(caller, their_settings)
        peer = self.others.get(caller)
        # Not a host of this job, one that is connected already, or not the one that we called.
        if not peer or peer.heard or caller != (name or caller):
            writer.close()
            return False
        peer.heard = time.monotonic()
        peer.writer = writer
        _send(writer, self.last)
        while message := await self._read_message(reader):
            peer.heard = time.monotonic()
            peer.status = message.get("status", peer.status)
            peer.ready = "ready" in message or peer.ready
            peer.done = "done" in message or peer.done
            if "dead" in message:
                self.suspect(Verdict(message["dead"], here=False, doubt=message["doubt"]))
            for key in {"failed", "stopped"} & message.keys():
                peer.done = True
                self.decide(Verdict(message[key], here=False, stopped=key == "stopped"))
        if not peer.done:
            self._lost(
                caller,
                "nothing was heard of it any more"
                if message is None
                else "its connection broke off",
            )
        writer.close()
        peer.gone.set()
        return True

    async def _read_message(self, reader: asyncio.StreamReader) -> dict | None:
        """Return the next message; {} at the end; None after too long a silence."""
        try:
            line = await asyncio.wait_for(reader.readline(), self.silence)
            message = json.loads(line or "{}")
            return message if isinstance(message, dict) else {}
        except TimeoutError:
            return None
        # The connection was reset, or the other end speaks another protocol.
        except (OSError, ValueError, RecursionError):
            return {}

    def _compare_settings(self, name: str, their_settings: Mapping[str, str]) -> None:
        """End the job if the settings of host `name` differ from this host's."""
        # In the order of their names, so that both hosts write the same line.
        settings = {self.host: self.told, name: their_settings}
        hosts = sorted(settings)
        parts = [
            f"{key} is {str(first)[:80]} and {str(second)[:80]}"
            for key, first, second in sorted(
                differences(*(settings[host] for host in hosts), missing="(none)")
            )
        ]
        if parts:
            why = (
                f"hosts {' and '.join(hosts)} were told different things: {'; '.join(parts)}; "
                "start all with the same"
            )
            self.decide(Verdict(why, here=False))

    def _lost(self, name: str, symptom: str) -> None:
        """End the job because host `name` is lost; `symptom` says why.

        If all of several other hosts are silent, this host's own network is most likely cut.
        """
        now = time.monotonic()
        silent = [
            peer
            for peer in self.others.values()
            if peer.heard and now - peer.heard > self.silence / 2
        ]
        peer = self.others[name]
        if len(silent) == len(self.others) > 1:
            name = "every other host"
            symptom = f"{symptom}: the network of this one ({self.host}) is most likely cut"
            peer = max(silent, key=lambda peer: peer.heard)
        why = f"lost {name}: {symptom}; last heard {now - peer.heard:.0f} s ago: {peer.status}"
        self.decide(Verdict(why, here=False))


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


def _send(writer: asyncio.StreamWriter, message: Mapping) -> None:
    with suppress(OSError, RuntimeError):  # RuntimeError: this end is closed for writing already
        writer.write(json.dumps(message).encode() + b"\n")
