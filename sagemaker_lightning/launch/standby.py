"""Keeps a process ready that starts a program again without its imports (launch/warm_start.py)."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.process_stat import PARENT, process_stat
from sagemaker_lightning.contract.rendezvous import free_port
from sagemaker_lightning.launch import HOME, attempts
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.launch.warm_start import Answer, RankStart
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.waits import TORCHRUN
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.supervisor import ProgramEnd, Started, Supervisor, command_line

SCRIPT = Path(__file__).with_name("warm_start.py")
POLL_SECONDS = 0.5
FIRST_SECONDS = 5.0
"""Seconds before the process imports anything: the ranks then make what they begin with.

A job that ends by then has no use for it.
"""
ANSWER_SECONDS = 60.0
"""Seconds for an answer, as the process may have just begun its imports; without one, it hangs."""
LOCAL_RANK = "LOCAL_RANK"
"""The variable by which a rank knows that a launcher has started it."""
OWN_IMPORTS = ("sagemaker_lightning.resume.callback",)
"""What each program has imported that the watch knows of."""
IMAGES_IMPORTS = ("sagemaker_lightning.cli.run", "torch.utils.tensorboard")
"""What a program of the image imports."""


@dataclass(frozen=True)
class Rank:
    """How a rank of this host was started."""

    command: list[str]
    variables: dict[str, str]
    cwd: Path = Path()
    """Its working directory, which it may have changed since."""
    parent: int = 0
    """The PID of what has started it; 0 if that is unknown."""

    @property
    def local_rank(self) -> int:
        """Its number on this host; the process that starts the others has no variable for it."""
        return int(self.variables.get(LOCAL_RANK, "0"))

    @property
    def words(self) -> list[str]:
        """What follows Python's own flags, those that `become` of launch/warm_start.py knows."""
        words = self.command[1:]
        while words[:1] in (["-u"], ["--"]):
            words = words[1:]
        return words

    @property
    def can_be_forked(self) -> bool:
        """Whether it is a script, or a module (-m), that this Python runs."""
        words = self.words
        is_module = words[:1] == ["-m"] and len(words) > 1
        return self._is_this_python and (is_module or words[:1] != [] and words[0].endswith(".py"))

    @property
    def _is_this_python(self) -> bool:
        """Whether its Python is this process's, with the same packages."""
        path = self.variables.get("PATH", os.defpath)
        found = shutil.which(self.command[0], path=path) if self.command else None
        if not found:
            return False
        here = Path(sys.executable)
        # python and python3 are two names of one file in each virtual environment.
        return Path(found).samefile(here) and Path(found).parent.samefile(here.parent)

    def is_of_image(self, cwd: Path) -> bool:
        """Whether it is one of the image's own programs, started in folder `cwd`."""
        if self.words[0] == "-m":
            return self.words[1].startswith("app.")
        return (cwd / self.words[0]).is_relative_to(HOME / "app")

    @classmethod
    def of_process(cls, pid: int) -> "Rank":
        """Return how a process was started, as the kernel keeps it; OSError if it is gone."""
        words, variables = (
            Path(f"/proc/{pid}/{name}")
            .read_bytes()
            .decode(errors="surrogateescape")
            .split("\0")[:-1]
            for name in ("cmdline", "environ")
        )
        entries = dict(entry.split("=", 1) for entry in variables if "=" in entry)
        return cls(words, entries, Path(f"/proc/{pid}/cwd").readlink(), _parent(pid))


