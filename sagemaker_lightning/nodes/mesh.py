"""The line between the hosts of a job: who is there, what they were told, and who is not heard of any more.

What goes over it is a JSON object a line:

    {"host": NAME, "told": {...}}   once, by both ends: who this is, and what it was told; who calls adds
                                    "calls": NAME, whom it takes the other end for
    {"ready": true}                 its program may start
    {"status": TEXT}                every few seconds: it is alive, and what it does
    {"done": true}                  its program has ended well
    {"dead": WHY, "doubt": N}       a rank of it is dead, which may be the reason to end (see Verdict.doubt)
    {"failed": WHY}                 its program has not, or it knows of a host whose program has not
    {"stopped": WHY}                the same, where the cause is that it was told to stop
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from sagemaker_lightning.contract.rendezvous import pauses

LINE = 2**20  # bytes at most: 100 hyperparameters of 2,500 characters are a quarter of it
LAST_WORDS = 5.0  # seconds for what ends by itself: a launcher whose rank is dead, a connection after its last message


@dataclass(frozen=True)
class Verdict:
    """Why this node's program has to end."""

    why: str
    here: bool
    """Whether the cause is on this node."""
    stopped: bool = False
    """Whether the cause is that a node was told to stop: its ranks, and so these, may be saving."""
    doubt: int = 0
    """Of a rank that ended without a word: 0 if that needs no other reason, 1 if the reason may be the end of a rank of
    another host, 2 if it most likely is that of a process of its own host."""


