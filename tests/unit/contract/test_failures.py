"""contract/failures.py: one line that a person can act on, with host and rank.

The failure file has at most 1,024 characters.
"""

import builtins
import gc
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
from containers import ROOT
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from sagemaker_lightning.contract import failures
from sagemaker_lightning.contract.environment import SageMakerEnvironment, host_and_rank
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.failures import (
    LAST_LINE,
    ended_rank,
    explain,
    last_error,
    report_uncaught,
    reported,
    write,
    written,
)
from sagemaker_lightning.contract.reporting import report_failures, report_stop
from sagemaker_lightning.launch import toolkit_hook

TORCH_ERRORS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 15.7 GiB"
)


@pytest.mark.parametrize(
    ("class_name", "message", "says"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
            "out of GPU memory: make",
        ),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate",
            "out of host mem",
        ),
        (
            "OSError",
            "[Errno 28] No space left on device: '/opt/ml/checkpoints/a.ckpt'",
            "disk full: make the job's",
        ),
        (
            "RuntimeError",
            "[enforce fail] . PytorchStreamWriter failed writing file data/3",
            "disk full",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid 9) is killed by signal: Bus error. shared memory",
            "--shm-size=1g",
        ),
        (
            "DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was",
            "lost a peer",
        ),
        (
            "RuntimeError",
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [172.18.0.3]:3",
            "lost a peer",
        ),
        (
            "DistNetworkError",
            "The client socket has timed out after 600000ms while trying to connect",
            "lost a peer",
        ),
        ("std::bad_alloc", "std::bad_alloc", "out of host memory"),
        (
            "ModuleNotFoundError",
            "No module named 'wandb'",
            "requirements.txt there (ModuleNotFoundError: No",
        ),
        (
            "FileNotFoundError",
            "[Errno 2] No such file: '/opt/ml/input/data/train/x.csv'",
            "missing in the input",
        ),
        (
            "ValueError",
            "Expected more than 1 value per channel when training, "
            "got input size torch.Size([1, 8])",
            "batch norm cannot train on a batch of one sample, such as the last of an epoch: "
            "give another --data.batch_",
        ),
        ("KeyError", "'x'", "KeyError: 'x'"),
        (
            "ConnectionRefusedError",
            "[Errno 111] Connection refused",
            "ConnectionRefusedError: [Errno 111] Connection",
        ),
        (
            "RuntimeError",
            "NCCL error in: x.cpp:1, unhandled cuda error",
            "RuntimeError: NCCL error",
        ),
        (
            "DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp:9, unhandled cuda error, NCCL version 2.27.3",
            "DistBackendError: NCCL error in",
        ),
        (
            "DistBackendError",
            "NCCL error in: x.cpp:1, invalid usage. Last error: Duplicate GPU detected : rank 1",
            "DistBackendError: NCCL error in",
        ),
        (
            "DistBackendError",
            "NCCL error in: x.cpp:1, system error. Last error: Error while creating shared "
            "memory segment /dev/shm/nccl-a1 (size 9637888), error: No space left on device",
            "--shm-size=1g",
        ),
        ("ValueError", "two\n  lines", "ValueError: two lines"),
    ],
)
def test_what_to_do_about_an_exception(class_name, message, says):
    line = explain(class_name, message)
    assert says in line and "\n" not in line
    assert ("lost a peer" in line) == ("lost a peer" in says)
    assert " ".join(message.split())[:60] in line


def test_a_long_message_leaves_room(tmp_path):
    write(
        tmp_path / "failure",
        f"error: {explain('ValueError', 'x ' * 2500)}",
        "frame\n" * 1000 + "ValueError: the end\n",
    )
    text = (tmp_path / "failure").read_text()
    assert len(text) == 1024
    assert text.endswith("ValueError: the end\n")
    assert text.splitlines()[0].endswith("...")


