"""compat/namespaces.py: the two names of Lightning are the same modules.

`pytorch_lightning` and `lightning.pytorch` are the same, whichever of the two is installed.
Lightning itself shows it for this environment; small packages of its shape show it for the others,
one process each.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import pytorch_lightning
from conftest import Job
from containers import ROOT
from lightning.pytorch.callbacks import ModelCheckpoint
from test_strangers import check

from sagemaker_lightning.compat import namespaces
from sagemaker_lightning.state.graph import values

# The Lightning of this environment ----------------------------------------------------------------


@pytest.mark.parametrize("packages", list(zip(*namespaces.PACKAGES.values(), strict=True)), ids=str)
def test_a_module_is_the_same_under_both_names(packages: tuple[str, str]):
    path = importlib.import_module(packages[0]).__path__
    names = [module.name for module in pkgutil.iter_modules(path) if module.name[0] != "_"]
    assert {"loggers", "strategies", "utilities"} <= set(names)
    for name in ["", *names, "utilities.seed", "utilities.rank_zero", "plugins.environments"]:
        first_module, second_module = (
            importlib.import_module(f"{package}.{name}".strip(".")) for package in packages
        )
        assert first_module is second_module
        assert first_module.__spec__.name == first_module.__name__
        assert not first_module.__spec__._initializing


def test_any_other_name_is_left():
    for name in ("torch.nn", "lightningfast", "pytorch_lightning_extra", ""):
        assert namespaces.first_name(name) == name


def test_the_names_of_the_root():
    import lightning_fabric.utilities.seed

    assert L.Trainer is pytorch_lightning.Trainer
    assert L.LightningModule is pytorch_lightning.LightningModule
    assert L.LightningDataModule is pytorch_lightning.LightningDataModule
    assert L.Callback is pytorch_lightning.Callback
    assert L.seed_everything is lightning_fabric.utilities.seed.seed_everything
    assert L.Fabric is lightning_fabric.Fabric and L.__version__ == pytorch_lightning.__version__
    assert L.pytorch is pytorch_lightning and L.fabric is lightning_fabric
    assert (
        ModelCheckpoint
        is pytorch_lightning.callbacks.ModelCheckpoint
        is L.pytorch.callbacks.ModelCheckpoint
    )
    with pytest.raises(ModuleNotFoundError, match="No module named 'lightning.pytorch.nothing'"):
        importlib.import_module("lightning.pytorch.nothing")
    with pytest.raises(ModuleNotFoundError, match="No module named 'pytorch_lightning.nothing'"):
        importlib.import_module("pytorch_lightning.nothing")


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_a_pickle_may_name_either(name: str):
    text = pickle.dumps(ModelCheckpoint, protocol=0).decode()
    own = ModelCheckpoint.__module__.removesuffix(".callbacks.model_checkpoint")
    assert pickle.loads(text.replace(own, name).encode()) is ModelCheckpoint


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_our_checkpoints_may_name_either(package: str):
    """A job may continue in an environment with the other distribution."""
    stage = pytorch_lightning.trainer.states.RunningStage
    own = stage.__module__.removesuffix(".trainer.states")
    record = values.encode(stage.VALIDATING)
    record["nodes"] = record["nodes"].replace(own, package)
    assert values.decode(record) is stage.VALIDATING


def test_a_module_may_be_reloaded_and_asked_for():
    progress = importlib.import_module("lightning.pytorch.callbacks.lambda_function")
    assert importlib.reload(progress) is progress
    assert importlib.import_module("pytorch_lightning.callbacks.lambda_function") is progress
    for name in (
        "lightning",
        "lightning.pytorch.tuner",
        "pytorch_lightning.tuner",
        "lightning.fabric.loggers",
    ):
        assert importlib.util.find_spec(name).origin
    assert importlib.util.find_spec("lightning.pytorch.nothing") is None


def test_the_logger_that_lightnings_documentation_names():
    for first_name, second_name in zip(*namespaces.PACKAGES.values(), strict=True):
        for name in ("", ".utilities.rank_zero"):  # the second is the one that Lightning writes to
            assert importlib.import_module(first_name + name) is importlib.import_module(
                second_name + name
            )
            assert logging.getLogger(first_name + name) is logging.getLogger(second_name + name)


def test_either_distribution_is_asked_for_its_version():
    for name in ("lightning", "pytorch-lightning", "pytorch_lightning"):
        assert importlib.metadata.version(name) == pytorch_lightning.__version__
    distribution_names = [
        distribution.metadata["Name"] for distribution in importlib.metadata.distributions()
    ]
    assert [name for name in distribution_names if name in namespaces.PACKAGES] == [
        namespaces.distribution()
    ]


# Other environments, in this process --------------------------------------------------------------


def test_to_find_a_package_under_its_second_name_imports_none(monkeypatch):
    monkeypatch.setattr(namespaces, "_find", lambda name: pytest.fail(f"looked at {name}"))
    for name in ("lightning.pytorch", "lightning.fabric"):
        spec = namespaces._Finder().find_spec(name)
        assert spec.name == name and spec.submodule_search_locations is not None


@pytest.mark.parametrize(
    ("installed", "asked", "found"),
    [
        ("lightning", "pytorch_lightning", ["lightning"]),
        ("lightning", "Lightning", []),  # Python's own finder gives it
        ("pytorch-lightning", "lightning", ["pytorch-lightning"]),
        ("pytorch-lightning", None, []),
    ],
)
def test_a_distributions_metadata_stand_for_the_others(tmp_path: Path, installed, asked, found):
    install(tmp_path, installed)
    context = importlib.metadata.DistributionFinder.Context(name=asked, path=[str(tmp_path)])
    assert [
        distribution.metadata["Name"]
        for distribution in namespaces._Finder().find_distributions(context)
    ] == found


def test_a_module_under_its_second_name_has_the_firsts_code_and_logger(monkeypatch):
    first, second = "pytorch_lightning.utilities.seed", "lightning.pytorch.utilities.seed"
    module = importlib.import_module(first)
    monkeypatch.delitem(sys.modules, second, raising=False)
    monkeypatch.delitem(logging.Logger.manager.loggerDict, second, raising=False)
    assert importlib.import_module(second) is module
    assert logging.getLogger(second) is logging.getLogger(first)
    loader = importlib.util.find_spec("lightning.pytorch.utilities.parsing").loader
    assert loader.get_code("").co_filename.endswith("utilities/parsing.py")
    assert "def parse_class_init_keys(" in loader.get_source("")


# Programs as Lightning's documentation writes them ------------------------------------------------


@pytest.mark.slow
def test_a_module_of_lightnings_documentation_is_exact(tmp_path: Path):
    flags = ["--model=autoencoder.Interrupted", "--model.hidden=6", "--data=autoencoder.Noise"]
    check(tmp_path, *flags, "--trainer.callbacks=lightning.pytorch.callbacks.LearningRateMonitor")


@pytest.mark.slow
def test_a_program_of_lightnings_documentation_runs_as_a_job(job: Job):
    """The job runs in a new Python, where only the environment itself imports the runtime."""
    job.write("code/train.py", (ROOT / "tests/support/autoencoder.py").read_text())
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "train.py"}')
    run = job.run(cold=True)
    assert run.returncode == 0, run.stdout
    assert f"TRAINED 20 {pytorch_lightning.__version__}" in run.stdout
    assert (job.base / "model/autoencoder.ckpt").is_file()


# Packages of Lightning's shape --------------------------------------------------------------------

MODULES = {
    "pytorch-lightning": ("pytorch_lightning", "lightning_fabric"),
    "lightning": ("lightning/pytorch", "lightning/fabric"),
}


def install(folder: Path, distribution: str, version: str = "2.6.6", seconds: float = 0) -> None:
    """Write a distribution of Lightning's shape: classes, a tool for `python -m`, and metadata."""
    pytorch, fabric = (folder / name for name in MODULES[distribution])
    for path in (pytorch / "callbacks", fabric / "utilities"):
        path.mkdir(parents=True)
    name_of_fabric = MODULES[distribution][1].replace("/", ".")
    (fabric / "__init__.py").write_text(
        f"print('run', __name__)\nimport time\ntime.sleep({seconds})\n"
        "from .utilities import seed_everything\nclass Fabric: pass\n"
    )
    (fabric / "utilities/__init__.py").write_text("def seed_everything(): pass\n")
    (pytorch / "__init__.py").write_text(
        f"print('run', __name__)\nimport time\ntime.sleep({seconds})\n"
        f"from {name_of_fabric}.utilities import seed_everything\n"
        "from .callbacks import Callback\n__version__ = '" + version + "'\n"
        "class Trainer: pass\nclass LightningModule: pass\nclass LightningDataModule: pass\n"
    )
    (pytorch / "callbacks/__init__.py").write_text(
        f"import time\ntime.sleep({seconds})\nclass Callback: pass\n"
    )
    (pytorch / "tool.py").write_text(
        "from .callbacks import Callback\nprint(__name__, Callback.__module__)\n"
    )
    if distribution == "lightning":
        (folder / "lightning/__init__.py").write_text(
            "print('run lightning')\n"
            "from lightning.fabric import Fabric\n"
            "from lightning.pytorch import Callback, LightningDataModule, LightningModule, "
            "Trainer, __version__\n"
        )
        (folder / "lightning/data.py").write_text("kept = 1\n")
    information = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def run(folder: Path, *line: str, status: int = 0) -> str:
    """Run a command line in a Python with the runtime and what is in `folder`.

    Return what it prints.
    """
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
    command = [sys.executable, "-I", "-S", "-c", start + "\n".join(line)]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert completed.returncode == status, completed.stderr
    return completed.stdout + completed.stderr


