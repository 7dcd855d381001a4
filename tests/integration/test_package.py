"""The runtime as a package: installed without the rest, and imported without torch."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import environments
import pytest
import pytorch_lightning  # it sets a variable when it is imported
from botocore.exceptions import ClientError
from containers import ROOT, copy_checkout
from rehearsals import Rehearsal
from row_parts import write_parts

import sagemaker_lightning
from sagemaker_lightning.compat import versions

ALONE = """
import sys
import sagemaker_lightning
from sagemaker_lightning import UserError
from sagemaker_lightning.launch import torchrun_command
from sagemaker_lightning.nodes import watchdog
assert issubclass(UserError, ValueError)
assert not {"torch", "numpy", "pytorch_lightning", "app"} & set(sys.modules)
print(sagemaker_lightning.__version__)
"""


def test_each_public_name_is_there():
    for name in sagemaker_lightning.__all__:
        assert getattr(sagemaker_lightning, name) is not None and name in dir(sagemaker_lightning)
    for name in ("UserError", "Seeding"):
        first = sagemaker_lightning.__getattr__(name)
        assert first is getattr(sagemaker_lightning, name) and first.__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        sagemaker_lightning.Nothing  # noqa: B018


def test_a_type_checker_sees_each_public_name():
    """`__getattr__` tells it nothing: imports that only it reads say where each name is from."""
    tree = ast.parse(Path(sagemaker_lightning.__file__).read_text())
    (block, *_) = (node for node in tree.body if isinstance(node, ast.If))
    assert isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
    seen = {
        alias.asname: node.module.removeprefix("sagemaker_lightning.")
        for node in block.body
        for alias in node.names
        if alias.name == alias.asname
    }
    assert seen == sagemaker_lightning.PUBLIC


def test_a_name_that_needs_lightning_is_given_to_a_supported_version_alone(monkeypatch):
    checked = []
    monkeypatch.setattr(versions, "check", lambda: checked.append("version"))
    sagemaker_lightning.__getattr__("UserError")
    assert checked == []  # the toolkit's process has no Lightning
    sagemaker_lightning.__getattr__("Seeding")
    assert checked == ["version"]


def test_it_is_imported_without_any_package():
    """Python runs isolated and without site-packages: only the standard library is there."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{ALONE}",
    ]
    assert subprocess.check_output(command, text=True).strip() == sagemaker_lightning.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that this checkout builds; in `make test-wheel`, the one that it has built."""
    if built := os.environ.get("WHEEL"):
        return Path(built)
    folder = tmp_path_factory.mktemp("wheel")
    copy_checkout(folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, folder / "source"], check=True)
    (built,) = folder.glob("sagemaker_lightning-*.whl")
    return built


def test_the_wheel_says_that_it_has_types(wheel: Path):
    """PEP 561: without this file, type checkers take all of the package for untyped."""
    assert "sagemaker_lightning/py.typed" in zipfile.ZipFile(wheel).namelist()


FOREIGN = """
{imports}
for name in set(sagemaker_lightning.PUBLIC) - {{"Application", "SageMakerCLI"}}:
    assert getattr(sagemaker_lightning, name)
import autoencoder, lightning.pytorch, pytorch_lightning
assert pytorch_lightning is lightning.pytorch and pytorch_lightning.__name__ == {name!r}
assert issubclass(autoencoder.LitAutoEncoder, pytorch_lightning.LightningModule)
assert "torchvision" not in sys.modules and "jsonargparse" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import sys, lightning as L, sagemaker_lightning", "lightning.pytorch"),
        pytest.param(
            "import sys, sagemaker_lightning, lightning as L",
            "pytorch_lightning",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["after Lightning", "before Lightning"],
)
def test_all_but_the_command_line_needs_torch_and_lightning_alone(
    tmp_path: Path, wheel: Path, imports: str, name: str
):
    """It runs in the environment of `pip install lightning`, which has both distributions."""
    target = tmp_path / "target"
    installed = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
    ]
    subprocess.run([*installed, wheel], check=True)
    shutil.copy(ROOT / "tests/support/autoencoder.py", target)
    command = [environments.python_of("bare"), "-c", FOREIGN.format(imports=imports, name=name)]
    variables = os.environ | {"PYTHONPATH": str(target)}
    completed = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert completed.returncode == 0 and not completed.stderr, completed.stderr


