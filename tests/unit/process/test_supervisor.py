"""process/supervisor.py: nothing outlives the program.

That holds for whatever it started, and however it ended.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from containers import ROOT

from sagemaker_lightning.contract.shutdown import handled_signals
from sagemaker_lightning.process import supervisor as supervise
from sagemaker_lightning.process.parent_process import LAUNCHER_ENDED, PR_SET_PDEATHSIG
from sagemaker_lightning.process.supervisor import Started, StoppedBeforeStart, Supervisor


def living(mark: str) -> list[list[str]]:
    """Return the command lines of the processes that have `mark` in them."""
    lines = [
        process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline", "status"])
    ]
    return [line for line in lines if any(mark in part for part in line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "prefix",
    ["", "setsid "],
    ids=["in its group", "in a session of its own, as torchrun's ranks are"],
)
@pytest.mark.parametrize("status", [0, 3])
def test_what_a_program_leaves_behind_is_ended(tmp_path, monkeypatch, capsys, prefix, status):
    monkeypatch.setattr(supervise, "REST_IS_KILLED", 0.5)
    mark = f"rest-{uuid.uuid4().hex}"
    # A shell that ends before `setsid` has begun its session leaves it in the group of the program.
    rest = (
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(300)"
    )
    script = f'{prefix}{sys.executable} -c "{rest}" {mark} & '
    script += f"until [ -e ready ]; do sleep 0.01; done; exit {status}"
    supervisor = Supervisor()
    ended = supervisor.run(["sh", "-c", script], cwd=tmp_path)
    assert ended.status == status and ended.stop_signal is None
    assert supervisor.statuses[supervisor.child.pid] == status
    assert ("what it has left running was ended" in capsys.readouterr().out) == (status == 0)
    # The watch of the ranks may ask for the other one's, which nobody else will ever read.
    (other,) = supervisor.statuses.keys() - {supervisor.child.pid}
    assert supervisor.statuses[other] == -(signal.SIGKILL if prefix else signal.SIGTERM)
    assert living(mark) == []


DEAF = "trap '' TERM; touch ready; while :; do sleep 60; done"


ORPHANS = """
import os, pathlib, sys, time
children = pathlib.Path(f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/children")
others = children.read_text().split()  # of other tests, too
for status in range(3):
    if not os.fork():
        os.fork() or (time.sleep(0.1), os._exit(status))
        os._exit(0)
    os.wait()
def zombies():
    pids = set(children.read_text().split()).difference(others)
    paths = [pathlib.Path(f"/proc/{pid}/stat") for pid in pids]
    return [path for path in paths if path.exists() and ") Z" in path.read_text()]
ends_at = time.monotonic() + 60
while not zombies() and time.monotonic() < ends_at:
    time.sleep(0.05)
while zombies() and time.monotonic() < ends_at:
    time.sleep(0.05)
sys.exit(len(zombies()))
"""


def test_what_loses_its_parent_and_ends_is_reaped_while_the_program_runs(tmp_path):
    aside = subprocess.Popen(["sh", "-c", "exit 3"])  # somebody else's, who asks for it later
    supervisor = Supervisor()
    command = [sys.executable, "-S", "-c", ORPHANS, str(os.getpid())]
    assert supervisor.run(command, tmp_path).status == 0
    assert sorted(supervisor.statuses.values()) == [0, 0, 1, 2]
    assert aside.wait() == 3


def test_what_ends_after_the_program_is_not_named(tmp_path, capsys):
    script = "setsid sh -c 'touch ready; sleep 0.2' & until [ -e ready ]; do sleep 0.01; done"
    ended = Supervisor().run(["sh", "-c", script], tmp_path)
    assert ended.status == 0 and capsys.readouterr().out == ""


def test_a_program_that_does_not_listen_is_killed(tmp_path):
    supervisor = Supervisor()
    mark = f"deaf-{uuid.uuid4().hex}"

    def end() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        supervisor.terminate(grace=0.0)

    threading.Thread(target=end, daemon=True).start()
    assert supervisor.run(["sh", "-c", DEAF, mark], cwd=tmp_path).status == -9
    assert living(mark) == []


HEARS = "trap : TERM; touch ready; while :; do sleep 0.01; done"
LEAVES = f'sh -c "{DEAF}" & wait'
ENDS = "trap 'trap \"\" TERM' TERM; touch ready; while :; do sleep 0.01; done"
STILL_RUNS = {
    "it ignores the signal": (DEAF, "the program", "it ignores the signal"),
    "it hears the signal": (HEARS, "the program", "it saves, or does not act on the signal"),
    "it has heard the signal": (ENDS, "the program", "it saves, or does not act on the signal"),
    "it has ended": (LEAVES, "something that the program has started", "it ignores the signal"),
}


@pytest.mark.parametrize(("script", "what", "why"), STILL_RUNS.values(), ids=STILL_RUNS)
def test_a_program_that_does_not_end_of_a_signal_is_named_before_it_is_killed(
    tmp_path, monkeypatch, script, what, why
):
    said = []
    monkeypatch.setattr(supervise.log, "log", lambda level, line: said.append(line))
    supervisor = Supervisor()
    ignored = []
    supervisor.on_ignored = ignored.append

    def stop() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while len(supervisor.timers) < 2 or (script == LEAVES and not supervisor.statuses):
            time.sleep(0.01)
        kill, say = supervisor.timers
        say.function()
        kill.function()

    with supervisor:
        threading.Thread(target=stop, daemon=True).start()
        ended = supervisor.run(["sh", "-c", script], cwd=tmp_path)
    status = -signal.SIGTERM if script == LEAVES else -signal.SIGKILL
    assert (ended.status, ended.stop_signal) == (status, signal.SIGTERM)
    line = f"{what} has not ended 5 s after SIGTERM: {why}; SIGKILL comes 110 s after the signal"
    assert said == [f"{line}, or before"] and supervisor.has_killed
    assert ignored == (said if "ignores" in why else [])
    supervisor._say_that_it_runs()
    assert len(said) == 1  # nothing runs any more


def test_the_end_may_come_before_the_start(tmp_path):
    supervisor = Supervisor()
    supervisor.terminate(grace=1)
    assert (
        supervisor.run([sys.executable, "-c", "import time; time.sleep(300)"], cwd=tmp_path).status
        == -15
    )


class SlowError(io.BytesIO):
    """A log that is written slowly, and loses what is not flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.log = b""

    def write(self, data: bytes) -> int:
        time.sleep(0.05)
        return super().write(data)

    def flush(self) -> None:
        self.log = self.getvalue()


def test_the_end_of_its_stderr_is_kept_and_all_of_it_is_in_the_log(tmp_path, monkeypatch):
    log = SlowError()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=log, flush=log.flush))
    script = "head -c 70000 /dev/zero | tr '\\0' x >&2; printf 'caf\\351' >&2"
    ended = Supervisor().run(["sh", "-c", script], cwd=tmp_path)
    assert ended.stderr == "x" * (64 * 1024 - 4) + "caf\ufffd"
    assert log.log == b"x" * 70000 + b"caf\xe9"


