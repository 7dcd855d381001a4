"""A job's source before it runs: unpacking it, and what pip could not install.

It is unpacked safely with every Python.
"""

import io
import logging
import os
import runpy
import shutil
import socket
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from conftest import Job
from local_mode import unpacked
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import requirements, torchrun_command, user_program
from sagemaker_lightning.process import start_notice, threads
from sagemaker_lightning.process.parent_process import LAUNCHER_VARIABLE


@pytest.fixture
def code(tmp_path, monkeypatch) -> Path:
    """The folder for a job's source."""
    monkeypatch.setattr(user_program, "CODE_FOLDER", tmp_path / "code")
    return tmp_path / "code"


@pytest.fixture(params=[True, False], ids=["3.11.4", "3.11.2"])
def filters(request, monkeypatch) -> bool:
    """With and without tarfile's filters.

    Python 3.11.2 of Debian 12 has none, and no argument for them.
    """
    if not request.param:
        extractall = tarfile.TarFile.extractall
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(
            tarfile.TarFile,
            "extractall",
            lambda self, path=".", members=None: extractall(self, path, members),
        )
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python's tarfile has no filters")
    return request.param


def source(path: Path, **members: str | bytes) -> str:
    """Write a source archive: files with their content, links with their target."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type = tarfile.SYMTYPE
                member.linkname = content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return str(path)


def test_a_source_is_unpacked(code, tmp_path, filters):
    user_program.unpack(source(tmp_path / "s.tar.gz", **{"train.py": b"1", "deep/other.py": b"2"}))
    assert (code / "train.py").read_text() == "1" and (code / "deep/other.py").read_text() == "2"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("etc/passwd", r"/passwd, .* \(it is damaged, or no archive\)"),
        ("etc", r"/etc, .* \(\S*/etc/gone: \[Errno 2\] No such file"),
    ],
)
def test_a_wrong_source_is_one_line(code, tmp_path, name, says):
    """Nothing of it gets into the job's folder."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root")
    (tmp_path / "etc/gone").symlink_to("nowhere")
    with pytest.raises(UserError, match=says):
        user_program.unpack(str(tmp_path / name))
    assert not code.exists() or not list(code.iterdir())


def test_a_source_on_s3_is_checked_like_any_other(code, tmp_path, monkeypatch):
    (tmp_path / "damaged.tar.gz").write_bytes(b"no archive")
    source(tmp_path / "s.tar.gz", **{"train.py": b"1"})

    def download(address: str, path: str) -> None:
        shutil.copy(tmp_path / address.removeprefix("s3://bucket/"), path)

    monkeypatch.setattr(user_program.files, "s3_download", download)
    says = r"found s3://bucket/damaged.tar.gz, .* \(it is damaged, or no "
    with pytest.raises(UserError, match=says):
        user_program.unpack("s3://bucket/damaged.tar.gz")
    user_program.unpack("s3://bucket/s.tar.gz")
    assert [path.name for path in code.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        EndpointConnectionError(endpoint_url="https://s3"),
        ValueError("Invalid endpoint: https://s3..amazonaws.com"),
    ],
)
def test_a_source_that_an_isolated_job_cannot_fetch(code, monkeypatch, error):
    """Without a network there is no region, no credentials or no connection."""

    def download(address: str, path: str) -> None:
        raise error

    monkeypatch.setattr(user_program.files, "s3_download", download)
    says = r"found s3://bucket/s.tar.gz, and S3 was not reached \(.*network isolation .* channel"
    with pytest.raises(UserError, match=says):
        user_program.unpack("s3://bucket/s.tar.gz")
    error = ClientError({"Error": {"Code": "403", "Message": "Forbidden"}}, "HeadObject")
    with pytest.raises(UserError, match=r"Forbidden\); expected .* may read, or a folder$"):
        user_program.unpack("s3://bucket/s.tar.gz")


