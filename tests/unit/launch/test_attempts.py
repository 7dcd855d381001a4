"""launch/attempts.py: a program is started again, or its end is the job's.

Real ranks: tests/unit/resume/test_container_restarts.py.
"""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagemaker_lightning.contract.environment import RESTARTS_VARIABLE, SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.launch import attempts, job_end, job_watch
from sagemaker_lightning.launch.job_end import Interrupted, OtherFailed, ProgramFailed
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.messages import Fault, FaultKind
from sagemaker_lightning.nodes.rank_progress import ProgressFile
from sagemaker_lightning.process.supervisor import ProgramEnd

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n'
KILLED = ProgramFailed("x", ProgramEnd(-9, None, ""))
CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f8344292b80 (most recent call first):
  File "train.py", line 3 in <module>
"""
CRASHED = ProgramFailed("x", ProgramEnd(-11, None, CRASH))
KILLED_LATER = ProgramFailed("x", ProgramEnd(-9, None, f"{TRACE}ValueError: x\n"))
RANK_KILLED = ProgramFailed(
    "x", ProgramEnd(1, None, "Child process with PID 7 terminated with code -9")
)
GPU = ProgramFailed("x", ProgramEnd(1, None, f"{TRACE}RuntimeError: CUDA error: x\n"))
PEER = ProgramFailed("x", ProgramEnd(1, None, f"{TRACE}RuntimeError: [gloo/pair.cc] closed\n"))
ERROR = ProgramFailed("x", ProgramEnd(1, None, f"{TRACE}ValueError: x\n"))
IMPORT = ProgramFailed("x", ProgramEnd(1, None, f"{TRACE}ModuleNotFoundError: x\n"))
SYNTAX = ProgramFailed("x", ProgramEnd(1, None, '  File "a.py", line 1\n    x =\nSyntaxError: x\n'))
TABS = ProgramFailed("x", ProgramEnd(1, None, f"{TRACE}TabError: x\n"))
LEFT = ProgramFailed("x", ProgramEnd(3, None, ""))
OTHER = StopReason("host algo-2: boom", is_local=False)
RAISED = StopReason("a rank failed: ValueError: x", is_local=True)
OUT_OF_MEMORY = StopReason("a rank failed: OutOfMemoryError: x", is_local=True)
DEAD = StopReason("rank 1 ended without giving a reason", is_local=True)
KINDS = {
    "killed": (KILLED, FaultKind.DEATH),
    "a rank was killed": (RANK_KILLED, FaultKind.DEATH),
    "a crash": (CRASHED, FaultKind.DEATH),
    "killed after an error": (KILLED_LATER, FaultKind.ERROR),
    "an error of CUDA": (GPU, FaultKind.DEATH),
    "a lost peer that nobody explains": (PEER, FaultKind.DEATH),
    "a rank that died": (OtherFailed(DEAD), FaultKind.DEATH),
    "memory of a GPU": (OtherFailed(OUT_OF_MEMORY), FaultKind.DEATH),
    "an error": (ERROR, FaultKind.ERROR),
    "an error that a rank has reported": (OtherFailed(RAISED), FaultKind.ERROR),
    "an exit status": (LEFT, FaultKind.ERROR),
    "an accident of ours": (KeyError("x"), FaultKind.ERROR),
    "an import": (IMPORT, FaultKind.MISTAKE),
    "a syntax error": (SYNTAX, FaultKind.MISTAKE),
    "tabs": (TABS, FaultKind.MISTAKE),
    "a mistake": (UserError("--a: found 1"), FaultKind.MISTAKE),
    "another host's": (OtherFailed(OTHER), FaultKind.EFFECT),
    "a stop": (Interrupted("interrupted, resume from step 3: x"), FaultKind.STOP),
}


class Watch:
    """Stands for a watch; the other hosts' faults are `others`."""

    def __init__(self, path: Path, others: dict | None = None) -> None:
        self.path = path
        self.others = others or {}
        self.suspicions = [DEAD]
        self.trouble_at = time.monotonic()

    def fail(self, why: str, is_request: bool) -> None:
        self.failed = why

    def tell_fault(self, fault: Fault) -> None:
        self.told = fault

    def wait_for_faults(self, limit: float) -> dict:
        return self.others


