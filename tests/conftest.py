"""Fixtures and hooks of all tests: data, runs of `train`, the image, order, leaks."""

import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import containers
import lanes
import numpy as np
import pytest
import s3
import sweeper
import torch
import warm
from containers import ROOT
from endpoint_requests import allowed_folder, endpoint  # noqa: F401  fixtures
from lightning_utilities.core.rank_zero import rank_zero_only
from rehearsed_inputs import paged_aws  # noqa: F401  a fixture

from sagemaker_lightning.process.parent_process import LAUNCHER_VARIABLE
from sagemaker_lightning.resume import signals

# Under nohup, programs ignore SIGHUP, and so would all that the tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A second thread takes and waits for a processor that other tests use, to add up four samples: five
# times the processor time of a short training. What tests start has its own number.
torch.set_num_threads(1)

gc.disable()  # until the tests are collected: nothing that is imported is garbage

CIFAR_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tell whether the test is slow, before a fixture of its module starts processes."""
    warm.is_slow_test = item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def check_for_leaks():
    """Fail a test that leaks a variable, a signal handler or a process group."""
    variables = _checked_variables()
    handlers = _handlers()
    yield
    os.environ.pop(LAUNCHER_VARIABLE, None)  # ExactResume names the process that has made it
    signals._unheeded.clear()
    assert _checked_variables() == variables
    assert _handlers() == handlers
    assert not torch.distributed.is_initialized()
    rank = getattr(rank_zero_only, "rank", 0)
    rank_zero_only.rank = 0  # else the tests after it print nothing
    assert not rank


# Lightning's seed_everything sets the first two, its Trainer the third, torch the fourth,
# scikit-learn the next two, and SageMaker's toolkit the last one.
VARIABLES_OF_LIBRARIES = (
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "POSSIBLE_USER_WARNINGS",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "SAGEMAKER_BASE_DIR",
)


def _checked_variables() -> dict[str, str]:
    """Return the environment without the variables that pytest and libraries set."""
    left_out = ("PYTEST_CURRENT_TEST", LAUNCHER_VARIABLE, *VARIABLES_OF_LIBRARIES)
    return {key: value for key, value in os.environ.items() if key not in left_out}


def _handlers() -> list:
    """Return the handlers of SIGINT and SIGTERM."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def batch(images: int, seed: int, labels=None) -> dict:
    """Return one CIFAR-10 batch in the form in which the authors pickle it.

    The images are random; their brightness shows their class.
    """
    generator = np.random.RandomState(seed)
    labels = list(range(10)) * (images // 10) if labels is None else labels
    pixels = generator.randint(0, 60, (images, 3072)) + 19 * np.array(labels)[:, None]
    return {
        "batch_label": "",
        "labels": labels,
        "data": pixels.astype(np.uint8),
        "filenames": [""] * images,
    }


def write_cifar(folder: Path, images: int = 40) -> Path:
    """Write a small cifar-10-batches-py into `folder` (`images` a batch) and return it."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    for number, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        (target / name).write_bytes(pickle.dumps(batch(images, number), protocol=2))
    (target / "batches.meta").write_bytes(pickle.dumps({"label_names": CIFAR_CLASSES}, protocol=2))
    return target


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder that holds a small cifar-10-batches-py."""
    write_cifar(tmp_path / "cifar")
    return tmp_path / "cifar"


# The command that entrypoint.sh ends with.
TOOLKIT_COMMAND = ["python", "-m", "sagemaker_lightning.launch.train_command"]


class Job:
    """An /opt/ml of its own, on which `train` (the real toolkit) runs.

    It runs through entrypoint.sh, as in the container.
    """

    def __init__(self, base: Path) -> None:
        self.base = base

    @property
    def variables(self) -> dict[str, str]:
        """The environment that the image gives `train`."""
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SAGEMAKER_BASE_DIR": str(self.base),
            "SAGEMAKER_PROGRAM": "app/train_multi_node.py",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_lightning.launch.toolkit_hook:main",
        }

    def write(self, name: str, text: str) -> None:
        """Write a file below the base folder."""
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *command: str, timeout: float = 300, cold: bool = False, **variables: str):
        """Run `command` (default: train) and return it with all its output in `stdout`.

        `train` starts warm (warm.py), unless `cold`: then it is the process that a container
        starts.
        """
        if command or cold:
            return subprocess.run(
                [str(ROOT / "entrypoint.sh"), *(command or ("train",))],
                env=self.variables | variables,
                cwd=self.base.parent,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
        prepared, environment = self._prepare(variables)
        if not environment:
            return prepared
        return warm.run(TOOLKIT_COMMAND, self.base.parent, environment, timeout)

    def start(self, output: int | None = None, **variables: str) -> warm.Started:
        """Start `train`, warm, and return the process.

        Its output goes to file descriptor `output`, or else to the pipe of the returned process.
        """
        prepared, environment = self._prepare(variables)
        assert environment, prepared.stdout
        return warm.start(TOOLKIT_COMMAND, self.base.parent, environment, output)

    def _prepare(
        self, variables: dict[str, str]
    ) -> tuple[subprocess.CompletedProcess, dict[str, str]]:
        """Run entrypoint.sh up to the toolkit's command; return run and environment.

        The environment is the one that the toolkit gets; it is empty if entrypoint.sh ended before.
        """
        variables_file = self.base.parent / f".{self.base.name}-variables"
        variables_file.unlink(missing_ok=True)
        job_variables = self.variables | variables
        shim_variables = job_variables | {
            "PATH": f"{ROOT / 'tests/shims'}:{job_variables['PATH']}",
            "WARM_VARIABLES": str(variables_file),
        }
        prepared = subprocess.run(
            [str(ROOT / "entrypoint.sh"), "train"],
            env=shim_variables,
            cwd=self.base.parent,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        if not variables_file.exists():
            return prepared, {}
        entries = variables_file.read_text().split("\0")
        variables_file.unlink()
        environment = dict(entry.split("=", 1) for entry in entries if entry)
        environment.pop("WARM_VARIABLES", None)
        environment["PATH"] = job_variables["PATH"]
        return prepared, environment

    @property
    def failure(self) -> str:
        """The text that becomes the job's FailureReason."""
        return (self.base / "output/failure").read_text()[:1024]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on an empty folder."""
    return Job(tmp_path / "ml")


@pytest.fixture(scope="session")
def image() -> str:
    """Build the image from this checkout, and return its tag.

    The image stays, so that the next run of the tests builds from its cache.
    """
    build = containers.build(containers.IMAGE_TAG, **containers.build_variables())
    assert build.returncode == 0, build.stdout[-3000:]
    return containers.IMAGE_TAG


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """The address of an S3 server."""
    with s3.server(tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture
def bucket(s3_server: str) -> s3.Bucket:
    """A bucket for one test."""
    return s3.Bucket(s3_server)


def pytest_configure(config):
    """Start the sweeper (sweeper.py), which removes what a killed run leaves behind.

    From now on, SIGTERM ends the run as SIGINT does.
    """
    if hasattr(config, "workerinput"):
        return
    # The first two are `make test`'s: no other make gets them. Without the third, each process of a
    # client would compile its packages again: 2 s for an SDK.
    for name in ("FLAGS", "MAKEFLAGS", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    run = os.environ[sweeper.RUN_VARIABLE] = uuid.uuid4().hex
    command = [sys.executable, str(Path(sweeper.__file__)), run, containers.IMAGE_TAG]
    config.sweeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, text=True
    )
    config.came_to_its_end = False
    # A shell ignores SIGINT in a run that it starts in the background.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_sessionstart(session):
    """Write the run's folder to the sweeper."""
    if pipe := getattr(session.config, "sweeper", None):
        pipe.stdin.write(f"{session.config._tmp_path_factory.getbasetemp()}\n")
        pipe.stdin.flush()


def pytest_unconfigure(config):
    """Tell the sweeper to sweep, and wait until it has."""
    gc.unfreeze()  # some libraries look, as the interpreter ends, for objects that are left
    if hasattr(config, "sweeper"):
        config.sweeper.stdin.write(f"{sweeper.DONE_LINE if config.came_to_its_end else ''}\n")
        config.sweeper.stdin.close()
        config.sweeper.wait(timeout=120)
        del os.environ[sweeper.RUN_VARIABLE]


def pytest_addoption(parser):
    """Add --write-durations and --shuffle."""
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write tests/durations.json, the table that orders the files",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="take files, and the tests of each, in a random order",
    )


def pytest_collection_modifyitems(config, items):
    """Order the files, deselect what nobody asked for, skip what cannot run here."""
    positions = lanes.longest_first([item.nodeid for item in items])
    if (seed := config.option.shuffle) is not None:  # all workers get the same order
        random.Random(seed).shuffle(items)
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
        positions = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: positions[item.nodeid.partition("::")[0]])
    for item in items:
        if "image" in item.fixturenames:
            item.add_marker("docker")
        if item.get_closest_marker("docker"):
            item.add_marker("slow")
            if containers.no_engine():
                item.add_marker(pytest.mark.skip(reason="no Docker engine answers"))
        if item.get_closest_marker("root") and os.geteuid():
            item.add_marker(pytest.mark.skip(reason="needs root"))
    # The user asked for a test that the command line names.
    named = any("::" in arg for arg in config.args)
    for marker in () if named else ("thorough", "soak"):
        if marker not in config.option.markexpr:
            # A test that has both is of the soak.
            other = "soak" if marker == "thorough" else ""
            marked = [
                item
                for item in items
                if item.get_closest_marker(marker) and not item.get_closest_marker(other)
            ]
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in set(marked)]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Look for garbage again once the tests are collected."""
    collected = yield
    gc.enable()
    return collected


def pytest_collection_finish(session):
    """Take what is imported out of the collector's sight: it need not look at it in each test."""
    gc.freeze()


def pytest_xdist_make_scheduler(config, log):
    """Run lanes side by side (lanes.py)."""
    config.option.loadscopereorder = False
    return lanes.Lanes(config, log)


seconds: dict[str, float] = {}


def pytest_runtest_logreport(report):
    """Add up the seconds of each file."""
    file = report.nodeid.partition("::")[0]
    seconds[file] = seconds.get(file, 0.0) + report.duration


def pytest_sessionfinish(session, exitstatus):
    """Write the table of durations if it is asked for."""
    session.config.came_to_its_end = exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
    )
    if session.config.option.write_durations and not hasattr(session.config, "workerinput"):
        file_seconds = lanes.durations() | {
            file: round(value, 1) for file, value in seconds.items()
        }
        existing = {
            file: file_seconds[file] for file in sorted(file_seconds) if (ROOT / file).exists()
        }
        lanes.DURATIONS_FILE.write_text(json.dumps(existing, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter):
    """Print one line if the container tests did not run, with the reason."""
    if reason := containers.no_engine():
        terminalreporter.write_line(
            f"the container tests did not run: no Docker engine answers ({reason})"
        )