def test_a_code_folder_that_cannot_be_written_is_named(code, tmp_path, monkeypatch):
    archive = source(tmp_path / "s.tar.gz", **{"train.py": b"1"})
    code.mkdir()
    # This process may be root's, which can write to any folder.
    monkeypatch.setattr(os, "access", lambda path, mode: path != code)
    says = f"^{code}: cannot be written, and the job's source is unpacked there; mount a folder"
    with pytest.raises(UserError, match=says):
        user_program.unpack(archive)


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("train.py", "train.py"),
        ('"train.py"', "train.py"),
        ("null", "image.py"),
        ("", "image.py"),
        (None, "image.py"),
    ],
)
def test_what_a_job_calls_its_program(code, monkeypatch, sent, name):
    """The SDK sends JSON, as it does for each value; null stands for what was not given."""
    hyperparameters = {} if sent is None else {"sagemaker_program": sent}
    monkeypatch.setenv("SAGEMAKER_PROGRAM", "image.py")
    asked = request(hyperparameters, {})
    named_by = "sagemaker_program" if name == "train.py" else "SAGEMAKER_PROGRAM"
    assert (asked.program, asked.named_by) == (name, named_by)


def test_which_program_is_found(code, tmp_path):
    """That of the job's source comes first; a package may have it as a module."""
    assert user_program.find("app/train.py", "sagemaker_program") == user_program.HOME
    (code / "app").mkdir(parents=True)
    (code / "app/train.py").touch()
    assert user_program.find("app/train.py", "sagemaker_program") == code
    with pytest.raises(UserError, match="sagemaker_program: found mine.main, which is neither in"):
        user_program.find("mine.main", "sagemaker_program")
    (code / "setup.py").touch()
    assert user_program.find("mine.main", "sagemaker_program") == code
    for name in ("src/mine/trian.py", "src/mine", "run.sh"):  # the path of a file is not a module
        with pytest.raises(UserError, match=f"sagemaker_program: found {name}, which is neither"):
            user_program.find(name, "sagemaker_program")
    (tmp_path / "outside.py").touch()
    with pytest.raises(UserError, match="'..' path segments"):
        user_program.find("../outside.py", "sagemaker_program")


def test_a_program_that_is_not_there_is_named_with_what_is(code):
    with pytest.raises(UserError, match="^SAGEMAKER_PROGRAM: not given; expected a file"):
        command(code, "", {})
    for there, made in (("nothing", code.parent), ("nothing", code), ("a, b", code)):
        made.mkdir(exist_ok=True)
        for name in there.split(", ") if there != "nothing" else ():
            (code / name).touch()
        says = rf"found x.py, which is neither in the job's source \(which has: {there}\) nor"
        with pytest.raises(UserError, match=says):
            user_program.find("x.py", "sagemaker_program")
    for letter in "cdefghijkl":
        (code / letter).touch()
    with pytest.raises(UserError, match=r"\(which has: a, b, c, d, e, f, g, h, i, j\) nor"):
        user_program.find("x.py", "sagemaker_program")


def test_a_link_stays_a_link_also_when_it_is_there_already(code, tmp_path):
    for _ in range(2):  # twice: on a person's machine the folder is used again
        user_program.unpack(
            source(tmp_path / "s.tar.gz", **{"deep/all": "..", "deep/train.py": b"1"})
        )
    assert (code / "deep/all").is_symlink() and (code / "deep/all/deep/train.py").read_text() == "1"


# The second one is three links that are harmless one by one: if each is checked before the others
# exist, the file seems to stay inside.
ESCAPES = [
    {"../evil": b"x", "/evil": b"x", "ok": b"1"},
    {"p/q": "..", "p/q/r": "../..", "p/q/r/evil": b"x", "ok": b"1"},
    {"l": "/", "l/evil": b"x", "ok": b"1"},
]


def test_an_early_python_refuses_links_and_names_the_first(code, tmp_path, filters):
    """It cannot tell whether they lead out of the folder."""
    archive = source(tmp_path / "s.tar.gz", **{"train.py": b"1", "first": ".", "second": "."})
    if hasattr(tarfile, "data_filter"):
        user_program.unpack(archive)
        assert (code / "first").is_symlink()
        return
    says = r"\(it has the link first, which takes Python 3.11.4 or later\)"
    with pytest.raises(UserError, match=says):
        user_program.unpack(archive)


