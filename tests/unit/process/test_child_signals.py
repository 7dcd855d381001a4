"""process/child_signals.py: processes that a training's code starts, and who signals all of them.

Each test has real processes, which import no torch. A Stop stands for the training.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nightly
import psutil
import pytest
from containers import ROOT

from sagemaker_lightning.process import child_signals

HANG_SECONDS = 120
# What a user's code starts, by kind: a function that makes use of it.
KINDS = '''
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sagemaker_lightning.contract.shutdown import TrainingStop
from sagemaker_lightning.process import child_signals


def manager(context):
    shared = context.Manager().dict(value=6)
    return lambda: shared["value"]


def pool(context):
    workers = context.Pool(2)
    return lambda: sum(workers.map(abs, [-1, 2, -3]))


def executor(context):
    workers = ProcessPoolExecutor(2, context)
    return lambda: sum(workers.map(abs, [-1, 2, -3]))


def process(context):
    """One that is not a daemon: this process waits for its end before it ends."""
    started = context.Process(target=time.sleep, args=(1000,))
    started.start()
    return lambda: 6 if started.is_alive() else started.exitcode


def process_of_process(context):
    ours, theirs = context.Pipe()
    context.Process(target=start_another, args=(theirs,)).start()
    other = ours.recv()
    return lambda: 6 if Path(f"/proc/{other}").exists() else 0


def start_another(connection):
    os.register_at_fork(after_in_child=lambda: time.sleep(0.2))  # a signal comes before it begins
    started = multiprocessing.Process(target=time.sleep, args=(1000,))
    started.start()
    connection.send(started.pid)
    time.sleep(1000)


class Sleeper(multiprocessing.Process):
    """A class of the user's own, with a method of its own."""

    def run(self):
        time.sleep(1000)


def handles(connection):
    """Wait, in a system call, for what never comes; end with 7 when asked to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    connection.send("ready")
    connection.recv()


def starts_programs(connection):
    """Start programs in two ways, and tell how SIGTERM ends them."""
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    connection.send(program.wait())
    copy = os.fork()
    if not copy:
        os.execvp("sleep", ["sleep", "1000"])
    os.kill(copy, signal.SIGTERM)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
'''
TRAINS = f"""{KINDS}
if __name__ == "__main__":
    use = globals()[sys.argv[1]](multiprocessing.get_context(sys.argv[2]))
    with TrainingStop(Path.cwd(), print) as stop:
        use()
        print("ready", flush=True)
        while not stop.signal_number:
            time.sleep(0.01)
        time.sleep(0.5)  # the batch continues
        print("used:", use(), flush=True)
    sys.exit(143)
