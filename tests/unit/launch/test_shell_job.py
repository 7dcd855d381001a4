"""launch/shell_job.py: what SDK 3's script, its driver and the job's program tell of an end.

test_container.py has the image, test_clients_sdk3.py and test_foreign_image.py
the real SDK.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from containers import ROOT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import shell_job
from sagemaker_lightning.launch.job_end import Interrupted, ProgramFailed
from sagemaker_lightning.process.supervisor import ProgramEnd, StoppedBeforeStart

PROGRAM = """
import json
def inner():
    exec("raise ValueError('no column age')")
def outer(n):
    return inner() if n == 0 else outer(n - 1)
try:
    json.loads("{")
except ValueError as error:
    outer(6)
"""
DRIVER = """Command failed with exit code 1. Traceback: Traceback (most recent call last):
  File "/opt/ml/input/data/sm_drivers/common/utils.py", line 193, in execute_commands
    raise subprocess.CalledProcessError(exitcode, commands)
subprocess.CalledProcessError: Command '['python3', 'train.py']' returned non-zero exit status 1.

"""
HANDLER = "+++ handle_error\n+++ EXIT_STATUS=1\nAn error occurred with exit code 1\n+++ exit 1\n"


@pytest.fixture
def base(tmp_path) -> Path:
    """A job's folder with two hosts, a channel and the SDK's two."""
    for name in ("input/config", "input/data/sm_drivers", "output"):
        (tmp_path / name).mkdir(parents=True)
    files = {
        "resourceconfig": {"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]},
        "inputdataconfig": dict.fromkeys(("train-set", "code", "sm_drivers"), {}),
        "hyperparameters": {"lr": "0.1"},
    }
    for name, content in files.items():
        (tmp_path / f"input/config/{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"entry_script": "train.py", "command": None}, "train.py"),
        ({"entry_script": None, "command": "python\n a.py"}, "python a.py"),
        ({"command": "x" * 200}, "x" * 100),
        ({}, "sm_train.sh"),
        (None, "sm_train.sh"),
    ],
)
def test_what_the_job_runs(base, source, name):
    if source is not None:
        file = base / "input/data/sm_drivers/sourcecode.json"
        file.write_text(json.dumps(source))
    assert shell_job.program(shell_job.source_code(base)) == name


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ({"entry_script": "train.py", "command": None}, True),
        ({"command": "exec python -m mine.train --lr=$LR"}, True),
        ({"command": "python a.py; python b.py"}, False),
        ({"command": "python a.py && python b.py"}, False),
        ({"command": "python a.py | tee log", "entry_script": "a.py"}, False),
        ({"command": "python a.py > log"}, False),
        ({"command": "python a.py\npython b.py"}, False),
        ({}, False),
    ],
)
def test_whether_the_script_starts_one_program_alone(source, is_one):
    assert shell_job.is_one_program(source) is is_one


@pytest.mark.parametrize(
    ("line", "is_sdks"),
    [
        ("/bin/bash -c chmod +x /opt/ml/input/data/sm_drivers/sm_train.sh && ...", True),
        ("/bin/bash /opt/ml/input/data/sm_drivers/sm_train.sh", True),
        ("python3 /opt/ml/input/data/sm_drivers/distributed_drivers/torchrun_driver.py", True),
        ("python3 train.py --pause 0.5", False),
        ("torchrun --nnodes=1 train.py", False),
        ("/bin/sh -c chmod +x run.sh && ./run.sh", False),
    ],
)
def test_which_processes_are_the_sdks(line, is_sdks):
    assert shell_job.is_the_sdks(line.split()) == is_sdks


def test_a_traceback_that_the_driver_has_stripped_is_whole_again(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True
    )
    stripped = "".join(f"{line.strip()}\n" for line in run.stderr.splitlines())
    whole = shell_job.indented(f"begun\n{stripped}").splitlines()
    assert [line.replace(" " * 4, "").strip("^~ ") for line in whole[1:]] == [
        line.replace(" " * 4, "").strip("^~ ") for line in run.stderr.splitlines()
    ]
    assert [line[:1] == " " for line in whole[1:] if line] == [
        line[:1] == " " for line in run.stderr.splitlines() if line
    ]
    end = shell_job.of_program(ProgramEnd(1, None, f"begun\n{stripped}{DRIVER}{HANDLER}"))
    assert str(ProgramFailed("x", end)) == ("x ended with exit status 1: ValueError: no column age")


def failed_by(program: str, folder: Path, status: int = 1) -> ProgramFailed:
    """Return the error of a program of Python's whose output SDK 3's driver has stripped."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-X", "faulthandler", "program.py"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    stripped = "".join(f"{line.strip()}\n" for line in run.stderr.splitlines())
    end = shell_job.of_program(ProgramEnd(status, None, f"begun\n{stripped}{DRIVER}{HANDLER}"))
    return ProgramFailed("x", end)


