"""Finds out which host or rank of a job was lost, and tells every node.

torch.distributed alone waits half an hour for a rank that is gone, and then does not say which one
it was (init_process_group, `timeout`). Here, the toolkit's process on each node keeps a connection
to the same process on every other node (nodes/mesh.py), and each rank of the application keeps one
to the toolkit's process of its own node (callbacks/heartbeat.py). The toolkit's process computes
nothing, so it always answers in time. The first reason to end that a node hears of is its verdict:
the node tells it to all others and ends its own program.

A rank that ends without giving a reason may have ended because another rank ended: NCCL aborts a
process whose peer is gone, and a launcher kills its ranks when one has failed. So such an end is
only a suspicion at first. The node tells it to all others, with a degree of doubt. It then waits
for a while for a better reason. If none comes, the suspicion with the least doubt is the verdict;
of several with the same doubt, it is the first.
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

from sagemaker_lightning.contract import deadlines, shutdown
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import LOST, OUT_OF_MEMORY
from sagemaker_lightning.nodes.mesh import LINE, Peers, Verdict
from sagemaker_lightning.process.parent_process import process_stat

# Signals that end a rank for a reason of its own, whatever happened to other ranks. SIGABRT is not
# one of them: NCCL and gloo abort where a peer is gone.
OF_ITS_OWN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
TOLD_TO_STOP = {sign for number in shutdown.SIGNALS for sign in (-number, shutdown.status(number))}
PF_EXITING = 0x4  # flag of a process that ends, or has ended (Linux, include/linux/sched.h)
MOMENT = 0.02  # seconds in which the event loop handles all that had arrived before


class Watch:
    """Watches the other hosts and this host's ranks, in a thread.

    The thread runs while the watch is entered.

    Args:
        host: Name of this host.
        hosts: Names of all hosts to watch, this one included.
        told: Settings of this host, which must be the same on all hosts (see `Peers`).
        on_verdict: Called from the thread, with the verdict, when the program has to end.
        settings: The other arguments of `Peers`: port, appear, silence.

    Entering it raises UserError if this host cannot listen on the port.
    """

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...],
        told: Mapping[str, str],
        *,
        on_verdict: Callable,
        **settings,
    ) -> None:
        self.verdict: Verdict | None = None
        # The suspicions of all hosts, in the order in which this host heard of them.
        self.suspected: list[Verdict] = []
        self.dead: Verdict | None = None  # the suspicion on a rank of this host
        self.due = False  # whether the time for a better reason than `dead` is over
        self.bereft = False  # whether a rank of this host has said that it lost a peer
        self.ended = False  # whether this host's program has ended
        self.peers = Peers(
            host, hosts, told, decide=self._decide, suspect=self.suspected.append, **settings
        )
        self.on_verdict = on_verdict
        self.silence = settings["silence"]
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> "Watch":
        self.folder = tempfile.TemporaryDirectory(prefix="watch-")
        self.path = Path(self.folder.name, "ranks")
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self._run_in_loop(self._open())
        except OSError as error:
            raise UserError(
                f"port {self.peers.port}: cannot be listened on ({error.strerror}); it is the one "
                "after MASTER_PORT: set that to a port with a free one after it, alike on all hosts"
            ) from None
        return self

    def __exit__(self, *_) -> None:
        self._run_in_loop(self._leave())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.folder.cleanup()

    def wait_until_all_are_ready(self) -> Verdict | None:
        """Wait until every host is ready to start its program, or for a verdict.

        Return the verdict; None if there is none.
        """
        self._tell_hosts({"ready": True})
        self._wait_until(lambda: all(peer.ready for peer in self.peers.others.values()))
        self.peers.status = "its program had just started"
        return self.verdict

    def wait_until_all_are_done(self) -> Verdict | None:
        """Wait until all programs have ended well, or for a verdict.

        Return the verdict; None if there is none. The program of this host must have ended well
        before.
        """
        self.peers.status = "its program had ended well"
        self._tell_hosts({"done": True})
        self._wait_until(lambda: all(peer.done for peer in self.peers.others.values()))
        return self.verdict

    def wait_for_verdict(self) -> Verdict | None:
        """Wait for the verdict, for as long as it takes to notice that a host is lost.

        Return the likeliest suspicion if no verdict comes; None if there is no suspicion either.
        """
        self._wait_until(
            lambda: self.due or self._certain_suspicion() or not self.peers.others,
            limit=deadlines.any_reason(self.silence),
        )
        return self.verdict or self._likeliest_suspicion()

    @property
    def known(self) -> Verdict | None:
        """The verdict, or the suspicion without doubt, which will become the verdict."""
        return self.verdict or self._certain_suspicion()

    def program_ended(self) -> None:
        """Note that this host's program has ended: its ranks' ends are no reason any more."""
        self.ended = True

    def fail(self, why: str, stopped: bool) -> None:
        """Tell the other hosts why this one fails, unless there is a verdict.

        Args:
            why: The reason, in one line.
            stopped: Whether the cause is that this host was told to stop.
        """
        self.on_verdict = lambda verdict: None
        verdict = Verdict(why, here=True, stopped=stopped)
        self.loop.call_soon_threadsafe(self._decide, verdict)

    def _run_in_loop(self, coroutine: Coroutine) -> None:
        """Run a coroutine in the watch's thread and wait for its end."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _tell_hosts(self, message: dict) -> None:
        self.loop.call_soon_threadsafe(self.peers.tell, message)

    def _wait_until(self, condition: Callable[[], bool], limit: float | None = None) -> None:
        """Wait for a condition or a verdict, for at most `limit` seconds."""

        async def poll() -> None:
            while not condition() and not self.verdict:
                await asyncio.sleep(0.05)

        with suppress(TimeoutError):
            self._run_in_loop(asyncio.wait_for(poll(), limit))

    async def _open(self) -> None:
        self.server = await asyncio.start_unix_server(self._accept_rank, self.path, limit=LINE)
        if self.peers.others:
            await self.peers.open()

    async def _leave(self) -> None:
        self.server.close()
        if self.peers.others:
            await self.peers.leave()
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)

    async def _accept_rank(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Listen to a rank of this node until its connection breaks."""
        # asyncio logs the cancelled task of a connection as an error. This one ends quietly.
        with suppress(asyncio.CancelledError):
            await self._listen(reader, writer)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank_pid, launcher_pid = _rank_and_launcher(writer.get_extra_info("socket"))
        name = "a rank"
        explained = False
        with suppress(OSError):
            while line := await reader.readline():
                message = json.loads(line)
                name = message.get("rank", name)
                self.peers.status = message.get("status", self.peers.status)
                explained = explained or bool({"done", "failed", "stopped"} & message.keys())
                await self._handle_message(message)
        status = _exit_status(rank_pid)
        writer.close()
        if not explained and status not in TOLD_TO_STOP:
            await self._suspect(name, status, alone=_is_running(launcher_pid) and not self.bereft)

    async def _handle_message(self, message: Mapping[str, str]) -> None:
        """Act on what a rank of this node says."""
        failed = message.get("failed", "")
        if failed.startswith(f"error: {LOST}"):
            # This rank does not know why its peer is gone; whoever knows will tell. A process of
            # this node that ends after this may have ended for the same reason. The peer that the
            # rank misses has died before, so the loop first gets time to notice its death.
            await asyncio.sleep(MOMENT)
            self.bereft = True
        elif failed:
            self._decide(Verdict(f"a rank failed: {failed.removeprefix('error: ')}", here=True))
        # When a rank has died, the launcher stops the others: the reason is the death, not the
        # stop.
        elif "stopped" in message and not (self.bereft or self.dead):
            self._decide(Verdict(message["stopped"], here=True, stopped=True))

    async def _suspect(self, name: str, ended: int | None, alone: bool) -> None:
        """Suspect a rank of this node, and decide after a while.

        Another, better reason may come in that time.

        Args:
            name: What to call the rank.
            ended: Its exit status, -N for signal N; None if it is unknown.
            alone: Whether no other process of this host had ended before it.
        """
        if alone and not (self.dead and self.dead.doubt < 2):
            doubt = 0 if ended in [-number for number in OF_ITS_OWN] else 1
            why = f"{name} ended without a word: {_describe_end(ended)}"
        else:
            doubt = 2
            why = (
                f"{name} ended without a word after another process of its host: with it, or it "
                "was killed or crashed"
            )
        if self.dead and self.dead.doubt <= doubt:
            return
        self.dead = Verdict(why, here=True, doubt=doubt)
        self.suspected.append(self.dead)
        self.peers.tell({"dead": why, "doubt": doubt})
        # The rank's launcher knows more: how the rank died. If a peer was lost, the node of that
        # peer knows why, and gets time to tell: less than `wait_for_verdict` waits.
        await asyncio.sleep(
            deadlines.better_reason(self.silence)
            if doubt == 2 and self.peers.others
            else deadlines.ENDS_BY_ITSELF
        )
        self.due = True
        if not self.ended:
            self._decide(self._likeliest_suspicion())

    def _certain_suspicion(self) -> Verdict | None:
        """Return the first suspicion without doubt; None if there is none."""
        return next((suspicion for suspicion in self.suspected if not suspicion.doubt), None)

    def _likeliest_suspicion(self) -> Verdict | None:
        """Return the suspicion with the least doubt; None if there is none.

        Of several with the same doubt, it is the first.
        """
        return min(self.suspected, key=lambda suspicion: suspicion.doubt, default=None)

    def _decide(self, verdict: Verdict) -> None:
        """Make this the verdict if there is none yet.

        Then tell the other hosts, and end this host's program.
        """
        if self.verdict:
            return
        # A rank that ended for a reason of its own is the cause of the failures after it.
        if not verdict.stopped:
            verdict = self._certain_suspicion() or verdict
        self.verdict = verdict
        self.peers.tell({"stopped" if verdict.stopped else "failed": verdict.why})
        # If a rank of this node failed, its launcher ends by itself, and gets time for that.
        self.loop.call_later(
            deadlines.ENDS_BY_ITSELF if verdict.here else 0, lambda: self.on_verdict(verdict)
        )


def _rank_and_launcher(connection: socket.socket) -> tuple[int, int]:
    """Return the PIDs of the rank at the other end and of its launcher.

    A PID that is unknown is 0.
    """
    rank_pid, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    stat = process_stat(rank_pid)
    return rank_pid, int(stat[1]) if stat else 0


def _exit_status(pid: int) -> int | None:
    """Return the exit status of a process that has closed its files, -N for signal N.

    None if it is unknown: it still runs, or the launcher has read the status, which the kernel then
    forgets.
    """
    stat = process_stat(pid)
    if not stat or not int(stat[6]) & PF_EXITING:
        return None
    code = int(stat[49])
    return -(code & 0x7F) or code >> 8


def _is_running(launcher_pid: int) -> bool:
    """Return whether a launcher had not begun to end; True if it is unknown (PID 0).

    When a launcher ends, the kernel kills its ranks (process/parent_process.py).
    """
    stat = process_stat(launcher_pid)
    return not launcher_pid or bool(stat and stat[0] not in "ZX" and stat[49] == "0")


def _describe_end(ended: int | None) -> str:
    """Return in words how a rank ended; `ended` as in `Watch._suspect`."""
    if ended is None:
        return "it was killed, or it crashed"
    if ended >= 0:
        return f"its exit status was {ended}"
    return (
        f"it was killed by {signal.Signals(-ended).name}"
        f"{f': {OUT_OF_MEMORY}' if ended == -signal.SIGKILL else ''}"
    )
