"""launch/warm_start.py and launch/standby.py: a start without imports is as any other start.

The imports are left out here; tests/unit/resume/test_container_restarts.py has the whole, with
real ranks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from containers import ROOT

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.launch import attempts, standby, warm_start
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.launch.standby import Rank, Standby
from sagemaker_lightning.nodes import rank_progress
from sagemaker_lightning.nodes.rank_progress import PREFIX, RECORD
from sagemaker_lightning.process.parent_process import LAUNCHER_ENDED
from sagemaker_lightning.process.supervisor import Started, Supervisor, adopt_orphans

# In place of the imports, which take seconds; what a fork has to set is there.
QUICK = """
import sys, types
sys.path.insert(0, {root!r})
def module(name, **names):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(names)
    return made
cuda = types.SimpleNamespace(is_initialized=lambda: {has_gpu})
module("torch", cuda=cuda)
module("numpy", random=types.SimpleNamespace(seed=lambda: None))
for name in ("pytorch_lightning", "pytorch_lightning.utilities"):
    module(name)
only = types.SimpleNamespace(rank=None)
module("pytorch_lightning.utilities.rank_zero", rank_zero_only=only)
module(
    "sagemaker_lightning.process.lightning_import", import_lightning=lambda: {imports}
)
module("sagemaker_lightning.compat.torch_store", connect_soon=lambda: None)
names = dict(__name__="__main__", __file__={script!r})
with open({script!r}) as file:
    code = compile(file.read(), {script!r}, "exec")
exec(code, names)
"""
SCRIPT = """
import json, os, sys
rank = os.environ["LOCAL_RANK"]
seen = [sys.argv[1:], rank, os.environ.get("NEW"), __name__, os.getcwd(), sys.path[0]]
os.write(1, f"{json.dumps(seen)}\\n".encode())
exec(sys.argv[1 + int(rank)])
"""


def test_the_first_rank_that_fails_decides_how_the_others_end(monkeypatch, capsys):
    ended = iter([(11, 0), (0, 0), (99, 9 << 8), (12, 3 << 8), (13, 4 << 8)])
    monkeypatch.setattr(warm_start.os, "waitpid", lambda *_: next(ended))
    assert warm_start.wait_for([11, 12, 13]) == 3
    assert capsys.readouterr().err == warm_start.FAILED.format(pid=12, code=3) + "\n"
    assert next(ended, None) is None


def test_ranks_that_do_not_end_with_the_one_that_fails_are_killed(monkeypatch, capsys):
    ended = iter([(11, 5 << 8), (0, 0), (0, 0), (12, 9)])
    killed = []
    monkeypatch.setattr(warm_start.os, "waitpid", lambda *_: next(ended))
    monkeypatch.setattr(warm_start.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(warm_start, "OTHERS_END_SECONDS", -1)
    assert warm_start.wait_for([11, 12]) == 5
    assert killed == [(12, LAUNCHER_ENDED), (12, signal.SIGCONT)]
    assert "PID 11" in capsys.readouterr().err


class Ranks:
    """Ranks of a script, started warm in a folder: by one process, as often as is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen | None = None

    @property
    def has_forked(self) -> bool:
        """Whether the process has said that it can fork."""
        return (self.folder / "forks").exists()

    def begin(self, has_gpu: bool = False, imports: str = "None", modules: tuple = ()) -> None:
        """Start the process.

        Args:
            has_gpu: Whether it has touched a GPU.
            imports: What the imports do.
            modules: What it imports besides.
        """
        adopt_orphans()
        (self.folder / "mine.py").write_text(SCRIPT)
        quick = QUICK.format(
            root=str(ROOT), script=str(standby.SCRIPT), has_gpu=has_gpu, imports=imports
        )
        self.requests, theirs = socket.socketpair()
        self.requests.settimeout(60)
        self.output = (self.folder / "output").open("a+")
        command = [sys.executable, "-c", quick, str(self.folder / "forks"), *modules]
        self.process = subprocess.Popen(
            command, cwd=self.folder, stdin=theirs, stdout=self.output, stderr=subprocess.DEVNULL
        )
        theirs.close()

    def ask(self, *codes: str, words: tuple = ("--", "mine.py")) -> tuple[dict, Started]:
        """Ask for a rank for each code; return the answer, and the program if there is one."""
        ranks = [
            {
                "command": [sys.executable, *words, *codes],
                "variables": dict(os.environ) | {"LOCAL_RANK": str(number), "NEW": "yes"},
            }
            for number in range(len(codes))
        ]
        reading, writing = os.pipe()
        socket.send_fds(self.requests, [b"{"], [writing])
        os.close(writing)
        self.requests.sendall(json.dumps({"ranks": ranks}).encode()[1:] + b"\n")
        with self.requests.makefile() as answers:
            answer = json.loads(answers.readline())
        return answer, Started(answer.get("pid", 0), reading)

    def run(self, *codes: str, words: tuple = ("--", "mine.py"), **how) -> tuple[int, list, str]:
        """Return the status, what the ranks have printed, by rank, and what stderr has."""
        if not self.process:
            self.begin(**how)
        self.output.truncate(0)
        _, program = self.ask(*codes, words=words)
        with program.stderr:
            stderr = program.stderr.readall().decode()
        status = program.wait()
        self.output.seek(0)
        printed = [json.loads(line) for line in self.output]
        return status, sorted(printed, key=lambda seen: seen[1]), stderr

    def end(self) -> int:
        """Ask for nothing more, and return the process's status."""
        self.requests.close()
        status = self.process.wait(60)
        self.output.close()
        return status


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[Ranks]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Ranks(tmp_path)
    yield made
    assert made.end() == 0  # without a request, the process ends