def test_a_message_is_cut_at_its_limit():
    text = f"{'x ' * 348}x"
    assert explain("E", text) == f"E: {text}"
    assert explain("E", f"{text}x") == f"E: {text[:694]}..."
    advised = explain("MemoryError", text)
    assert advised.endswith(f" (MemoryError: {text[:384]}...)")
    assert advised.startswith("out of host")
    assert last_error("x" * 501) == (LAST_LINE + "x" * 497 + "...", "")


@pytest.mark.parametrize("length", [1021, 1022, 1023, 1024, 1030])
def test_a_traceback_gets_the_room_that_its_line_leaves(tmp_path, length):
    write(tmp_path / "failure", "x" * length, "a traceback")
    rest = {1021: "\nck", 1022: "\nk"}.get(length, "")
    assert (tmp_path / "failure").read_text() == "x" * length + rest


def test_a_reason_that_is_not_utf_8(tmp_path):
    """A file's name may have any bytes, and a job's own program writes what it likes."""
    write(tmp_path / "failure", "error: no file caf\udce9.py")
    assert (tmp_path / "failure").read_text() == "error: no file caf\\udce9.py"


def test_a_failure_file_of_the_program_that_is_not_utf_8(tmp_path, monkeypatch):
    (tmp_path / "failure").write_bytes(b"arr\xeat\xe9")
    monkeypatch.setattr(toolkit_hook.environment, "output_dir", str(tmp_path))
    assert toolkit_hook._report(UserError("wrong")) == "arr\ufffdt\ufffd"


TWO_OF_TORCHRUN = """Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 2)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 1)
"""
GLOO = "RuntimeError: [gloo/pair.cc] Connection closed by peer"
DIRECT_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
ABORTED = """[rank1]:[E1122 10:00:00.123 ProcessGroupNCCL.cpp:2057] [PG ID 0 Rank 1] watchdog thread terminated
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] NCCL error: remote process exited or there was a network error, NCCL version 2.27.3
Exception raised from checkForNCCLErrorsInternal at /pytorch/ProcessGroupNCCL.cpp:2308 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f at libc10.so)

"""  # noqa: E501

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("stderr", "says", "trace"),
    [
        (f"loading\n{TRACE}KeyError: 'x'\n", "KeyError: 'x'", True),
        (f"{TRACE}pkg.errors.MyError\nbye\n", "MyError", True),
        (f"{TRACE}{TORCH_ERRORS}\n", "out of GPU memory", True),
        (
            f"{TRACE}KeyError: 'x'\n\n"
            f"During handling of the above exception, another exception:\n\n{TRACE}OSError: y\n",
            "OSError: y",
            True,
        ),
        (
            f"[rank1]: {TRACE}".replace("\n  ", "\n[rank1]:   ")
            + "[rank1]: ValueError: the cause\n"
            + f"{TRACE}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n",
            "ValueError: the cause",
            True,
        ),
        (
            f"{TRACE}ValueError: the cause\n"
            f"{TRACE}RuntimeError: [gloo/pair.cc] Connection closed by peer\n",
            "ValueError: the",
            True,
        ),
        (f"{TRACE}{GLOO}\n", "lost a peer", True),
        (f"{TRACE}EOFError\nmore: x\n", "lost a peer", True),
        (f"{TRACE}EOFError: Ran out of input\n", "EOFError: Ran out of input", True),
        (
            f"{TRACE}{GLOO}\n{DIRECT_CAUSE}{TRACE}mine.SyncError: no gradients\n",
            "lost a peer",
            True,
        ),
        (
            f"{TRACE}{GLOO}\n{MEANWHILE}{TRACE}OSError: x\n{MEANWHILE}{TRACE}KeyError: 'y'\n",
            "lost a peer",
            True,
        ),
        (
            f"{TRACE}{GLOO}\n{MEANWHILE}{TRACE}OSError: x\n{TRACE}KeyError: 'y'\n",
            "KeyError: 'y'",
            True,
        ),
        (f"{TRACE}KeyError: 'y'\n{MEANWHILE}{TRACE}{GLOO}\n", "KeyError: 'y'", True),
        (f"{TRACE}KeyError: 'x'\n{MEANWHILE}{TRACE}OSError: y\n", "OSError: y", True),
        (ABORTED, "lost a peer, or never reached it", True),
        (f"{TRACE}ValueError: the cause\n{ABORTED}", "ValueError: the cause", True),
        (
            "terminate called after throwing an instance of 'mine::Error'\nAborted\n",
            "mine::Error",
            True,
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n"
            "  what():  std::bad_alloc\n",
            "out of host memory",
            True,
        ),
        (f"{TRACE}ValueError: one\ntwo\n", "ValueError: one two", True),
        (
            '  + Exception Group Traceback (most recent call last):\n  |   File "x"\n'
            "  | ExceptionGroup: eg (1 sub-exception)\n"
            "  +-+---------------- 1 ----------------\n    | ValueError: one\n"
            "    +------------------------------------\n",
            "ExceptionGroup: eg (1 sub-exception) 1 ---------------- ValueError: one",
            True,
        ),
        (
            "Fatal Python error: Segmentation fault\n\n"
            "Current thread 0x1 (most recent call first):\n"
            '  File "x.py", line 1 in f\n\n'
            "Extension modules: numpy\n",
            "Fatal Python error: Segmentation fault",
            True,
        ),
        (
            "usage: x\nx: error: unrecognized arguments: --a\n\n",
            f"{LAST_LINE}x: error: unrecognized arguments: --a",
            False,
        ),
        (
            '  File "x.py", line 1\n    def f(:\nSyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax (x.py, line 1)",
            True,
        ),
        ("", "", False),
        ("\n \n", "", False),
        ("starting: importing torch (9 s so far)\n", "", False),
        ("it is wrong\nstarting: importing torch (9 s so far)\n", f"{LAST_LINE}it is wrong", False),
        (TRACE, f"{LAST_LINE}f()", False),  # cut off
    ],
)
def test_the_error_that_a_log_ends_with(stderr, says, trace):
    line, actual_trace = last_error(stderr)
    assert line.startswith(says) and bool(says) == bool(line)
    assert bool(actual_trace) == trace