SAVES = """
(trap 'sleep 0.2; touch saved; exit 0' TERM; touch ready; while :; do sleep 0.02; done) &
wait
"""


@pytest.mark.parametrize("stop_comes_first", [True, False])
def test_a_program_that_saves_gets_one_signal_and_is_waited_for(
    tmp_path, monkeypatch, stop_comes_first
):
    """Its first process dies of the signal; then another host fails, too, or it was the first."""
    sent = []
    slept = []
    send = os.killpg

    def wait(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(os, "killpg", lambda *signal: sent.append(signal[1]) or send(*signal))
    monkeypatch.setattr(supervise, "time", SimpleNamespace(sleep=wait))

    def stop(supervisor: Supervisor) -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        acts = [lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: supervisor.terminate(30)]
        first, second = acts if stop_comes_first else reversed(acts)
        first()
        while not supervisor.timers:
            time.sleep(0.01)
        second()

    with Supervisor() as supervisor:
        threading.Thread(target=stop, args=(supervisor,), daemon=True).start()
        ended = supervisor.run(["sh", "-c", SAVES], cwd=tmp_path)
    assert (ended.status, ended.stop_signal) == (-15, signal.SIGTERM)
    assert sent == [signal.SIGTERM] and (tmp_path / "saved").exists()
    assert slept and set(slept) == {0.1}
    intervals = [timer.interval for timer in supervisor.timers]
    assert intervals == ([110.0, 5.0, 30] if stop_comes_first else [30, 110.0])
    assert all(timer.finished.is_set() and timer.daemon for timer in supervisor.timers)


def test_what_runs_as_another_user_is_the_jobs_and_nothing_is_left_of_it(tmp_path, monkeypatch):
    """This process may not read its variables. No orphan stays as a zombie."""

    def refuse(self) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "environ", refuse)
    children = {child.pid for child in psutil.Process().children()}
    ended = Supervisor().run(["sh", "-c", "sleep 60 & sleep 60 & exit 3"], cwd=tmp_path)
    left = [child for child in psutil.Process().children() if child.pid not in children]
    for child in left:
        child.kill()
    assert (ended.status, left) == (3, [])