def test_each_rank_finds_what_its_command_would_give_it(ranks, tmp_path):
    status, printed, stderr = ranks.run("pass", "pass")
    assert (status, stderr) == (0, "") and ranks.has_forked
    here = str(tmp_path)
    assert printed == [
        [["pass", "pass"], rank, "yes", "__main__", here, here] for rank in ("0", "1")
    ]


def test_a_module_is_run_as_python_runs_it(ranks, tmp_path):
    (tmp_path / "pkg").mkdir()
    code = "import os, sys; os.write(2, repr((sys.argv, __name__, __package__)).encode())"
    (tmp_path / "pkg/train.py").write_text(f"{code}\nimport mine")
    expected = subprocess.run(
        [sys.executable, "-m", "pkg.train", "pass"],
        cwd=tmp_path,
        env=dict(os.environ) | {"LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
    )
    (tmp_path / "mine.py").unlink(missing_ok=True)
    status, _, stderr = ranks.run("pass", words=("-m", "pkg.train"))
    assert status == 0 and stderr == expected.stderr.partition("Traceback")[0]
    assert "'__main__', 'pkg'" in stderr


def test_a_forked_rank_is_known_by_its_name(ranks):
    """Its variables in /proc are those of the process that forked it."""
    codes = [f"assert open('/proc/self/comm').read() == 'rank-{rank}\\n'" for rank in (0, 1)]
    assert ranks.run(*codes)[0] == 0 and ranks.has_forked


def test_an_error_is_shown_as_python_shows_it(ranks):
    status, _, stderr = ranks.run("pass", "raise KeyError('the cause')")
    assert status == 1 and "warm_start" not in stderr
    assert stderr.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'the c" in stderr
    assert "terminated with code 1\n" in stderr


def test_a_rank_that_dies_ends_the_others(ranks):
    began = time.monotonic()
    status, _, stderr = ranks.run("import time; time.sleep(50)", "os.kill(os.getpid(), 9)")
    assert status == 128 + signal.SIGKILL and time.monotonic() - began < 45
    assert "terminated with code -9\n" in stderr


def test_ranks_that_were_asked_to_stop_end_with_the_signals_status(ranks):
    status, _, stderr = ranks.run("sys.exit(143)", "sys.exit(0)")
    assert (status, stderr) == (143, "")


@pytest.mark.parametrize(
    ("unsafe", "why"),
    [
        ({"has_gpu": True}, "it uses a GPU"),
        ({"imports": "1 / 0"}, "the imports fail (ZeroDivisionError)"),
        (
            {
                "imports": "__import__('threading').Thread(target=__import__('time').sleep, "
                "args=(60,), daemon=True, name='mine').start()"
            },
            "it has threads (mine)",
        ),
    ],
)
def test_where_a_fork_is_unsafe_it_says_why(ranks, unsafe, why):
    ranks.begin(**unsafe)
    answer, program = ranks.ask("pass", "pass")
    with program.stderr:
        assert (answer, program.stderr.readall()) == ({"why_not": why}, b"")
    assert not ranks.has_forked


def test_one_process_starts_the_ranks_again_and_again(ranks):
    for _ in range(3):
        status, printed, stderr = ranks.run("pass", "pass")
        assert (status, len(printed), stderr) == (0, 2, "")


def test_what_the_ranks_had_imported_is_imported_if_it_is_there(ranks):
    code = "assert 'wave' in sys.modules and 'aifc' not in sys.modules"
    status, _, stderr = ranks.run(code, code, modules=("no_such.module", "wave"))
    assert (status, stderr) == (0, "")


def test_the_program_has_a_process_group_of_its_own_that_hears_signals(ranks):
    ranks.begin()
    waits = "import time; print('here', file=sys.stderr, flush=True); time.sleep(50)"
    _, program = ranks.ask(waits, waits)
    with program.stderr:
        assert program.stderr.read(4) == b"here"
        os.killpg(program.pid, signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM


def test_a_signal_that_comes_before_there_are_ranks_reaches_them(ranks):
    ranks.begin()
    _, program = ranks.ask("import time; time.sleep(50)")
    os.killpg(program.pid, signal.SIGTERM)
    with program.stderr:
        program.stderr.readall()
        assert program.wait() == 128 + signal.SIGTERM


# The side of the toolkit's process ----------------------------------------------------------------

WAITS = "import time\ntime.sleep(600)\n"
# Writes what it is asked for, starts a process for it, and ends; with a rank's argument, it stands
# for one that it has forked.
CAT = """
import json, os, socket, sys, time
if "--a=1" in sys.argv:
    time.sleep(600)
requests = socket.socket(fileno=0)
begin, *_ = socket.recv_fds(requests, 1, 1)
line = begin + requests.makefile("rb").readline()
open("asked", "w").write(json.dumps(json.loads(line) | {"imports": sys.argv[2:]}))
pid = os.fork() or os._exit(0)
requests.sendall(json.dumps({"pid": pid}).encode() + b"\\n")
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A function that starts processes that look like ranks which are about to train.

    They know how many they are, unless `count` says otherwise.
    """
    monkeypatch.setattr(standby, "FIRST_SECONDS", 0.0)
    started = []
    (tmp_path / "mine.py").write_text(WAITS)

    def start(
        *variables: dict, flags: tuple = (), script: str = "mine.py", count: int | None = None
    ) -> None:
        for each in variables:
            command = [sys.executable, *flags, script, "--a=1"]
            process = subprocess.Popen(command, cwd=tmp_path, env=dict(os.environ) | each)
            started.append(process)
            count = len(variables) if count is None else count
            note(tmp_path, process.pid, count)

    def end() -> None:
        for process in started:
            process.kill()
            process.wait()

    start.end = end
    yield start
    end()


def note(folder: Path, pid: int, count: int) -> None:
    """Write what a rank does that is one of `count` on its host."""
    record = RECORD.pack(pid, 0, 0, 0, 0, 0, count, 0, False, False)
    (folder / f"{PREFIX}{pid}").write_bytes(record)


def supervisor(tmp_path, program: int | None = None) -> Supervisor:
    """Return one whose program has a PID: that of a rank, if it is not given."""
    found = Supervisor()
    pid = program or next(rank_progress.all_ranks(tmp_path / "ranks")).pid
    found.child = SimpleNamespace(pid=pid)
    return found


def asked(
    tmp_path,
    monkeypatch,
    hosts=("algo-1",),
    all_fork: bool = False,
    program: int | None = None,
    starts_it: Callable | None = None,
) -> dict | None:
    """Return what a Standby asks its process for; None if it has no process."""
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    (tmp_path / "cat.py").write_text(CAT)
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "cat.py")
    here = SageMakerEnvironment(hosts=hosts, current_host=hosts[0])
    with Standby(here, supervisor(tmp_path, program), starts_it) as aside:
        return of(aside, tmp_path, all_fork)


def of(aside: Standby, tmp_path, all_fork: bool = False) -> dict | None:
    """Return what it asks its process for; None if it has no process."""
    adopt_orphans()
    aside.prepare(tmp_path / "ranks", tmp_path)
    aside.thread.join(30)
    process = aside.process
    program = aside.take({"NEW": "yes"}, all_fork)
    if not program:
        return None
    assert process.pid in aside.supervisor.unrelated_pids
    process.wait(30)
    assert program.wait() == 0
    program.stderr.close()
    return json.loads((tmp_path / "asked").read_text())


def test_ranks_that_were_forked_are_started_again_as_at_first(trained, tmp_path, monkeypatch):
    """The kernel has the command and the variables of the process that they were forked from."""
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    (tmp_path / "cat.py").write_text(CAT)
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "cat.py")
    trained({"MINE": "0"}, {"LOCAL_RANK": "1", "MINE": "1"})
    with Standby(SageMakerEnvironment(), supervisor(tmp_path)) as aside:
        first = of(aside, tmp_path)
        for file in tmp_path.glob(f"{PREFIX}*"):
            file.unlink()
        trained({"MINE": "0"}, {"MINE": "0"}, script=str(tmp_path / "cat.py"))
        again = of(aside, tmp_path)
    for request in (first, again):
        for rank in request["ranks"]:
            del rank["variables"]["MASTER_PORT"]
    assert again == first and first["ranks"][1]["variables"]["MINE"] == "1"