@pytest.mark.parametrize(("error", "kind"), KINDS.values(), ids=KINDS)
def test_what_has_ended_a_program(tmp_path, error, kind):
    assert job_end.fault_of(error, Watch(tmp_path / "ranks")).kind is kind


def test_a_mistake_that_a_rank_has_noted(tmp_path):
    (tmp_path / "mistake").touch()
    assert job_end.fault_of(ERROR, Watch(tmp_path / "ranks")).kind is FaultKind.MISTAKE


def test_the_step_is_that_of_the_rank_that_came_furthest(tmp_path):
    def steps() -> tuple[int | None, int | None]:
        fault = job_end.fault_of(ERROR, Watch(tmp_path / "ranks"))
        return fault.step, fault.began_with

    assert steps() == (None, None)
    progress = ProgressFile(tmp_path / "ranks")
    assert steps() == (None, None)
    progress.begin(4)
    assert steps() == (None, 4)
    progress.batch_ended(5)
    assert steps() == (5, 4)


def test_a_fault_came_when_a_rank_raised_and_not_when_its_program_had_ended(tmp_path):
    watch = Watch(tmp_path / "ranks")
    watch.trouble_at = 0.0
    assert job_end.fault_of(ERROR, watch).seconds_ago == 0
    progress = ProgressFile(watch.path)
    progress.begin(4)
    assert job_end.fault_of(ERROR, watch).seconds_ago == 0
    progress.fail()
    time.sleep(0.05)
    assert job_end.fault_of(ERROR, watch).seconds_ago >= 0.05
    watch.trouble_at = time.monotonic() - 5.0
    assert job_end.fault_of(ERROR, watch).seconds_ago >= 5.0


def test_the_seconds_of_a_restart_begin_with_the_first_hosts_fault(run, monkeypatch):
    taken = []
    monkeypatch.setattr(attempts, "note_progress", lambda restarts, _: taken.append(restarts.taken))
    earlier = Fault("ValueError: x", FaultKind.ERROR, 9, seconds_ago=60.0)
    began = time.monotonic()
    run(OtherFailed(OTHER), None, others={"algo-2": earlier})
    (restart,) = taken[0]
    assert began - 61.0 < restart.at <= time.monotonic() - 60.0


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable:
    """A function that runs attempts with these ends, and returns what each was given."""
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    monkeypatch.delenv("SAGEMAKER_LIGHTNING_MAX_RESTARTS", raising=False)
    here = SageMakerEnvironment(hosts=("algo-1", "algo-2"), current_host="algo-1")
    did = []
    supervisor = SimpleNamespace(stop_signal=None, prepare_again=lambda: did.append("again"))

    def run(
        *ends: BaseException | None,
        others: dict | None = None,
        during: Callable = lambda supervisor: None,
        **hyperparameters,
    ) -> list:
        did.clear()

        @contextmanager
        def watchdog(here, program, sent, supervisor, restarts):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            yield Watch(folder / "ranks", others)

        def attempt(watch: Watch, restarts: Restarts) -> None:
            did.append([each.get("resumed_step") for each in described(restarts)])
            during(supervisor)
            if end := ends[len(restarts.taken)]:
                (tmp_path / "failure").write_text("error: x")
                progress = ProgressFile(watch.path)
                progress.begin(10 * len(restarts.taken))
                progress.batch_ended(10 * len(restarts.taken) + 7)
                raise end

        monkeypatch.setattr(job_watch, "watchdog", watchdog)
        attempts.run(here, "x", hyperparameters, supervisor, attempt)
        return did

    return run