NATIVE = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no device"
SYNTAX = '  File "a/x.py", line 1\n    def f(:\nSyntaxError: invalid syntax'


@pytest.mark.parametrize(
    ("stderr", "says", "trace"),
    [
        (
            f"loading\n{TRACE}ValueError: one\ntwo\n",
            "ValueError: one two",
            f"{TRACE}ValueError: one\ntwo",
        ),
        (f"{TRACE}AssertionError\na log: x\n", "AssertionError", f"{TRACE}AssertionError"),
        (
            f"{TRACE}ValueError: one\n" + "more\n" * 10,
            "ValueError: one" + " more" * 10,
            f"{TRACE}ValueError: one" + "\nmore" * 10,
        ),
        (
            f"{TRACE}ValueError: one\n" + "a log\n" * 11,
            "ValueError: one",
            f"{TRACE}ValueError: one",
        ),
        (
            f"{TRACE}ValueError: one\ntwo\nerror: ValueError: one two [host a, local rank 1]\n"
            "[rank: 1] Child process with PID 7 terminated with code 1. Forcefully\n",
            "ValueError: one two",
            f"{TRACE}ValueError: one\ntwo",
        ),
        (
            f"\r 50%|#{TRACE}ValueError: one\nChild process with PID 7 terminated with code 1\n",
            "ValueError: one",
            f"{TRACE}ValueError: one",
        ),
        (f"loading\n{NATIVE}\nAborted\n", "std::runtime_error: no device", NATIVE),
        (NATIVE.partition("\n")[0], "std::runtime_error", NATIVE.partition("\n")[0]),
        (f"loading\n{SYNTAX}\n", "SyntaxError: invalid syntax (x.py, line 1)", SYNTAX),
    ],
)
def test_an_error_with_all_of_its_lines(stderr, says, trace):
    assert last_error(stderr) == (says, trace)


