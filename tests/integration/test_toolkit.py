"""launch/toolkit_hook.py in the real toolkit: which program runs, by which launcher.

And what the job says about it.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import warm
from conftest import ROOT, Job

from sagemaker_lightning.process.threads import usable_cpus

pytestmark = pytest.mark.slow

# What a user's own script may do when it is asked to stop: it saves for two seconds.
SAVER = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(2)
    print("SAVED", flush=True)
    sys.exit({status})
signal.signal(signal.{name}, save)
os.write(1, b"READY\\n")  # no print: the signal may come while it is at work
time.sleep(60)
"""


def program(job: Job, source: str, **hyperparameters) -> Job:
    """Give the job a program of its own, train.py."""
    job.write("code/train.py", source)
    job.write(
        "input/config/hyperparameters.json",
        json.dumps({"sagemaker_program": "train.py"} | hyperparameters),
    )
    return job


def ready(started):
    """Return a process when its program has said that it is ready."""
    for line in started.stdout:
        if "READY" in line:
            return started
    raise AssertionError("the program never got ready")


def start(job: Job) -> warm.Started:
    """Start `train` on the job; return when the program says that it is ready."""
    return ready(job.start())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("status", [0, 5])
def test_a_signal_reaches_the_program_and_is_waited_for(job: Job, name, status):
    started = start(program(job, SAVER.format(name=name, status=status)))
    started.send_signal(getattr(signal, name))
    output, _ = started.communicate(timeout=60)
    assert "SAVED" in output
    assert f"train.py: ended with exit status {status} after {name}" in output
    assert started.returncode == (128 + getattr(signal, name) if status else 0)
    if status:
        assert job.failure.startswith(
            f"interrupted, resume from step 0: train.py ended with exit status 5 after {name}"
        )
    else:
        assert (job.base / "output/success").exists()


def test_a_program_that_does_not_listen_dies_of_the_signal(job: Job):
    started = start(program(job, "import time\nprint('READY', flush=True)\ntime.sleep(60)\n"))
    started.terminate()
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 143
    assert job.failure.startswith("interrupted, resume from step 0: train.py was killed by SIGTERM")


def test_what_a_shell_script_started_may_finish_saving(job: Job):
    job.write("code/saver.py", SAVER.format(name="SIGTERM", status=0))
    job.write("code/run.sh", f"#!/bin/sh\n{sys.executable} saver.py\nexit 0\n")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "run.sh"}')
    started = start(job)
    started.terminate()
    output, _ = started.communicate(timeout=60)
    assert "SAVED" in output


@pytest.mark.root
def test_as_pid_1(job: Job):
    """The kernel drops signals to PID 1 without a handler, and PID 1 gets the orphans."""
    job.write("code/saver.py", SAVER.format(name="SIGTERM", status=0))
    source = f"""
import subprocess, sys
subprocess.Popen(["sh", "-c", "{sys.executable} saver.py & wait"])
import time
time.sleep(60)
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", str(ROOT / "entrypoint.sh"), "train"]
    variables = program(job, source).variables
    started = ready(
        subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    )
    children = subprocess.check_output(["pgrep", "-P", str(started.pid)], text=True).split()
    os.kill(int(children[0]), signal.SIGTERM)
    output, _ = started.communicate(timeout=60)
    assert "SAVED" in output and "train.py: was killed by SIGTERM" in output


@pytest.mark.root
@pytest.mark.parametrize("seconds", [0, 0.2, 0.5, 0.9])
def test_as_pid_1_a_signal_is_heard_from_the_start(job: Job, seconds):
    """Without a handler the first process would not hear it, and train to its end.

    The shell has a handler as soon as it runs the script, and what it becomes blocks the signal.
    In the milliseconds between, nothing can be done (docs/interruptions.md).
    """
    program(job, "import time\nprint('READY', flush=True)\ntime.sleep(20)\n")
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", str(ROOT / "entrypoint.sh"), "train"]
    started = subprocess.Popen(
        namespace, env=job.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not (children := psutil.Process(started.pid).children()) or not handles_sigterm(
        children[0].pid
    ):
        time.sleep(0.01)
    time.sleep(seconds)
    while not handles_sigterm(children[0].pid, ("SigCgt", "SigBlk")):
        time.sleep(0.001)
    os.kill(children[0].pid, signal.SIGTERM)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 143, output


def handles_sigterm(pid: int, masks: tuple[str, ...] = ("SigCgt",)) -> bool:
    """Return whether SIGTERM is in one of a process's masks, as that of what it has handlers for.

    unshare blocks it, too, before it becomes the shell, and has no handler then.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = [re.search(rf"{mask}:\s+(\w+)", status)[1] for mask in masks]
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in found)