def test_no_process_begins_beside_ranks_that_have_just_begun(
    trained, tmp_path, monkeypatch, capsys
):
    """Its imports would slow theirs down, and a short job ends before it is of use."""
    monkeypatch.setattr(standby, "FIRST_SECONDS", 600.0)
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    trained({"LOCAL_RANK": "0"}, count=1)
    (rank,) = rank_progress.all_ranks(tmp_path / "ranks")
    with Standby(SageMakerEnvironment(), supervisor(tmp_path, rank.pid)) as aside:
        aside.prepare(tmp_path / "ranks", tmp_path)
        says = "the ranks were known for less than 600 s"
        while aside.why_not != says:
            time.sleep(0.01)
        assert not aside.process and aside.take({}) is None
    assert capsys.readouterr().out == f"starting it with all imports: {says}\n"


def test_a_process_begins_with_the_first_rank_and_forks_once_all_are_known(
    trained, tmp_path, monkeypatch, capsys
):
    """So it is ready when the ranks begin to train: what dies then is forked."""
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    (tmp_path / "cat.py").write_text(CAT)
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "cat.py")
    seen = set()
    of_process = Rank.of_process
    monkeypatch.setattr(Rank, "of_process", lambda pid: (of_process(pid), seen.add(pid))[0])
    note(tmp_path, 2**22 + 1, count=0)  # one that has ended
    trained({"LOCAL_RANK": "0"}, count=0)
    program = min(rank.pid for rank in rank_progress.all_ranks(tmp_path / "ranks"))
    with Standby(SageMakerEnvironment(), supervisor(tmp_path, program)) as aside:
        aside.prepare(tmp_path / "ranks", tmp_path)
        while not aside.process:
            time.sleep(0.01)
        process = aside.process
        assert aside.take({}) is None and not aside.is_ready and process.poll() is None
        said = "starting it with all imports: not all ranks were known yet\n"
        assert capsys.readouterr().out == said
        trained({"LOCAL_RANK": "1"}, count=0)
        aside.prepare(tmp_path / "ranks", tmp_path)
        while aside.why_not != "not all ranks were known yet":
            time.sleep(0.01)
        while len(seen) < 2:
            time.sleep(0.01)
        trained.end()  # their files stay, and one has said how many they are
        note(tmp_path, program, count=2)
        aside.thread.join(30)
        assert len(aside.ranks) == 2 and aside.process is process