@pytest.mark.slow
def test_a_wheel_installs_into_an_empty_environment(tmp_path: Path, wheel: Path):
    """It has the runtime, the launcher and the rehearsal, and neither the example nor the tests."""
    assert wheel.name.split("-")[1] == sagemaker_lightning.__version__
    python = tmp_path / "empty/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    assert (
        subprocess.check_output([python, "-I", "-c", ALONE], text=True).strip()
        == sagemaker_lightning.__version__
    )
    shown = subprocess.check_output(
        [python, "-m", "pip", "show", "--files", "sagemaker-lightning"], text=True
    )
    assert "\nRequires: psutil\n" in shown
    packages = {
        line.strip().partition("/")[0]
        for line in shown.partition("Files:")[2].splitlines()
        if ".py" in line
    }
    assert packages == {"sagemaker_lightning", "sagemaker_rehearsal"}
    for name in ("report/report.css", "report/goodput.schema.json", "web/page.css", "web/page.js"):
        assert f"sagemaker_rehearsal/{name}" in shown
    for name in ("launch/entrypoint.sh", "launcher/prices.csv"):
        assert f"sagemaker_lightning/{name}" in shown
    missing = {"drill": "psutil", "launch": "boto3", "merge": "numpy", "rehearsal": "botocore"}
    missing["shards"] = "numpy"
    for command, package in missing.items():
        line = [python.with_name(f"sagemaker-lightning-{command}")]
        completed = subprocess.run(
            line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True
        )
        assert completed.returncode == 1 and completed.stderr.count("\n") == 1, completed.stderr
        assert completed.stderr.startswith("error: ") and f"has no {package}; " in completed.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheel: Path):
    """Return a function that installs the wheel and gives it what packages a folder has.

    The environment is elsewhere, and so is the working folder of what runs in it: nothing of the
    checkout is near.
    """
    made = {}

    def python_with(packages: Path) -> Path:
        if packages not in made:
            folder = tmp_path_factory.mktemp("environment")
            python = made[packages] = folder / "bin/python"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
            options = ["--quiet", "--no-deps", "--no-index"]
            pip = [sys.executable, "-m", "pip", f"--python={python}", "install", *options]
            subprocess.run([*pip, wheel], check=True)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "packages.pth").write_text(f"{packages}\n")
        return python

    return python_with


@pytest.fixture(scope="module")
def desk(environment) -> Path:
    """The Python with the wheel, boto3 and moto: the extras `launcher` and `rehearsal`."""
    return environment(environments.packages_of("rehearsal"))


@pytest.fixture(scope="module")
def training(environment) -> Path:
    """The Python with the wheel, torch, Lightning and SageMaker's toolkit."""
    return environment(Path(pytorch_lightning.__file__).parents[1])


def run_in(folder: Path, python: Path, name: str, *words) -> subprocess.CompletedProcess:
    """Run a command of the wheel, or a module (-m NAME), in a folder."""
    program = [python, *name.split()] if name.startswith("-m ") else [python.with_name(name)]
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*program, *words], cwd=folder, env=variables, capture_output=True, text=True
    )


DESK_COMMANDS = [
    "sagemaker-lightning-launch",
    "sagemaker-lightning-rehearsal",
    "-m sagemaker_lightning.doctor",
    "-m sagemaker_rehearsal",
]
TRAINING_COMMANDS = [
    "sagemaker-lightning-drill",
    "sagemaker-lightning-merge",
    "sagemaker-lightning-shards",
    "-m sagemaker_lightning.drill",
    "-m sagemaker_lightning.shards",
]


def test_each_command_of_the_wheel_is_tried():
    """The commands that pyproject.toml has are in the lists here."""
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    names = re.findall(r"^(sagemaker-[a-z-]+) = ", scripts, re.MULTILINE)
    assert set(names) == {name for name in DESK_COMMANDS + TRAINING_COMMANDS if name[0] != "-"}