"""
METHODS = ("fork", "spawn", "forkserver")
CASES = [
    *((kind, "fork") for kind in ("manager", "pool", "executor", "process", "process_of_process")),
    *((kind, method) for kind in ("manager", "process") for method in METHODS[1:]),
]


class Program:
    """A program in a session of its own."""

    def __init__(self, folder: Path, code: str, *arguments: str) -> None:
        file = folder / "program.py"
        file.write_text(code)
        self.process = subprocess.Popen(
            [sys.executable, "-Wignore::DeprecationWarning", file, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Program":
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.process.stdout.read()
        return self

    def __exit__(self, *_) -> None:
        for process in self.all():
            process.kill()
        self.process.communicate()

    def all(self) -> list[psutil.Process]:
        """Return the processes of its session that live."""
        processes = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    processes.append(process)
            except ProcessLookupError:
                continue
        return [each for each in processes if each.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> tuple[int, str]:
        """Wait until it and all that it started have ended; return its status and its output."""
        status = self.process.wait(HANG_SECONDS)
        deadline = time.monotonic() + HANG_SECONDS
        while left := self.all():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return status, self.process.stdout.read()


@pytest.mark.parametrize(
    "number", nightly.all_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT])
)
@pytest.mark.parametrize(("kind", "method"), CASES)
def test_what_a_training_uses_outlives_a_signal_to_the_group(tmp_path, kind, method, number):
    """And none of it is left when the training has ended."""
    with Program(tmp_path, TRAINS, kind, method) as program:
        assert len(program.all()) > 1
        os.killpg(program.process.pid, number)
        status, output = program.end()
    assert status == 143 and "used: 6\n" in output, output


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_nothing_that_a_training_started_outlives_it_when_it_is_killed(tmp_path, kind, method):
    with Program(tmp_path, TRAINS, kind, method) as program:
        for process in program.all():
            process.terminate()  # they keep it
        program.process.kill()
        assert program.end()[0] == -signal.SIGKILL


ENDED_BY_PARENT = f"""{KINDS}
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with TrainingStop(Path.cwd(), print):
        print("ready", flush=True)
        with context.Pool(2) as workers:  # it signals them as it ends
            print(sum(workers.map(abs, [-1, 2, -3])))
        for started in [context.Process(target=time.sleep, args=(1000,)), Sleeper()]:
            started.start()
            started.terminate()
            started.join()
            print(started.exitcode)
        ours, theirs = context.Pipe()
        started = context.Process(target=handles, args=(theirs,))
        started.start()
        ours.recv()
        time.sleep(0.2)  # it waits in the system call
        started.terminate()
        started.join()
        print(started.exitcode)
        started = context.Process(target=starts_programs, args=(theirs,))
        started.start()
        print(ours.recv(), ours.recv())
        started.join()
        print(started.exitcode, "run" in vars(started))
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_its_parent_signals_ends_as_it_would_without_us(tmp_path, method):
    with Program(tmp_path, ENDED_BY_PARENT, method) as program:
        status, output = program.end()
    says = ["6", "-15", "-15", "7", "-15", "-15", "0", "False"]
    assert (status, output.split()) == (0, says), output


TRAINS_NOT = f"""{KINDS}
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    processes = [context.Process(target=time.sleep, args=(1000,)) for _ in range(2)]
    for started in processes:
        started.start()
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
    print("ready", flush=True)
    for started in processes:
        started.join()
        print(started.exitcode)
"""


@pytest.mark.parametrize("method", METHODS)
def test_where_nothing_is_trained_a_signal_ends_children_at_once(tmp_path, method):
    with Program(tmp_path, TRAINS_NOT, method) as program:
        os.killpg(program.process.pid, signal.SIGTERM)
        status, output = program.end()
    assert (status, output.split()) == (0, ["heard", "-15", "-15"])


WORKS = f"""{KINDS}
def work(connection):
    child_signals.end_with_the_loader()
    connection.send(None)
    connection.recv()
    connection.send("works")
    time.sleep(1000)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    workers = []
    start = multiprocessing.process.BaseProcess.start
    for start in (start, start.__wrapped__):  # the second as if this module were not imported
        ours, theirs = context.Pipe()
        workers.append((ours, context.Process(target=work, args=(theirs,))))
        start(workers[-1][1])
        ours.recv()
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(None))
    print("ready", flush=True)
    while not heard:
        time.sleep(0.02)
    time.sleep(0.5)  # the kernel drops a signal that comes while another one of its number waits
    for connection, worker in workers:
        connection.send(None)
        print(connection.recv())
        worker.terminate()
        worker.join()
        print(worker.exitcode)
"""


def test_a_data_worker_ends_with_its_loader_alone(tmp_path):
    """Whether or not something is trained: who hears a signal may continue with its data."""
    with Program(tmp_path, WORKS) as program:
        os.killpg(program.process.pid, signal.SIGTERM)
        status, output = program.end()
    assert (status, output.split()) == (0, ["works", "0", "works", "0"]), output


@pytest.mark.parametrize("fails", [False, True])
def test_a_start_leaves_nothing_behind(fails):
    """One that fails leaves nothing either."""
    during = []

    def start(process) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        during.append((child_signals._thread.starts_child, set(child_signals.SIGNALS) <= blocked))
        if fails:
            raise OSError

    process = multiprocessing.get_context("fork").Process(target=print)
    attributes = dict(vars(process))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        child_signals._keeping(start)(process)
    except OSError:
        assert fails
    assert during == [(True, True)]
    assert not child_signals._thread.starts_child and vars(process) == attributes
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
