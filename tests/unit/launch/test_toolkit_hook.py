"""launch/toolkit_hook.py in this process: what a program's end, and the other hosts', come to.

The watch and the program have stand-ins. test_toolkit.py has the real toolkit,
test_mesh.py and test_watchdog.py the real watch.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import OUT_OF_MEMORY
from sagemaker_lightning.launch import job_watch, toolkit_hook, user_program
from sagemaker_lightning.launch.job_end import (
    Interrupted,
    NoModel,
    OtherFailed,
    ProgramFailed,
    Unfinished,
)
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.messages import Fault
from sagemaker_lightning.process import threads
from sagemaker_lightning.process.supervisor import ProgramEnd, StoppedBeforeStart

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'
ACCIDENT = f"{TRACE}KeyError: 'x'\n"
LOST_PEER = f"{TRACE}RuntimeError: [gloo/pair.cc] Connection closed by peer\n"
RANK = "  rank      : {} (local_rank: 0)\n  exitcode  : {} (pid: 15668)\n"
OTHER = StopReason("host algo-2: boom", is_local=False)
OWN = StopReason("a rank failed: boom", is_local=True)
REQUEST = StopReason("interrupted, resume from step 3: SIGTERM", is_local=False, is_request=True)
FLAGS = {"lr": "0.1"}
PROGRAM = 4711
"""The PID of the program."""


class Left(BaseException):
    """Stands for the end of this process."""


class Watch:
    """Stands for the watch; notes what it was asked and given."""

    path = Path("/watch")
    trouble_at = 0.0

    def __init__(
        self, ready=None, known=None, waited=None, done=None, lost_peer=False, first_status=None
    ) -> None:
        self.first_status = first_status
        self.statuses = {}
        self.ready = ready
        self.known_reason = known
        self.waited = waited
        self.done = done
        self.lost_peer = lost_peer
        self.suspicions = []
        self.did = []

    def wait_until_all_are_ready(self, forks: bool) -> StopReason | None:
        self.did.append("ready")
        self.forks = forks
        return self.ready

    def program_ended(self) -> None:
        self.did.append("ended")

    def wait_for_reason(self) -> StopReason | None:
        self.did.append("waited")
        return self.waited

    def wait_until_all_are_done(self) -> StopReason | None:
        self.did.append("done")
        return self.done

    def fail(self, why: str, is_request: bool) -> None:
        self.did.append((why, is_request))

    def tell_fault(self, fault: Fault) -> None:
        self.fault = fault

    def wait_for_faults(self, limit: float) -> dict:
        return {}


class Log:
    """What this process prints, from `begin` on, without what is not flushed yet."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = path.open("w")
        self.path = path
        self.monkeypatch = monkeypatch

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            self.monkeypatch.setattr(sys, name, self.file)

    def __call__(self) -> str:
        return self.path.read_text()