def test_a_stop_before_the_program_is_started(job: Job):
    """The stop comes while pip installs the job's requirements."""
    program(job, "print('RAN')")
    job.write("code/requirements.txt", "./slow\n")
    job.write("code/slow/setup.py", "import time\nopen('../../installing', 'w')\ntime.sleep(4)\n")
    process = subprocess.Popen(
        [str(ROOT / "entrypoint.sh"), "train"],
        env=job.variables | {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while (
        "program:" not in (line := process.stdout.readline())
        and line
        and not (job.base / "installing").exists()
    ):
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "RAN" not in output
    assert job.failure.startswith(
        "interrupted, resume from step 0: SIGTERM came before the program was started"
    )


def test_a_source_archive_runs_even_where_there_is_code_already(job: Job, tmp_path: Path):
    """The toolkit alone would say that it ignores the archive, and run the code that is there."""
    job.write("code/left_over.py", "")
    job.write("code/train.py", "print('THE WRONG ONE')")
    (tmp_path / "train.py").write_text("import left_over\nprint('THE RIGHT ONE')")
    with tarfile.open(tmp_path / "sourcedir.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "train.py", "train.py")
    hyperparameters = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": str(tmp_path / "sourcedir.tar.gz"),
    }
    job.write(
        "input/config/hyperparameters.json",
        json.dumps({key: json.dumps(value) for key, value in hyperparameters.items()}),
    )
    run = job.run()
    assert run.returncode == 0, run.stdout
    assert "THE RIGHT ONE" in run.stdout and "THE WRONG ONE" not in run.stdout


@pytest.mark.parametrize("archived", [False, True])
def test_our_program_finds_the_jobs_modules(job: Job, tmp_path: Path, archived: bool):
    """Our program finds a job's modules: `--model=mine.Model`.

    The source has no program of its own. It is a folder with a requirements.txt, or an archive
    that a hyperparameter names, as a client without an SDK gives it (docs/clients.md).
    """
    module = "raise RuntimeError('IMPORTED')\n"
    hyperparameters = {"model": "mine.Model"}
    if archived:
        (tmp_path / "mine.py").write_text(module)
        with tarfile.open(tmp_path / "sourcedir.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "mine.py", "mine.py")
        hyperparameters["sagemaker_submit_directory"] = str(tmp_path / "sourcedir.tar.gz")
    else:
        job.write("code/requirements.txt", "pip\n")
        job.write("code/mine.py", module)
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    run = job.run()
    assert run.returncode == 1
    says = "--model: found 'mine.Model' (RuntimeError: IMPORTED, mine.py line 1), expected ResNet18"
    assert says in job.failure


RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("RANKS", int(total), os.environ["LOCAL_WORLD_SIZE"], flush=True)
"""


@pytest.mark.parametrize(
    ("option", "warns"),
    [
        ("sagemaker_torch_distributed_enabled", False),
        pytest.param("sagemaker_pytorch_ddp_enabled", True, marks=pytest.mark.thorough),
        ("sagemaker_distributed_dataparallel_enabled", True),
    ],
)
def test_a_distribution_runs_as_torchrun(job: Job, option, warns):
    """The script is plain PyTorch and knows nothing of Lightning or SageMaker."""
    run = program(job, RANKS, **{option: "true", "sagemaker_instance_type": '"local"'}).run()
    assert run.returncode == 0, run.stdout
    assert "RANKS 1 1" in run.stdout
    assert ("AWS has published no SMDDP build since PyTorch 2.5" in run.stdout) == warns


@pytest.mark.parametrize(
    ("own", "threads_expected"),
    [({}, str(max(1, usable_cpus() // 2))), ({"OMP_NUM_THREADS": "7"}, "7")],
)
def test_the_ranks_of_a_jobs_own_program_share_the_cpus(job: Job, own, threads_expected):
    """torchrun itself would warn, and leave each of them one thread."""
    hyperparameters = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": '"local"',
    }
    program(
        job,
        "import os\nprint('THREADS', os.environ['OMP_NUM_THREADS'])",
        **hyperparameters,
        **{"trainer.devices": "2"},
    )
    run = job.run(**own)
    assert run.returncode == 0, run.stdout
    assert (
        run.stdout.count(f"THREADS {threads_expected}\n") == 2
        and "Setting OMP_NUM_THREADS" not in run.stdout
    )


def test_torchrun_for_our_own_program(job: Job):
    hyperparameters = {
        "sagemaker_torch_distributed_enabled": "true",
        "trainer.devices": "2",
        "trainer.accelerator": "cpu",
    }
    hyperparameters |= {"trainer.max_steps": "2", "data.batch_size": "32"}
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    run = job.run()
    assert run.returncode == 0, run.stdout
    assert "MEMBER: 2/2" in run.stdout and ", torchrun" in run.stdout


def test_a_jobs_program_that_calls_ours_gets_its_hyperparameters_unharmed(job: Job):
    """The toolkit's command line would have '' for null, a=1 for {"a": 1} and 1.1 for 1.10."""
    program(
        job,
        "from app.train import main\nmain()\n",
        **{
            "trainer.max_time": "null",
            "trainer.max_steps": "1",
            "data.batch_size": "256",
            "logger.name": "1.10",
            "model": '{"class_path": "app.model.ResNet18"}',
        },
    )
    run = job.run()
    assert run.returncode == 0, run.stdout
    assert list(job.base.glob("output/data/tensorboard/localhost/1.10/version_0/events.*"))


def test_an_environment_that_a_job_makes_has_its_own_packages(job: Job):
    """Those of the interpreter that runs the toolkit do not come before them."""
    script = (
        f"set -e\n{sys.executable} -m venv --without-pip mine\n"
        'echo \'VERSION = "MINE"\' >"$(echo mine/lib/*/site-packages)/numpy.py"\n'
        "mine/bin/python -c 'import numpy; print(numpy.VERSION)'\n"
        "mine/bin/python -c 'import helper; print(helper.NAME)'\n"
    )
    job.write("code/train.sh", script)
    job.write("code/helper.py", "NAME = 'OF THE SOURCE'\n")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "train.sh"}')
    run = job.run()
    assert run.returncode == 0, run.stdout
    assert "MINE\nOF THE SOURCE\n" in run.stdout


@pytest.mark.root
@pytest.mark.parametrize("ends", ["well", "badly", "by a stop"])
def test_a_person_can_delete_what_root_left_in_mounted_folders(job: Job, ends):
    person = 54321
    for name in ("output", "model", "checkpoints"):
        (job.base / name).mkdir(parents=True)
        os.chown(job.base / name, person, person)
    source = """
import os, signal, time
from pathlib import Path
for folder in map(Path, ("{base}/output/data/logs/deep", "{base}/model", "{base}/checkpoints/a")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").touch()
"""
    last = {
        "well": "",
        "badly": "raise RuntimeError\n",
        "by a stop": "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(30)\n",
    }
    run = program(job, source.format(base=job.base) + last[ends]).run()
    assert run.returncode == {"well": 0, "badly": 1, "by a stop": 143}[ends], run.stdout
    names = ("output", "model", "checkpoints")
    written = [path for name in names for path in (job.base / name).rglob("*")]
    assert len(written) >= 8 and {path.stat().st_uid for path in written} == {person}
    # Nothing else is given away.
    others = [job.base, *(job.base / "input").rglob("*"), *(job.base / "code").rglob("*")]
    assert {path.stat().st_uid for path in others} == {0}


def test_the_summary_masks_what_looks_like_a_credential(job: Job):
    secret = {
        "api_key": "k1",
        "wandb.token": "k2",
        "db_password": "k3",
        "url": "https://me:k4@host/",
        "index": "https://k6k6k6@host/",
        "aws": "AKIA" + "K5K5" * 4,
    }
    program(job, "print('RAN')", lr="0.1", **secret)
    job.write("input/data/training/file", "x" * 1000)
    run = job.run(MY_OWN_VARIABLE="not for the log")
    assert run.returncode == 0, run.stdout
    assert not [
        value
        for value in ("k1", "k2", "k3", "k4", "K5K5", "k6", "not for the log")
        if value in run.stdout
    ]
    for line in (
        "hosts: localhost (this one)",
        f"channel training: {job.base}/input/data/training, 1 files, 1000 bytes",
        f"program: {job.base}/code/train.py, the job's own, one process",
        "hyperparameter lr: 0.1",
        "hyperparameter api_key: ******",
    ):
        assert f"{line}\n" in run.stdout
    assert "Environment variables" not in run.stdout


BROKEN = {
    "no such program": (
        {"sagemaker_program": "other.py"},
        {},
        "sagemaker_program: found other.py, which is neither",
    ),
    "a program elsewhere": ({"sagemaker_program": "../x.py"}, {}, "error: "),
    "an archive that is not there": (
        {"sagemaker_submit_directory": "/nowhere/sourcedir.tar.gz"},
        {},
        "sagemaker_submit_directory: found /nowhere/",
    ),
    "a damaged archive": (
        {"sagemaker_submit_directory": "{base}/broken.tar.gz"},
        {"broken.tar.gz": "no"},
        "could not be unpacked",
    ),
    "requirements": (
        {},
        {"code/requirements.txt": "no-such-package-of-ours==9\n"},
        "requirements.txt: pip could not install",
    ),
    "mpi": (
        {"sagemaker_mpi_enabled": "true"},
        {},
        "distribution: found mpi, expected torch_distributed",
    ),
    "parameter servers": (
        {"sagemaker_parameter_server_enabled": "true"},
        {},
        "found parameter_server, expected",
    ),
    "an import": (
        {},
        {"code/train.py": "import not_there"},
        "import failed: put what is missing into the job's",
    ),
    "a syntax error": ({}, {"code/train.py": "def f(:\n"}, "SyntaxError: invalid syntax"),
    "a channel": (
        {},
        {"code/train.py": "open('{base}/input/data/train/x')"},
        "missing in the input channels: give",
    ),
    "a flag": (
        {},
        {"code/train.py": "import argparse\nargparse.ArgumentParser().parse_args()"},
        "unrecognized arguments: --size",
    ),
    "memory": (
        {},
        {"code/train.py": "raise MemoryError"},
        "out of host memory: use smaller batches",
    ),
    "a full disk": (
        {},
        {"code/train.py": "open('/dev/full', 'w', 1).write('x\\n')"},
        "disk full: make the job's",
    ),
    "sys.exit": (
        {},
        {"code/train.py": "import sys; sys.exit('give me data')"},
        "exit status 1: its last line: give me data",
    ),
}


@pytest.mark.parametrize(("hyperparameters", "sources", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_job_says_why(job: Job, hyperparameters, sources, says):
    written = {
        key: value.replace("{base}", str(job.base)) for key, value in hyperparameters.items()
    }
    program(job, "print('RAN')", **{"size": "1"} | written)
    for name, source in sources.items():
        job.write(name, source.replace("{base}", str(job.base)))
    run = job.run(PIP_NO_INDEX="1")
    assert run.returncode == 1, run.stdout
    first_line = job.failure.splitlines()[0]
    assert (
        first_line.startswith("error: ")
        and says in first_line
        and first_line.endswith("[host localhost]")
    )
    assert len((job.base / "output/failure").read_text()) <= 1024
    assert "RAN" not in run.stdout
    assert first_line in run.stdout
    assert "Framework Error" not in run.stdout


@pytest.mark.parametrize("text", ["", "my own words\nand more"])
def test_a_failure_file_of_the_programs_own_stays_unless_it_is_empty(job: Job, text):
    source = (
        f"import os, sys\nopen(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write({text!r})\n"
        "sys.exit(9)\n"
    )
    run = program(job, source).run()
    assert run.returncode == 1
    failure = (job.base / "output/failure").read_text()
    assert (
        failure == text if text else failure.startswith("error: train.py ended with exit status 9")
    )
    assert "train.py: ended with exit status 9" in run.stdout and "IndexError" not in run.stdout


LEAVES = {  # what a program does with PATH, before it ends
    "a pipe": "os.mkfifo(PATH)",
    "a folder": "os.mkdir(PATH); open(PATH + '/mine', 'w').close()",
    "a link to a file": "os.symlink('../mine', PATH)",
    "a link for an output folder": (
        "shutil.rmtree(os.environ['SM_OUTPUT_DIR']); "
        "os.symlink('/nowhere/mine', os.environ['SM_OUTPUT_DIR'])"
    ),
}


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("status", [0, 9])
def test_whatever_a_program_leaves_where_its_end_is_noted_is_replaced(job: Job, leaves, status):
    """It is not followed, and nothing waits for somebody who reads a pipe."""
    job.write("mine", "mine")
    source = (
        "import os, shutil, sys\n"
        "open(os.environ['SM_MODEL_DIR'] + '/model', 'w').close()\n"
        f"PATH = os.environ['SM_OUTPUT_DIR'] + '/{'failure' if status else 'success'}'\n"
        f"{LEAVES[leaves]}\nsys.exit({status})\n"
    )
    run = program(job, source).run(timeout=60)
    assert run.returncode == (1 if status else 0), run.stdout
    path = job.base / "output" / ("failure" if status else "success")
    text = "error: train.py ended with exit status 9" if status else ""
    assert stat.S_ISREG(path.lstat().st_mode) and path.read_text().startswith(text)
    assert (job.base / "mine").read_text() == "mine"
    assert len(list((job.base / "output").glob(f"{path.name}.*/mine"))) == (leaves == "a folder")


def test_the_cause_among_several_ranks_is_reported(job: Job):
    source = (
        RANKS
        + "if dist.get_rank() == 1:\n    raise ValueError('the cause')\ndist.all_reduce(total)\n"
    )
    program(job, source, sagemaker_torch_distributed_enabled="true", **{"trainer.devices": "2"})
    run = job.run()
    assert run.returncode == 1
    assert "ValueError: the cause" in job.failure.splitlines()[0]
    assert "raise ValueError" in job.failure


def test_the_image_leaves_no_code_in_the_jobs_folder(job: Job):
    job.write("input/config/hyperparameters.json", '{"nonsense": "1"}')
    assert job.run().returncode == 1
    assert not list((job.base / "code").iterdir())
    shutil.rmtree(job.base)


ONCE = """
import os
import signal
from pathlib import Path
from probe import Probe

class Once(Probe):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and self.global_rank == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_starts_all_ranks_again_if_it_may(job: Job, restarts):
    job.write("code/probe.py", (ROOT / "tests/support/probe.py").read_text())
    job.write("code/once.py", ONCE)
    hyperparameters = {
        "model": "once.Once",
        "data": "probe.Counted",
        "trainer.devices": "2",
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": "1",
        "checkpoint.monitor": "null",
        "checkpoint.filename": "null",
        "max_restarts": str(restarts),
        "data.batch_size": "8",
    }
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    run = job.run(SAGEMAKER_PROGRAM="app/train_torchrun.py", OMP_NUM_THREADS="1")
    assert (job.base / "code/died").exists(), run.stdout
    assert run.returncode == (0 if restarts else 1), run.stdout
    if not restarts:
        assert "rank 1 was killed by SIGKILL" in job.failure


def test_max_restarts_is_a_number(job: Job):
    job.write("input/config/hyperparameters.json", '{"max_restarts": "often"}')
    assert job.run(SAGEMAKER_PROGRAM="app/train_torchrun.py").returncode == 1
    assert job.failure.startswith(
        "error: --max_restarts: found 'often', expected a number, 0 or more"
    )


def test_a_program_gets_what_its_job_set(job: Job):
    """No variable of the user is overwritten, and none is added if there is one host."""
    program(
        job,
        "import os\nprint([os.environ.get(name) for name in ('MASTER_PORT', 'FI_PROVIDER', "
        "'NODE_RANK')])",
    )
    assert "['1234', 'tcp', None]" in job.run(MASTER_PORT="1234", FI_PROVIDER="tcp").stdout