@pytest.mark.parametrize(
    "launcher",
    [
        "[rank: 1] Child process with PID 7 terminated with code 1. Forcefully terminating all\n",
        "Child process with PID 7 terminated with code 1\n",
        "E1128 15:30:00.100000 7 torch/distributed/elastic/multiprocessing/api.py:984] failed\n"
        + TRACE
        + "torch.distributed.elastic.errors.ChildFailedError: \n====\na.py FAILED\n",
    ],
)
def test_the_last_line_of_a_rank_says_more_than_its_launcher(launcher):
    line, _ = last_error(f"loading\nno rows in rows.csv\n{launcher}")
    assert line == f"{LAST_LINE}no rows in rows.csv"


@pytest.mark.parametrize(
    "warning",
    [
        "/env/pytorch_lightning/utilities/_pytree.py:21: `isinstance(...)` is deprecated\n",
        "/env/a.py:7: UserWarning: too few workers\n  warnings.warn('too few workers')\n",
    ],
)
def test_a_warning_is_no_cause(warning):
    assert last_error(warning) == ("", "")
    assert last_error(f"no rows\n{warning}{warning}") == (f"{LAST_LINE}no rows", "")


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        (
            "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 15668)  (SIGKILL)\n",
            ("rank 1", -9),
        ),
        (
            "  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 15667)  (SIGTERM)\n",
            ("rank 0", -15),
        ),
        (TWO_OF_TORCHRUN.format(-9), ("rank 1", -9)),
        (TWO_OF_TORCHRUN.format(-6), ("rank 0", 1)),
        (
            "[rank: 0] Child process with PID 7 terminated with code -9. Forcefully",
            ("the rank with PID 7", -9),
        ),
        ("Child process with PID 7 terminated with code 1.", ("the rank with PID 7", 1)),
        ("", ("", 0)),
    ],
)
def test_the_rank_that_a_launcher_tells_of(stderr, says):
    assert ended_rank(stderr) == says


def raise_lost() -> None:
    """Raise what a rank raises when it has lost its peer."""
    raise RuntimeError("[gloo/pair.cc] Connection closed by peer")


def from_it() -> None:
    """Raise a user's own exception from the lost peer's."""
    try:
        raise_lost()
    except RuntimeError as error:
        raise KeyError("no gradients") from error


def meanwhile() -> None:
    """Fail in a handler that runs after a failure."""
    try:
        from_it()
    finally:
        {}["on_exception"]


def hidden() -> None:
    """Raise an exception that hides the one before (`from None`)."""
    try:
        raise_lost()
    except RuntimeError:
        raise KeyError("mine") from None


def a_mistake() -> None:
    """Raise an error that names a wrong flag."""
    try:
        raise_lost()
    except RuntimeError as error:
        raise UserError("--trainer.strategy: gloo") from error


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (raise_lost, "error: lost a peer"),
        (from_it, "error: lost a peer"),
        (meanwhile, "error: lost a peer"),
        (hidden, "error: KeyError: 'mine'"),
        (a_mistake, "error: --trainer.strategy: gloo"),
    ],
)
def test_the_effects_of_a_lost_peer_are_not_another_reason(act, says):
    reasons = []
    with pytest.raises(SystemExit), reported(None, tell=reasons.append):
        act()
    (line,) = reasons
    assert line.startswith(says) and ("Connection closed by peer" in line) == ("lost" in says)