@pytest.mark.parametrize("members", ESCAPES, ids=["names", "chain", "link"])
def test_nothing_is_written_outside(code, tmp_path, filters, members, monkeypatch):
    (tmp_path / "tmp/tmp").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp/tmp"))
    archive = source(tmp_path / "s.tar.gz", **members)
    try:
        user_program.unpack(archive)
    except UserError as error:
        assert "could not be unpacked" in str(error)
    outside = {path for path in tmp_path.rglob("evil") if not path.is_relative_to(code)}
    assert not outside and not Path("/evil").exists()


def test_what_a_job_left_is_read_with_every_python(tmp_path, filters):
    source(tmp_path / "model.tar.gz", **{"model.pt": b"1"})
    assert (unpacked(tmp_path / "model.tar.gz") / "model.pt").read_text() == "1"


LOGS = {  # as pip 23 and 26 write them
    "nothing of that name": (
        "Looking in indexes: x\n"
        "ERROR: Could not find a version that satisfies the requirement nosuch==1.0 (from "
        "versions: none)\nERROR: No matching distribution found for nosuch==1.0\n",
        "pip could not install nosuch==1.0: No matching distribution found for nosuch==1.0; "
        "correct or remove that line",
    ),
    "no network": (
        "Collecting some\nWARNING: Retrying (Retry(total=0)) after connection broken by "
        "'NewConnectionError'\n"
        "ERROR: No matching distribution found for some\n",
        "pip could not install some: No matching distribution found for some (the package "
        "index was not reached); give the job a network that reaches the index (with network "
        "isolation it has none), or remove that line",
    ),
    "a conflict": (
        "Collecting a==1\nERROR: Cannot install a==1 and a==2 because these package versions "
        "have conflicting dependencies.\n"
        "ERROR: ResolutionImpossible: for help visit https://x\n",
        "pip could not install a==1 and a==2: these package versions have conflicting "
        "dependencies; correct",
    ),
    "a build": (
        "Processing ./broken\n"
        "  Running command python setup.py\n"
        "  Traceback (most recent call last):\n"
        "  RuntimeError: no luck\n"
        "  ERROR: [present-rich] Preparing metadata exited with 1\n"
        "ERROR: [present-rich] metadata generation failed\n",
        "pip could not install ./broken: RuntimeError: no luck (Preparing metadata exited "
        "with 1); correct",
    ),
    "a build of a later pip": (
        "Processing ./broken\n"
        "  Running command Preparing metadata\n"
        "  RuntimeError: no luck\n"
        "  ERROR: Preparing metadata exited with 1\n"
        "ERROR: metadata generation failed\n"
        "Exception information:\n",
        "pip could not install ./broken: RuntimeError: no luck (Preparing metadata exited "
        "with 1); correct",
    ),
    "no requirement": (
        "ERROR: Invalid requirement: './no': Expected package name\n"
        "    ./no\n    ^ (from line 1 of x.txt)\n",
        "pip could not install './no': it is neither a requirement nor a file of the source; "
        "correct",
    ),
    "a secret": (
        "Collecting git+https://me:k5@host/x.git\n"
        "  fatal: unable to access https://me:k5@host/x.git\n"
        "  ERROR: [present-rich] git clone https://me:k5@host/x.git exited with 128\n",
        "pip could not install git+https://******@host/x.git: fatal: unable to access "
        "https://******@host/x.git (git",
    ),
    "a secret where the line is cut": (
        f"  fatal: {'x' * 480} https://me:k5k5k5k5@host/x.git\n"
        "  ERROR: [present-rich] git clone https://host/x.git exited with 128\n",
        f"pip could not install what it asks for: fatal: {'x' * 480} https://****; correct",
    ),
    "its own fault": (
        "ERROR: Exception:\nTraceback (most recent call last):\n"
        "UnicodeDecodeError: bad\n"
        "Removed build tracker: x\n",
        "pip could not install what it asks for: UnicodeDecodeError: bad; correct",
    ),
    "something before the reason": (
        "Collecting some\nCollecting other\n"
        "ERROR: Ignored the following yanked versions: 1.0\n"
        "ERROR: Could not open the file\nERROR: it is gone\n",
        "pip could not install other: Could not open the file; correct",
    ),
    "no answer": (
        f"Collecting {'x' * 201}\nWARNING: Retrying after connection broken by 'Timeout'\n",
        f"pip could not install {'x' * 200}: no answer (the package index was not reached); give",
    ),
    "nothing": (
        "",
        "pip could not install what it asks for: pip ended with exit status 2, and its log "
        "says no more;",
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_why_pip_could_not(case):
    log, says = LOGS[case]
    log = "".join(f"2026-11-22T16:03:13,004 {line}\n" for line in log.splitlines())
    assert requirements.explain(log, "2").startswith(says)


class Pip:
    """Stands for the toolkit's calls of pip; each writes `log` to pip's log, and fails if asked to.

    Attributes:
        error: The error that a call raises; None if it ends well.
        log: What a call logs; None if it writes no log.
        calls: What was to be installed.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.log: str | None = None
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *what: str) -> None:
        self.calls.append(what)
        if self.log is not None:
            with Path(os.environ["PIP_LOG"]).open("a") as log:
                log.write(f"2026-11-22T16:03:13,004 {self.log}\n")
        if self.error:
            raise self.error


@pytest.fixture
def pip(monkeypatch) -> Pip:
    """A pip that installs nothing."""
    pip = Pip()
    monkeypatch.delenv("PIP_LOG", raising=False)
    monkeypatch.setattr(requirements.entry_point, "install", pip)
    monkeypatch.setattr(requirements.modules, "install_requirements", pip)
    return pip


def test_what_is_installed_for_a_program(tmp_path, pip):
    """A program of the image may use what the source asks for, but does not need the source."""
    requirements.install(tmp_path, "train.py", own=True)
    requirements.install(tmp_path, "app/train.py", own=False)
    (tmp_path / "requirements.txt").touch()
    requirements.install(tmp_path, "app/train.py", own=False)
    assert pip.calls == [("train.py", str(tmp_path)), (str(tmp_path),)]


@pytest.mark.parametrize("users_log", [None, "", "after connection broken by 'Timeout'\n"])
@pytest.mark.parametrize("file", ["requirements.txt", "setup.py"])
def test_what_pip_has_logged_of_a_failure_is_explained(tmp_path, monkeypatch, pip, file, users_log):
    """The user's own log, which PIP_LOG names, may have something of an earlier call."""
    (tmp_path / file).touch()
    if users_log is not None:
        monkeypatch.setenv("PIP_LOG", str(tmp_path / "log"))
    if users_log:
        (tmp_path / "log").write_text(users_log)
    pip.error = requirements.errors.InstallModuleError("pip install https://me:k5@host", 3)
    pip.log = "ERROR: No matching distribution found for a==1"
    with pytest.raises(UserError) as raised:
        requirements.install(tmp_path, "train.py", own=True)
    assert str(raised.value) == (
        f"{file}: pip could not install a==1: No matching distribution found for a==1; correct or "
        "remove that line"
    )
    assert raised.value.__suppress_context__  # its text has the password
    assert ("PIP_LOG" in os.environ) == (users_log is not None)


def test_a_pip_that_has_logged_nothing_has_an_exit_status(tmp_path, pip):
    pip.error = requirements.errors.InstallRequirementsError("pip install", 3)
    says = "^setup.py: pip could not install .* pip ended with exit status 3, and its log says no"
    with pytest.raises(UserError, match=says):
        requirements.install(tmp_path, "train.py", own=True)


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["the job's program", "the image's"])
@pytest.mark.parametrize("has_pip_log", [True, False], ids=["PIP_LOG", ""])
def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, own, has_pip_log):
    (tmp_path / "train.py").touch()
    (tmp_path / "requirements.txt").write_text("pip\nnosuchpackage-of-ours==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.syspath_prepend(str(tmp_path))  # the toolkit does it
    if has_pip_log:
        (tmp_path / "log").write_text(
            "WARNING: Retrying after connection broken by 'Timeout'\n"
            "ERROR: No matching distribution found for an-earlier-one\n"
        )
        monkeypatch.setenv("PIP_LOG", str(tmp_path / "log"))
    with pytest.raises(
        UserError,
        match="requirements.txt: pip could not install nosuchpackage-of-ours==1.0: No match",
    ) as raised:
        requirements.install(tmp_path, "train.py", own)
    assert ("PIP_LOG" in os.environ) == has_pip_log
    assert "was not reached" not in str(raised.value)  # that was another call of pip


@pytest.mark.slow
def test_the_setup_py_of_a_source_is_named(job: Job):
    job.write("code/setup.py", "raise RuntimeError('no luck')\n")
    job.write("code/train.py", "")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "train.py"}')
    assert job.run(PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1").returncode == 1
    first_line = job.failure.splitlines()[0]
    assert first_line.startswith("error: setup.py: pip could not install")
    assert "RuntimeError: no luck" in first_line


@pytest.mark.slow
def test_a_program_in_a_folder_of_a_source_that_is_a_package(job: Job, tmp_path):
    """The package is installed, and the program runs from its file."""
    job.write(
        "code/setup.py",
        "from setuptools import setup\n"
        "setup(name='mine', package_dir={'': 'src'}, packages=['mine'])\n",
    )
    job.write("code/src/mine/__init__.py", "")
    job.write("code/src/mine/train.py", "import sys\nprint('RAN', *sys.argv)\n")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "src/mine/train.py"}')
    installed = tmp_path / "installed"
    run = job.run(PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1", PIP_TARGET=str(installed))
    assert run.returncode == 0, run.stdout
    assert "RAN src/mine/train.py\n" in run.stdout and (installed / "mine/train.py").is_file()


# Command lines ------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, str(Path(torchrun_command.__file__).with_name("torchrun.py"))]
DDP = {"sagemaker_torch_distributed_enabled": True}


def request(sent: dict, options: dict, *hosts: str) -> user_program.Request:
    """Return what a job asks of host a, with two ranks if torchrun starts them."""
    job = SimpleNamespace(
        to_cmd_args=lambda: ["--trainer.devices", "2"],
        additional_framework_parameters=options,
        num_gpus=0,
    )
    here = SageMakerEnvironment(hosts=hosts or ("a",), current_host="a")
    return user_program.Request.read(job, here, sent)


def command(folder: Path, name: str, options: dict, *hosts: str) -> tuple[list[str], str, int]:
    """Return what runs a program on host a, with two ranks if torchrun does."""
    asked = request({"sagemaker_program": name, "trainer.devices": "2"}, options, *hosts)
    here = SageMakerEnvironment(hosts=hosts or ("a",), current_host="a")
    return user_program.command(asked, here, folder)


def test_the_command_line_of_each_kind_of_program(code):
    code.mkdir()
    python = sys.executable
    args = ["--trainer.devices", "2"]
    own = "the job's own, one process"
    image = [str(user_program.HOME / "app/train.py"), "--trainer.devices=2"]
    for hosts in (("a",), ("b", "c")):  # on the second ones, this host takes no part
        options = DDP if hosts == ("b", "c") else {}
        assert command(user_program.HOME, "app/train.py", options, *hosts) == (
            [python, *image],
            "one process",
            1,
        )
        assert command(code, "x.py", options, *hosts) == ([python, "--", "x.py", *args], own, 1)
    shell = ["/bin/sh", "-c", "./x.sh --trainer.devices 2"]
    assert command(code, "x.sh", {}) == (shell, own, 1)
    (code / "setup.py").touch()
    assert command(code, "x.py", {}) == ([python, "-m", "x", *args], own, 1)
    assert command(code, "x.sh", {}) == (shell, own, 1)
    (code / "src/mine").mkdir(parents=True)
    for name, line in (
        ("src/mine/x.py", [python, "--", "src/mine/x.py", *args]),
        ("src/mine/run", ["/bin/sh", "-c", "./src/mine/run --trainer.devices 2"]),
        ("y.py", [python, "--", "y.py", *args]),
    ):
        (code / name).touch()
        assert command(code, name, {}) == (line, own, 1)


def test_the_command_line_of_a_distribution(code, tmp_path, monkeypatch):
    of_image = [str(user_program.HOME / "app/train_torchrun.py"), "--trainer.devices=2"]
    assert command(user_program.HOME, "app/train.py", DDP) == (
        [sys.executable, *of_image],
        "torchrun",
        1,
    )
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", str(code / "x.py")]
    expected = [*TORCHRUN, *flags, "--trainer.devices", "2"], "torchrun", 2
    log = tmp_path / "log"
    # SDK 2 sends both for pytorchddp.
    both = {
        "sagemaker_pytorch_ddp_enabled": True,
        "sagemaker_distributed_dataparallel_enabled": True,
    }
    with log.open("w") as output:  # what the program prints comes after the warning
        monkeypatch.setattr(sys, "stdout", output)
        assert command(code, "x.py", DDP) == expected and log.read_text() == ""
        assert command(code, "x.py", both) == expected
        says = "warning: distribution smdistributed.dataparallel runs as torch_distributed"
        assert log.read_text().startswith(says)
    with pytest.raises(UserError, match="found x.sh, torchrun allows a .py file only"):
        command(code, "x.sh", DDP)
    with pytest.raises(UserError, match="distribution: found mpi, expected torch_distributed"):
        command(code, "x.py", {"sagemaker_mpi_enabled": True})


@pytest.mark.parametrize(
    ("args", "gpus", "ranks"),
    [
        ([], 0, 1),
        ([], 4, 4),
        (["--trainer.devices=auto"], 4, 4),
        (["--trainer.devices=-1"], 0, 1),
        (["--trainer.devices="], 4, 4),
        (["--trainer.devices=3"], 4, 3),
        (["--trainer.devices", "1"], 4, 1),
        (["--trainer.devices=[0, 2]"], 4, 2),
        (["--trainer.devices=0,1,3"], 4, 3),
        (["--trainer.devices=[2]"], 4, 1),  # the GPU of that number, as in Lightning
        (["--trainer.devices=0,"], 4, 1),
        (["--trainer.devices=[]"], 4, 4),
        (["--trainer=3", "--help"], 2, 2),
    ],
)
def test_how_many_ranks_a_node_has(args, gpus, ranks):
    assert torchrun_command.processes(args, gpus) == ranks


@pytest.mark.parametrize("devices", ["0", "00", "two", "1,two", "-2", "1.5", ","])
def test_a_wrong_number_of_devices_is_refused(devices):
    with pytest.raises(UserError, match=rf"--trainer.devices: found '{devices}', expected -1"):
        torchrun_command.processes([f"--trainer.devices={devices}"], 2)


@pytest.mark.parametrize(("host", "port"), [("a", None), ("b", None), ("b", "29500")])
def test_torchrun_on_several_hosts(monkeypatch, host, port):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port:
        monkeypatch.setenv("MASTER_PORT", port)
    here = SageMakerEnvironment(hosts=("a", "b"), current_host=host)
    # On GPUs, their number is the limit.
    args = ["--trainer.devices=99"]
    assert torchrun_command.command(here, args, 99, Path("x.py"), 3) == [
        *TORCHRUN,
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--local-addr={host}",
        f"--rdzv-endpoint=a:{port or 7777}",
        f"--rdzv-conf=is_host={int(host == 'a')}",
        "--nproc-per-node=99",
        "--max-restarts=3",
        "x.py",
        *args,
    ]


@pytest.fixture
def started(monkeypatch) -> list:
    """What torchrun_command.main says and starts: activities, then command lines and variables."""
    done = []
    monkeypatch.setattr(start_notice, "set_activity", done.append)
    monkeypatch.setattr(os, "execve", lambda *call: done.append(call))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 6)
    for name in (*threads.COUNT_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_WATCH", "/watch")
    return done


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_program_of_the_image_becomes_torchrun(started, restarts):
    """All other flags are the program's. With restarts, its ranks are not watched."""
    args = ["--max=1", "--help"]
    torchrun_command.main(Path("x.py"), [*args, *([f"--max-restarts={restarts}"] * (restarts > 0))])
    (activity, (program, line, variables)) = started
    assert activity == "torchrun, which starts the ranks" and program == sys.executable
    flags = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "x.py"]
    assert line == [*TORCHRUN, *flags, *args]
    assert variables["OMP_NUM_THREADS"] == "3" and "MASTER_ADDR" not in variables
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    assert ("SAGEMAKER_LIGHTNING_WATCH" in variables) == (restarts == 0)