def test_the_rank_that_starts_the_others_is_forked_alone_as_long_as_they_are_unknown(
    trained, tmp_path, monkeypatch
):
    """So it is as at first: Lightning starts the others; once all are known, all are forked."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    (tmp_path / "cat.py").write_text(CAT)
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "cat.py")
    trained({"MINE": "x"}, count=0)
    with Standby(SageMakerEnvironment(), supervisor(tmp_path)) as aside:
        adopt_orphans()
        aside.prepare(tmp_path / "ranks", tmp_path)
        while not aside.first:
            time.sleep(0.01)
        process = aside.process
        first = aside.take({})
        process.wait(30)
        assert first.wait() == 0 and not aside.ranks
        first.stderr.close()
        (rank,) = json.loads((tmp_path / "asked").read_text())["ranks"]
        assert rank["variables"]["MINE"] == "x" and "LOCAL_RANK" not in rank["variables"]
        trained.end()
        for file in tmp_path.glob(f"{PREFIX}*"):
            file.unlink()
        trained({}, script=str(tmp_path / "cat.py"), count=2)
        trained({"LOCAL_RANK": "1", "MINE": "y"}, count=2)
        ranks = of(aside, tmp_path)["ranks"]
        assert [rank["variables"]["MINE"] for rank in ranks] == ["x", "y"]
        assert [rank["variables"]["LOCAL_RANK"] for rank in ranks] == ["0", "1"]


def test_a_rank_alone_may_start_others_in_a_later_training(trained, tmp_path, monkeypatch):
    """With the variable, Lightning would take it for one that has been started by a launcher."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trained({"MINE": "x"})
    (rank,) = asked(tmp_path, monkeypatch)["ranks"]
    assert "LOCAL_RANK" not in rank["variables"]


