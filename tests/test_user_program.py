"""A job's source before it runs: unpacking it, and what pip could not install.

It is unpacked safely with every Python.
"""

import io
import os
import tarfile
from pathlib import Path

import pytest
from conftest import Job
from local_mode import unpacked

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import requirements, user_program


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
        "index was not reached); give the job a network that reaches the index, or remove "
        "that line",
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


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["the job's program", "the image's"])
@pytest.mark.parametrize("has_pip_log", [True, False], ids=["PIP_LOG", ""])
def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, own, has_pip_log):
    (tmp_path / "train.py").touch()
    (tmp_path / "requirements.txt").write_text("pip\nnosuchpackage-of-ours==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.syspath_prepend(str(tmp_path))  # the toolkit does it
    if has_pip_log:
        (tmp_path / "log").write_text("ERROR: No matching distribution found for an-earlier-one\n")
        monkeypatch.setenv("PIP_LOG", str(tmp_path / "log"))
    with pytest.raises(
        UserError,
        match="requirements.txt: pip could not install nosuchpackage-of-ours==1.0: No match",
    ):
        requirements.install(tmp_path, "train.py", own)
    assert ("PIP_LOG" in os.environ) == has_pip_log


@pytest.mark.slow
def test_of_a_source_that_is_a_package_setup_py_is_named(job: Job):
    job.write("code/setup.py", "raise RuntimeError('no luck')\n")
    job.write("code/train.py", "")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "train.py"}')
    assert job.run(PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1").returncode == 1
    first_line = job.failure.splitlines()[0]
    assert (
        first_line.startswith("error: setup.py: pip could not install")
        and "RuntimeError: no luck" in first_line
    )