@pytest.fixture
def log(tmp_path, monkeypatch) -> Iterator[Log]:
    log = Log(tmp_path / "log", monkeypatch)
    yield log
    log.file.close()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A job's folder with a program, train.py, a checkpoint of step 7 and no model."""
    for name in ("code", "checkpoints", "model", "output"):
        (tmp_path / name).mkdir()
    (tmp_path / "code/train.py").touch()
    (tmp_path / "checkpoints/step-000000007.ckpt").touch()
    monkeypatch.setattr(user_program, "CODE_FOLDER", tmp_path / "code")
    monkeypatch.setattr(toolkit_hook.environment, "output_dir", str(tmp_path / "output"))
    monkeypatch.setattr(user_program.requirements, "install", lambda *_, **options: None)
    monkeypatch.setattr(job_watch.checks, "summary", lambda machine: ["GPU: none"])
    monkeypatch.setenv("SM_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    for name in ("CURRENT_HOST", "SAGEMAKER_PROGRAM", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, log) -> Callable[..., list]:
    """Return a function that runs a program, which ends at once; it returns what was started."""
    announced = []
    monkeypatch.setattr(job_watch.start_notice, "begin", announced.append)
    monkeypatch.setattr(job_watch.start_notice, "end", lambda: announced.append("end"))
    monkeypatch.setattr(threads, "usable_cpus", lambda: 6)

    def run(
        watch: Watch,
        status: int = 0,
        stop_signal: int | None = None,
        stderr: str = "",
        grace: float | None = None,
        stop_came_first: bool = True,
        has_killed: bool = False,
        program: str = "train.py",
        forks: bool = False,
        **here,
    ) -> list:
        started = []

        def start(command: list[str], cwd: Path, variables: dict, *of_attempt) -> ProgramEnd:
            assert of_attempt == (watch, restarts)
            started.append((command, cwd, variables, list(announced), log()))
            return ProgramEnd(status, stop_signal, stderr)

        environment = SageMakerEnvironment(
            **{"hosts": ("localhost",), "model_dir": folder / "model"} | here
        )
        job = SimpleNamespace(
            to_cmd_args=lambda: ["--lr", "0.1"],
            additional_framework_parameters={},
            num_gpus=0,
        )
        restarts = Restarts()
        supervisor = SimpleNamespace(
            grace=grace,
            stop_came_first=bool(stop_signal) and stop_came_first,
            has_killed=has_killed,
            statuses={},
            child=SimpleNamespace(pid=PROGRAM),
        )
        log.begin()
        monkeypatch.setenv("SAGEMAKER_PROGRAM", program)
        request = user_program.Request.read(job, environment, FLAGS)
        if program := user_program.prepare(request, environment):
            aside = SimpleNamespace(is_ready=forks, run=start)
            arguments = (environment, FLAGS, supervisor, watch, restarts, aside)
            toolkit_hook._run_program(program, *arguments)
        return started

    return run


# Before the program -------------------------------------------------------------------------------


def test_the_log_says_what_runs_before_it_runs(run, folder, monkeypatch):
    for name in threads.COUNT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    watch = Watch()
    ((command, cwd, variables, announced, log),) = run(watch)
    assert command == [sys.executable, "--", "train.py", "--lr", "0.1"]
    assert cwd == folder / "code" and announced == ["end"]
    program = f"program: {folder}/code/train.py, the job's own, one process"
    lines = log.splitlines()
    assert lines[0] == "hosts: localhost (this one)"
    assert lines[-3:] == [program, "hyperparameter lr: 0.1", "GPU: none"]
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    assert variables["OMP_NUM_THREADS"] == "6" and "MASTER_ADDR" not in variables
    assert watch.did == ["ready", "ended", "done"]


def test_the_source_is_unpacked_and_what_it_asks_for_installed_before(run, folder, monkeypatch):
    did = []
    monkeypatch.setattr(user_program, "unpack", did.append)
    monkeypatch.setattr(
        user_program.requirements, "install", lambda *args, **options: did.append((args, options))
    )
    run(Watch())
    monkeypatch.setitem(FLAGS, "sagemaker_submit_directory", '"s3://bucket/source.tar.gz"')
    with pytest.raises(NoModel):
        run(Watch(), program="app/train.py")
    source = folder / "code"
    assert did == [
        None,
        ((source, "train.py"), {"own": True}),
        "s3://bucket/source.tar.gz",
        ((source, "app/train.py"), {"own": False}),
    ]


def test_hosts_wait_for_each_other_and_what_the_user_has_set_stays(run, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(job_watch.checks, "summary", lambda machine: [])
    two_hosts = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-2"}
    ((_, _, variables, announced, log),) = run(Watch(), **two_hosts)
    assert log.endswith("hyperparameter lr: 0.1\n")
    assert announced == ["waiting for the other hosts", "end"]
    assert [variables[name] for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")] == [
        "algo-1",
        "29500",
        "1",
    ]


def test_a_program_of_the_image_sets_its_threads_itself(run, folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (folder / "code/train.py").unlink()
    (folder / "code").rmdir()
    with pytest.raises(NoModel) as raised:
        run(watch := Watch(), program="app/train.py")
    assert watch.did == ["ready", "ended"]
    assert str(raised.value) == (
        f"app/train.py ended with exit status 0 and wrote nothing to {folder}/model: code of the "
        "job has ended it early (os._exit(0), SystemExit or the like); return instead"
    )
    ((command, cwd, variables, _, _),) = run(
        Watch(), program="app/train.py", hosts=("a", "localhost")
    )
    assert command == [sys.executable, str(user_program.HOME / "app/train.py"), "--lr=0.1"]
    assert cwd == user_program.HOME and "OMP_NUM_THREADS" not in variables


@pytest.mark.parametrize("forks", [True, False])
def test_the_other_hosts_hear_whether_this_one_can_fork(run, forks):
    watch = Watch()
    run(watch, forks=forks)
    assert watch.forks is forks


def test_the_hyperparameters_that_an_own_program_does_not_get_are_named(
    run, log, monkeypatch, folder
):
    line = (
        "hyperparameter max_restarts sets how often train.py is started again in this container, "
        "and is not passed to it\n"
    )
    run(Watch())
    assert line not in log()
    monkeypatch.setitem(FLAGS, "max_restarts", "5")
    run(Watch())
    assert line in log()
    with pytest.raises(NoModel):  # programs of the image have no such flag
        run(Watch(), program="app/train.py")
    assert log().count(line) == 1


def test_a_host_that_takes_no_part_runs_no_program_of_the_image(run, log):
    elsewhere = {"hosts": ("algo-2", "algo-3"), "current_host": "algo-1"}
    watch = Watch()
    assert run(watch, program="app/train.py", **elsewhere) == [] and watch.did == []
    assert log() == "algo-1 takes no part in the training, which is for algo-2, algo-3\n"
    assert len(run(watch, **elsewhere)) == 1  # but the job's own program


@pytest.mark.parametrize(
    ("reason", "kind"), [(OTHER, OtherFailed), (REQUEST, Interrupted)], ids=["failed", "stopped"]
)
def test_a_host_that_fails_before_the_start(run, reason, kind):
    with pytest.raises(kind, match=f"^{reason.why}$"):
        run(watch := Watch(ready=reason))
    assert watch.did == ["ready"]


# After the program --------------------------------------------------------------------------------

WITHOUT_MODEL = "train.py ended with exit status 0 and wrote nothing to "
TORCHRUN_LOST = """Traceback (most recent call last):
  File "/x/site-packages/torch/distributed/elastic/agent/server/api.py", line 958, in _invoke_run
    num_nodes_waiting = rdzv_handler.num_nodes_waiting()
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection has failed.
"""
KILLED = f"{LOST_PEER}{RANK.format(1, -9)}"
STOPPED = "interrupted, resume from step 7: train.py "
ENDS = {
    "a success": (Watch(), {}, ["done"], None),
    "a success while a rank fails": (Watch(known=OWN), {}, ["done"], None),
    "a success while another host fails": (Watch(known=OTHER), {}, [], OtherFailed(OTHER)),
    "a success after another host": (Watch(done=OTHER), {}, ["done"], OtherFailed(OTHER)),
    "an accident": (
        Watch(waited=OTHER),
        {"status": 1, "stderr": ACCIDENT},
        [],
        "train.py ended with exit status 1: KeyError: 'x'",
    ),
    "an accident that the watch knows": (
        Watch(known=OWN, waited=OTHER, lost_peer=True),
        {"status": 1, "stderr": ACCIDENT},
        [],
        "train.py ended with exit status 1: KeyError: 'x'",
    ),
    "an accident after another host's": (
        Watch(known=OTHER),
        {"status": 1, "stderr": ACCIDENT},
        [],
        OtherFailed(OTHER),
    ),
    "a lost peer": (
        Watch(waited=OTHER),
        {"status": 1, "stderr": LOST_PEER},
        ["waited"],
        OtherFailed(OTHER),
    ),
    "a lost peer that a rank of this host has left": (
        Watch(known=OWN, waited=OWN),
        {"status": 1, "stderr": LOST_PEER},
        ["waited"],
        OtherFailed(OWN),
    ),
    "a lost peer that the rank alone knows of": (
        Watch(waited=OTHER, lost_peer=True),
        {"status": 1, "stderr": ACCIDENT},
        ["waited"],
        OtherFailed(OTHER),
    ),
    "a lost peer without a reason": (
        Watch(),
        {"status": 1, "stderr": LOST_PEER},
        ["waited"],
        "train.py ended with exit status 1: lost a peer, or never reached it",
    ),
    "a rank that was killed": (
        Watch(waited=OTHER, lost_peer=True),
        {"status": 1, "stderr": KILLED},
        [],
        f"train.py: rank 1 was killed by SIGKILL: {OUT_OF_MEMORY}",
    ),
    "ended because of a rank": (
        Watch(known=OWN),
        {"status": -15, "grace": 10.0},
        [],
        OtherFailed(OWN),
    ),
    "ended because of a rank, and it ends well": (
        Watch(known=OWN),
        {"grace": 10.0},
        [],
        OtherFailed(OWN),
    ),
    "ended for no reason that is known": (
        Watch(),
        {"status": -15, "grace": 10.0},
        [],
        "train.py was killed by SIGTERM: nothing on its stderr says why",
    ),
    "asked to stop": (
        Watch(waited=OTHER, lost_peer=True),
        {"status": 1, "stderr": LOST_PEER, "stop_signal": signal.SIGTERM},
        [],
        (f"{STOPPED}ended with exit status 1 after SIGTERM", signal.SIGTERM),
    ),
    "asked to stop, which it does not hear": (
        Watch(),
        {"status": -9, "stop_signal": signal.SIGTERM, "has_killed": True},
        [],
        (
            f"{STOPPED}was killed by SIGKILL after SIGTERM: that signal alone did not end it",
            signal.SIGTERM,
        ),
    ),
    "asked to stop by Ctrl-C": (
        Watch(),
        {"status": -2, "stop_signal": signal.SIGINT},
        [],
        (f"{STOPPED}was killed by SIGINT after SIGINT", signal.SIGINT),
    ),
    "asked to stop when another host had failed": (
        Watch(known=OTHER),
        {"status": -9, "grace": 10.0, "stop_signal": signal.SIGTERM, "stop_came_first": False},
        [],
        OtherFailed(OTHER),
    ),
    "asked to stop, and it ends well": (Watch(), {"stop_signal": signal.SIGTERM}, ["done"], None),
    "stopped by somebody else": (
        Watch(),
        {"status": 143},
        [],
        (f"{STOPPED}ended with exit status 143", signal.SIGTERM),
    ),
    "a rank of Lightning's was stopped, and Lightning has killed the program": (
        Watch(),
        {"status": -9, "stderr": "Child process with PID 7 terminated with code 143."},
        [],
        (f"{STOPPED}was killed by SIGKILL", signal.SIGTERM),
    ),
    "a rank of Lightning's was killed by a signal to stop": (
        Watch(),
        {"status": -9, "stderr": "Child process with PID 7 terminated with code -2."},
        [],
        (f"{STOPPED}was killed by SIGKILL", signal.SIGINT),
    ),
    "a rank was stopped, which another one has lost": (
        Watch(waited=OTHER, first_status=-15),
        {"status": 1, "stderr": LOST_PEER},
        [],
        (f"{STOPPED}ended with exit status 1", signal.SIGTERM),
    ),
    "torchrun has lost the other hosts, and has stopped its ranks": (
        Watch(waited=OTHER, first_status=-15),
        {"status": 1, "stderr": TORCHRUN_LOST},
        ["waited"],
        OtherFailed(OTHER),
    ),
    "a rank was stopped because another one had failed": (
        Watch(first_status=-15),
        {"status": 1, "stderr": ACCIDENT},
        [],
        "train.py ended with exit status 1: KeyError: 'x'",
    ),
    "a rank of torchrun's was stopped": (
        Watch(waited=OTHER),
        {"status": 1, "stderr": f"{LOST_PEER}{RANK.format(0, 1)}{RANK.format(1, -15)}"},
        [],
        (f"{STOPPED}ended with exit status 1", signal.SIGTERM),
    ),
    "stopped by somebody's Ctrl-C": (
        Watch(),
        {"status": -2},
        [],
        (f"{STOPPED}was killed by SIGINT", signal.SIGINT),
    ),
    "stopped with another host": (
        Watch(known=REQUEST),
        {"status": 143, "grace": 110.0},
        [],
        (REQUEST.why, signal.SIGTERM),
    ),
    "stopped as another host is": (
        Watch(known=REQUEST),
        {"status": 130, "stop_signal": signal.SIGINT},
        [],
        (REQUEST.why, signal.SIGINT),
    ),
}


@pytest.mark.parametrize(("watch", "end", "asked", "result"), ENDS.values(), ids=ENDS)
def test_what_the_end_of_a_program_comes_to(run, log, watch, end, asked, result):
    watch.did.clear()
    if result is None:
        run(watch, **end)
    elif isinstance(result, tuple):
        with pytest.raises(Interrupted) as raised:
            run(watch, **end)
        assert (str(raised.value), raised.value.number) == result
    elif isinstance(result, OtherFailed):
        with pytest.raises(OtherFailed) as other_failed:
            run(watch, **end)
        assert str(other_failed.value) == result.args[0]
    else:
        with pytest.raises(ProgramFailed) as failed:
            run(watch, **end)
        assert str(failed.value).startswith(result)
    assert watch.did == ["ready", "ended", *asked]
    ended = log().partition("GPU: none\n")[2]
    if "grace" in end:
        assert ended.startswith("train.py: was ended because a rank or another host failed\n")
    else:
        assert ended.startswith(("train.py: ended with exit status ", "train.py: was killed by SI"))
    assert (f"warning: {WITHOUT_MODEL}" in ended) == ("done" in asked)


@pytest.mark.parametrize(
    ("pid", "launcher", "trains", "has_failed", "is_unfinished"),
    [
        (PROGRAM, 0, True, False, True),
        (PROGRAM + 1, PROGRAM, True, False, True),
        (PROGRAM, 0, False, False, False),
        (PROGRAM, 0, True, True, False),  # whoever has caught the error knows
        (PROGRAM + 1, 0, True, False, False),  # such as a trial that the program has ended
    ],
)
def test_a_program_that_ends_within_its_training_has_not_ended_well(
    run, tmp_path, pid, launcher, trains, has_failed, is_unfinished
):
    watch = Watch()
    watch.path = tmp_path / "ranks"
    record = rank_progress.RECORD.pack(pid, 0, 7, 1, 1, 0, 0, launcher, trains, has_failed)
    (tmp_path / f"rank-{pid}").write_bytes(record)
    if not is_unfinished:
        run(watch)
        return
    with pytest.raises(Unfinished) as raised:
        run(watch)
    assert str(raised.value) == (
        f"the rank with PID {pid} ended with exit status 0 within its training, after step 7: code "
        "of the job has ended it early (os._exit(0), SystemExit or the like); to end a training, "
        "set trainer.should_stop = True"
    )
    with pytest.raises(Interrupted, match=f"^interrupted, resume from step 7: the rank .*{pid} "):
        run(watch, stop_signal=signal.SIGTERM)


@pytest.mark.parametrize("known", [None, StopReason("the rank ended", is_local=True)])
@pytest.mark.parametrize(("status", "ends_early"), [(0, True), (1, False), (None, False)])
def test_a_rank_that_ends_early_is_why_another_one_has_lost_it(
    run, tmp_path, status, ends_early, known
):
    watch = Watch(waited=known)
    watch.path = tmp_path / "ranks"
    watch.statuses = {} if status is None else {7: status}
    record = rank_progress.RECORD.pack(7, 0, 7, 1, 1, 0, 0, PROGRAM, True, False)
    (tmp_path / "rank-7").write_bytes(record)
    error = Unfinished if ends_early else OtherFailed if known else ProgramFailed
    with pytest.raises(error):
        run(watch, status=1, stderr=LOST_PEER)


def test_a_program_that_was_asked_to_stop_says_how_it_ended(run, log):
    with pytest.raises(Interrupted):
        run(Watch(), status=1, stop_signal=signal.SIGTERM, grace=10.0)
    assert "train.py: ended with exit status 1 after SIGTERM\n" in log()


def test_a_program_that_stops_on_request_leaves_no_model(run):
    with pytest.raises(Interrupted, match="^interrupted, resume from step 7: app/train.py ended"):
        run(Watch(), program="app/train.py", stop_signal=signal.SIGTERM)


ENDED = "x ended with exit status 1: "
TELLS = {
    "nothing": ("", 1, f"{ENDED}nothing on its stderr says why"),
    "an error": (ACCIDENT, 1, f"{ENDED}KeyError: 'x'"),
    "killed": ("", -9, f"x was killed by SIGKILL: {OUT_OF_MEMORY}"),
    "killed under a shell": ("loading", 137, f"x ended with exit status 137: {OUT_OF_MEMORY}"),
    "killed after an error": (ACCIDENT, -9, "x was killed by SIGKILL: KeyError: 'x'"),
    "killed by Lightning": (
        "Child process with PID 7 terminated with code 1",
        -9,
        "x was killed by SIGKILL: its last line: Child process with PID 7 terminated with code 1",
    ),
    "a rank that was killed": (
        f"{ACCIDENT}{RANK.format(1, -9)}",
        1,
        f"x: rank 1 was killed by SIGKILL: {OUT_OF_MEMORY}",
    ),
    "a rank that crashed, and one that missed it": (
        f"{LOST_PEER}{RANK.format(1, -11)}{RANK.format(0, 1)}",
        1,
        "x: rank 1 was killed by SIGSEGV",
    ),
    "a rank that crashed": (RANK.format(0, -6), 1, "x: rank 0 was killed by SIGABRT"),
    "a rank that crashed, whose launcher Lightning has killed": (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        "  <no Python frame>\nChild process with PID 7 terminated with code -11",
        -9,
        "x: the rank with PID 7 was killed by SIGSEGV",
    ),
    "a rank that ended itself after an error in native code": (
        "terminate called after throwing an instance of 'std::runtime_error'\n"
        f"  what():  no device\n{RANK.format(0, -6)}",
        1,
        f"{ENDED}std::runtime_error: no device",
    ),
    "a rank that crashed after an error": (
        f"{RANK.format(0, -6)}{ACCIDENT}",
        1,
        f"{ENDED}KeyError: 'x'",
    ),
}


@pytest.mark.parametrize(("stderr", "status", "says"), TELLS.values(), ids=TELLS)
def test_why_a_program_failed(stderr, status, says):
    assert str(ProgramFailed("x", ProgramEnd(status, None, stderr))) == says


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        (LOST_PEER, f"x: b was killed by SIGKILL: {OUT_OF_MEMORY}"),
        # A data worker that was sending to the rank prints it.
        (f"{TRACE}EOFError\n{LOST_PEER}", f"x: b was killed by SIGKILL: {OUT_OF_MEMORY}"),
        (ACCIDENT, f"{ENDED}KeyError: 'x'"),
    ],
)
def test_a_rank_of_which_nobody_else_says_how_it_ended(stderr, says):
    ended_ranks = [("a", -6), ("b", -9), ("c", -11), ("d", 1)]
    error = ProgramFailed("x", ProgramEnd(1, None, stderr), ended_ranks)
    assert str(error) == says and error.killed == ("" if stderr == ACCIDENT else "b")


# What is said and written -------------------------------------------------------------------------

TOLD = {
    "a mistake": (UserError("--a: found 1,\n expected 2"), ": --a: found 1, expected 2"),
    "an accident": (ValueError("x"), ": ValueError: x"),
    "a program": (ProgramFailed("x", ProgramEnd(1, None, "")), f": {TELLS['nothing'][2]}"),
}


@contextmanager
def told(monkeypatch, folder: Path, error: BaseException, number: int | None) -> Iterator[Watch]:
    """Have the hook run a program that ends with an error, and yield the watch that it tells."""
    watch = Watch()

    @contextmanager
    def watchdog(here, program, hyperparameters, supervisor, restarts) -> Iterator[Watch]:
        assert (program, hyperparameters, restarts.most) == ("train.py", FLAGS, 3)
        yield watch

    def fail(*_) -> None:
        raise error

    (folder / "hyperparameters.json").write_text(json.dumps(FLAGS))
    job = SimpleNamespace(
        to_env_vars=dict,
        hyperparameters={"max_restarts": 1},
        to_cmd_args=lambda: [],
        additional_framework_parameters={},
    )
    monkeypatch.setenv("SAGEMAKER_PROGRAM", "train.py")
    monkeypatch.setenv("PYTHONPATH", "")  # the toolkit sets it
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(toolkit_hook.environment, "Environment", lambda: job)
    sent = str(folder / "hyperparameters.json")
    monkeypatch.setattr(toolkit_hook.environment, "hyperparameters_file_dir", sent)
    monkeypatch.setattr(job_watch, "watchdog", watchdog)
    monkeypatch.setattr(user_program, "prepare", fail)
    toolkits_log = logging.getLogger("sagemaker-training-toolkit")
    toolkits_log.setLevel(logging.INFO)
    with pytest.raises(BaseException) as raised:  # noqa: PT011  its type is checked
        toolkit_hook._run(SimpleNamespace(stop_signal=number))
    assert os.environ["PYTHONPATH"].split(":")[0] == str(folder / "code")
    assert job.hyperparameters == {}  # that one is for the hook
    assert not toolkits_log.isEnabledFor(logging.INFO)  # the hook's own summary says it better
    watch.raised = raised.value
    yield watch


@pytest.mark.parametrize(("error", "why"), TOLD.values(), ids=TOLD)
def test_the_other_hosts_hear_which_host_failed(monkeypatch, folder, error, why):
    with told(monkeypatch, folder, error, None) as watch:
        assert watch.did == [(f"host localhost{why}", False)] and watch.raised is error


def test_an_accident_keeps_the_error_that_caused_it(monkeypatch, folder):
    """The log has both tracebacks."""
    error = ValueError("x")
    error.__cause__ = OSError("y")
    with told(monkeypatch, folder, error, None) as watch:
        assert str(watch.raised.__cause__) == "y"


def test_the_other_hosts_hear_of_a_stop(monkeypatch, folder):
    error = Interrupted(REQUEST.why)
    with told(monkeypatch, folder, error, None) as watch:
        assert watch.did == [(REQUEST.why, True)] and watch.raised is error
    with told(monkeypatch, folder, OtherFailed(OTHER), None) as watch:
        assert watch.did == [(OTHER.why, False)]


def test_the_other_hosts_hear_of_a_stop_before_the_start(monkeypatch, folder):
    with told(monkeypatch, folder, StoppedBeforeStart("SIGINT came"), signal.SIGINT) as watch:
        assert watch.did == [("interrupted, resume from step 7: SIGINT came", True)]
        assert isinstance(watch.raised, Interrupted) and watch.raised.number == signal.SIGINT


def end_of_main(monkeypatch, log: Log, error: BaseException | None) -> BaseException | None:
    """Return what `main` raises if the job ends with an error; Left stands for os._exit."""

    def end(supervisor) -> None:
        if error:
            raise error

    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(toolkit_hook, "_run", end)
    monkeypatch.setattr(os, "_exit", leave)
    log.begin()
    try:
        toolkit_hook.main()
    except BaseException as raised:
        return raised
    return None


def test_a_job_that_ends_well_leaves_a_file_that_says_so(monkeypatch, folder, log):
    assert end_of_main(monkeypatch, log, None) is None
    assert (folder / "output/success").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_stopped_exits_with_the_signals_status(monkeypatch, folder, log, number):
    left = end_of_main(monkeypatch, log, Interrupted("SIGINT came", number))
    line = "interrupted, resume from step 7: SIGINT came [host unknown]"
    assert isinstance(left, Left) and left.args == (128 + number,)
    assert log() == f"{line}\n" and (folder / "output/failure").read_text() == line


def test_a_job_that_is_stopped_at_once_finds_its_checkpoints(monkeypatch, folder, log):
    """The variables that name their folder are not set yet."""
    variables = {"SM_CHECKPOINT_DIR": str(folder / "checkpoints"), "CURRENT_HOST": "algo-1"}
    for name in (*variables, "PYTHONPATH"):  # restored after the test
        monkeypatch.setenv(name, "/nowhere")
    job = SimpleNamespace(to_env_vars=lambda: variables)
    monkeypatch.setattr(toolkit_hook.environment, "Environment", lambda: job)
    left = end_of_main(monkeypatch, log, StoppedBeforeStart("SIGTERM came"))
    assert isinstance(left, Left) and left.args == (143,)
    assert log() == "interrupted, resume from step 7: SIGTERM came [host algo-1]\n"


@pytest.mark.parametrize(
    ("error", "says", "traced"),
    [
        (UserError("--a: found 1"), "error: --a: found 1", False),
        (OtherFailed(OTHER), f"error: {OTHER.why}", False),
        (SystemExit(0), "error: SystemExit: 0", True),
    ],
)
def test_a_job_that_fails_is_a_failure_for_the_toolkit(
    monkeypatch, folder, log, error, says, traced
):
    raised = end_of_main(monkeypatch, log, error)
    assert isinstance(raised, toolkit_hook.errors.ClientError)
    assert str(raised) == f"{says} [host unknown]"
    first_line, *trace = (folder / "output/failure").read_text().splitlines()
    assert first_line == str(raised) and bool(trace) == traced
    log.file.flush()
    assert log().startswith("Traceback (most recent call last)") == traced


KILLED_RANK = ProgramFailed("x", ProgramEnd(1, None, RANK.format(1, -9)))
WITHOUT_KNOWLEDGE = ProgramFailed("x", ProgramEnd(1, None, ACCIDENT))
EFFECTS = ("error: lost a peer, or never reached it: x", "interrupted, resume from step 3: x")


def test_a_stop_is_the_reason_where_a_rank_has_lost_a_peer(folder):
    """A rank has died, and before its program was started again, the job was asked to stop."""
    stopped = Interrupted("interrupted, resume from step 3: SIGTERM")
    for written, stays in zip(EFFECTS, (False, True), strict=True):
        (folder / "output/failure").write_text(written)
        assert toolkit_hook._report(stopped) == (written if stays else f"{stopped} [host unknown]")


@pytest.mark.parametrize("error", [OtherFailed(OTHER), KILLED_RANK, WITHOUT_KNOWLEDGE])
@pytest.mark.parametrize("written", ["", *EFFECTS, "error: ValueError: the cause\nmore"])
def test_an_effect_of_the_reason_is_replaced_by_it(folder, error, written):
    """A rank has written it before. What it wrote stays if no better reason is known."""
    (folder / "output/failure").write_text(written)
    line = toolkit_hook._report(error)
    replaced = not written or (written in EFFECTS and error is not WITHOUT_KNOWLEDGE)
    expected = f"error: {error} [host unknown]" if replaced else written.splitlines()[0]
    assert line == expected == (folder / "output/failure").read_text().splitlines()[0]
    if replaced:
        assert (folder / "output/failure").read_text().endswith(getattr(error, "trace", ""))


def test_a_failure_file_that_cannot_be_written_is_not_a_success(monkeypatch, folder, log):
    monkeypatch.setattr(toolkit_hook.environment, "output_dir", str(folder / "no/output"))
    left = end_of_main(monkeypatch, log, UserError("--a: found 1"))
    assert isinstance(left, Left) and left.args == (1,)
    assert log() == (
        "error: --a: found 1 [host unknown]\n"
        f"error: {folder}/no/output/failure could not be written: No such file or directory\n"
    )
