"""Each node watches the others and its own ranks: who is lost, and why, is known everywhere within seconds.

torch.distributed alone waits half an hour for a rank that is gone, and then does not say which (init_process_group,
`timeout`). Here the toolkit's process on each node, which computes nothing and so is never late, holds a line to that
of every other node (app/peers.py), and each rank of the application one to that of its own (app/lifeline.py). The first
reason to end that a node hears of is its verdict: it tells all others, and has its own program end.

A rank that ends without a word may have been ended by the end of another one: NCCL aborts a process whose peer is gone,
a launcher kills its ranks when one has failed. So that is a suspicion at first. It is told to all nodes with the doubt
that there is. After a while for better reasons, the suspicion of least doubt, and of these the first, is the verdict.
"""

import asyncio
import json
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path

from app import stop
from app.errors import UserError
from app.failures import LOST, OUT_OF_MEMORY
from app.launched import state_of
from app.peers import LAST_WORDS, LINE, Peers, Verdict

# What ends a rank whatever became of the others. Not SIGABRT: it is what NCCL and gloo do where a peer is gone.
OF_ITS_OWN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
TOLD_TO_STOP = {sign for number in stop.SIGNALS for sign in (-number, stop.status(number))}
MOMENT = 0.02  # seconds in which the loop comes to all that was there before