@pytest.mark.slow
def test_a_frozen_rank_dies_of_its_launchers_end(tmp_path):
    """The kernel's signal waits until it continues. A program that is asked to stop has minutes."""
    rank = "import ctypes, os, signal; os.write(1, b'x'); "
    rank += f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {LAUNCHER_ENDED}); "
    rank += "os.kill(os.getpid(), signal.SIGSTOP); signal.pause()"
    script = (
        f"import os, subprocess, sys; rank = subprocess.Popen([sys.executable, '-c', {rank!r}])"
    )
    script += "; os.waitpid(rank.pid, os.WUNTRACED); print(rank.pid, file=open('rank', 'w'))"
    supervisor = Supervisor()
    # As if it had been asked to stop, and had heard it.
    supervisor.timers.append(threading.Timer(10, supervisor._kill))
    supervisor.timers[0].start()
    supervisor.run([sys.executable, "-c", script], cwd=tmp_path)
    assert supervisor.statuses[int((tmp_path / "rank").read_text())] == -LAUNCHER_ENDED


def test_signals_that_were_blocked_are_heard():
    """As entrypoint.sh blocks them until somebody listens."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
    try:
        with Supervisor():
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*handled_signals()}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("number", handled_signals())
def test_a_signal_that_comes_before_the_program_ends_what_prepares_it(number):
    with Supervisor() as supervisor, pytest.raises(StoppedBeforeStart) as raised:
        signal.raise_signal(number)
    name = signal.Signals(number).name
    assert str(raised.value) == f"{name} came before the program was started"
    assert supervisor.stop_signal == number


def children_but(program: subprocess.Popen) -> set[int]:
    """Return the PIDs of this process's children that have nothing to do with a program."""
    return {child.pid for child in psutil.Process().children()} - {program.pid}