def test_where_native_code_has_crashed_is_said(tmp_path):
    crash = "import os\ndef f():\n    os.abort()\nf()\nimport json\n"
    failed = failed_by(crash, tmp_path, 250)
    assert str(failed) == "x was killed by SIGABRT: Fatal Python error: Aborted"
    assert 'program.py", line 3 in f\n' in failed.trace
    assert failed.trace.endswith('program.py", line 4 in <module>\n') and failed.is_death


def test_a_file_that_cannot_be_compiled_is_named(tmp_path):
    failed = failed_by("x = 1\ndef f(:\n", tmp_path)
    assert (
        str(failed)
        == "x ended with exit status 1: SyntaxError: invalid syntax (program.py, line 2)"
    )
    assert failed.kind == "SyntaxError"


def test_a_rank_of_torchrun_is_the_reason():
    trace = '[rank1]: Traceback (most recent call last):\n[rank1]: File "x.py", line 1, in f\n'
    trace += "[rank1]: g()\n[rank1]: KeyError: 'age'\n"
    end = shell_job.of_program(ProgramEnd(1, None, f"{trace}{DRIVER}{HANDLER}"))
    assert str(ProgramFailed("x", end)) == "x ended with exit status 1: KeyError: 'age'"


@pytest.mark.parametrize(
    ("status", "program"),
    [(0, 0), (1, 1), (143, 143), (241, -15), (247, -9), (245, -11), (255, 255), (-9, -9)],
)
def test_the_status_of_a_program_that_a_signal_has_ended(status, program):
    assert shell_job.of_program(ProgramEnd(status, None, "")).status == program


def test_what_pip_could_not_install_is_the_reason():
    trace = DRIVER.partition("Traceback: ")[2].replace(
        "common/utils.py", "scripts/install_requirements.py"
    )
    end = shell_job.of_program(ProgramEnd(1, None, f"ERROR: No x==9\n{trace}{HANDLER}"))
    assert str(ProgramFailed("x", end)) == (
        "x ended with exit status 1: its last line: ERROR: No x==9"
    )


def test_a_script_that_fails_before_the_program():
    """Its trap says that it fails, and no more; the line before it says why."""
    why = "sm_training.env: line 17: export: `SM_HP_A.B=2': not a valid identifier"
    end = shell_job.of_program(
        ProgramEnd(1, None, f"+ set +x\n{why}\nAn error occurred with exit code 1\n")
    )
    assert str(ProgramFailed("x", end)) == f"x ended with exit status 1: its last line: {why}"


