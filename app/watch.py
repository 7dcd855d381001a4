"""Each node watches the others and its own ranks: who is lost, and why, is known everywhere within seconds.

torch.distributed alone waits half an hour for a rank that is gone, and then does not say which (init_process_group,
`timeout`). Here the toolkit's process on each node, which computes nothing and so is never late, holds a line to that
of every other node (app/peers.py), and each rank of the application one to that of its own (app/lifeline.py). The first
reason to end that a node hears of is its verdict: it tells all others, and has its own program end.
"""

import asyncio
import json
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path

from app.errors import UserError
from app.peers import LAST_WORDS, LINE, Peers, Verdict


class Watch:
    """The watch on `host`; while it is entered, it runs in a thread.

    Args:
        on_verdict: Called from the thread, with the verdict, when the program has to end.
        settings: Those of `Peers`.
    """

    def __init__(
        self, host: str, hosts: tuple[str, ...], told: Mapping[str, str], *, on_verdict: Callable, **settings
    ) -> None:
        self.peers = Peers(host, hosts, told, decide=self._decide, **settings)
        self.on_verdict, self.silence = on_verdict, settings["silence"]
        self.verdict: Verdict | None = None
        self.ended, self.dead, self.bereft = False, None, False
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
        """Return the verdict, waiting for as long as it may take to miss a host that is lost; or which rank is dead."""
        self._until(lambda: self.dead or not self.peers.others, limit=self.silence + LAST_WORDS)
        return self.verdict or self.dead

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
        name, explained, bereft = "a rank", False, False
        with suppress(OSError):
            while line := await reader.readline():
                message = json.loads(line)
                name, self.peers.status = message.get("rank", name), message.get("status", self.peers.status)
                explained = explained or bool({"done", "failed", "stopped"} & message.keys())
                if "stopped" in message:
                    self._decide(Verdict(message["stopped"], here=True, stopped=True))
                # A rank that lost another one does not know why; who does will say so.
                if message.get("failed", "").startswith("error: lost a peer"):
                    bereft = True
                elif "failed" in message:
                    self._decide(Verdict(f"a rank failed: {message['failed'].removeprefix('error: ')}", here=True))
        writer.close()
        self.bereft = self.bereft or bereft
        if not explained:
            # Ended by its launcher, as another rank here had lost a peer and ended: the peer's node knows why.
            if self.bereft and self.peers.others:
                await asyncio.sleep(min(3 * LAST_WORDS, self.silence))  # within what `wait_for_verdict` waits
            self.dead = Verdict(f"{name} ended without a word: it was killed, or it crashed", here=True)
            await asyncio.sleep(LAST_WORDS)  # its launcher knows more: how it died
            if not self.ended:
                self._decide(self.dead)

    def _decide(self, verdict: Verdict) -> None:
        """Take `verdict` if it is the first: tell the others, and whoever has to end the program."""
        if self.verdict:
            return
        self.verdict = verdict
        self.peers.tell({"stopped" if verdict.stopped else "failed": verdict.why})
        # A launcher whose rank has failed ends by itself.
        self.loop.call_later(LAST_WORDS if verdict.here else 0, lambda: self.on_verdict(verdict))
