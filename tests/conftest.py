"""Fixtures of all tests: small CIFAR-10 folders, runs of `train`, a watch for leaks."""

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

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaks an environment variable, a signal handler or a process group."""
    before = (
        dict(os.environ),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    )
    yield
    variables = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTEST_CURRENT_TEST", *OTHERS_OWN)
    }
    expected = {
        key: value
        for key, value in before[0].items()
        if key not in ("PYTEST_CURRENT_TEST", *OTHERS_OWN)
    }
    assert variables == expected
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before[1]
    assert not torch.distributed.is_initialized()


# Lightning's seed_everything sets the first two; then come its Trainer's and torch's; scikit-learn
# sets the last two.
OTHERS_OWN = (
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "POSSIBLE_USER_WARNINGS",
    "TORCHINDUCTOR_CACHE_DIR",
)
OTHERS_OWN += ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")


def batch(images: int, seed: int, labels=None) -> dict:
    """Return one CIFAR-10 batch in the form in which the authors pickle it.

    The images are random; their brightness shows their class.
    """
    random = np.random.RandomState(seed)
    labels = list(range(10)) * (images // 10) if labels is None else labels
    data = random.randint(0, 60, (images, 3072)) + 19 * np.array(labels)[:, None]
    return {
        "batch_label": "",
        "labels": labels,
        "data": data.astype(np.uint8),
        "filenames": [""] * images,
    }


def write_cifar(folder: Path, images: int = 40) -> Path:
    """Write a small cifar-10-batches-py into `folder` (`images` a batch) and return it."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    for number, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        (target / name).write_bytes(pickle.dumps(batch(images, number), protocol=2))
    (target / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}, protocol=2))
    return target


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder that holds a small cifar-10-batches-py."""
    write_cifar(tmp_path / "cifar")
    return tmp_path / "cifar"


TOOLKIT = ["python", "-m", "sagemaker_lightning.launch.train_command"]  # what entrypoint.sh becomes


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

        `train` starts warm (tests/warm.py), unless `cold`: then it is the process that a container
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
        return warm.run(TOOLKIT, self.base.parent, environment, timeout)

    def start(self, output: int | None = None, **variables: str) -> warm.Started:
        """Start `train`, warm, and return the process.

        Its output goes to file descriptor `output`, or else to the pipe of the process that is
        returned.
        """
        prepared, environment = self._prepare(variables)
        assert environment, prepared.stdout
        return warm.start(TOOLKIT, self.base.parent, environment, output)

    def _prepare(
        self, variables: dict[str, str]
    ) -> tuple[subprocess.CompletedProcess, dict[str, str]]:
        """Run entrypoint.sh up to the toolkit's command, and return it with the environment.

        The environment is the one that it leaves to the toolkit; it is empty if it ended before.
        """
        left = self.base.parent / f".{self.base.name}-variables"
        left.unlink(missing_ok=True)
        given = self.variables | variables
        shimmed = given | {
            "PATH": f"{ROOT / 'tests/shims'}:{given['PATH']}",
            "WARM_VARIABLES": str(left),
        }
        prepared = subprocess.run(
            [str(ROOT / "entrypoint.sh"), "train"],
            env=shimmed,
            cwd=self.base.parent,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        if not left.exists():
            return prepared, {}
        found = dict(one.split("=", 1) for one in left.read_text().split("\0") if one)
        left.unlink()
        return prepared, {key: value for key, value in found.items() if key != "WARM_VARIABLES"} | {
            "PATH": given["PATH"]
        }

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
    done = containers.build(containers.TAG, **containers.build_variables())
    assert done.returncode == 0, done.stdout[-3000:]
    return containers.TAG


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """The address of an S3 server."""
    with s3.server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_server: str) -> s3.Bucket:
    """A bucket for one test."""
    return s3.Bucket(s3_server)


def pytest_configure(config):
    """Start the sweeper, which removes what a killed run leaves behind (tests/sweeper.py).

    SIGTERM ends the run as SIGINT does.
    """
    if hasattr(config, "workerinput"):
        return
    # The first two are `make test`'s: no other make gets them. Without the third, each process of a
    # client would compile its packages anew: 2 s for an SDK.
    for name in ("FLAGS", "MAKEFLAGS", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    run = os.environ[sweeper.VARIABLE] = uuid.uuid4().hex
    line = [sys.executable, str(Path(sweeper.__file__)), run, containers.TAG]
    config.sweeper = subprocess.Popen(
        line, stdin=subprocess.PIPE, start_new_session=True, text=True
    )
    config.came_to_its_end = False
    # A shell ignores SIGINT in a run that it starts in the background.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_sessionstart(session):
    """Tell the sweeper the run's folder."""
    if pipe := getattr(session.config, "sweeper", None):
        pipe.stdin.write(f"{session.config._tmp_path_factory.getbasetemp()}\n")
        pipe.stdin.flush()


def pytest_unconfigure(config):
    """Tell the sweeper to sweep, and wait until it has."""
    if hasattr(config, "sweeper"):
        config.sweeper.stdin.write(f"{sweeper.DONE if config.came_to_its_end else ''}\n")
        config.sweeper.stdin.close()
        config.sweeper.wait(timeout=120)
        del os.environ[sweeper.VARIABLE]


def pytest_addoption(parser):
    """Add --write-durations and --shuffle."""
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write tests/durations.json, the table of an order",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="take files, and the tests of each, in a random order",
    )


def pytest_collection_modifyitems(config, items):
    """Order the files; leave out what is not asked for; skip what cannot run here."""
    place = lanes.longest_first([item.nodeid for item in items])
    if (seed := config.option.shuffle) is not None:  # alike on all workers
        random.Random(seed).shuffle(items)
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
        place = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])
    for item in items:
        if "image" in item.fixturenames:
            item.add_marker("docker")
        if item.get_closest_marker("docker"):
            item.add_marker("slow")
            if containers.no_engine():
                item.add_marker(pytest.mark.skip(reason="no Docker engine answers"))
        if item.get_closest_marker("root") and os.geteuid():
            item.add_marker(pytest.mark.skip(reason="needs root"))
    # A test that is named on the command line was asked for.
    named = any("::" in arg for arg in config.args)
    for marker in () if named else ("thorough", "soak"):
        if marker not in config.option.markexpr:
            marked = [item for item in items if item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in set(marked)]


def pytest_xdist_make_scheduler(config, log):
    """Run lanes side by side (tests/lanes.py)."""
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
        table = lanes.durations() | {file: round(value, 1) for file, value in seconds.items()}
        there = {file: table[file] for file in sorted(table) if (ROOT / file).exists()}
        lanes.TABLE.write_text(json.dumps(there, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter):
    """Print one line if the container tests did not run, with the reason."""
    if reason := containers.no_engine():
        terminalreporter.write_line(
            f"the container tests did not run: no Docker engine answers ({reason})"
        )