@pytest.mark.thorough  # a job by the wheel is below
@pytest.mark.slow
def test_each_command_of_the_wheel_has_help_far_from_a_checkout(tmp_path: Path, desk, training):
    for python, names in ((desk, DESK_COMMANDS), (training, TRAINING_COMMANDS)):
        for name in names:
            completed = run_in(tmp_path, python, name, "--help")
            assert completed.returncode == 0 and not completed.stderr, (name, completed.stderr)
            assert completed.stdout.startswith("usage: "), (name, completed.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_shards_are_indexed_and_the_machine_is_looked_at_far_from_a_checkout(
    tmp_path: Path, desk, training
):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.txt", "0.cls"):
            archive.addfile(tarfile.TarInfo(name))
    for word in ("index", "check"):
        completed = run_in(tmp_path, training, "sagemaker-lightning-shards", word, tmp_path)
        assert completed.returncode == 0, completed.stderr
    completed = run_in(tmp_path, desk, "-m sagemaker_lightning.doctor")
    assert re.search(r"^(nothing is|\d+) wrong$", completed.stdout, re.MULTILINE), completed.stderr


LAUNCH_FLAGS = [
    "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/x:1",
    "--role=arn:aws:iam::123456789012:role/x",
    "--output=s3://bucket/jobs",
    "--dry-run",
    "trainer.max_epochs=2",
]


@pytest.mark.slow
def test_a_request_is_made_far_from_a_checkout(tmp_path: Path, desk, monkeypatch):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    completed = run_in(tmp_path, desk, "sagemaker-lightning-launch", *LAUNCH_FLAGS)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["HyperParameters"] == {"trainer.max_epochs": "2"}
    assert completed.stderr.startswith(
        "not checked: the hyperparameters: their parser, app/train.py, is in a checkout of "
    )
    completed = run_in(tmp_path, desk, "sagemaker-lightning-launch", *LAUNCH_FLAGS, "--drill")
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1].startswith(
        "error: --drill: the application to drill is in a checkout of "
    )


@pytest.mark.slow
def test_parts_are_merged_far_from_a_checkout(tmp_path: Path, training):
    write_parts(tmp_path / "parts")
    words = [*(tmp_path / "parts").iterdir(), "--output=merged"]
    completed = run_in(tmp_path, training, "sagemaker-lightning-merge", *words)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "merged/scores.npy").is_file()


@pytest.mark.slow
@pytest.mark.root
def test_a_job_is_rehearsed_far_from_a_checkout(tmp_path: Path, desk, training, monkeypatch):
    """Without Docker, it is a process of another environment, and its program is its own."""

    class Installed(Rehearsal):
        root = tmp_path
        python = desk

    flags = ["--engine=processes", "--port=0"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lacking = run_in(tmp_path, desk, "sagemaker-lightning-rehearsal", *flags)
    assert lacking.returncode == 1 and lacking.stderr.count("\n") == 1
    assert re.match(
        r"error: --engine=processes: \S+, which runs the jobs, has no sagemaker_training; ",
        lacking.stderr,
    )
    monkeypatch.setenv("REHEARSAL_PYTHON", str(training))
    program = b"import os, pathlib\nprint('hello')\n"
    program += b"pathlib.Path(os.environ['SM_MODEL_DIR'], 'model').write_text('x')\n"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        member = tarfile.TarInfo("mine.py")
        member.size = len(program)
        tar.addfile(member, io.BytesIO(program))
    with Installed(tmp_path, "--engine=processes") as rehearsal:
        key = {"Bucket": "rehearsal", "Key": "sourcedir.tar.gz"}
        rehearsal.s3.put_object(**key, Body=archive.getvalue())
        with pytest.raises(ClientError, match="only a checkout .* has an application: found no"):
            rehearsal.create("none")
        source = {"sagemaker_submit_directory": "s3://rehearsal/sourcedir.tar.gz"}
        name = rehearsal.create("none", HyperParameters=source | {"sagemaker_program": "mine.py"})
        job = rehearsal.wait_until_ended(name)
        assert job["TrainingJobStatus"] == "Completed", rehearsal.lines(name)
        assert "hello" in rehearsal.lines(name)["algo-1"]
        assert rehearsal.archive(name) == {"model": b"x"}
        words = ["list", f"--endpoint={rehearsal.endpoint}"]
        listed = run_in(tmp_path, desk, "sagemaker-lightning-rehearsal", *words)
        assert listed.stdout.endswith(f"  Completed   {name}\n"), listed.stderr