def test_a_driver_that_dies_of_what_the_program_prints_is_named():
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/opt/ml/input/data/sm_drivers/basic_driver.py", line 82, '
        "in <module>\n    main()\n"
        '  File "/opt/ml/input/data/sm_drivers/utils.py", line 178, in log_subprocess_output\n'
        '    logger.info(line.decode("utf-8").strip())\n'
        "                ^^^^^^^^^^^^^^^^^^^^\n"
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 3: invalid byte\n"
    )
    end = shell_job.of_program(ProgramEnd(1, None, f"step 3\n{trace}{HANDLER}"))
    assert str(ProgramFailed("x", end)) == (
        "x ended with exit status 1: its last line: SDK 3's driver, which reads what the program "
        "prints, died of a byte that is not UTF-8 and ended the program (UnicodeDecodeError: "
        "'utf-8' codec can't decode byte 0xe9 in position 3: invalid byte); print UTF-8 alone"
    )


def test_what_a_driver_says_of_its_command_is_not_why():
    program = "++ cd /opt/ml/input/data/code\nRunning Basic Script driver\n"
    kept = 'SM_TRAINING_ENV={"hyperparameters": {}}\n++ set +x\n'
    variables = "Environment Variables:\n_=/usr/bin/python3\nMINE=first\nsecond\n"
    for before in (kept, variables + kept):  # only the end of what is printed is kept
        printed = f"{before}{program}Executing command: /usr/bin/python3 x.py\n{DRIVER}{HANDLER}"
        end = shell_job.of_program(ProgramEnd(3, None, printed))
        assert str(ProgramFailed("x", end)).endswith(": nothing on its stderr says why")


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("make: *** no rule\n", "its last line: make: *** no rule"),
        ("", "nothing on its stderr says why"),
    ],
)
def test_a_command_that_fails_without_a_traceback(says, why):
    """What the shell prints of its commands is not why."""
    printed = f"++ eval 'make it'\n+++ make it\n{says}{HANDLER}"
    end = shell_job.of_program(ProgramEnd(2, None, printed))
    assert str(ProgramFailed("x", end)) == f"x ended with exit status 2: {why}"


def ended(status: int) -> ProgramFailed:
    """Return the error of a program that has ended with a status and has said nothing."""
    return ProgramFailed("x", ProgramEnd(status, None, ""))


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("--a: found 1"), 1, "error: --a: found 1 [host algo-2]"),
        (KeyError("x"), 1, "error: KeyError: 'x' [host algo-2]"),
        (ended(7), 7, "error: x ended with exit status 7: nothing on its stderr says why"),
        (ended(-9), 137, "error: x was killed by SIGKILL"),
        (Interrupted("interrupted, x", signal.SIGINT), 130, "interrupted, x [host algo-2]"),
        (StoppedBeforeStart("SIGTERM came"), 143, "interrupted, resume from step 0: SIGTERM came"),
    ],
)
@pytest.mark.parametrize("written", ["", f"{DRIVER[44:]}", "\nTraining Execution failed. For more"])
def test_the_reason_takes_the_place_of_what_the_driver_wrote(
    base, monkeypatch, capfd, error, status, line, written
):
    def run(command: str, supervisor) -> None:
        assert command == "the command"
        raise error

    monkeypatch.setattr(shell_job, "BASE", base)
    monkeypatch.setattr(shell_job, "_run", run)
    monkeypatch.setattr(sys, "argv", ["shell_job", "the command"])
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    monkeypatch.setenv("SM_HOSTS", '["algo-2"]')
    monkeypatch.setattr(shell_job.streams, "prepare", lambda: None)
    (base / "output/failure").write_text(written)
    with pytest.raises(SystemExit) as left:
        shell_job.main()
    assert left.value.code == status
    failure = (base / "output/failure").read_text()
    assert failure.startswith(line) and failure.splitlines()[0] in capfd.readouterr().err
    assert ("KeyError: 'x'" in failure.partition("\n")[2]) == isinstance(error, KeyError)


