"""process/threads.py: as many threads as this process has CPUs, which spin for a short time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import torchrun_command
from sagemaker_lightning.process import threads

from app import train

ROOT = Path(__file__).resolve().parents[3]
MANY = 64  # CPUs of the machine that has the quotas below


def run(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run Python code in a process with no OpenMP variables but the given ones."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "MKL_"))
    }
    environment |= {"PYTHONPATH": ":".join(map(str, (*path, ROOT)))} | variables
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    return completed


def write(folder: Path, **files: str) -> None:
    """Write the files of a cgroup; names with _us are those of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


V1 = "4:memory:/job\n2:cpu,cpuacct:/job\n"
HYBRID = "2:cpu:/\n0::/job\n"
TREES = {
    "none": ("0::/job\n", {}, MANY),
    "version 2": ("0::/job\n", {"job": {"cpu_max": "300000 100000"}}, 3),
    "of a parent": (
        "0::/pod/job\n",
        {"pod": {"cpu_max": "200000 100000"}, "pod/job": {"cpu_max": "max 100000"}},
        2,
    ),
    "of the parent and less": (
        "0::/pod/job\n",
        {"pod": {"cpu_max": "4 1"}, "pod/job": {"cpu_max": "3 1"}},
        3,
    ),
    "no quota": ("0::/job\n", {"job": {"cpu_max": "max 100000"}}, MANY),
    "half a CPU": ("0::/job\n", {"job": {"cpu_max": "50000 100000"}}, 1),
    "nearly two": ("0::/job\n", {"job": {"cpu_max": "190000 100000"}}, 2),
    "the host's path": ("0::/docker/0a1b\n", {".": {"cpu_max": "500000 100000"}}, 5),
    "a path upwards": ("0::/../../other\n", {".": {"cpu_max": "500000 100000"}}, 5),
    "damaged": ("0::/job\n", {"job": {"cpu_max": "?"}}, MANY),
    "version 1": (
        V1,
        {"cpu,cpuacct/job": {"cpu_cfs_quota_us": "200000", "cpu_cfs_period_us": "100000"}},
        2,
    ),
    "version 1, linked": (
        V1,
        {"cpu": {"cpu_cfs_quota_us": "200000", "cpu_cfs_period_us": "100000"}},
        2,
    ),
    "version 1, no quota": (
        V1,
        {"cpu/job": {"cpu_cfs_quota_us": "-1", "cpu_cfs_period_us": "100000"}},
        MANY,
    ),
    "version 1, of another controller": (
        "4:memory:/other\n2:cpu:/job\n",
        {"cpu/other": {"cpu_cfs_quota_us": "100000", "cpu_cfs_period_us": "100000"}},
        MANY,
    ),
    "a path with colons": (
        "0::/system.slice:docker:1/job\n",
        {"system.slice:docker:1/job": {"cpu_max": "300000 100000"}},
        3,
    ),
    "a quota of nothing": ("0::/job\n", {"job": {"cpu_max": "0 100000"}}, MANY),
    "the least quota": ("0::/job\n", {"job": {"cpu_max": "1 1"}}, 1),
    "both versions": (
        HYBRID,
        {"unified/job": {"cpu_max": "4 1"}, "cpu": {"cpu_cfs_quota_us": "-1"}},
        4,
    ),
}


@pytest.mark.parametrize(("own", "tree", "cpus"), TREES.values(), ids=TREES)
def test_a_quota_of_cpus_counts(tmp_path, monkeypatch, own, tree, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MANY)))
    (tmp_path / "own").write_text(own)
    for folder, files in tree.items():
        write(tmp_path / "cgroups" / folder, **files)
    assert threads.usable_cpus(tmp_path / "cgroups", tmp_path / "own") == cpus


def test_a_system_without_cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", {0: {3, 5}}.get)  # 0: this process
    assert threads.usable_cpus(tmp_path, tmp_path / "none") == 2


def test_the_affinity_counts():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from sagemaker_lightning.process import threads\n"
    assert run(f"{code}print(threads.usable_cpus())").stdout == "1\n"


def test_ranks_share_what_there_is(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(MANY))}.get)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 6)
    assert [threads.thread_variables(ranks, {}) for ranks in (1, 2, 4, 9)] == [
        {"OMP_NUM_THREADS": text} for text in ("6", "3", "1", "1")
    ]
    assert threads.thread_variables(given={}) == {"OMP_NUM_THREADS": "6"}  # one process
    monkeypatch.setattr(threads, "usable_cpus", lambda: MANY)
    assert threads.thread_variables(1, {}) == {}  # OpenMP itself starts one for each core


@pytest.mark.parametrize("name", threads.COUNT_VARIABLES)
def test_what_the_user_has_set_stays(monkeypatch, name):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 1)
    assert threads.thread_variables(2, {name: "7"}) == {}