@pytest.mark.parametrize(
    ("kind", "text", "free", "says"),
    [
        ("OSError", "[Errno 28] No space left on device", 99, "shared memory (/dev/shm) is full: "),
        ("OSError", "[Errno 28] No space left on device", 2**20, "disk full: "),
        ("OSError", "[Errno 28] No space left on device: '/a'", 99, "disk full: "),
        ("RuntimeError", "PytorchStreamWriter failed", 99, "disk full: "),
        (
            "RuntimeError",
            "unable to write to file </torch_9_1>: No space left on device (28)",
            2**20,
            "shared memory (/dev/shm) is full: ",
        ),
    ],
)
def test_what_has_no_space_is_shared_memory_or_the_disk(monkeypatch, kind, text, free, says):
    room = SimpleNamespace(f_bavail=free, f_frsize=1)
    monkeypatch.setattr(failures.os, "statvfs", lambda path: room)
    assert explain(kind, text).startswith(says)


def test_without_shared_memory_it_is_the_disk(monkeypatch):
    monkeypatch.setattr(failures.os, "statvfs", lambda path: Path("/nowhere").stat())
    assert explain("OSError", "[Errno 28] No space left on device").startswith("disk full: ")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("", "error: --a: found 1 [host a]"),
        ("found 1", "error: --a: found 1 [host a]"),
        ("see b", "error: --a: found 1 (see b) [host a]"),
    ],
)
def test_what_else_is_known_is_said_once(capsys, more, line):
    with pytest.raises(SystemExit), reported(None, "host a", also=lambda: more):
        raise UserError("--a: found 1")
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_last_of_several_tracebacks_is_the_cause(number):
    """For example, one exception came while another one was handled."""
    text = (
        "Traceback (most recent call last):\n  File {}\nValueError: {}\n\nDuring its handling:\n\n"
    )
    line, trace = last_error("".join(text.format(k, k) for k in range(number)))
    assert line.startswith(f"ValueError: {number - 1}") and f"File {number - 1}" in trace
    assert trace.count("Traceback") == 1


def test_the_first_reason_stays(tmp_path):
    file = tmp_path / "failure"
    write(file, "error: the cause")
    with pytest.raises(SystemExit) as raised, reported(file, "host algo-2, rank 3"):
        raise RuntimeError("its consequence")
    assert raised.value.code == 1 and file.read_text() == "error: the cause"