def test_what_a_program_has_started_is_found_however_deep():
    """Else it would not be killed in time: a process is adopted only when its parent has ended."""
    script = "sh -c \"sh -c 'echo; exec sleep 60'; :\"; :"
    command = ["sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as program:
        program.stdout.readline()
        below = psutil.Process(program.pid).children(recursive=True)
        found = supervise.living_processes(program.pid, children_but(program), {})
        os.killpg(program.pid, signal.SIGKILL)
    psutil.wait_procs(below)  # they may be this process's now
    assert len(below) == 2 and {process.pid for process in found} == {
        program.pid,
        *(process.pid for process in below),
    }


def test_the_exit_status_of_the_program_itself_is_left_to_who_waits_for_it():
    with subprocess.Popen(["false"]) as program:
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        assert supervise.living_processes(program.pid, children_but(program), {}) == []
    assert program.returncode == 1


def test_a_process_that_ends_while_it_is_looked_at_has_started_nothing(monkeypatch):
    children = psutil.Process.children

    def look(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        if recursive:
            raise psutil.NoSuchProcess(process.pid)
        return children(process)

    monkeypatch.setattr(psutil.Process, "children", look)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        found = supervise.living_processes(program.pid, children_but(program), {})
    assert [process.pid for process in found] == [program.pid]


COUNTING = """
import signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
open("ready", "w").close()
while not signals:
    time.sleep(0.01)
time.sleep(1)
sys.exit(len(signals))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [(subprocess, "Popen"), (threading, "Thread")],
    ids=["before it is known", "once it is known"],
)
def test_a_signal_at_the_start_reaches_the_program_once(tmp_path, monkeypatch, module, name):
    def make(*args, **options):
        """Return what the module makes; meanwhile the job is asked to stop."""
        made = getattr(module, name)(*args, **options)
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3)  # two signals at the same time would be one
        return made

    monkeypatch.setattr(supervise, module.__name__, SimpleNamespace(**vars(module) | {name: make}))
    with Supervisor() as supervisor:
        end = supervisor.run([sys.executable, "-c", COUNTING], cwd=tmp_path)
    assert (end.status, end.stop_signal) == (1, signal.SIGTERM)


@pytest.mark.slow
def test_other_peoples_processes_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "REST_IS_KILLED", 0.5)
    mark = f"other-{uuid.uuid4().hex}"
    other_process = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(300)' {mark}; true"]
    )
    try:
        _wait_for(mark)
        assert Supervisor().run(["true"], cwd=tmp_path).status == 0
        assert living(mark) and other_process.poll() is None
    finally:
        for child in psutil.Process(other_process.pid).children():
            child.kill()
        other_process.wait()


OUTSIDE = """
import subprocess, sys
from pathlib import Path
from sagemaker_lightning.process import supervisor
supervisor.REST_IS_KILLED = 0.5
code = 'import sys, time; open(sys.argv[1], "w"); time.sleep(300)'
left = f"{sys.executable} -c '{code}' {sys.argv[1]}"
started = f"until [ -e {sys.argv[1]}-outside ]; do sleep 0.1; done; exit 3"
program = f"env -u {supervisor.MARK_VARIABLE} setsid {left}-outside & {left}-inside & {started}"
assert supervisor.Supervisor().run(["sh", "-c", program], Path.cwd()).status == 3
"""


@pytest.mark.slow
def test_what_came_from_outside_is_left_alone(tmp_path):
    """As a session of remote debugging; it has none of the job's variables."""
    mark = f"session-{uuid.uuid4().hex}"
    variables = os.environ | {supervise.MARK_VARIABLE: "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OUTSIDE, mark]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True, timeout=60)
    processes_left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(mark in part for part in process.info["cmdline"] or [])
    ]
    names = [process.info["cmdline"][-1] for process in processes_left]
    for process in processes_left:
        process.kill()
    assert names == [f"{mark}-outside"]


def _wait_for(mark: str) -> None:
    while not living(mark):
        time.sleep(0.05)
    time.sleep(0.5)  # time for the handler to be set


IN_A_SHELL = """
import signal, sys, time
def save(number, frame):
    print("SAVED", flush=True)
    sys.exit(9)
signal.signal(signal.SIGTERM, save)
open("ready", "w")
time.sleep(120)
"""


def stop_once_ready(folder: Path) -> None:
    """Send this process SIGTERM, from a thread, once a program has made a file."""

    def stop() -> None:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()


@pytest.mark.parametrize("starts", [True, False], ids=["a program", "no program yet"])
def test_who_dies_of_a_signal_gets_none_if_another_process_hears_it(tmp_path, monkeypatch, starts):
    """As SDK 3's shell and driver, which read what the program prints."""
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=log, flush=log.flush))
    (tmp_path / "program.py").write_text(IN_A_SHELL)
    program = f"{sys.executable} program.py" if starts else "touch ready; read line <fifo"
    os.mkfifo(tmp_path / "fifo")
    script = f"({program}) | while read line; do echo got $line; done; exit 7 # the-shell"
    supervisor = Supervisor(is_deaf=lambda words: any("the-shell" in word for word in words))

    with supervisor:
        stop_once_ready(tmp_path)
        ended = supervisor.run(["bash", "-c", script], cwd=tmp_path, keeps_stdout=True)
    expected = (7, "got SAVED\n") if starts else (-15, "")
    assert (ended.status, ended.stderr) == expected
    assert log.getvalue().decode() == expected[1]