PRINTS_DISTRIBUTION = """
import lightning as L
import lightning.pytorch as new, pytorch_lightning as old
import lightning.fabric, lightning_fabric
from lightning.pytorch.callbacks import Callback
from pytorch_lightning.callbacks import Callback as OldCallback
assert new is old and lightning.fabric is lightning_fabric and Callback is OldCallback is L.Callback
assert L.Trainer is old.Trainer and L.Fabric is lightning_fabric.Fabric
from sagemaker_lightning.compat import namespaces, versions
versions.check()
print("is", old.__name__, lightning_fabric.__name__)
"""


@pytest.mark.parametrize(
    "installed", [["pytorch-lightning"], ["lightning"], ["pytorch-lightning", "lightning"]]
)
def test_one_distribution_is_imported_whichever_is_there(tmp_path: Path, installed: list[str]):
    for distribution in installed:
        install(tmp_path, distribution)
    output = run(tmp_path, "import sagemaker_lightning", PRINTS_DISTRIBUTION)
    expected = ("pytorch_lightning", "lightning_fabric")
    if installed == ["lightning"]:
        expected = ("lightning.pytorch", "lightning.fabric")
    assert output.splitlines()[-1] == f"is {' '.join(expected)}"
    assert sorted(
        line for line in output.splitlines() if line.startswith("run ") and line != "run lightning"
    ) == sorted(f"run {name}" for name in expected)
    if "lightning" in installed:
        run(tmp_path, "import sagemaker_lightning, lightning.data\nassert lightning.data.kept == 1")


