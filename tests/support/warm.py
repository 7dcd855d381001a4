"""Processes that start warm: forked from a server with torch and Lightning imported.

`start(argv, folder, variables)` does for `python SCRIPT`, `python -m MODULE` and `python -c CODE`
what Popen does, in 0.1 s of processor time in place of 4. The server has also imported the
application.

Whatever such a process starts with the same interpreter is forked in the same way: the toolkit's
program, for example, and Lightning's ranks. So the tree of processes is the real one, and so are
signals, exit statuses, output, environment and working folder. Two things differ from a new
interpreter: modules of installed packages are imported already, and the allocator and OpenMP keep
the server's settings. A test of the start itself uses subprocess.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import io
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path

import mutations
import psutil

ROOT = Path(__file__).resolve().parents[2]
# Modules that take most of a start's time. The toolkit itself is not among them: it reads its
# environment when it is imported.
PRELOADED = (
    "app.train",
    "app.train_multi_node",
    "torchmetrics.classification",
    "boto3",
    "paramiko",
    "s3fs",
    "tensorboard.backend.event_processing.event_file_loader",
    "warm",
)
STACK_SIGNAL = signal.SIGRTMIN + 5
"""A process writes its stack when it gets this signal, for which programs have no use."""
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(list(PRELOADED))
# The folder in which each process notes its environment: /proc/PID/environ still has the server's.
notes_dir = os.environ.get("WARM_NOTES")
# Whether the test that runs may start processes: `make test-fast` leaves those tests out.
is_slow_test = True
OWN_FOLDERS = str(ROOT / "app"), str(ROOT / "sagemaker_lightning")
# An environment of real_projects.py also uses the packages of another environment.
ADDED_PACKAGES = {path for path in sys.path if Path(path).name == "site-packages"}
PACKAGE_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    | ADDED_PACKAGES
)


class Started:
    """A process started by `start`, with the part of subprocess.Popen that the tests use."""

    def __init__(self, process, stdout: io.TextIOBase | None) -> None:
        self.process = process
        self.stdout = stdout
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, else None."""
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        """Its exit status; -N if signal N ended it; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended.

        subprocess.TimeoutExpired: it takes longer than that.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return the process's output since the last call, when it has ended."""
        outputs: list[str] = []
        reader = threading.Thread(target=lambda: outputs.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            error = subprocess.TimeoutExpired(str(self.pid), timeout)
            error.add_note(stacks(self.pid))
            raise error
        self.wait(timeout)
        return outputs[0], None

    def send_signal(self, number: int) -> None:
        """Send it a signal if it is still there."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    argv: Sequence[object],
    folder: Path,
    variables: Mapping[str, str] = os.environ,
    output: int | None = None,
    errors: int | None = None,
) -> Started:
    """Start `argv` in `folder` with exactly these variables.

    Both streams go to file descriptor `output`, or else to the pipe `stdout` of what is returned;
    the stream of errors goes to file descriptor `errors` if that is given.
    """
    ensure_server()
    reading = None
    if output is None:
        reading, output = os.pipe()
    with contextlib.ExitStack() as closed:
        if reading is not None:
            closed.callback(os.close, output)
        process = FORK_SERVER.Process(
            target=_begin,
            args=(
                [str(word) for word in argv],
                str(folder),
                dict(variables),
                _SentDescriptor(output),
                _SentDescriptor(output if errors is None else errors),
                notes_dir,
            ),
        )
        start_alone(process)
        # Otherwise another thread's start() also waits for this process; if two threads wait for
        # it, one of them gets exit status 255.
        multiprocessing.process._children.discard(process)
    return Started(
        process,
        os.fdopen(reading, encoding="utf-8", errors="replace") if reading is not None else None,
    )


def start_alone(process: multiprocessing.Process) -> None:
    """Start a child that stands for a program: it keeps no signals as a training's child does.

    process/child_signals.py has changed how processes of multiprocessing start.
    """
    start = type(process).start
    getattr(start, "__wrapped__", start)(process)


def run(
    argv: Sequence[object],
    folder: Path,
    variables: Mapping[str, str] = os.environ,
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Run `argv` to its end, and return it with all its output in `stdout`.

    It is killed after `timeout` seconds.
    """
    started = start(argv, folder, variables)
    try:
        output, _ = started.communicate(timeout)
    finally:
        started.kill()
    return subprocess.CompletedProcess([str(word) for word in argv], started.returncode, output, "")


def run_apart(
    argv: Sequence[object],
    folder: Path,
    variables: Mapping[str, str] = os.environ,
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Do as `run`, with what is written to the stream of errors in `stderr`."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = start(argv, folder, variables, output.fileno(), errors.fileno())
        try:
            started.wait(timeout)
        finally:
            started.kill()
        for file in (output, errors):
            file.seek(0)
        words = [str(word) for word in argv]
        return subprocess.CompletedProcess(words, started.returncode, output.read(), errors.read())


def environ(pid: int) -> dict[str, str]:
    """Return the environment of a process that was started warm; {} for any other process."""
    try:
        return json.loads(Path(notes_dir, str(pid)).read_text())
    except (OSError, ValueError):
        return {}


def stacks(pid: int) -> str:
    """Return what a process and all below it are doing: states, signals, Python's stacks."""
    lines = []
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            lines += [
                f"{process.pid}, child of {process.ppid()}: {' '.join(process.cmdline())[:200]}"
            ]
            lines += re.findall(r"^(?:State|Threads|Sig\w+|ShdPnd):.*", status, re.MULTILINE)
            stack = Path(notes_dir, f"{process.pid}.stack")
            if stack.exists():  # else it was not started warm, and the signal would end it
                process.send_signal(STACK_SIGNAL)
                time.sleep(0.5)
                lines.append(stack.read_text())
    return "\n".join(lines)


def ensure_server() -> None:
    """Start the server if it does not run; it has a PYTHONPATH of its own."""
    global notes_dir
    assert is_slow_test, "a test that starts processes which import torch is marked `slow`"
    if notes_dir is None:
        notes_dir = tempfile.mkdtemp(prefix="warm-")
        atexit.register(shutil.rmtree, notes_dir, ignore_errors=True)
    own_environment = dict(os.environ)
    python_path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    os.environ.update(PYTHONPATH=python_path, OMP_NUM_THREADS="1", WARM_NOTES=notes_dir)
    os.environ.pop("COVERAGE_PROCESS_START", None)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own_environment)


class _SentDescriptor:
    """A file descriptor that is sent to a process of the server."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _SentDescriptor._received, (reduction.DupFd(self.number),)

    @staticmethod
    def _received(duplicate) -> int:
        return duplicate.detach()


def _begin(
    argv: list[str],
    folder: str,
    variables: dict[str, str],
    output: int,
    errors: int,
    shared_notes_dir: str,
) -> None:
    """Become the requested process; this runs in a child of the server.

    Another test may have started the server, with another folder of environments.
    """
    global notes_dir
    notes_dir = shared_notes_dir
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for number in {output, errors} - {1, 2}:
        os.close(number)
    # Data workers need this: a child of a fork server would start them through the server.
    multiprocessing.set_start_method("fork", force=True)
    _become(argv, folder, variables)


def _become(argv: list[str], folder: str | None, variables: Mapping[str, str]) -> None:
    """Change this process as exec would, as far as a program can see, and run `argv`.

    It never returns.
    """
    status = 1
    try:
        os.environ.clear()
        os.environ.update(variables)
        Path(notes_dir, str(os.getpid())).write_text(json.dumps(dict(variables)))
        if folder is not None:
            os.chdir(folder)
        _reset_process()
        if "COVERAGE_PROCESS_START" in variables:  # mutants.py
            _measure()
        mutations.apply_named()
        status = _exit_status(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def _reset_process() -> None:
    """Remove what the server left: signal handlers, streams, modules, thread counts."""
    tempfile.tempdir = None  # else it is that of the test in which the server began
    gc.freeze()  # else each collection would look at, and copy, what the server has imported
    signal.set_wakeup_fd(-1)
    # The test in which the server began may have blocked or ignored some; Python ignores two.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
    for number in set(signal.Signals) - kept:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    logging.root.handlers.clear()
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    # These files stay open until the process ends.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    # It is open as long as the process runs.
    faulthandler.register(STACK_SIGNAL, Path(notes_dir, f"{os.getpid()}.stack").open("w"))  # noqa: SIM115
    multiprocessing.process._children.clear()
    multiprocessing.process._current_process._config["daemon"] = False
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.startswith("sagemaker_training") or (
            file
            and not file.startswith((*PACKAGE_FOLDERS, *OWN_FOLDERS))
            and name not in ("__main__", "warm")
        ):
            del sys.modules[name]
    sys.path[:] = [
        path
        for path in sys.path
        if path.startswith((*PACKAGE_FOLDERS, sys.base_prefix)) or path == str(ROOT)
    ]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]

    import torch
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    # Lightning reads the rank once, when it is imported.
    ranks = (
        os.environ.get(name)
        for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    )
    rank_zero_only.rank = int(next((rank for rank in ranks if rank), 0))
    subprocess._fork_exec = _fork_exec
    os.execve = _execve


def _measure() -> None:
    """Record which lines run, until the process ends, as a new interpreter would."""
    import coverage

    if started := coverage.Coverage.current():  # before the fork
        started._auto_save = False
        started.stop()
    coverage.process_startup(force=True)


def _exit_status(argv: list[str]) -> int:
    """Run a command line in this interpreter, and return its exit status, -N for signal N."""
    script, code, sys.argv = _program(argv)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    status: object = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as leaving:
        status = leaving.code
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        status = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()
    if status is None:
        return 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        return 1
    return status & 255


def _program(argv: list[str]) -> tuple[str, object, list[str]]:
    """Return file, code and sys.argv of a command line that `_is_ours` accepts."""
    words = list(argv[1:])
    while words[0] in ("-u", "--"):
        del words[0]
    if words[0] == "-c":
        sys.path.insert(0, "")
        return "<string>", compile(words[1], "<string>", "exec"), ["-c", *words[2:]]
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        code = (
            f"import runpy\nrunpy.run_module({words[1]!r}, run_name='__main__', alter_sys=True)\n"
        )
        return words[1], code, words[1:]
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    return words[0], compile(Path(words[0]).read_bytes(), words[0], "exec"), words


def _is_ours(argv: Sequence[str], folder: str | bytes | None = None) -> bool:
    """Return whether this interpreter can run a command line.

    The command must name this interpreter, and then a file below `folder`, a module or code.
    """
    words = [word for word in argv[1:3] if word not in ("-u", "--")]
    if argv[0] not in ("python", sys.executable) or not words or words[:2] == ["-m", "pip"]:
        return False
    return words[0] in ("-c", "-m") or Path(os.fsdecode(folder or "."), words[0]).suffix == ".py"


_real_fork_exec = subprocess._fork_exec


def _fork_exec(*arguments) -> int:
    """Fork this process if subprocess would start the same interpreter.

    Args:
        *arguments: What `Popen._execute_child` passes (Lib/subprocess.py of Python 3.11).
    """
    words = arguments[0]
    folder = arguments[4]
    variables = arguments[5]
    stdin = arguments[6]
    stdout = arguments[9]
    stderr = arguments[11]
    new_session = arguments[15]
    argv = [os.fsdecode(word) for word in words]
    if not _is_ours(argv, folder):
        return _real_fork_exec(*arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        if new_session:
            os.setsid()
        for number, source in ((0, stdin), (1, stdout), (2, stderr)):
            if source not in (-1, number):
                os.dup2(source, number)
        _close_on_exec()
        environment = (
            dict(os.environ)
            if variables is None
            else dict(os.fsdecode(entry).split("=", 1) for entry in variables)
        )
        _become(argv, folder and os.fsdecode(folder), environment)
    return pid


def _close_on_exec() -> None:
    """Close the files that exec would close.

    Their numbers stay in use: objects that the server made may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        if number > 2 and number != nothing:
            with contextlib.suppress(OSError):
                if fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.dup2(nothing, number, inheritable=False)


_real_execve = os.execve


def _execve(path: str, argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """Continue as another program, as exec does."""
    if not _is_ours(list(argv)):
        _real_execve(path, argv, variables)
    sys.stdout.flush()
    _close_on_exec()
    _become(list(argv), None, dict(variables))
