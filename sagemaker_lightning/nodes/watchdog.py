"""Finds out which host or rank of a job was lost, and tells every node.

torch.distributed alone waits half an hour for a rank that is gone, and then does not say which one
it was (init_process_group, `timeout`). Here, the toolkit's process on each node keeps a connection
to the same process on every other node (nodes/mesh.py), and each rank of the application keeps one
to the toolkit's process of its own node (callbacks/heartbeat.py). The toolkit's process computes
nothing, so it always answers in time. The first reason to end that a node hears of counts: the
node passes it on to all others and ends its own program.

A rank that ends without giving a reason may have ended because another rank ended: NCCL aborts a
process whose peer is gone, and a launcher kills its ranks when one has failed. So such an end is
only a suspicion at first. The node passes it on to all others, with a degree of doubt. It then
waits for a while for a better reason. If none comes, the suspicion with the least doubt counts;
of several with the same doubt, it is the first.
"""

import asyncio
import math
import os
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract import deadlines, shutdown
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import LOST_PEER, OUT_OF_MEMORY, OWN_REASONS
from sagemaker_lightning.contract.process_stat import PARENT, process_stat
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.hang_watch import HangWatch
from sagemaker_lightning.nodes.mesh import MAX_MESSAGE_BYTES, Mesh, StopReason
from sagemaker_lightning.nodes.messages import (
    HEARD,
    Doubt,
    Fault,
    HostMessage,
    RankMessage,
    Suspicion,
)

STOP_STATUSES = {sign for number in shutdown.SIGNALS for sign in (-number, shutdown.status(number))}
PF_EXITING = 0x4  # flag of a process that ends, or has ended (Linux, include/linux/sched.h)
LOOKS_FOR_RANKS = 0.5  # seconds between two looks for ranks that have begun
LOOKS_FOR_HANGS = 60  # how often, within `hang_timeout`, the ranks are looked at
SETTLE_SECONDS = 0.02  # seconds in which the event loop handles all that had arrived before