@pytest.mark.parametrize(
    "first", ["pytorch_lightning", "lightning", "lightning.pytorch", "lightning.fabric"]
)
def test_the_one_that_is_imported_before_the_runtime_is_taken(tmp_path: Path, first: str):
    for distribution in MODULES:
        install(tmp_path, distribution)
    output = run(tmp_path, f"import {first}, sagemaker_lightning", PRINTS_DISTRIBUTION)
    assert output.splitlines()[-1].startswith(f"is {first.partition('.')[0]}")
    assert output.count("run ") - output.count("run lightning\n") == 2


def test_both_before_the_runtime_are_one_line(tmp_path: Path):
    """The error comes only when something that needs Lightning is imported."""
    for distribution in MODULES:
        install(tmp_path, distribution)
    code = (
        "import lightning, pytorch_lightning\n"
        "from sagemaker_lightning import SageMakerEnvironment, UserError\n"
    )
    output = run(tmp_path, code, "from sagemaker_lightning import ExactResume", status=1)
    assert output.splitlines()[-1].startswith(
        "error: import lightning, import pytorch_lightning: found both before import "
        "sagemaker_lightning, which makes them one; put import sagemaker_lightning above them"
    )


def test_without_any_lightning_one_line_says_so(tmp_path: Path):
    output = run(tmp_path, "from sagemaker_lightning import ExactResume", status=1)
    assert "error: Lightning: not installed in " in output.splitlines()[-1]
    assert "No module named 'lightning'" in run(
        tmp_path, "import sagemaker_lightning, lightning", status=1
    )
    output = run(tmp_path, "import sagemaker_lightning, pytorch_lightning", status=1)
    assert "No module named 'pytorch_lightning'" in output