class Watch:
    """The watch on `host`; while it is entered, it runs in a thread.

    Args:
        on_verdict: Called from the thread, with the verdict, when the program has to end.
        settings: Those of `Peers`.
    """

    def __init__(
        self, host: str, hosts: tuple[str, ...], told: Mapping[str, str], *, on_verdict: Callable, **settings
    ) -> None:
        self.verdict: Verdict | None = None
        self.suspected: list[Verdict] = []  # on all hosts, in the order in which they were heard of
        self.dead: Verdict | None = None  # the one of them that is this host's
        self.due = False  # whether it has been left its time
        self.bereft = False  # whether a rank here has said that it lost a peer
        self.ended = False
        self.peers = Peers(host, hosts, told, decide=self._decide, suspect=self.suspected.append, **settings)
        self.on_verdict, self.silence = on_verdict, settings["silence"]
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> "Watch":
        self.folder = tempfile.TemporaryDirectory(prefix="watch-")
        self.path = Path(self.folder.name, "ranks")
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self._wait(self._open())
        except OSError as error:
            raise UserError(
                f"port {self.peers.port}: cannot be listened on ({error.strerror}); it is the one after MASTER_PORT: "
                "set that to a port with a free one after it, alike on all hosts"
            ) from None
        return self

    def __exit__(self, *_) -> None:
        self._wait(self._leave())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.folder.cleanup()

    def wait_until_all_are_ready(self) -> Verdict | None:
        """Return when every host is ready for its program to start, or the verdict as soon as there is one."""
        self._tell({"ready": True})
        self._until(lambda: all(peer.ready for peer in self.peers.others.values()))
        self.peers.status = "its program had just started"
        return self.verdict

    def wait_until_all_are_done(self) -> Verdict | None:
        """Return when this host's and every other's program has ended well, or the verdict."""
        self.peers.status = "its program had ended well"
        self._tell({"done": True})
        self._until(lambda: all(peer.done for peer in self.peers.others.values()))
        return self.verdict

    def wait_for_verdict(self) -> Verdict | None:
        """Return the verdict, waiting for as long as it may take to miss a host that is lost; or what is suspected."""
        self._until(lambda: self.due or self._sure() or not self.peers.others, limit=self.silence + LAST_WORDS)
        return self.verdict or self._likeliest()

    @property
    def known(self) -> Verdict | None:
        """The verdict, or what will be it."""
        return self.verdict or self._sure()

    def fail(self, why: str, stopped: bool) -> None:
        """Tell the other hosts why this one fails, unless there is a verdict."""
        self.on_verdict = lambda verdict: None
        self.loop.call_soon_threadsafe(self._decide, Verdict(why, here=True, stopped=stopped))

    def _wait(self, coroutine: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _tell(self, message: dict) -> None:
        self.loop.call_soon_threadsafe(self.peers.tell, message)

    def _until(self, condition: Callable[[], bool], limit: float | None = None) -> None:
        async def wait() -> None:
            while not condition() and not self.verdict:
                await asyncio.sleep(0.05)

        with suppress(TimeoutError):
            self._wait(asyncio.wait_for(wait(), limit))

    async def _open(self) -> None:
        self.server = await asyncio.start_unix_server(self._rank, self.path, limit=LINE)
        if self.peers.others:
            await self.peers.open()

    async def _leave(self) -> None:
        self.server.close()
        if self.peers.others:
            await self.peers.leave()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a rank of this node until its line breaks."""
        # asyncio logs a connection's task that is cancelled as an error: this one ends quietly.
        with suppress(asyncio.CancelledError):
            await self._listen(reader, writer)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, launcher = _processes(writer.get_extra_info("socket"))
        name, explained = "a rank", False
        with suppress(OSError):
            while line := await reader.readline():
                message = json.loads(line)
                name, self.peers.status = message.get("rank", name), message.get("status", self.peers.status)
                explained = explained or bool({"done", "failed", "stopped"} & message.keys())
                await self._hear(message)
        ended = _exit_status(rank)
        writer.close()
        if not explained and ended not in TOLD_TO_STOP:
            await self._suspect(name, ended, alone=_lives(launcher) and not self.bereft)

    async def _hear(self, message: Mapping[str, str]) -> None:
        """Take what a rank of this node says."""
        failed = message.get("failed", "")
        if failed.startswith(f"error: {LOST}"):
            # It does not know why; who does will say so. What ends from now on may have been ended with it; a rank that
            # it misses is dead already, though the loop may not have come to that.
            await asyncio.sleep(MOMENT)
            self.bereft = True
        elif failed:
            self._decide(Verdict(f"a rank failed: {failed.removeprefix('error: ')}", here=True))
        # A launcher stops those that are left of its ranks: that one has ended is the reason.
        elif "stopped" in message and not (self.bereft or self.dead):
            self._decide(Verdict(message["stopped"], here=True, stopped=True))

    async def _suspect(self, name: str, ended: int | None, alone: bool) -> None:
        """Suspect that a rank is the reason; `alone` if nothing of its host had ended before."""
        if alone and not (self.dead and self.dead.doubt < 2):
            doubt = 0 if ended in [-number for number in OF_ITS_OWN] else 1
            why = f"{name} ended without a word: {_how(ended)}"
        else:
            doubt = 2
            why = f"{name} ended without a word after another process of its host: with it, or it was killed or crashed"
        if self.dead and self.dead.doubt <= doubt:
            return
        self.dead = Verdict(why, here=True, doubt=doubt)
        self.suspected.append(self.dead)
        self.peers.tell({"dead": why, "doubt": doubt})
        # Its launcher knows more: how it died. The node of a peer that was lost knows why, and gets time to tell;
        # less than `wait_for_verdict` takes.
        await asyncio.sleep(min(3 * LAST_WORDS, self.silence) if doubt == 2 and self.peers.others else LAST_WORDS)
        self.due = True
        if not self.ended:
            self._decide(self._likeliest())

    def _sure(self) -> Verdict | None:
        """Return the suspicion of which there is no doubt."""
        return next((one for one in self.suspected if not one.doubt), None)

    def _likeliest(self) -> Verdict | None:
        """Return the suspicion of which there is the least doubt."""
        return min(self.suspected, key=lambda one: one.doubt, default=None)

    def _decide(self, verdict: Verdict) -> None:
        """Take `verdict` if it is the first: tell the others, and whoever has to end the program."""
        if self.verdict:
            return
        if not verdict.stopped:  # what fails after a rank that ended of its own does so because of it
            verdict = self._sure() or verdict
        self.verdict = verdict
        self.peers.tell({"stopped" if verdict.stopped else "failed": verdict.why})
        # A launcher whose rank has failed ends by itself.
        self.loop.call_later(LAST_WORDS if verdict.here else 0, lambda: self.on_verdict(verdict))


def _processes(line: socket.socket) -> tuple[int, int]:
    """Return the PID of the rank at the other end of a line, and that of its launcher; 0 for what cannot be known."""
    rank, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    told = state_of(rank)
    return rank, int(told[1]) if told else 0


def _exit_status(process: int) -> int | None:
    """Return how a process that has closed its files ended: exit status, -N for signal N; None if nobody can tell."""
    told = state_of(process)  # until its launcher has asked for it
    code = int(told[49]) if told else 0
    return (-(code & 0x7F) or code >> 8) if code else None


def _lives(launcher: int) -> bool:
    """Return whether a launcher had not begun to end: the kernel kills its ranks then (app/launched.py)."""
    told = state_of(launcher)
    return not launcher or bool(told and told[0] not in "ZX" and told[49] == "0")


def _how(ended: int | None) -> str:
    """Return how a rank ended, in words."""
    if ended is None:
        return "it was killed, or it crashed"
    if ended >= 0:
        return f"its exit status was {ended}"
    return f"it was killed by {signal.Signals(-ended).name}{f': {OUT_OF_MEMORY}' if ended == -signal.SIGKILL else ''}"
