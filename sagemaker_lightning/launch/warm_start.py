"""A process that has imported torch and Lightning, and forks the ranks of a restarted program.

    python sagemaker_lightning/launch/warm_start.py FILE MODULE ...

launch/standby.py starts it once a rank is known. It imports the modules, too, makes FILE once it
can fork, and gets a request on the socket that is its stdin each time that the ranks have died. It
forks a launcher, which forks each rank, and ends as they do. A rank runs the program's script at
once. This process stays for the next time. It has no thread of Python's and has not touched a GPU:
then fork is safe. (numpy and scipy have started threads of OpenBLAS, which itself starts them again
in a fork.) Otherwise its answer is why it cannot fork.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import TypedDict

if __name__ == "__main__":
    # `python FILE` puts the file's folder first; the program's own folder comes later.
    sys.path.pop(0)

from sagemaker_lightning.contract.log import say_last
from sagemaker_lightning.contract.shutdown import SIGNALS, status
from sagemaker_lightning.process.parent_process import LAUNCHER_ENDED, LAUNCHER_VARIABLE

OTHERS_END_SECONDS = 2.0
"""Seconds from the end of a rank to that of the others, which wait for it."""
FAILED = "Child process with PID {pid} terminated with code {code}"
"""What Lightning's own launcher writes, which contract/failures.py reads."""


RANK_NAME = "rank-"
"""How the name of a forked rank's process begins, before its local rank."""


class RankStart(TypedDict):
    """How to start a rank: the command and the variables that a request has for it."""

    command: list[str]
    variables: dict[str, str]


class Answer(TypedDict, total=False):
    """The answer to a request: one of these two members."""

    pid: int
    """The PID of the launcher."""
    why_not: str
    """Why this process cannot fork."""


def main() -> None:
    """Import, wait for requests, and start the ranks of each; return in each of them alone."""
    why_not = threads_at_start() or imports_fail(sys.argv[2:]) or why_unsafe()
    if not why_not:
        open(sys.argv[1], "x").close()  # noqa: PTH123, SIM115
    requests = socket.socket(fileno=os.dup(0))
    while True:
        line, stderr = receive(requests)
        if not line:
            os._exit(0)  # the job has ended
        answer: Answer = {"why_not": why_not}
        if not why_not:
            launcher = fork_launcher()
            if not launcher:
                break
            answer = {"pid": launcher}
        os.close(stderr)
        requests.sendall(json.dumps(answer).encode() + b"\n")
    requests.close()
    os.dup2(stderr, 2)
    os.close(stderr)
    start_ranks(json.loads(line)["ranks"])


def receive(requests: socket.socket) -> tuple[bytes, int]:
    """Return the next request, and the file descriptor for what its program says of errors.

    The request is b"" if no more will come.
    """
    begin, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
    if not begin:
        return b"", -1
    with requests.makefile("rb") as stream:
        return begin + stream.readline(), descriptors[0]


def fork_launcher() -> int:
    """Fork the launcher, which the parent of this process adopts; return its PID, 0 in itself.

    It has a process group of its own, and blocks signals: they are meant for the ranks.
    """
    reading, writing = os.pipe()
    if between := os.fork():
        os.close(writing)
        os.waitpid(between, 0)
        with open(reading) as file:  # noqa: PTH123
            return int(file.read())
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.setsid()
    os.write(writing, str(os.getpid()).encode())
    os.close(writing)
    os.close(reading)
    return 0