def described(restarts: Restarts) -> list[dict]:
    return json.loads(attempts.variables(restarts).get(RESTARTS_VARIABLE, "[]"))


def test_a_program_is_started_again_until_it_ends_well(run, tmp_path, capsys):
    assert run(KILLED, RANK_KILLED, None) == [[], "again", [None], "again", [10, None]]
    assert not (tmp_path / "failure").exists()  # that was no reason of the job's
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(
        "restart 1 in this container (at most 3 an hour), after step 7: x was k"
    )
    assert printed[1].startswith("restart 2 in this container (at most 3 an hour), after step 17: ")


def test_the_variable_stays_short_enough_for_the_kernel():
    restarts = Restarts(taken=[ContainerRestart("x" * 1000, 10**12, 1.0, 10**12, 1.5)] * 1000)
    (value,) = attempts.variables(restarts).values()
    assert len(value) < 2**16 and len(described(restarts)) == attempts.MAX_LISTED


def test_an_error_is_raised_once_there_is_no_restart(run):
    with pytest.raises(ProgramFailed) as raised:
        run(KILLED, max_restarts="0")
    assert raised.value.restarts == ""
    with pytest.raises(UserError):
        run(UserError("--a: found 1"))
    with pytest.raises(ProgramFailed) as raised:
        run(KILLED, GPU, max_restarts=1)
    assert raised.value.restarts.startswith("after 1 restart in the container: the limit within ")


def test_a_program_that_ignores_a_stop_leaves_a_reason_until_it_ends(run, tmp_path):
    file = tmp_path / "failure"
    seen = []

    def ignore(supervisor: SimpleNamespace) -> None:
        supervisor.on_ignored("it ignores SIGTERM")
        seen.append(file.read_text())

    run(None, during=ignore)
    assert seen[0].startswith("interrupted, resume from step 0: it ignores SIGTERM")
    assert seen[0].endswith(" [host algo-1]") and not file.exists()
    file.write_text("error: its own [host algo-1]")
    run(None, during=ignore)
    assert file.read_text() == seen[1] == "error: its own [host algo-1]"


def test_all_hosts_decide_by_the_same_faults(run, capsys):
    death = Fault("host algo-2: x was killed", FaultKind.DEATH, 9)
    run(OtherFailed(OTHER), None, others={"algo-2": death})
    assert ", after step 9: host algo-2: x was killed" in capsys.readouterr().out
    with pytest.raises(ProgramFailed):
        run(KILLED, others={"algo-2": None})  # it is gone
    with pytest.raises(ProgramFailed):
        run(KILLED, others={"algo-2": Fault("interrupted, ...", FaultKind.STOP)})


def test_the_failure_file_says_how_often_it_was_tried(tmp_path):
    error = OtherFailed(DEAD)
    error.restarts = "after 2 restarts in the container: it came back"
    line = job_end.report(error, tmp_path / "failure", "algo-1")
    assert line == f"error: {DEAD.why} ({error.restarts}) [host algo-1]"
    (tmp_path / "failure").write_text("error: ValueError: x [host algo-1, rank 0]\ntrace")
    line = job_end.report(error, tmp_path / "failure", "algo-1")
    assert line == f"error: ValueError: x [host algo-1, rank 0] ({error.restarts})"


def test_a_restart_of_several_hosts_names_the_one_where_it_began():
    death, effect = Fault("x was killed", FaultKind.DEATH), Fault("x ended", FaultKind.EFFECT)
    both = {"algo-1": effect, "algo-2": death}
    assert attempts._why_and_where(both) == "host algo-2: x was killed"
    assert attempts._why_and_where({"algo-1": death}) == "x was killed"
    known = Fault("host algo-2, local rank 1 ended", FaultKind.DEATH)
    assert attempts._why_and_where({"algo-1": effect, "algo-2": known}) == known.why
