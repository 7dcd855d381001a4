"""Every block of commands of a page is run on a copy of this checkout.

The blocks of a page are run in the page's order.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sweeper
import warm
from conftest import write_cifar
from containers import DOCKER, IMAGE_TAG, ROOT, build_variables, copy_checkout, no_engine
from environments import python_of
from local_mode import Client
from pages import FENCE, PAGES, TESTS, blocks

from sagemaker_lightning.resume.check import journal

pytestmark = pytest.mark.slow

BLOCKS = [(page, *block) for page in PAGES if page not in TESTS for block in blocks(page)]
# Blocks of the SDKs and parts of scripts are not run: test_names_of_pages.py reads their imports.
COMMANDS = [block for block in BLOCKS if "from sagemaker" not in block[2]]
NEEDS_DOCKER = re.compile(r"docker|make build|make rehearsal|output/model/")
# The README's containers show what those of the other pages show. A page's blocks stay together.
THOROUGH_PAGES = {
    page for page, _, text in COMMANDS if page.startswith("docs/") and NEEDS_DOCKER.search(text)
} | {f"docs/{name}.md" for name in ("clients", "row-jobs", "sharded", "shards")}
MINUTES = 25
"""The limit of a block: on a slow machine, to build the image beside other tests took ten."""


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes a page's checkout, as `git clone` does.

    It has this environment, and a small CIFAR-10 in `cifar10`.
    """

    @functools.cache
    def checkout(page: str) -> Path:
        folder = tmp_path_factory.mktemp(Path(page).stem)
        copy_checkout(folder)
        if Path(sys.prefix, "ready").exists():
            (folder / ".venv").symlink_to(sys.prefix)
        python_of("rehearsal")
        (folder / ".venvs").symlink_to(ROOT / ".venvs")
        example = folder / "examples/spot.json"  # made to train on an eighth of the images
        configuration = (
            example.read_text()
            .replace('"sagemaker-lightning"', f'"{IMAGE_TAG}"')
            .replace('"64"', '"8"')
        )
        # SGD: its checkpoints, which are copied all the time, have a third of the default's bytes.
        # Its 45 steps reach beyond the second interruption, at step 40.
        short_training = (
            '"trainer.limit_train_batches": "9", "trainer.limit_val_batches": "1", '
            '"trainer.limit_test_batches": "1", "optimizer": "SGD", "resume.every'
        )
        example.write_text(configuration.replace('"resume.every', short_training))
        write_cifar(folder / "cifar10", images=10)
        # More epochs are test_train.py's.
        config = folder / "output/ml/input/config"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text('{"trainer.max_epochs": "1"}')
        return folder

    return checkout


def image_variables() -> dict[str, str]:
    """Return the variables of `make build` for a test.

    With them the image has the tag that other tests use, and stand-ins replace what a test cannot
    reach. It is the very image of the fixture `image`, with the version of ROOT's files: where two
    builds give a tag to two images by turns, each may remove the other's as the earlier one.
    """
    return {
        "IMAGE": IMAGE_TAG,
        "DOCKER": DOCKER,
        "GIT_DIR": str(ROOT / ".git"),
        "GIT_WORK_TREE": str(ROOT),
        **build_variables(),
    }


