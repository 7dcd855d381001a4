"""launch/warm_start.py and launch/standby.py: a start without imports is as any other start.

The imports are left out here; tests/unit/resume/test_container_restarts.py has the whole, with
real ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from containers import ROOT

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.launch import standby, warm_start
from sagemaker_lightning.launch.standby import Rank, Standby
from sagemaker_lightning.nodes.rank_progress import PREFIX, RECORD
from sagemaker_lightning.process.supervisor import Supervisor

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


class Ranks:
    """Two ranks of a script, started warm in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, *codes: str, has_gpu: bool = False, imports: str = "None", send: bool = True
    ) -> tuple[int, list, str]:
        """Return the status, what the ranks have printed, by rank, and what stderr has.

        Args:
            codes: What each rank does.
            has_gpu: Whether the process has touched a GPU.
            imports: What the imports do.
            send: Whether there is a request.
        """
        (self.folder / "mine.py").write_text(SCRIPT)
        quick = QUICK.format(
            root=str(ROOT), script=str(standby.SCRIPT), has_gpu=has_gpu, imports=imports
        )
        plain = [sys.executable, "-c", "print('PLAIN')"]
        ranks = [
            {
                "command": [sys.executable, "--", "mine.py", *codes],
                "variables": dict(os.environ) | {"LOCAL_RANK": str(number), "NEW": "yes"},
            }
            for number in range(len(codes))
        ]
        request = {"command": plain, "variables": dict(os.environ), "ranks": ranks}
        completed = subprocess.run(
            [sys.executable, "-c", quick],
            input=json.dumps(request) + "\n" if send else "",
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = completed.stdout.splitlines()
        printed = [json.loads(line) for line in lines if line.startswith("[")]
        printed.sort(key=lambda seen: seen[1])
        self.lines = lines
        return completed.returncode, printed, completed.stderr


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Ranks:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Ranks(tmp_path)


def test_each_rank_finds_what_its_command_would_give_it(ranks, tmp_path):
    status, printed, stderr = ranks.run("pass", "pass")
    assert (status, stderr) == (0, "")
    here = str(tmp_path)
    assert printed == [
        [["pass", "pass"], rank, "yes", "__main__", here, here] for rank in ("0", "1")
    ]


def test_an_error_is_shown_as_python_shows_it(ranks):
    status, _, stderr = ranks.run("pass", "raise KeyError('the cause')")
    assert status == 1 and "warm_start" not in stderr
    assert (
        stderr.startswith("Traceback (most recent call last):\n") and "KeyError: 'the c" in stderr
    )
    assert "terminated with code 1\n" in stderr


def test_a_rank_that_dies_ends_the_others(ranks):
    began = time.monotonic()
    status, _, stderr = ranks.run("import time; time.sleep(50)", "os.kill(os.getpid(), 9)")
    assert status == 128 + signal.SIGKILL and time.monotonic() - began < 45
    assert "terminated with code -9\n" in stderr


def test_ranks_that_were_told_to_stop_end_with_the_signals_status(ranks):
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
def test_where_a_fork_is_unsafe_the_program_starts_anew(ranks, unsafe, why):
    status, printed, stderr = ranks.run("pass", "pass", **unsafe)
    assert (status, printed, ranks.lines) == (0, [], ["PLAIN"])
    assert stderr == f"starting anew, as no process can be forked: {why}\n"


def test_without_a_request_it_ends(ranks):
    assert ranks.run("pass", send=False) == (0, [], "")


# The side of the toolkit's process ----------------------------------------------------------------

WAITS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def trained(tmp_path):
    """A function that starts processes that look like ranks which train."""
    started = []
    (tmp_path / "mine.py").write_text(WAITS)

    def start(*variables: dict, flags: tuple = (), script: str = "mine.py") -> None:
        for each in variables:
            command = [sys.executable, *flags, script, "--a=1"]
            process = subprocess.Popen(command, cwd=tmp_path, env=dict(os.environ) | each)
            started.append(process)
            record = RECORD.pack(process.pid, 0, 1, 1, 1, True)
            (tmp_path / f"{PREFIX}{process.pid}").write_bytes(record)

    yield start
    for process in started:
        process.kill()
        process.wait()


def asked(tmp_path, monkeypatch, hosts=("algo-1",)) -> dict | None:
    """Return what a Standby asks its process for; None if it has no process."""
    monkeypatch.setattr(standby, "POLL_SECONDS", 0.01)
    (tmp_path / "cat.py").write_text("import sys\nopen('asked', 'w').write(sys.stdin.read())\n")
    monkeypatch.setattr(standby, "SCRIPT", tmp_path / "cat.py")
    here = SageMakerEnvironment(hosts=hosts, current_host=hosts[0])
    with Standby(here, Supervisor()) as aside:
        aside.prepare(tmp_path / "ranks", tmp_path)
        aside.thread.join(30)
        process = aside.take(["own", "command"], {"A": "b"}, {"NEW": "yes"})
        if not process:
            return None
        assert process.pid in aside.supervisor.unrelated_pids
        assert process.wait(30) == 0
        process.stderr.close()
    return json.loads((tmp_path / "asked").read_text())


def test_ranks_of_lightnings_own_launcher(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trained({"LOCAL_RANK": "1", "MASTER_PORT": "1"}, {"MINE": "x"})
    request = asked(tmp_path, monkeypatch)
    assert request["command"] == ["own", "command"]
    assert request["variables"] == {"A": "b", "NEW": "yes"}
    first, second = request["ranks"]
    assert first["command"] == [sys.executable, "mine.py", "--a=1"]
    assert (first["variables"]["LOCAL_RANK"], first["variables"]["MINE"]) == ("0", "x")
    assert second["variables"]["LOCAL_RANK"] == "1" and second["variables"]["NEW"] == "yes"
    ports = {rank["variables"]["MASTER_PORT"] for rank in request["ranks"]}
    assert len(ports) == 1 and ports != {"1"}


def test_ranks_of_torchrun_have_a_store_of_their_own(trained, tmp_path, monkeypatch):
    variables = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    trained(*({"LOCAL_RANK": str(n), "RANK": str(n)} | variables for n in (0, 1)), flags=("-u",))
    for rank in asked(tmp_path, monkeypatch)["ranks"]:
        assert rank["variables"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert asked(tmp_path, monkeypatch, hosts=("algo-1", "algo-2")) is None


def test_what_a_fork_cannot_run_starts_anew(trained, tmp_path, monkeypatch):
    trained({"LOCAL_RANK": "0"}, flags=("-I",))
    assert asked(tmp_path, monkeypatch) is None


def test_ranks_that_are_not_all_known_start_anew(trained, tmp_path, monkeypatch):
    trained({"LOCAL_RANK": "1"})
    assert asked(tmp_path, monkeypatch) is None


def test_a_rank_that_is_gone_is_none():
    with pytest.raises(OSError, match="No such file"):
        Rank.of_process(2**22 + 1)
    assert warm_start.FAILED.format(pid=7, code=-9).startswith(
        "Child process with PID 7 terminated"
    )