LEFT = {  # what a program leaves at a path
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/mine"),
    "a link to a file": lambda path: path.symlink_to("mine"),
    "a link to what never ends": lambda path: path.symlink_to("/dev/zero"),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "an empty file": Path.touch,
    "a blank file": lambda path: path.write_text(" \n"),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_whatever_is_in_the_place_of_a_reason_is_replaced_and_not_followed(tmp_path, leave):
    (tmp_path / "mine").write_text("mine")
    file = tmp_path / "failure"
    leave(file)
    assert written(file) == ""
    write(file, "error: the cause")
    assert file.read_text() == written(file) == "error: the cause"
    assert stat.S_ISREG(file.lstat().st_mode) and (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_whatever_is_in_the_place_of_the_folder_is_replaced_unless_it_is_one(tmp_path, leave):
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "output"
    leave(folder)
    write(folder / "failure", "error: the cause")
    assert written(folder / "failure") == "error: the cause"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_in_the_place_of_a_reason_gets_another_name(tmp_path):
    (tmp_path / "failure/mine").mkdir(parents=True)
    write(tmp_path / "failure", "error: the cause")
    (other,) = tmp_path.glob("failure.*")
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_the_beginning_of_an_endless_reason_is_read(tmp_path):
    (tmp_path / "failure").write_text("x" * 2**20)
    assert written(tmp_path / "failure") == "x" * 2**16


def test_one_of_two_ranks_that_write_at_once_has_written(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "written", lambda file: "")
    monkeypatch.setattr(Path, "unlink", lambda file, missing_ok: file.write_text("the other's"))
    write(tmp_path / "failure", "error: the cause")
    assert (tmp_path / "failure").read_text() == "the other's"


def test_a_reason_that_is_better_replaces_what_is_there(tmp_path):
    for line in ("error: an effect", "error: the cause"):
        write(tmp_path / "failure", line, replaces=True)
    assert written(tmp_path / "failure") == "error: the cause"


def test_host_and_rank_are_named(tmp_path, capsys):
    with (
        pytest.raises(SystemExit),
        reported(tmp_path / "failure", host_and_rank({"SM_CURRENT_HOST": "algo-2", "RANK": "3"})),
    ):
        raise RuntimeError("no luck")
    lines = (tmp_path / "failure").read_text().splitlines()
    assert lines[0] == "error: RuntimeError: no luck [host algo-2, rank 3]"
    assert lines[-1] == "RuntimeError: no luck"
    assert capsys.readouterr().err.endswith("error: RuntimeError: no luck [host algo-2, rank 3]\n")


def test_what_is_no_exception_of_pythons_own_is_reported_too(tmp_path, capsys):
    """Some libraries derive their errors from BaseException."""

    class Missing(BaseException):
        pass

    with pytest.raises(SystemExit), reported(tmp_path / "failure"):
        raise Missing("no key")
    assert (tmp_path / "failure").read_text().startswith("error: Missing: no key")
    for passes in (KeyboardInterrupt, SystemExit):
        with pytest.raises(passes), reported(None):
            raise passes
    assert capsys.readouterr().err.endswith("error: Missing: no key\n")


def test_host_and_rank_without_a_rank():
    assert host_and_rank({}) == "host localhost, local rank 0"
    assert host_and_rank({"LOCAL_RANK": "1"}) == "host localhost, local rank 1"


def test_a_job_that_is_known_names_its_host(tmp_path, monkeypatch):
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit), report_failures(SageMakerEnvironment(current_host="localhost")):
        raise UserError("--a: found 1")
    job = SageMakerEnvironment(hosts=("algo-7",), current_host="algo-7")
    assert (tmp_path / "failure").read_text() == "error: --a: found 1 [host localhost, rank 3]"
    (tmp_path / "failure").unlink()
    with pytest.raises(SystemExit), report_failures(job):
        raise UserError("--a: found 1")
    assert (tmp_path / "failure").read_text() == "error: --a: found 1 [host algo-7, rank 3]"


def test_a_test_an_interactive_session_and_a_notebook_get_the_exception_itself(monkeypatch, capsys):
    with pytest.raises(ValueError, match="^x$"), report_failures():
        raise ValueError("x")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for owner, name in ((sys, "ps1"), (builtins, "__IPYTHON__")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, True, raising=False)
            with pytest.raises(ValueError, match="^x$"), report_failures():
                raise ValueError("x")
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit), report_failures():
        raise UserError("--a: found 1")
    assert capsys.readouterr().err == "error: --a: found 1 [host localhost, local rank 0]\n"


@pytest.fixture
def log(tmp_path) -> Iterator[TextIO]:
    """A log in a file; `name` is its path."""
    with (tmp_path / "log").open("w") as file:
        yield file


def test_a_stop_is_reported_unless_another_process_does_so(tmp_path, monkeypatch, log):
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    report_stop("interrupted, resume from step 7", loud=False)
    assert Path(log.name).read_text() == "" and not (tmp_path / "failure").exists()
    report_stop("interrupted, resume from step 7")
    line = "interrupted, resume from step 7 [host localhost, local rank 0]"
    assert Path(log.name).read_text() == f"{line}\n"
    assert (tmp_path / "failure").read_text() == line
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path / "none/none"))
    report_stop(line)
    assert Path(log.name).read_text().count(line) == 2