@pytest.mark.timeout(MINUTES * 60 + 60)
@pytest.mark.parametrize(
    ("page", "language", "text"),
    [
        pytest.param(*block, marks=[pytest.mark.thorough] if block[0] in THOROUGH_PAGES else [])
        for block in COMMANDS
    ],
    ids=[f"{page}: {text.splitlines()[-1]}" for page, _, text in COMMANDS],
)
def test_a_block_of_a_page(checkouts, request, page: str, language: str, text: str):
    if text == "make test\n":  # it runs these tests; .ci/run calls it
        assert re.search(r"^run make test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
        return
    needs_docker = NEEDS_DOCKER.search(text)
    if needs_docker and (reason := no_engine()):
        pytest.skip(f"no Docker engine answers: {reason}")
    if needs_docker and "make build" not in text:
        request.getfixturevalue("image")
    checkout = checkouts(page)
    # A file of the user's, which another command of the page names.
    if name_match := re.match(r"# (\w+\.py)\n", text):
        (checkout / name_match[1]).write_text(text)
        compile(text, name_match[1], "exec")
        assert f"{Path(name_match[1]).stem}." in PAGES[page].replace(text, "").replace(
            name_match[1], ""
        )
        return
    # The page's image name belongs to the user: a test never tags its own image with it.
    text = re.sub(r"\bsagemaker-lightning(?= train| python| bash)", IMAGE_TAG, text)
    hyperparameters_mount = (
        "output/ml/input/config/hyperparameters.json:/opt/ml/input/config/hyperparameters.json:ro"
    )
    text = text.replace(
        f"--rm {IMAGE_TAG} train", f'--rm -v "$PWD/{hyperparameters_mount}" {IMAGE_TAG} train'
    )
    text = text.replace("docker run", f"docker run {' '.join(sweeper.labels())}")
    command = (
        [sys.executable, "-c", text]
        if language == "python"
        else ["bash", "-euo", "pipefail", "-c", text]
    )
    variables = (
        os.environ
        | {"XDG_CACHE_HOME": str(checkout / "cache"), "OMP_NUM_THREADS": "1"}
        | (image_variables() if needs_docker else {})
    )
    completed = subprocess.run(
        command,
        cwd=checkout,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=MINUTES * 60,
    )
    assert completed.returncode == 0, completed.stdout[-3000:]
    if "make rehearsal" in text:
        (report,) = (checkout / "output/rehearsal").glob("*/report.html")
        assert completed.stdout.count("Training job interrupted") == 2
        assert "algo-2" in report.read_text()
    elif "merge_parts" in text:
        assert "scores.npy: float32 [2000, 10]" in completed.stdout
    elif "--help" not in text and "--dry-run" not in text and language == "sh":
        assert "model.pt" in completed.stdout
    if "make build" in text:
        assert "epoch=1/1" in completed.stdout
    if text == "make train\n":
        assert (checkout / "output/ml/model/model.pt").is_file()


def _journal_goes_beyond_the_checkpoint(folder: Path) -> bool:
    """Return whether steps after the newest checkpoint are recorded."""
    saved = [int(path.stem.removeprefix("step-")) for path in folder.rglob("step-*.ckpt")]
    recorded = [
        step
        for path in folder.rglob("journal-0.bin")
        for step, *_ in journal.RECORD.iter_unpack(path.read_bytes()[journal.HEADER.size :])
    ]
    return bool(saved) and max(recorded, default=0) > max(saved)


def test_the_five_lines_say_what_the_page_says(tmp_path):
    """Killed within an epoch, some steps after a checkpoint, and started again."""
    ((program, said),) = re.findall(
        r"```python\n(# exact.py\n.*?)```.*?```\n(resumed at .*?)\n```",
        PAGES["README.md"],
        re.DOTALL,
    )
    (tmp_path / "exact.py").write_text(program)
    command = [sys.executable, tmp_path / "exact.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(5):  # a slow disk may leave the journal without steps until the program ends
        process = warm.start(command, tmp_path, environment)
        while process.poll() is None:
            time.sleep(0.02)
            # It stands still while it is looked at: an epoch of this program takes 70 ms.
            process.send_signal(signal.SIGSTOP)
            if _journal_goes_beyond_the_checkpoint(tmp_path):
                break
            process.send_signal(signal.SIGCONT)
        killed = process.poll() is None
        process.kill()
        process.communicate()
        if killed:
            break
        shutil.rmtree(tmp_path / "output")
    completed = warm.run_apart(command, tmp_path, environment)
    assert completed.returncode == 0, completed.stderr
    output = completed.stdout
    form = r"resumed at step \d+: the .* bit for bit"
    assert re.fullmatch(form, said) and re.search(form, output), output


@pytest.mark.thorough  # what the SDKs send: test_clients_sdk2.py, test_clients_sdk3.py
@pytest.mark.docker
@pytest.mark.parametrize(
    ("sdk", "client", "output"),
    [
        ("sdk2", "Estimator(", "output/estimator"),
        ("sdk3", "ModelTrainer(", "output/model-trainer"),
    ],
)
def test_a_job_by_an_sdk(checkouts, tmp_path: Path, image: str, sdk: str, client: str, output: str):
    ((page, text),) = [(page, text) for page, _, text in BLOCKS if client in text]
    checkout = checkouts(page)
    text = text.replace('"sagemaker-lightning"', f'"{image}"')
    user = Client(sdk, tmp_path)
    try:
        completed = subprocess.run(
            [python_of(sdk), "-c", text],
            cwd=checkout,
            env=user.variables,
            text=True,
            timeout=600,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert completed.returncode == 0, completed.stdout[-3000:]
        (archive,) = (checkout / output).rglob("model.tar.gz")
        assert "model.pt" in subprocess.check_output(["tar", "-tf", archive], text=True)
    finally:
        user.clean()


def test_the_file_tree_is_true():
    (tree,) = [
        text
        for _, text in FENCE.findall(PAGES["docs/architecture.md"])
        if text.startswith("Dockerfile ")
    ]
    for name in re.findall(r"(?:^|  )(\.?[\w./]+[/.\w])  ", tree):
        assert (ROOT / name).exists(), name
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        top_entry = f"{name.split('/')[0]}{'/' if '/' in name else ''}"
        assert top_entry in tree or top_entry in (
            ".dockerignore",
            ".gitignore",
            "LICENSE",
            "pyproject.toml",
            ".pre-commit-config.yaml",
            ".ci/",
            ".github/",
            *PAGES,
        ), name