class Standby:
    """Starts a process that waits, soon after a rank of this host is known; it stays until the end.

    By then, that rank has made its own imports. What the process forks has to be known, too. All
    ranks are known before they set up their data. Until then, it can fork the one that starts the
    others by itself, as Lightning does.

    Args:
        here: Describes the job and this host.
        supervisor: Runs the program.
        starts_it: Whether a process, given by its command line, starts what is forked in its place,
            and does nothing else once that has ended. None if only the supervisor does.
    """

    def __init__(
        self,
        here: SageMakerEnvironment,
        supervisor: Supervisor,
        starts_it: Callable[[list[str]], bool] | None = None,
    ) -> None:
        self.here = here
        self.supervisor = supervisor
        self.starts_it = starts_it
        self.why_not = ""
        """Why there is no process."""
        self.ranks: list[Rank] = []
        """How all ranks were started; [] as long as not all are known."""
        self.first: list[Rank] = []
        """How the one was started that starts the others; [] if it is unknown, or there is none."""
        self.forked: list[Rank] = []
        """Those that were forked last."""
        self.process: subprocess.Popen[bytes] | None = None
        self.requests: socket.socket | None = None
        """To the process."""
        self.folder = tempfile.TemporaryDirectory(prefix="standby-")
        self.forks = Path(self.folder.name, "forks")
        """A file that the process makes once it can fork."""
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> "Standby":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_thread()
        self._end_process()
        self.folder.cleanup()

    @property
    def is_ready(self) -> bool:
        """Whether there is a process, and it can fork."""
        self._end_thread()
        return self._waits and bool(self.ranks) and self.forks.exists()

    @property
    def _waits(self) -> bool:
        """Whether there is a process."""
        return bool(self.process and self.process.poll() is None)

    def run(
        self,
        command: list[str],
        cwd: Path,
        variables: Mapping[str, str],
        watchdog: Watchdog,
        restarts: Restarts,
        keeps_stdout: bool = False,
    ) -> ProgramEnd:
        """Run the program once: without its imports if it is started again and that is possible.

        Otherwise a line says why not.

        Args:
            command: See `Supervisor.run`.
            cwd: See `Supervisor.run`.
            variables: The environment, without what differs from one start to the next.
            watchdog: Watches the other hosts, and this host's ranks.
            restarts: The restarts so far.
            keeps_stdout: See `Supervisor.run`.
        """
        new = {"SAGEMAKER_LIGHTNING_WATCH": str(watchdog.path)} | attempts.variables(restarts)
        started = self.take(new, watchdog.all_fork) if restarts.taken else None
        if len(restarts.taken) < restarts.most:
            self.prepare(watchdog.path, cwd)
        return self.supervisor.run(command, cwd, {**variables, **new}, keeps_stdout, started)

    def prepare(self, watch: Path, cwd: Path) -> None:
        """Unless there is a process that knows all ranks, start one as soon as a rank is known.

        Args:
            watch: The socket of this host's watch, beside which the ranks write.
            cwd: The working directory of the ranks, unless `starts_it` has changed it.
        """
        if self._waits and self.ranks:
            return
        self.why_not = "no rank had made its ExactResume"
        self.ended.clear()
        self.thread = threading.Thread(target=self._start_in_time, args=(watch, cwd), daemon=True)
        self.thread.start()

    def take(self, new: Mapping[str, str], all_fork: bool = False) -> Started | None:
        """Let the process start the program; return the program.

        None, and a line, if there is no process, or none that can. The torchruns of several hosts
        start their ranks together, or none does.

        Args:
            new: What is new in the environment of its ranks.
            all_fork: Whether all hosts were ready to start it without the imports.
        """
        self._end_thread()
        is_shared = any(TORCHRUN in rank.variables for rank in self.ranks)
        if self.process and is_shared and len(self.here.hosts) > 1 and not all_fork:
            self._end_process()
            self.why_not = "another host has to start torchrun"
        self.forked = self.ranks or self.first
        if not (self.process and self.requests and self.forked):
            log.info(f"starting it with all imports: {self.why_not}")
            return None
        port = free_port()
        ranks: list[RankStart] = [
            {
                "command": rank.command,
                "variables": {**rank.variables, **self._rendezvous(rank, port), **new},
            }
            for rank in self.forked
        ]
        reading, writing = os.pipe()
        answer: Answer = {}
        try:
            socket.send_fds(self.requests, [b"{"], [writing])
            self.requests.sendall(json.dumps({"ranks": ranks}).encode()[1:] + b"\n")
            with self.requests.makefile() as answers:
                answer = json.loads(answers.readline() or "{}")
        except OSError:  # it has ended, or hangs
            pass
        finally:
            os.close(writing)
        if "pid" in answer:
            return Started(answer["pid"], reading)
        os.close(reading)
        self._end_process()
        why_not = answer.get("why_not", "the process that forks does not answer")
        log.info(f"starting it with all imports: {why_not}")
        return None

    def _rendezvous(self, rank: Rank, port: int) -> dict[str, str]:
        """Return the variables by which ranks find each other without their former launcher."""
        found = {}
        if len(self.forked) > 1:  # one alone may start others, now or in a later training
            found[LOCAL_RANK] = str(rank.local_rank)
        if TORCHRUN in rank.variables:
            found["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if len(self.here.hosts) == 1:
            found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return found

    def _end_process(self) -> None:
        if self.process and self.requests:
            self.process.kill()
            self.process.wait()
            self.requests.close()
        self.process = None

    def _end_thread(self) -> None:
        self.ended.set()
        if self.thread:
            self.thread.join()

    def _start_in_time(self, watch: Path, cwd: Path) -> None:
        """Start the process once a rank is known, and note the ranks once all of them are there.

        They may be dead by then: their files stay.
        """
        known: dict[int, Rank] = {}
        before = 0
        is_settled = False
        begins = math.inf
        while not (is_settled or self.ended.wait(POLL_SECONDS)):
            count = 0
            for rank in rank_progress.all_ranks(watch):
                count = max(count, rank.ranks)
                if rank.pid not in known:
                    with suppress(OSError):  # it has ended
                        known[rank.pid] = Rank.of_process(rank.pid)
            if known and begins == math.inf:
                begins = time.monotonic() + FIRST_SECONDS
                self.why_not = f"the ranks were known for less than {FIRST_SECONDS:g} s"
            if time.monotonic() >= begins:
                is_settled = self._settle(known, len(known) > before, count, cwd)
                before = len(known)

    def _settle(self, known: Mapping[int, Rank], is_new: bool, count: int, cwd: Path) -> bool:
        """Start the process if it can stand for the launcher of these ranks; note them, or why not.

        Return whether that is settled: whether all ranks are there, or it cannot.

        Args:
            known: How each rank was started, by PID.
            is_new: Whether there is another one since the last call.
            count: How many ranks there are; 0 as long as that is unknown.
            cwd: See `prepare`.
        """
        # A forked one has the command line of its parent.
        started = [rank for rank in known.values() if str(SCRIPT) not in rank.command]
        is_forked = len(started) < len(known)
        ranks = [*self.forked[: len(known) - len(started)], *started]
        ranks.sort(key=lambda rank: rank.local_rank)
        if is_new:
            if why_not := self._why_not(known, ranks, is_forked):
                self._end_process()
                self.why_not = why_not
                return True
            if not self._waits:
                self._start(ranks[0], cwd)
            self.first = [rank for rank in ranks if LOCAL_RANK not in rank.variables][:1]
        if len(ranks) != count:
            self.why_not = "not all ranks were known yet"
            return False
        if [rank.local_rank for rank in ranks] == list(range(len(ranks))):
            self.ranks = ranks
        else:
            self._end_process()
            self.why_not = "not all ranks are known"
        return True

    def _why_not(self, known: Mapping[int, Rank], ranks: list[Rank], is_forked: bool) -> str:
        """Return why these ranks cannot be forked; "" if they can."""
        if not (is_forked or self._are_the_program(known)):
            return "the program that started the ranks may have other work to do"
        if not all(rank.can_be_forked for rank in ranks):
            return f"the ranks were not started as a script or module by {sys.executable}"
        # The variable is that of the shell that has started it.
        if self.starts_it and any(rank.variables.get("PWD") != str(rank.cwd) for rank in ranks):
            return "the ranks have changed their working directory"
        return ""

    def _start(self, rank: Rank, cwd: Path) -> None:
        """Start the process, which has what a rank has found."""
        if self.starts_it:
            cwd = rank.cwd
        self.forks.unlink(missing_ok=True)
        imports = IMAGES_IMPORTS if rank.is_of_image(cwd) else OWN_IMPORTS
        command = [sys.executable, str(SCRIPT), str(self.forks), *imports]
        self.requests, theirs = socket.socketpair()
        self.requests.settimeout(ANSWER_SECONDS)
        with theirs:
            self.process = self.supervisor.start_aside(
                command, cwd, rank.variables, theirs.fileno()
            )

    def _are_the_program(self, known: Mapping[int, Rank]) -> bool:
        """Return whether these ranks are all that the program does.

        It is one of them, or a torchrun that has started them. What starts ranks otherwise, such as
        a shell script, may have more to do once they have ended.

        Args:
            known: How each rank was started, by PID.
        """
        if not self.supervisor.child:
            return False
        programs = {pid: rank.parent for pid, rank in known.items()}
        if all(TORCHRUN in rank.variables for rank in known.values()):
            programs = {rank.parent: _parent(rank.parent) for rank in known.values()}
            if len(programs) > 1:
                return False
        return self.supervisor.child.pid in programs or any(
            self.starts_it and self.starts_it(command_line(parent)) for parent in programs.values()
        )


def _parent(pid: int) -> int:
    """Return the PID of a process's parent; 0 if the process is gone."""
    return int((process_stat(pid)[PARENT : PARENT + 1] or ["0"])[0])