def test_what_is_in_a_session_of_its_own_gets_a_stop_once_the_program_has_ended(tmp_path):
    saves = "trap 'touch saved; exit' TERM; touch ready; while :; do sleep 0.01; done"
    supervisor = Supervisor()

    with supervisor:
        stop_once_ready(tmp_path)
        ended = supervisor.run(["sh", "-c", f'setsid sh -c "{saves}" & wait'], tmp_path)
    assert ended.status == -signal.SIGTERM and (tmp_path / "saved").exists()


PIPED = """
import signal, sys, time
from pathlib import Path

def save(*_):
    print("saving", flush=True)
    time.sleep(0.3)
    print("saving", flush=True)
    Path("saved").touch()
    sys.exit(3)

signal.signal(signal.SIGTERM, save)
Path("ready").touch()
while True:
    print("step", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("command", "status", "is_deaf"),
    [
        ("set -o pipefail; {python} program.py | tee log", 3, True),
        ("{python} program.py > >(tee log) 2>&1", 3, True),
        ("sleep 600 & {python} program.py; exit 5", 5, True),
        ("set -o pipefail; {python} program.py | cat | grep -c step", 3, True),
        ("{python} program.py | tee log", -signal.SIGTERM, False),
    ],
)
def test_what_reads_a_programs_output_does_not_die_before_it(tmp_path, command, status, is_deaf):
    """Whether the shell that starts it hears the signal, or dies of it, as a script's does."""
    (tmp_path / "program.py").write_text(PIPED)
    supervisor = Supervisor(is_deaf=(lambda words: "the-driver" in words) if is_deaf else None)

    script = command.format(python=sys.executable)
    with supervisor:
        stop_once_ready(tmp_path)
        ended = supervisor.run(["bash", "-c", script, "the-driver"], tmp_path, keeps_stdout=True)
    assert (tmp_path / "saved").exists()
    assert ended.status == status


LAST_PID = Path("/proc/sys/kernel/ns_last_pid")  # pid_namespaces(7): the next PID is the one after


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="who may not choose PIDs")
def test_a_program_gets_its_signal_if_another_process_had_its_pid(tmp_path):
    ready = tmp_path / "ready"
    program = f"trap 'exit 9' TERM; touch {ready}; while :; do sleep 0.05; done"
    for _ in range(20):  # another process may come first
        other = subprocess.Popen(["sleep", "60"])
        list(psutil.process_iter())
        other.kill()
        other.wait()
        supervisor = Supervisor(is_deaf=lambda words: False)

        def stop(supervisor=supervisor) -> None:
            while not ready.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        with supervisor:
            threading.Thread(target=stop, daemon=True).start()
            LAST_PID.write_text(str(other.pid - 1))
            ended = supervisor.run(["sh", "-c", program], cwd=tmp_path)
        assert supervisor.child is not None
        assert ended.status == 9
        ready.unlink()
        if supervisor.child.pid == other.pid:
            return
    pytest.fail("the PID was never given again")