def test_a_failure_is_in_the_log_before_anything_else_ends_the_process(tmp_path, monkeypatch, log):
    monkeypatch.setattr(sys, "stderr", log)
    told = []

    def tell(line: str) -> None:
        told.append((line, Path(log.name).read_text()))

    with pytest.raises(SystemExit), reported(tmp_path / "no/no/failure", "host a", tell):
        raise UserError("--a: found 1")
    line = "error: --a: found 1 [host a]"
    assert told == [(line, f"{line}\n")]
    assert Path(log.name).read_text() == (
        "error: --a: found 1 [host a]\n"
        f"error: {tmp_path}/no/no/failure could not be written: No such file or directory\n"
    )


def test_only_a_mistake_that_nobody_caught_is_reported_by_the_hook(tmp_path, monkeypatch, capsys):
    """Any other error is shown as it would be without the hook."""
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: others.append(error))
    report_uncaught(tmp_path / "failure", "host algo-2, rank 3")
    accident = (ValueError, ValueError("x"), None)
    sys.excepthook(*accident)
    assert others == [accident] and not (tmp_path / "failure").exists()
    sys.excepthook(UserError, UserError("--a: found 1"), None)
    line = "error: --a: found 1 [host algo-2, rank 3]"
    assert others == [accident] and capsys.readouterr().err == f"{line}\n"
    assert (tmp_path / "failure").read_text() == line


def test_a_wrong_variable_that_nobody_caught_is_reported(tmp_path, monkeypatch, capsys):
    """A program reads its environment before it can enter report_failures."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    variables = {"SM_NUM_GPUS": "many", "SM_OUTPUT_DIR": str(tmp_path), "RANK": "3"}
    with pytest.raises(UserError) as raised:
        SageMakerEnvironment.read(variables)
    sys.excepthook(UserError, raised.value, None)
    line = "error: SM_NUM_GPUS: found 'many', expected a JSON int, not empty"
    assert capsys.readouterr().err == f"{line} [host localhost, rank 3]\n"
    assert (tmp_path / "failure").read_text().startswith(line)


def test_what_a_terminal_would_obey_is_escaped():
    assert printable("\x1b[31mcaf\xe9\n\t") == "\\x1b[31mcaf\xe9\\n\\t"
    assert printable("a\n\tb", kept="\n") == "a\n\\tb"


def test_a_mistake_that_quotes_a_long_value_has_room_in_the_failure_file(tmp_path, capsys):
    """And for what comes after the value."""
    with pytest.raises(SystemExit), reported(tmp_path / "failure", "host algo-1, local rank 0"):
        raise UserError(f"/folder/{'x' * 3000}: logs cannot be written there")
    line = (tmp_path / "failure").read_text()
    value = f"/folder/{'x' * 142}...{'x' * 59}:"
    end = " [host algo-1, local rank 0]"
    assert line == f"error: {value} logs cannot be written there{end}"
    assert line in capsys.readouterr().err
    (tmp_path / "failure").unlink()
    with pytest.raises(SystemExit), reported(tmp_path / "failure", "host algo-1, local rank 0"):
        raise UserError("a word " * 3000)
    assert len(line := (tmp_path / "failure").read_text()) == len("error: ") + 900 + len(end)
    assert line.endswith(f"...{end}")


@pytest.mark.parametrize(
    ("limit", "says"),
    [(2**31, "ulimit -v allows each process 2.0 GiB"), (-1, "out of host memory")],
)
def test_memory_that_a_limit_refuses(monkeypatch, limit, says):
    monkeypatch.setattr(failures.resource, "getrlimit", lambda kind: (limit, -1))
    for line in (
        explain("ImportError", "libtorch_cpu.so: failed to map segment from shared object"),
        explain("MemoryError", ""),
        last_error("cannot allocate memory for thread-local data: ABORT\n")[0],
    ):
        assert line.startswith(says)
    assert "ulimit" not in explain("OutOfMemoryError", "CUDA out of memory")


def code(file: Path, source_line: str) -> Callable[[], object]:
    """Return a function with one line of code, as if from the module in `file`."""
    names = {"__name__": "app.somebodys", "UserError": UserError}
    exec(compile(f"def run():\n    {source_line}\n", str(file), "exec"), names)
    return names["run"]


ACCIDENTS = {
    "images, labels = 1, 2, 3": "ValueError: too many values to unpack",
    "dict()['x']": "KeyError: 'x'",
    "1 / 0": "ZeroDivisionError",
    "raise ValueError('--flag: found 1, expected 2')": ("ValueError: --flag: found 1, expected 2"),
}


@pytest.mark.parametrize("folder", [ROOT / "app", Path("/opt/ml/code")], ids=["app", "code"])
@pytest.mark.parametrize(("line", "says"), ACCIDENTS.items(), ids=ACCIDENTS)
def test_an_accident_has_its_traceback_wherever_its_code_is(tmp_path, capsys, folder, line, says):
    with pytest.raises(SystemExit) as raised, reported(tmp_path / "failure", "host algo-1"):
        code(folder / "model.py", line)()
    output = capsys.readouterr().err
    failure = (tmp_path / "failure").read_text()
    assert raised.value.code == 1
    assert output.startswith("Traceback (most recent call last)")
    assert f'{folder}/model.py", line 2, in run' in output
    first_line = failure.splitlines()[0]
    assert first_line.startswith(f"error: {says}") and output.splitlines()[-1] == first_line
    assert f'{folder}/model.py", line 2, in run' in failure


class Missing(FileNotFoundError, UserError):
    """A user's own kind of error."""