def start_ranks(ranks: list[RankStart]) -> None:
    """Start the ranks and end as they do; return in each of them alone.

    Args:
        ranks: The command line and the environment of each.
    """
    pids = []
    for rank in ranks:
        if not (pid := os.fork()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            become(rank["command"], rank["variables"] | {LAUNCHER_VARIABLE: str(os.getppid())})
            return
        pids.append(pid)
    for number in signal.sigpending() & set(SIGNALS):  # they came before all ranks were there
        for pid in pids:
            os.kill(pid, number)
    os._exit(wait_for(pids))


def imports_fail(modules: list[str]) -> str:
    """Import what a rank imports first; return why that fails, "" if it does not.

    From then on, the ranks meet at once: torch alone waits between its tries.

    Args:
        modules: What it imports then; the image of a job may lack some.
    """
    try:
        from sagemaker_lightning.process.lightning_import import import_lightning

        import_lightning()

        from sagemaker_lightning.compat.torch_store import connect_soon

        connect_soon()
    except BaseException as error:  # SystemExit, too: a version that is not supported
        return f"the imports fail ({type(error).__name__})"
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return ""


def threads_at_start() -> str:
    """Return a line if this process has threads before it imports anything; "" if it has none.

    They are those of a `sitecustomize.py` that computes: threads of OpenMP are not there in a fork,
    which waits for them for ever.
    """
    more = len([*Path("/proc/self/task").iterdir()]) - 1
    return f"the interpreter's start has left threads ({more})" if more else ""


def why_unsafe() -> str:
    """Return why this process must not be forked; "" if it may be."""
    import threading

    import torch

    if torch.cuda.is_initialized():
        return "it uses a GPU"
    threads = [
        thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
    ]
    return f"it has threads ({', '.join(threads)})" if threads else ""


def become(command: list[str], variables: dict[str, str]) -> None:
    """Make this process what `command`, a script or module of Python's, would find.

    Args:
        command: Python, -u or -- or neither, the script or -m and a module, and its arguments.
        variables: Its environment.
    """
    import random

    import numpy
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    os.environ.clear()
    os.environ.update(variables)
    words = command[1:]
    while words[0] in ("-u", "--"):
        if words.pop(0) == "-u" and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(write_through=True)
    sys.argv = words
    is_module = words[0] == "-m"
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))  # noqa: PTH100, PTH109, PTH120
    sys.path.insert(0, folder)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    # Each process has random numbers of its own, unless it seeds them.
    random.seed()
    numpy.random.seed()
    # Lightning reads the rank once, when it is imported.
    local_rank = variables.get("LOCAL_RANK", "0")
    rank = int(variables.get("RANK", local_rank))
    # Its environment in /proc is that of the process that it was forked from.
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:  # noqa: PTH123
        name.write(f"{RANK_NAME}{local_rank}")
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning keeps it on the function


def run_script() -> None:
    """Run the script, or the module, that sys.argv names as the main module of this process."""
    if sys.argv[0] == "-m":
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    path = sys.argv[0]
    with open(path, "rb") as file:  # noqa: PTH123
        code = compile(file.read(), path, "exec")
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def show_error(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Print an error as Python does, from the frames of the script on."""
    shown, frame = trace, trace
    while frame:
        if frame.tb_frame.f_code.co_filename == __file__:
            shown = frame.tb_next
        frame = frame.tb_next
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


def wait_for(pids: list[int]) -> int:
    """Wait for the ranks, end the others once one has failed, and return this process's status."""
    living = set(pids)
    statuses: list[int] = []
    kills_at = float("inf")
    while living:
        pid, raw = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if time.monotonic() > kills_at:
                for other in living:
                    os.kill(other, LAUNCHER_ENDED)  # not SIGKILL, which would look like a cause
                    os.kill(other, signal.SIGCONT)  # one that is frozen would not die of it
                kills_at = float("inf")
            time.sleep(0.02)
            continue
        if pid not in living:
            continue
        living.discard(pid)
        code = os.waitstatus_to_exitcode(raw)
        if code and not statuses and code not in map(status, SIGNALS):
            say_last(FAILED.format(pid=pid, code=code))
            kills_at = time.monotonic() + OTHERS_END_SECONDS
        if code:
            statuses.append(status(-code) if code < 0 else code)
    return statuses[0] if statuses else 0


if __name__ == "__main__":
    main()
    sys.excepthook = show_error
    run_script()