@pytest.mark.parametrize(
    "written",
    [
        "error: --lr: found -1",
        'Traceback (most recent call last):\n  File "train.py", line 1, in f\nKeyError: 1',
    ],
)
def test_what_the_program_itself_gave_as_the_reason_stays(base, monkeypatch, written):
    monkeypatch.setattr(shell_job, "BASE", base)
    monkeypatch.setattr(shell_job, "_run", lambda *_: (_ for _ in ()).throw(UserError("x ended")))
    monkeypatch.setattr(sys, "argv", ["shell_job", "the command"])
    monkeypatch.setattr(shell_job.streams, "prepare", lambda: None)
    (base / "output/failure").write_text(written)
    with pytest.raises(SystemExit):
        shell_job.main()
    assert (base / "output/failure").read_text() == written


# Is killed once, when it has begun to train.
DIES_ONCE = """
import os, signal, sys
from pathlib import Path
from sagemaker_lightning.contract.environment import watch
from sagemaker_lightning.nodes.rank_progress import ProgressFile
progress = ProgressFile(watch())
progress.begin(4)
progress.batch_ended(7)
print("COPIES", "SAGEMAKER_LIGHTNING_COPIES" in os.environ, flush=True)
if not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
progress.end(8)
"""


@pytest.fixture
def run(base, monkeypatch, capfd):
    """Run a script of SDK 3's to its end; return the exit status and what was printed."""

    def run(program: str, command: str, most: str) -> tuple[int, str]:
        (base / "program.py").write_text(program)
        monkeypatch.setattr(shell_job, "BASE", base)
        monkeypatch.setattr(sys, "argv", ["shell_job", command])
        monkeypatch.setattr(shell_job.streams, "prepare", lambda: None)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        for name, value in {"MAX_RESTARTS": most, "RENDEZVOUS_TIMEOUT": "5"}.items():
            monkeypatch.setenv(f"SAGEMAKER_LIGHTNING_{name}", value)
        (base / "input/config/resourceconfig.json").write_text(
            json.dumps({"current_host": "algo-2", "hosts": ["algo-2"]})
        )
        monkeypatch.chdir(base)
        # It sets variables for the program.
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as left:
            shell_job.main()
        return left.value.code, capfd.readouterr().out

    return run


@pytest.mark.parametrize(("most", "status"), [("3", 0), ("0", 137)])
def test_a_program_that_dies_is_started_again(base, run, most, status):
    """SDK 3's driver exits with the signal's number below 0; bash gives it 8 bits."""
    command = (
        f"{sys.executable} program.py; status=$?; [ $status != 137 ] || exit 247; exit $status"
    )
    ended, printed = run(DIES_ONCE, command, most)
    assert ended == status, printed
    line = (
        "restart 1 in this container (at most 3 an hour), after step 7: sm_train.sh was killed by"
    )
    assert (line in printed) == (status == 0) and printed.count("COPIES True") == 2 * (status == 0)
    assert (base / "output/failure").exists() == bool(status)


@pytest.mark.parametrize(
    ("ends", "says", "restarts"),
    [
        ("os._exit(0)", "the rank with PID [0-9]+ ended within its training, after step 7", 1),
        ("fail('CUDA error: x')", "RuntimeError: CUDA error: x", 1),
        ("fail('x')", "RuntimeError: x", 1),
        ("progress.fail()", "", 0),  # the program has caught the error
        ("progress.end(8)", "", 0),
    ],
)
def test_a_pipe_does_not_hide_how_a_program_ends(base, run, ends, says, restarts):
    program = f"""import os
os.environ["LOCAL_RANK"] = "0"  # as Lightning does
{DIES_ONCE.partition("print(")[0]}
from sagemaker_lightning import report_failures
def fail(text):
    with report_failures():
        progress.fail()
        raise RuntimeError(text)
{ends}
"""
    ended, printed = run(program, f"{sys.executable} program.py 2>&1 | cat", "3")
    assert ended == bool(says) and printed.count("restart 1 in this ") == restarts, printed
    if says:
        line = (base / "output/failure").read_text().splitlines()[0]
        assert re.match(f"error: {says}.* it came back at the same step", line), line