@pytest.mark.parametrize("error_class", [UserError, Missing])
@pytest.mark.parametrize("folder", [ROOT / "app", Path("/opt/ml/code")], ids=["app", "code"])
def test_a_mistake_is_one_line_wherever_its_code_is(tmp_path, capsys, folder, error_class):
    raising = code(
        folder / "mine.py", "raise kind('--flag: found 1,\\n expected 2') from KeyError('x')"
    )
    raising.__globals__["kind"] = error_class
    with pytest.raises(SystemExit) as raised, reported(tmp_path / "failure", "host algo-1"):
        raising()
    line = "error: --flag: found 1, expected 2 [host algo-1]"
    assert raised.value.code == 1
    assert capsys.readouterr().err == f"{line}\n" and (tmp_path / "failure").read_text() == line


OF_A_COPY = "-- Process 1 terminated with the following error:\nTraceback (most recent ...):\n"
NAME = f"{UserError.__module__}.UserError"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ProcessRaisedException(f"{OF_A_COPY}{NAME}: --a:\nfound 1\n", 1, 7), "--a: found 1"),
        (ProcessRaisedException(f"{OF_A_COPY}KeyError: 'x'\n", 1, 7), None),
        (RuntimeError(f"{OF_A_COPY}{NAME}: --a: found 1\n"), None),
        (UserError(f"--a: found\n{NAME}: b"), f"--a: found {NAME}: b"),
    ],
    ids=["a copy's mistake", "a copy's accident", "a text like a mistake", "a text with a name"],
)
def test_the_mistake_of_a_copy_of_this_process_is_one_line(capsys, error, line):
    """As strategy="ddp_spawn" copies it."""
    with pytest.raises(SystemExit), reported(None):
        raise error
    output = capsys.readouterr().err
    assert output == f"error: {line}\n" if line else output.startswith("Traceback (most recent")


class Picky:
    """A user's own data set."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise UserError("--data.folder: found UserError: in it")


def test_a_mistake_that_a_data_worker_finds_is_one_line(capsys, monkeypatch):
    # torch waits so many seconds for a worker that has failed.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    with pytest.raises(UserError, match=r"^--data.folder: found UserError: in it$"):
        list(DataLoader(Picky(), num_workers=1))
    with pytest.raises(SystemExit), reported(None):
        list(DataLoader(Picky(), num_workers=1))
    gc.collect()  # the error holds the worker, which would end in another test
    assert capsys.readouterr().err == "error: --data.folder: found UserError: in it\n"