@pytest.mark.parametrize(
    ("own", "threads_expected"),
    [({}, "1"), ({"OMP_NUM_THREADS": "7"}, "7"), ({"MKL_NUM_THREADS": "7"}, None)],
)
def test_the_number_is_set_before_torch_is_imported(tmp_path, own, threads_expected):
    for package in ("pytorch_lightning", "torchvision"):
        (tmp_path / f"{package}.py").write_text(
            "import gc, os\nprint(__name__, os.environ.get('OMP_NUM_THREADS'), gc.isenabled())\n"
        )
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print('end', gc.get_freeze_count()))\n"
        "from sagemaker_lightning.compat import versions\n"
        "from sagemaker_lightning.process import lightning_import, threads\n"
        "threads.usable_cpus = lambda: 1\n"
        "versions.check = lambda: print('versions')\n"
    )
    code += "lightning_import.import_lightning()\nassert gc.isenabled() and gc.get_freeze_count()"
    if len(os.sched_getaffinity(0)) == 1 and not own:
        pytest.skip("one CPU: there is nothing to say")
    # A version that is not supported may not even be importable. No garbage is collected during
    # the import; at the end no object is frozen any more.
    assert run(code, tmp_path, **own).stdout.splitlines() == [
        "versions",
        f"pytorch_lightning {threads_expected} False",
        f"torchvision {threads_expected} False",
        "end 0",
    ]


def test_ranks_of_lightning_share_a_quota(monkeypatch):
    """The variable that `prepare` set in this process is not the user's; the other ranks get the
    share.
    """
    threads_before = torch.get_num_threads()
    monkeypatch.setattr(threads, "USER_VARIABLES", {})
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(threads, "usable_cpus", lambda: 4)
    try:
        torch.set_num_threads(3)
        threads.divide_cpus(1)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (3, "4")
        threads.divide_cpus(2)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")
        threads.divide_cpus(1, "cuda")
        threads.divide_cpus(4)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads_before)


def test_what_the_toolkit_has_set_is_not_the_users(monkeypatch):
    """A variable of the toolkit's is not the user's.

    The job's own program may call ours with several ranks, which share the quota.
    """
    monkeypatch.setattr(threads, "usable_cpus", lambda: 64)
    assert threads.variables_of_user(threads.thread_variables(given={})) == {}
    assert threads.variables_of_user({"OMP_NUM_THREADS": "7", "PATH": ""}) == {
        "OMP_NUM_THREADS": "7"
    }


def test_too_many_processes_are_refused(monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    says = r"^--trainer.devices: found 64, expected at most 8 processes on 2 CPUs; give 2 or fewer"
    with pytest.raises(UserError, match=says):
        threads.divide_cpus(64)
    with pytest.raises(UserError, match=says):
        torchrun_command.command(
            SageMakerEnvironment(), ["--trainer.devices=64"], 0, Path("train.py")
        )
    threads.check_process_count(8)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 16)
    threads.check_process_count(64)
    with pytest.raises(UserError, match=r"found 65, expected at most 64 processes on 16 CPUs; "):
        threads.check_process_count(65)
    monkeypatch.setenv("LOCAL_RANK", "0")
    threads.divide_cpus(65, "cuda")  # on GPUs as many as there are


@pytest.mark.slow
def test_a_training_with_too_many_processes_never_starts(monkeypatch, tmp_path, capsys):
    def fit(*_):
        raise AssertionError("it was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    monkeypatch.setattr(pytorch_lightning.Trainer, "fit", fit)
    with pytest.raises(SystemExit) as raised:
        train.main(["--trainer.devices=64", "--trainer.accelerator=cpu"])
    assert raised.value.code == 1
    output = capsys.readouterr().err
    assert "error: --trainer.devices: found 64" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, str(threads.SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ""),
    ],
)
def test_waiting_threads_spin_for_a_short_time_unless_the_user_says_how_long(given, count):
    code = "import os\nfrom sagemaker_lightning.process import threads\nthreads.prepare()\n"
    code += "print(os.environ.get('GOMP_SPINCOUNT', ''))"
    assert run(code, **given).stdout == f"{count}\n"


# torch's libgomp without torch: two threads that only wait, 20 times for 20 ms.
WAITING = """
import ctypes, importlib.util, time
from pathlib import Path

torch = Path(importlib.util.find_spec("torch").origin).parent
libgomp = ctypes.CDLL(str(torch / "lib/libgomp.so.1"))
nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
before = time.process_time()
for _ in range(20):
    libgomp.GOMP_parallel(nothing, None, 2, 0)
    time.sleep(0.02)
print(time.process_time() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU libgomp does not spin")
def test_waiting_threads_leave_the_cpu_to_others():
    """The numbers are CPU seconds: libgomp's own threads spin for milliseconds each time."""
    prepared = "from sagemaker_lightning.process import threads\nthreads.prepare()\n"
    ours, libgomps = (float(run(code + WAITING).stdout) for code in (prepared, ""))
    assert ours < libgomps / 4, (ours, libgomps)