def test_a_program_of_the_image_has_the_flags_of_its_command_line(started, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_torchrun.py", "--max_restarts=1", "--a=1"])
    torchrun_command.main(Path("x.py"))
    assert started[-1][1][-3:] == ["--max-restarts=1", "x.py", "--a=1"]


def test_torchrun_waits_for_the_names_of_the_hosts(started, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: asked.append(host))
    monkeypatch.delenv("SAGEMAKER_LIGHTNING_WATCH")
    monkeypatch.setenv("SM_HOSTS", '["a", "b"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "b")
    monkeypatch.setenv("SM_NUM_GPUS", "1")  # as the toolkit counted them
    monkeypatch.setenv("MASTER_PORT", "29500")
    torchrun_command.main(Path("x.py"), [])
    assert asked == ["a", "b"] and started[0] == "waiting for the other hosts"
    _, line, variables = started[-1]
    assert "--nproc-per-node=1" in line and "--rdzv-endpoint=a:29500" in line
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("a", "29500")


def end_of_torchrun(monkeypatch, error: Exception | None = None) -> BaseException | None:
    """Return how torchrun.py ends, as a program, if torchrun itself ends with an error."""
    did = []
    monkeypatch.setenv(LAUNCHER_VARIABLE, "1")
    monkeypatch.setattr(
        "sagemaker_lightning.contract.shutdown.leave_at_once", lambda: did.append(0)
    )

    def main() -> None:
        did.append(os.environ[LAUNCHER_VARIABLE])
        if error:
            raise error

    monkeypatch.setattr("torch.distributed.run.main", main)
    try:
        runpy.run_module("sagemaker_lightning.launch.torchrun", run_name="__main__")
    except BaseException as raised:
        return raised
    finally:
        # It hears signals from the start, and the ranks know whose end is theirs.
        assert did == [0, str(os.getpid())]
    return None


@pytest.mark.parametrize("number", shutdown.SIGNALS)
def test_torchrun_that_is_stopped_has_the_signals_status(monkeypatch, capsys, number):
    left = end_of_torchrun(monkeypatch, SignalException("got a signal", number))
    assert isinstance(left, SystemExit) and left.code == 128 + number
    assert capsys.readouterr().err == "torchrun: got a signal\n"


@pytest.mark.parametrize(("error", "said"), [(SignalException("x", 15), False), (OSError(), True)])
def test_a_signal_while_torchrun_ends_is_not_an_error_of_its_own(monkeypatch, error, said):
    """torch logs whatever interrupts the end of its rendezvous, after the failure's reason."""
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(api.logger, "filters", [])
    monkeypatch.setattr(api.logger, "handlers", [handler])
    end_of_torchrun(monkeypatch)
    try:
        raise error
    except Exception:
        api.logger.exception("Error shutting down rendezvous handler")
    assert ("Error shutting down" in handler.stream.getvalue()) is said


@pytest.mark.parametrize(
    ("statuses", "status"), [([143], 143), ([130, 143], 143), ([143, 1], None), ([-9], None)]
)
def test_ranks_that_stopped_are_no_failure_of_torchrun(monkeypatch, statuses, status):
    """All of them have agreed to stop, though only one was asked to. Any other end is a failure."""
    failures = {
        rank: ProcessFailure(rank, 1, exit_status, "") for rank, exit_status in enumerate(statuses)
    }
    error = ChildFailedError("x.py", failures)
    left = end_of_torchrun(monkeypatch, error)
    if status is None:
        assert left is error
    else:
        assert isinstance(left, SystemExit) and left.code == status