@dataclass
class Peer:
    """What is known of another host."""

    heard: float | None = None
    status: str = "it had just started"
    ready: bool = False
    done: bool = False
    problem: str = "it never called"
    writer: asyncio.StreamWriter | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Peers:
    """The lines from `host`, one of `hosts`, to all others; everything here runs in one event loop.

    Args:
        told: What this host was told, by what it is called; all hosts were told the same.
        port: TCP port of all hosts.
        appear: Seconds that a host may take to appear.
        silence: Seconds after which a host of which nothing is heard is lost.
        decide: Called with each Verdict, a reason to end.
        suspect: Called with each Verdict on another host that may be one.
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
        self.host, self.told, self.port, self.appear, self.silence = (
            host,
            dict(told),
            port,
            appear,
            silence,
        )
        self.before = hosts[: hosts.index(host)]  # these are called, the others call
        self.others = {name: Peer() for name in hosts if name != host}
        self.decide, self.suspect = decide, suspect
        self.status, self.last = "it was preparing its program", {}
        self.tasks: list[asyncio.Task] = []  # asyncio itself keeps no reference

    async def open(self) -> None:
        """Listen, call, and go on telling that this host lives; OSError if the port cannot be had."""
        self.server = await asyncio.start_server(self._called, port=self.port, limit=LINE)
        for work in (self._appear(), self._say_that_we_live(), *map(self._call, self.before)):
            self.tasks.append(asyncio.create_task(work))

    def tell(self, message: Mapping) -> None:
        """Send a message to all, later ones included: to each that appears, what was said so far."""
        self.last |= message
        for peer in self.others.values():
            if peer.writer and not peer.gone.is_set():
                _send(peer.writer, message)

    async def leave(self) -> None:
        """Hang up, and let what was said last arrive: a container's network goes with it."""
        self.server.close()
        connected = [
            peer for peer in self.others.values() if peer.writer and not peer.gone.is_set()
        ]
        for peer in connected:
            with suppress(OSError, RuntimeError):
                peer.writer.write_eof()
        waits = [peer.gone.wait() for peer in connected]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), LAST_WORDS)

    async def _appear(self) -> None:
        await asyncio.sleep(self.appear)
        missing = [name for name, peer in self.others.items() if peer.heard is None]
        for name in missing[:1]:
            try:
                how = f"its name is that of {await _address(name)}, but {self.others[name].problem}"
            except OSError as error:
                how = f"its name does not resolve ({error.strerror or 'no answer'})"
            more = f"; nor did {', '.join(missing[1:6])}" if missing[1:] else ""
            advice = "see whether it started, or give it more time by SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT (seconds)"
            why = f"host {name} did not appear within {self.appear:.0f} s: {how}{more}; {advice}"
            self.decide(Verdict(why, here=False))

    async def _say_that_we_live(self) -> None:
        while True:
            self.tell({"status": self.status})
            await asyncio.sleep(min(2.0, self.silence / 5))

    async def _call(self, name: str) -> None:
        """Call a host until it answers; its name is resolved anew each time."""
        for pause in pauses():
            try:
                opening = asyncio.open_connection(await _address(name), self.port, limit=LINE)
                reader, writer = await asyncio.wait_for(opening, LAST_WORDS)
                _send(writer, {"host": self.host, "told": self.told, "calls": name})
                if await self._talk(name, reader, writer):
                    return
            except OSError as error:
                self.others[
                    name
                ].problem = f"it does not answer on port {self.port} ({str(error) or 'no answer'})"
            await asyncio.sleep(pause)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._talk(None, reader, writer)

    async def _talk(
        self, name: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Listen to a host until it hangs up; `name` if it is known. Return whether it was a watch that answered."""
        first = await self._read(reader) or {}
        caller, told = first.get("host"), first.get("told")
        wanted = (
            name or first.get("calls") == self.host
        )  # else it has an address that was another host's
        if not wanted or not isinstance(caller, str) or not isinstance(told, dict):
            writer.close()
            return False
        if name is None:
            _send(writer, {"host": self.host, "told": self.told})
        self._contradiction(caller, told)
        peer = self.others.get(caller)
        if not peer or peer.heard or caller != (name or caller):  # a stranger
            writer.close()
            return False
        peer.heard, peer.writer = time.monotonic(), writer
        _send(writer, self.last)
        while message := await self._read(reader):
            peer.heard, peer.status = time.monotonic(), message.get("status", peer.status)
            peer.ready, peer.done = "ready" in message or peer.ready, "done" in message or peer.done
            if "dead" in message:
                self.suspect(Verdict(message["dead"], here=False, doubt=message["doubt"]))
            for kind in {"failed", "stopped"} & message.keys():
                peer.done = True
                self.decide(Verdict(message[kind], here=False, stopped=kind == "stopped"))
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

    async def _read(self, reader: asyncio.StreamReader) -> dict | None:
        """Return the next message, {} at the end, None after too long a silence."""
        try:
            line = await asyncio.wait_for(reader.readline(), self.silence)
            message = json.loads(line or "{}")
            return message if isinstance(message, dict) else {}
        except TimeoutError:
            return None
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # a reset; a stranger that does not speak as we do
            return {}

    def _contradiction(self, name: str, told: Mapping[str, str]) -> None:
        """Compare what `name` was told with what this host was."""
        differing = [
            key
            for key in sorted(self.told.keys() | told.keys())
            if self.told.get(key) != told.get(key)
        ]
        if differing:
            (one, ours), (other, theirs) = sorted([(self.host, self.told), (name, told)])
            parts = (
                f"{key} is {str(ours.get(key, '(none)'))[:80]} and {str(theirs.get(key, '(none)'))[:80]}"
                for key in differing
            )
            why = f"hosts {one} and {other} were told different things: {'; '.join(parts)}; start all with the same"
            self.decide(Verdict(why, here=False))

    def _lost(self, name: str, how: str) -> None:
        now = time.monotonic()
        silent = [
            peer
            for peer in self.others.values()
            if peer.heard and now - peer.heard > self.silence / 2
        ]
        peer = self.others[name]
        if len(silent) == len(self.others) > 1:
            name, how = (
                "every other host",
                f"{how}: the network of this one ({self.host}) is most likely cut",
            )
            peer = max(silent, key=lambda peer: peer.heard)
        why = f"lost {name}: {how}; last heard {now - peer.heard:.0f} s ago: {peer.status}"
        self.decide(Verdict(why, here=False))


async def _address(name: str) -> str:
    """Return the address of a host, asked anew; OSError if it has none, or no name server answers.

    In a thread of its own, as Python waits at its exit for those of asyncio's getaddrinfo: half a minute of a
    resolver that does not answer.
    """
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            found = error
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))

    threading.Thread(target=ask, daemon=True).start()
    found = await asyncio.wait_for(answer, LAST_WORDS)
    if isinstance(found, OSError):
        raise found
    return found


def _send(writer: asyncio.StreamWriter, message: Mapping) -> None:
    with suppress(OSError, RuntimeError):  # RuntimeError: all that this host had to say is said
        writer.write(json.dumps(message).encode() + b"\n")