def test_ranks_of_lightnings_own_launcher(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trained({"LOCAL_RANK": "1", "MASTER_PORT": "1"}, {"MINE": "x"})
    request = asked(tmp_path, monkeypatch)
    assert request["imports"] == ["sagemaker_lightning.resume.callback"]
    first, second = request["ranks"]
    assert first["command"] == [sys.executable, "mine.py", "--a=1"]
    assert (first["variables"]["LOCAL_RANK"], first["variables"]["MINE"]) == ("0", "x")
    assert second["variables"]["LOCAL_RANK"] == "1" and second["variables"]["NEW"] == "yes"
    ports = {rank["variables"]["MASTER_PORT"] for rank in request["ranks"]}
    assert len(ports) == 1 and ports != {"1"}


def test_a_program_of_the_image_is_forked_with_its_imports(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "HOME", tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app/mine.py").write_text(WAITS)
    trained({"LOCAL_RANK": "0"}, script="app/mine.py")
    assert asked(tmp_path, monkeypatch)["imports"] == list(standby.IMAGES_IMPORTS)


def test_what_cannot_be_forked_is_said(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    script = tmp_path / "cannot.py"
    script.write_text(CAT.replace('{"pid": pid}', '{"why_not": "x"}'))
    monkeypatch.setattr(standby, "SCRIPT", script)
    trained({"LOCAL_RANK": "0"})
    with Standby(SageMakerEnvironment(), supervisor(tmp_path)) as aside:
        assert of(aside, tmp_path) is None and aside.process is None
    assert capsys.readouterr().out == "starting it with all imports: x\n"


def test_a_process_that_does_not_answer_is_ended(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(standby, "ANSWER_SECONDS", 0.1)
    (tmp_path / "hangs.py").write_text(WAITS)
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "hangs.py")
    trained({"LOCAL_RANK": "0"})
    with Standby(SageMakerEnvironment(), supervisor(tmp_path)) as aside:
        aside.prepare(tmp_path / "ranks", tmp_path)
        aside.thread.join(30)
        process = aside.process
        assert aside.take({}) is None and process.returncode == -signal.SIGKILL


def test_ranks_of_torchrun_have_a_store_of_their_own(trained, tmp_path, monkeypatch):
    variables = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    trained(*({"LOCAL_RANK": str(n), "RANK": str(n)} | variables for n in (0, 1)), flags=("-u",))
    for rank in asked(tmp_path, monkeypatch, program=os.getpid())["ranks"]:
        assert rank["variables"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_the_torchruns_of_several_hosts_start_their_ranks_together_or_none_does(
    trained, tmp_path, monkeypatch
):
    """They meet where they met before, in a store of the first rank's own."""
    where = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "1234"}
    trained({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"} | where)
    hosts = {"hosts": ("algo-1", "algo-2"), "program": os.getpid()}
    assert asked(tmp_path, monkeypatch, **hosts) is None
    (rank,) = asked(tmp_path, monkeypatch, **hosts, all_fork=True)["ranks"]
    assert {name: rank["variables"][name] for name in where} == where
    assert rank["variables"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_a_process_is_ready_once_it_can_fork(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    script = tmp_path / "forks.py"
    script.write_text("import os, sys\nos.read(0, 1)\nopen(sys.argv[1], 'x')\nos.read(0, 1)")
    monkeypatch.setattr(standby, "SCRIPT", script)
    trained({"LOCAL_RANK": "0"})
    with Standby(SageMakerEnvironment(), supervisor(tmp_path)) as aside:
        assert not aside.is_ready
        aside.prepare(tmp_path / "ranks", tmp_path)
        aside.thread.join(30)
        assert not aside.is_ready
        aside.requests.send(b"x")
        deadline = time.monotonic() + 30
        while not aside.is_ready:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process = aside.process
        aside.prepare(tmp_path / "ranks", tmp_path)
        assert aside.process is process and aside.is_ready  # it stays for the next time
        process.kill()
        process.wait()
        assert not aside.is_ready and aside.take({}) is None and aside.process is None


@pytest.mark.parametrize(
    ("flags", "script"), [(("-I",), "mine.py"), ((), "mine"), (("-m",), "mine"), ((), "./mine.py")]
)
def test_what_a_fork_cannot_run_starts_with_all_imports(
    trained, tmp_path, monkeypatch, capsys, flags, script
):
    (tmp_path / "mine").write_text(WAITS)
    trained({"LOCAL_RANK": "0"}, flags=flags, script=script)
    can = script == "./mine.py" or flags == ("-m",)
    assert bool(asked(tmp_path, monkeypatch)) == can
    line = (
        "starting it with all imports: the ranks were not started as a script or module by "
        f"{sys.executable}"
    )
    assert (line in capsys.readouterr().out) == (not can)


@pytest.mark.parametrize(
    ("launcher", "program"),
    [({}, os.getpid()), ({"TORCHELASTIC_RUN_ID": "x"}, os.getppid())],
    ids=["a script that trains", "a script that starts torchrun"],
)
def test_what_starts_ranks_and_may_have_more_to_do_starts_with_all_imports(
    trained, tmp_path, monkeypatch, capsys, launcher, program
):
    trained({"LOCAL_RANK": "0"} | launcher)
    assert asked(tmp_path, monkeypatch, program=program) is None
    assert (
        ": the program that started the ranks may have other work to do\n"
        in capsys.readouterr().out
    )


def test_what_starts_ranks_and_has_nothing_more_to_do_is_left_out(trained, tmp_path, monkeypatch):
    """SDK 3's driver: it is neither the supervisor's program nor a rank."""
    trained({"LOCAL_RANK": "0", "PWD": str(tmp_path)})
    mine = psutil.Process().cmdline()
    found = asked(tmp_path, monkeypatch, program=1, starts_it=lambda command: command == mine)
    assert len(found["ranks"]) == 1
    assert not asked(tmp_path, monkeypatch, program=1, starts_it=lambda command: False)


def test_where_a_shell_has_started_ranks_is_known_if_they_are_still_there(
    trained, tmp_path, monkeypatch, capsys
):
    trained({"LOCAL_RANK": "0", "PWD": str(tmp_path.parent)})
    assert not asked(tmp_path, monkeypatch, program=1, starts_it=lambda command: True)
    assert ": the ranks have changed their working directory\n" in capsys.readouterr().out


def test_ranks_that_are_not_all_known_start_with_all_imports(
    trained, tmp_path, monkeypatch, capsys
):
    trained({"LOCAL_RANK": "1"}, {"LOCAL_RANK": "2"})
    assert asked(tmp_path, monkeypatch) is None
    assert ": not all ranks are known\n" in capsys.readouterr().out


@pytest.mark.parametrize("all_fork", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_only_a_restart_is_forked_and_what_comes_next_is_prepared(
    monkeypatch, tmp_path, taken, all_fork
):
    did = []
    program = SimpleNamespace(run=lambda *given: did.append(given) or "its end")
    monkeypatch.setattr(Standby, "take", lambda self, new, all_fork: ("forked", new, all_fork))
    monkeypatch.setattr(Standby, "prepare", lambda self, *given: did.append(given))
    restart = ContainerRestart("x", 3, 1.0)
    restarts = Restarts(taken=[restart] * taken)
    watch = SimpleNamespace(path=tmp_path / "ranks", all_fork=all_fork)
    with Standby(SageMakerEnvironment(), program) as aside:
        assert aside.run(["a"], tmp_path, {"MINE": "1"}, watch, restarts, True) == "its end"
    new = {"SAGEMAKER_LIGHTNING_WATCH": str(watch.path)} | attempts.variables(restarts)
    started = ("forked", new, all_fork) if taken else None
    assert did == [
        *([(watch.path, tmp_path)] if taken < restarts.most else []),
        (["a"], tmp_path, {"MINE": "1"} | new, True, started),
    ]


@pytest.mark.parametrize(
    ("word", "is_this"),
    [
        (sys.executable, True),
        (Path(sys.executable).name, True),
        ("/usr/bin/env", False),
        ("no-such-python", False),
        ("", False),
    ],
)
def test_whether_a_rank_runs_in_this_python(word, is_this):
    """SDK 3 writes the whole path of it, a command may have its name alone."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert Rank([word, "train.py"], {"PATH": path}).can_be_forked is is_this


def test_a_rank_that_is_gone_is_not_counted():
    with pytest.raises(OSError, match="No such file"):
        Rank.of_process(2**22 + 1)
    assert warm_start.FAILED.format(pid=7, code=-9).startswith(
        "Child process with PID 7 terminated"
    )


def test_a_process_with_a_thread_is_not_forked():
    assert warm_start.why_unsafe() in ("", f"it has threads ({', '.join(others())})")
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="a-users")
    thread.start()
    try:
        assert warm_start.why_unsafe() == f"it has threads ({', '.join(others())})"
        assert "a-users" in others()
    finally:
        waiting.set()
        thread.join()


def others() -> list[str]:
    """Return the names of the threads beside the main one."""
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main]


@pytest.mark.parametrize(
    ("code", "why_not"),
    [
        ("", ""),
        (
            "import threading; threading.Thread(target=input).start()",
            "the interpreter's start has left threads (1)",
        ),
    ],
)
def test_threads_that_the_interpreters_start_has_left_are_not_forked(code, why_not):
    program = f"{code}\nfrom sagemaker_lightning.launch import warm_start\nimport os\n"
    program += "print(warm_start.threads_at_start(), flush=True)\nos._exit(0)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline().strip() == why_not