# Reads its program's output to the end before it asks how the program has ended, as SDK 3's driver.
DEAF_DRIVER = """
import subprocess, sys
program = subprocess.Popen([sys.executable, "-S", "program.py"], stdout=subprocess.PIPE)
program.stdout.read()
sys.exit(program.wait())
"""
LEAVES_ONE = """
import os, signal, time
from pathlib import Path
if os.fork():
    os._exit(STATUS)
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(20)
Path("outlived").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("status", [3, 0])
def test_who_waits_for_what_its_program_has_left_is_not_kept_waiting(tmp_path, monkeypatch, status):
    monkeypatch.setattr(supervise, "REST_IS_KILLED", 0.2)
    monkeypatch.setattr(supervise, "LOOKS_FOR_ORPHANS", 0.05)
    said = []
    monkeypatch.setattr(supervise.log, "warning", said.append)
    (tmp_path / "driver.py").write_text(DEAF_DRIVER)
    (tmp_path / "program.py").write_text(LEAVES_ONE.replace("STATUS", str(status)))
    supervisor = Supervisor(is_deaf=lambda words: "driver.py" in words)
    assert supervisor.run([sys.executable, "-S", "driver.py"], cwd=tmp_path).status == status
    assert not (tmp_path / "outlived").exists()
    assert len(said) == (status == 0) and all("has left running was ended" in line for line in said)


SAVES_IN_ITS_SESSION = """
import os, signal, sys, time
from pathlib import Path
if os.fork():
    signal.pause()  # a program without a handler, which dies of the signal
os.setsid()

def save(*_):
    with Path("heard").open("a") as file:
        file.write("x")
    os.close(1)  # what waits for the output ends, while this saves
    time.sleep(0.5)
    with Path("saved").open("a") as file:
        file.write("x")
    os._exit(0)

signal.signal(signal.SIGTERM, save)
Path("ready").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_session_of_its_own_hears_a_stop_while_a_deaf_process_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LOOKS_FOR_ORPHANS", 0.05)
    (tmp_path / "driver.py").write_text(DEAF_DRIVER)
    (tmp_path / "program.py").write_text(SAVES_IN_ITS_SESSION)
    supervisor = Supervisor(is_deaf=lambda words: "driver.py" in words)
    with supervisor:
        stop_once_ready(tmp_path)
        supervisor.run([sys.executable, "-S", "driver.py"], cwd=tmp_path)
    assert (tmp_path / "saved").read_text() == "x" and not supervisor.has_killed
    assert (tmp_path / "heard").read_text() == "x"


def test_what_is_started_aside_outlives_the_program_and_may_start_the_next_one(tmp_path):
    supervisor = Supervisor()
    theirs, ours = os.pipe()
    aside = []

    def start_aside() -> None:
        while not (tmp_path / "runs").exists():
            time.sleep(0.01)
        aside.append(supervisor.start_aside(["cat"], tmp_path, os.environ, theirs))
        (tmp_path / "end").touch()

    threading.Thread(target=start_aside, daemon=True).start()
    program = ["sh", "-c", "touch runs; while [ ! -e end ]; do sleep 0.01; done"]
    assert supervisor.run(program, cwd=tmp_path).status == 0
    (process,) = aside
    assert process.poll() is None
    supervisor.prepare_again()
    reading, writing = os.pipe()
    started = subprocess.Popen(["sh", "-c", "echo hello >&2; exit 4"], stderr=writing)
    os.close(writing)
    ended = supervisor.run([], cwd=tmp_path, started=Started(started.pid, reading))
    assert (ended.status, ended.stderr) == (4, "hello\n")
    assert process.poll() is None
    os.close(ours)
    os.close(theirs)
    assert process.wait(60) == 0


def test_which_came_first_a_stop_or_a_reason_to_end():
    supervisor = Supervisor()
    supervisor.terminate(1.0)
    assert not supervisor.stop_came_first
    supervisor.stop_signal = signal.SIGTERM
    assert not supervisor.stop_came_first
    supervisor.terminate(1.0)
    assert supervisor.stop_came_first


def test_a_stop_between_two_starts_is_one_before_the_start(tmp_path):
    with Supervisor() as supervisor:
        assert supervisor.run(["true"], cwd=tmp_path).status == 0
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedBeforeStart, match="^SIGTERM came before the program was start"):
            supervisor.prepare_again()
        with pytest.raises(StoppedBeforeStart):  # from now on, at once
            os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.stop_signal == signal.SIGTERM