@pytest.mark.parametrize(
    ("name", "version", "others"),
    [
        ("lightning", "2.6.3", []),
        ("lightning", "2.6.3", ["pytorch-lightning"]),
        ("pytorch-lightning", "2.6.2", []),
    ],
    ids=["alone", "beside pytorch-lightning", "pytorch-lightning"],
)
@pytest.mark.parametrize(
    "code", ["import lightning.pytorch", "from sagemaker_lightning import ExactResume"]
)
def test_a_malicious_release_is_not_run(tmp_path: Path, name, version, others, code):
    for distribution in others:
        install(tmp_path, distribution)
    install(tmp_path, name, version)
    output = run(tmp_path, "import sagemaker_lightning", code, status=1)
    assert "run " not in output
    line = f"rror: {name}: found {version}, a malicious release that steals"
    assert line in output.splitlines()[-1]


def test_a_package_of_the_users_own_stays_theirs(tmp_path: Path):
    install(tmp_path, "pytorch-lightning")
    (tmp_path / "lightning/pytorch").mkdir(parents=True)
    (tmp_path / "lightning/__init__.py").write_text("storm = 1\n")
    (tmp_path / "lightning/pytorch/rain.py").write_text("wet = 2\n")
    code = "import pytorch_lightning, lightning, lightning.pytorch.rain\n"
    run(
        tmp_path,
        "import sagemaker_lightning",
        code,
        "assert (lightning.storm, lightning.pytorch.rain.wet) == (1, 2)",
    )


def test_a_folder_of_the_users_own_is_not_a_package(tmp_path: Path):
    """A folder with Lightning's name is not a package, and modules in it are still found.

    Python takes a folder for a package where nothing else has its name.
    """
    install(tmp_path, "pytorch-lightning")
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning/rain.py").write_text("wet = 2\n")
    run(
        tmp_path,
        "import sagemaker_lightning",
        PRINTS_DISTRIBUTION,
        "import lightning.rain\nassert lightning.rain.wet == 2",
    )


@pytest.mark.parametrize("installed", MODULES)
def test_a_module_is_run_by_either_name(tmp_path: Path, installed: str):
    install(tmp_path, installed)
    for name in ("pytorch_lightning.tool", "lightning.pytorch.tool"):
        code = (
            "import runpy, sagemaker_lightning\n"
            f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
        )
        own = MODULES[installed][0].replace("/", ".")
        assert run(tmp_path, code).splitlines()[-1] == f"__main__ {own}.callbacks"


IMPORTS_IN_THREADS = """
import random, sys, threading, time, sagemaker_lightning
NAMES = {names!r}
failed, seen, start = [], {{}}, threading.Barrier(len(NAMES))
def work(name):
    start.wait()
    time.sleep(random.uniform(0, {seconds}))
    try:
        exec(f"from {{name}} import " + ("Fabric" if "fabric" in name else "Callback"), {{}})
    except BaseException as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
threads = [threading.Thread(target=work, args=[name]) for name in NAMES]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
import lightning.pytorch, pytorch_lightning
assert lightning.pytorch is pytorch_lightning
"""


# "pytorch_lightning.callbacks" is not imported at the same time where that is its first name.
# Python locks it and then its package, which locks them the other way round.
AT_ONCE = {
    "pytorch-lightning": [
        "lightning",
        "lightning.pytorch",
        "pytorch_lightning",
        "lightning.pytorch.callbacks",
    ],
    "lightning": [
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "pytorch_lightning.callbacks",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("installed", AT_ONCE)
def test_threads_import_both_at_once(tmp_path: Path, installed: str):
    install(tmp_path, installed, seconds=0.05)
    run(tmp_path, IMPORTS_IN_THREADS.format(names=4 * AT_ONCE[installed], seconds=0.1))