class Watchdog:
    """Watches the other hosts and this host's ranks, in a thread.

    The thread runs while the watchdog is entered.

    Args:
        host: Name of this host.
        hosts: Names of all hosts to watch, this one included.
        settings: Settings of this host, which must be the same on all hosts (see `Mesh`).
        on_reason: Called from the thread, with the StopReason, when the program has to end.
        port: As in `Mesh`.
        connect_timeout: As in `Mesh`.
        silence_timeout: As in `Mesh`.
        ends_by_itself: Seconds that a launcher whose rank has died gets to end by itself.
        may_restart: Whether the program is started again if a rank dies. Then the launcher gets no
            time if a signal explains the rank's end.
        hang_timeout: Seconds without a sign of work after which this host's ranks count as hanging.
        batch_timeout: Seconds that a rank may train without beginning or ending a batch.
        restarts: As in `Mesh`.
        program: Returns the PID of this host's program; None before there is one.
        reaped: The exit status of each process that this one has reaped, -N for signal N, by PID.

    Entering it raises UserError if this host cannot listen on the port.
    """

    def __init__(
        self,
        host: str,
        hosts: tuple[str, ...],
        settings: Mapping[str, str],
        *,
        on_reason: Callable[[StopReason], None],
        port: int,
        connect_timeout: float,
        silence_timeout: float,
        ends_by_itself: float | None = None,
        may_restart: bool = False,
        hang_timeout: float = deadlines.HANG_ENDS_PROGRAM,
        batch_timeout: float = math.inf,
        restarts: int = 0,
        program: Callable[[], int | None] = lambda: None,
        reaped: Mapping[int, int] | None = None,
    ) -> None:
        self.reaped = {} if reaped is None else reaped
        self.trouble_at = 0.0  # when it first heard of a fault, by time.monotonic(); 0 before
        self.reason: StopReason | None = None  # why the program has to end
        # The suspicions of all hosts, in the order in which this host heard of them.
        self.suspicions: list[StopReason] = []
        self.own_suspicion: StopReason | None = None  # the one on a rank of this host
        self.has_waited = False  # whether the time for a better reason than that is over
        # The PIDs of the connected ranks that have not said that they lost a peer, and of their
        # launchers.
        self.rank_pids: dict[asyncio.StreamWriter, tuple[int, int]] = {}
        self.launcher_pids: set[int] = set()  # the PIDs of the launchers of all ranks so far
        self.rank_processes: set[int] = set()  # file descriptors of ranks that have not ended
        # How the first rank has ended that a launcher has started; None before, 0 if it is unknown.
        self.first_status: int | None = None
        # The exit statuses, by PID, of the ranks whose end was seen before anybody read it.
        self.statuses: dict[int, int] = {}
        self.speakers: set[int] = set()  # the PIDs of all ranks that have connected so far
        self.connected: set[asyncio.StreamWriter] = set()  # all ranks whose end was not heard
        self.rank_tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference
        self.lost_peer = False  # whether a rank of this host has said that it lost a peer
        self.first_loss = ""  # what the first such rank has said
        # The PIDs of those that had begun to end, and not with their launcher, when a rank said so
        # for the first time.
        self.ended_before: set[int] | None = None
        self.program_has_ended = False  # whether this host's program has ended
        self.is_idle = False  # whether this host has said that its program does nothing
        self.forks = False  # whether this host has said that it can start without the imports
        self.mesh = Mesh(
            host,
            hosts,
            settings,
            port=port,
            connect_timeout=connect_timeout,
            silence_timeout=silence_timeout,
            on_reason=self._decide,
            on_suspicion=self.suspicions.append,
            restarts=restarts,
        )
        self.on_reason = on_reason
        self.silence_timeout = silence_timeout
        self.hang_timeout = hang_timeout
        self.batch_timeout = batch_timeout
        self.program = program
        self.ends_by_itself = deadlines.ENDS_BY_ITSELF if ends_by_itself is None else ends_by_itself
        self.may_restart = may_restart
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> "Watchdog":
        self.folder = tempfile.TemporaryDirectory(prefix="watch-")
        self.path = Path(self.folder.name, "ranks")
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self._run_in_loop(self._open_for_ranks())
        except OSError as error:
            raise UserError(
                f"TMPDIR: no socket can be made in {self.folder.name} ({error.strerror or error}); "
                "set TMPDIR to a folder with a short path, such as /tmp"
            ) from None
        try:
            self._run_in_loop(self._open_for_hosts())
        except OSError as error:
            raise UserError(
                f"port {self.mesh.port}: this host cannot listen on it ({error.strerror}); it is "
                "the one after MASTER_PORT: set MASTER_PORT to a port with a free one after it, "
                "the same on all hosts"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._run_in_loop(self._leave())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.folder.cleanup()

    def wait_until_all_are_ready(self, forks: bool = False) -> StopReason | None:
        """Wait until every host is ready to start its program, or one has a reason to end.

        Return the reason; None if there is none.

        Args:
            forks: Whether this host can start it without the imports.
        """
        self.forks = forks
        self._send_to_hosts(HostMessage(ready=True, forks=forks))
        self._wait_until(lambda: all(peer.ready for peer in self.mesh.others.values()))
        self.mesh.set_status("its program had started")
        return self.reason

    @property
    def all_fork(self) -> bool:
        """Whether all hosts have said that they can start without the imports."""
        return self.forks and all(peer.forks for peer in self.mesh.others.values())

    def wait_until_all_are_done(self) -> StopReason | None:
        """Wait until all programs have ended well, or one host has a reason to end.

        Return the reason; None if there is none. The program of this host must have ended well
        before.
        """
        self.mesh.set_status("its program had ended well")
        self._send_to_hosts(HostMessage(done=True))
        self._wait_until(lambda: all(peer.done for peer in self.mesh.others.values()))
        return self.reason

    def wait_for_reason(self) -> StopReason | None:
        """Wait for the reason to end, for as long as it takes to notice that a host is lost.

        Return the likeliest suspicion if no reason comes; None if there is no suspicion either.
        """
        self._wait_until(
            lambda: self.has_waited or bool(self._certain_suspicion()) or not self.mesh.others,
            limit=deadlines.any_reason(self.silence_timeout),
        )
        return self.reason or self._likeliest_suspicion()

    @property
    def known_reason(self) -> StopReason | None:
        """The reason to end, or the suspicion without doubt, which will become the reason."""
        return self.reason or self._certain_suspicion()

    def program_ended(self) -> None:
        """Note that this host's program has ended: its ranks' ends are no reason any more.

        All that its ranks have said, and how each of them has ended, is known afterwards. Only a
        process that has left the program may hold a connection open; it is not waited for.
        """
        self.program_has_ended = True

        async def all_are_heard() -> None:
            while self.connected:
                await asyncio.sleep(0.01)

        with suppress(TimeoutError):
            self._run_in_loop(asyncio.wait_for(all_are_heard(), deadlines.STDERR_IS_READ))

    def fail(self, why: str, is_request: bool) -> None:
        """Tell the other hosts why this one fails, unless there is a reason already.

        Args:
            why: The reason, in one line.
            is_request: Whether the cause is that this host was asked to stop.
        """
        self.on_reason = lambda reason: None
        reason = StopReason(why, is_local=True, is_request=is_request)
        self.loop.call_soon_threadsafe(self._decide, reason)

    def tell_fault(self, fault: Fault) -> None:
        """Tell the other hosts how this host's program ended."""
        self._send_to_hosts(HostMessage(fault=fault))

    def wait_for_faults(self, limit: float) -> dict[str, Fault | None]:
        """Wait until all other hosts have said how their programs ended; return it by host.

        It is None for a host that is gone, or has said nothing within `limit` seconds. A fault's
        `seconds_ago` are those until now.
        """
        peers = self.mesh.others

        async def poll() -> None:
            while not all(peer.has_said_all for peer in peers.values()):
                await asyncio.sleep(0.05)

        with suppress(TimeoutError):
            self._run_in_loop(asyncio.wait_for(poll(), limit))
        now = time.monotonic()
        return {
            name: peer.fault and peer.fault.aged(now - peer.fault_heard_at)
            for name, peer in peers.items()
        }

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the watchdog's thread and wait for its end."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _send_to_hosts(self, message: HostMessage) -> None:
        self.loop.call_soon_threadsafe(self.mesh.send, message)

    def _wait_until(self, condition: Callable[[], bool], limit: float | None = None) -> None:
        """Wait for a condition or a reason to end, for at most `limit` seconds."""

        async def poll() -> None:
            while not condition() and not self.reason:
                await asyncio.sleep(0.05)

        with suppress(TimeoutError):
            self._run_in_loop(asyncio.wait_for(poll(), limit))

    async def _open_for_ranks(self) -> None:
        self.server = await asyncio.start_unix_server(
            self._accept_rank, self.path, limit=MAX_MESSAGE_BYTES
        )
        self.hang_task = self.loop.create_task(self._look_for_hangs())
        if self.may_restart:
            self.ranks_task = self.loop.create_task(self._look_for_ranks())

    async def _look_for_ranks(self) -> None:
        """Notice the death of ranks that do not speak to the watch, as those of a user's program.

        torchrun gives the other ranks time to save, and they may wait for the dead one in a step.
        """
        seen: set[int] = set()
        while True:
            for rank in rank_progress.all_ranks(self.path):
                pid = rank.pid
                if pid in seen:
                    continue
                seen.add(pid)
                launcher = process_stat(pid)[PARENT : PARENT + 1]
                with suppress(ProcessLookupError):
                    if launcher and rank.launcher and not _may_be_started_again(pid):
                        process = os.pidfd_open(pid)
                        self.rank_processes.add(process)
                        self.loop.add_reader(process, self._ended, process, pid, int(launcher[0]))
            await asyncio.sleep(LOOKS_FOR_RANKS)

    def _ended(self, process: int, pid: int, launcher_pid: int) -> None:
        """Act on the end of a rank, which has just come.

        Args:
            process: A file descriptor of it, by pidfd_open(2).
            pid: Its PID.
            launcher_pid: That of its launcher.
        """
        self._forget_rank(process)
        status = self._exit_status(pid)
        is_first = self.first_status is None and _is_running(launcher_pid)
        if self.first_status is None:
            self.first_status = status or 0
        if status is not None:
            self.statuses[pid] = status
        if pid in self.speakers:
            return
        if status in OWN_REASONS:
            task = self.loop.create_task(self._act_on_death(pid, launcher_pid, status))
            self.rank_tasks.add(task)
            task.add_done_callback(self.rank_tasks.discard)
        elif status and status not in STOP_STATUSES and not self.program_has_ended:
            # The reason if the program says no more than that a rank was lost.
            self._suspect(self._name_of(pid), status, is_first)

    def _name_of(self, pid: int) -> str:
        """Return what to call a rank that has not said its number; other hosts read it, too."""
        return f"host {self.mesh.host}, the rank with PID {pid}"

    def _forget_rank(self, process: int) -> None:
        self.loop.remove_reader(process)
        self.rank_processes.discard(process)
        os.close(process)

    async def _act_on_death(self, pid: int, launcher_pid: int, status: int) -> None:
        """End the program because of a rank's death, unless its launcher ends it in time."""
        by_launcher = await self._killed_by_launcher(pid, launcher_pid)
        await asyncio.sleep(self.ends_by_itself)
        was_killed = status == -signal.SIGKILL
        if (
            not (self.program_has_ended or self.reason or (was_killed and by_launcher))
            and self._suspect(self._name_of(pid), status, True, was_killed)
            and self.own_suspicion
        ):
            self._decide(self.own_suspicion, at_once=True)

    async def _look_for_hangs(self) -> None:
        """End the program when the ranks of this host hang."""
        watch = HangWatch(self.path, self.hang_timeout, self.program, self.batch_timeout)
        while not (why := watch.look(time.monotonic()) or self._why_all_idle(watch.why_idle)):
            await asyncio.sleep(self.hang_timeout / LOOKS_FOR_HANGS)
        if not self.program_has_ended:
            reason = StopReason(f"host {self.mesh.host}: {why}", is_local=True)
            self.suspicions.append(reason)  # without doubt, as the ranks say nothing any more
            # A restart has cost the time in which nobody knew of it, too.
            self.trouble_at = self.trouble_at or watch.hangs_since
            self._decide(reason)

    def _why_all_idle(self, why_idle: str) -> str:
        """Return why the programs of all hosts count as hanging at their start; "" if one works.

        The other hosts hear of it when this host's program begins or ceases to do nothing.

        Args:
            why_idle: Why that of this host does; "" if it does not.
        """
        if bool(why_idle) != self.is_idle:
            self.is_idle = bool(why_idle)
            self.mesh.send(HostMessage(idle=int(self.is_idle)))
        others = self.mesh.others.values()
        return why_idle if all(peer.is_idle or peer.done for peer in others) else ""

    async def _open_for_hosts(self) -> None:
        if self.mesh.others:
            await self.mesh.open()

    async def _leave(self) -> None:
        self.server.close()
        for process in list(self.rank_processes):
            self._forget_rank(process)
        if self.mesh.others:
            await self.mesh.close()
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        # More than once: `wait_for` of Python 3.11 drops a cancellation that comes just when what
        # it waits for is done (https://github.com/python/cpython/issues/86296).
        while pending := [task for task in remaining if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        await asyncio.gather(*remaining, return_exceptions=True)

    def _accept_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a rank of this node until its connection breaks."""
        self.connected.add(writer)
        # In a task of ours: asyncio logs the cancellation of one that it makes as an error.
        task = self.loop.create_task(self._listen(reader, writer))
        self.rank_tasks.add(task)
        task.add_done_callback(self.rank_tasks.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank_pid, launcher_pid = _rank_and_launcher(writer.get_extra_info("socket"))
        self.rank_pids[writer] = rank_pid, launcher_pid
        self.launcher_pids.add(launcher_pid)
        self.speakers.add(rank_pid)
        name = "a rank"
        explained = False
        with suppress(OSError, ValueError):  # ValueError: a line that is too long
            while line := await reader.readline():
                message = RankMessage.parse(line)
                name = message.rank or name
                if message.status is not None:
                    self.mesh.set_status(message.status)
                explained = explained or message.explains_end
                await self._handle_message(message, writer)
                if message.failed is not None:
                    writer.write(HEARD)
        self.rank_pids.pop(writer, None)
        status = self._exit_status(rank_pid)
        writer.close()
        is_suspect = False
        if not explained and status not in STOP_STATUSES:
            is_first = rank_pid in (self.ended_before or ()) or (
                _is_running(launcher_pid) and not self.lost_peer
            )
            was_killed = status == -signal.SIGKILL and not await self._killed_by_launcher(
                rank_pid, launcher_pid
            )
            is_suspect = self._suspect(name, status, is_first, was_killed)
        self.connected.discard(writer)
        if is_suspect:
            await self._decide_after_a_while()

    async def _killed_by_launcher(self, rank_pid: int, launcher_pid: int) -> bool:
        """Return whether SIGKILL for a rank may have come from its launcher, or from itself.

        Where a rank has ended, Lightning's launcher, a rank itself, kills the others and then
        itself. What ends with it ends by a signal of its own (process/parent_process.py).
        """
        await asyncio.sleep(SETTLE_SECONDS)
        return rank_pid in self.launcher_pids or (
            self._exit_status(launcher_pid) == -signal.SIGKILL
        )

    async def _handle_message(self, message: RankMessage, writer: asyncio.StreamWriter) -> None:
        """Act on what a rank of this node says."""
        failed = message.failed or ""
        if failed.startswith(f"error: {LOST_PEER}"):
            self.rank_pids.pop(writer, None)
            self.first_loss = self.first_loss or failed.removeprefix("error: ")
            # This rank does not know why its peer is gone; whoever knows will tell. A process of
            # this node that ends after this may have ended for the same reason. The peer that the
            # rank misses has begun to end before, but the kernel may close its connection to the
            # rank long before the one to this node's toolkit process. The rank itself, which may be
            # that peer's launcher, lives until it is answered.
            if self.ended_before is None:
                self.ended_before = {
                    pid
                    for pid, launcher_pid in self.rank_pids.values()
                    if _has_begun_to_end(pid) and _is_running(launcher_pid)
                }
            await asyncio.sleep(SETTLE_SECONDS)
            self.lost_peer = True
        elif failed:
            why = f"a rank failed: {failed.removeprefix('error: ')}"
            self._decide(StopReason(why, is_local=True))
        # When a rank has died, the launcher stops the others: the reason is the death, not the
        # stop.
        elif message.stopped is not None and not (self.lost_peer or self.own_suspicion):
            self._decide(StopReason(message.stopped, is_local=True, is_request=True))

    def _suspect(
        self, name: str, status: int | None, is_first: bool, was_killed: bool = False
    ) -> bool:
        """Suspect a rank of this node; return whether no better suspicion was there before.

        Args:
            name: What to call the rank.
            status: Its exit status, -N for signal N; None if it is unknown.
            is_first: Whether no other process of this host had ended before it.
            was_killed: Whether SIGKILL has ended it, and neither its launcher nor the end of
                another process explains that, whenever it is heard.
        """
        self._note_trouble()
        known = self.own_suspicion
        if was_killed or (is_first and not (known and known.doubt < Doubt.OWN_HOST)):
            doubt = Doubt.NONE if was_killed or status in OWN_REASONS else Doubt.OTHER_HOST
            why = f"{name} ended without giving a reason: {_describe_end(status)}"
            # An error of NCCL's may be the rank's own, though it speaks of the others.
            if status and status > 0 and self.first_loss:
                why += f"; before, a rank said: {self.first_loss}"
        else:
            doubt = Doubt.OWN_HOST
            why = (
                f"{name} ended without giving a reason, after another process of its host: because "
                "of that, or it was killed or crashed"
            )
        if known and known.doubt <= doubt:
            return False
        self.own_suspicion = StopReason(why, is_local=True, doubt=doubt)
        self.suspicions.append(self.own_suspicion)
        self.mesh.send(HostMessage(dead=Suspicion(why, doubt)))
        return True

    async def _decide_after_a_while(self) -> None:
        """Make the likeliest suspicion the reason, unless a better reason comes in time."""
        assert self.own_suspicion
        doubt = self.own_suspicion.doubt
        if self.may_restart and doubt is Doubt.NONE:
            self._decide(self.own_suspicion, at_once=True)
            return
        # The rank's launcher knows more: how the rank died. If a peer was lost, the node of that
        # peer knows why, and gets time to tell: less than `wait_for_reason` waits.
        await asyncio.sleep(
            deadlines.better_reason(self.silence_timeout)
            if doubt is Doubt.OWN_HOST and self.mesh.others
            else self.ends_by_itself
        )
        self.has_waited = True
        if not self.program_has_ended and (reason := self._likeliest_suspicion()):
            self._decide(reason)

    def _exit_status(self, pid: int) -> int | None:
        """Return the exit status of a process that has closed its files, -N for signal N.

        None if it is unknown: it still runs, or its launcher has read the status, which the kernel
        then forgets.
        """
        stat = process_stat(pid)
        if not stat:
            return self.reaped.get(pid)
        if not int(stat[6]) & PF_EXITING:
            return None
        code = int(stat[49])
        return -(code & 0x7F) or code >> 8

    def _certain_suspicion(self) -> StopReason | None:
        """Return the first suspicion without doubt; None if there is none."""
        return next((suspicion for suspicion in self.suspicions if not suspicion.doubt), None)

    def _likeliest_suspicion(self) -> StopReason | None:
        """Return the suspicion with the least doubt; None if there is none.

        It is the first of several with the same doubt.
        """
        return min(self.suspicions, key=lambda suspicion: suspicion.doubt, default=None)

    def _note_trouble(self) -> None:
        self.trouble_at = self.trouble_at or time.monotonic()

    def _decide(self, reason: StopReason, at_once: bool = False) -> None:
        """Make this the reason to end if there is none yet.

        Then tell the other hosts, and end this host's program.

        Args:
            reason: The reason.
            at_once: Whether a launcher of this host gets no time to end by itself.
        """
        if self.reason:
            return
        self._note_trouble()
        # A rank that ended for a reason of its own is the cause of the failures after it.
        if not reason.is_request:
            reason = self._certain_suspicion() or reason
        self.reason = reason
        self.mesh.send(
            HostMessage(stopped=reason.why) if reason.is_request else HostMessage(failed=reason.why)
        )
        # If a rank of this node failed, its launcher ends by itself, and gets time for that.
        if reason.is_local and not at_once:
            self.loop.call_later(self.ends_by_itself, lambda: self.on_reason(reason))
        else:
            self.on_reason(reason)


def _rank_and_launcher(connection: socket.socket) -> tuple[int, int]:
    """Return the PIDs of the rank at the other end and of its launcher.

    A PID that is unknown is 0.
    """
    rank_pid, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    stat = process_stat(rank_pid)
    return rank_pid, int(stat[1]) if stat else 0


def _may_be_started_again(pid: int) -> bool:
    """Return whether a torchrun of the user's may start a rank again by itself.

    What was forked has the variables of the process that has forked it here, and none of these.
    """
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = {name: value for name, _, value in (each.partition(b"=") for each in entries)}
        return variables.get(b"TORCHELASTIC_MAX_RESTARTS", b"0") not in (b"", b"0")
    return True  # nothing is known of one that has ended


def _has_begun_to_end(pid: int) -> bool:
    """Return whether a process ends, or has ended; False if it is unknown (PID 0)."""
    stat = process_stat(pid)
    return bool(pid) and not (stat and not int(stat[6]) & PF_EXITING)


def _is_running(launcher_pid: int) -> bool:
    """Return whether a launcher had not begun to end; True if it is unknown (PID 0).

    When a launcher ends, the kernel ends its ranks (process/parent_process.py).
    """
    stat = process_stat(launcher_pid)
    return not launcher_pid or bool(stat and stat[0] not in "ZX" and stat[49] == "0")


def _describe_end(status: int | None) -> str:
    """Return in words how a rank ended; `status` as in `Watchdog._suspect`."""
    if status is None:
        return "it was killed, or it crashed"
    if status >= 0:
        return f"its exit status was {status}"
    return (
        f"it was killed by {signal.Signals(-status).name}"
        f"{f': {OUT_OF_MEMORY}' if status == -signal.SIGKILL else ''}"
    )
