"""Every command of the README is run, in its order, on a copy of this checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_cifar
from containers import DOCKER, ROOT, build_variables, no_engine
from environments import python_of

README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```(sh|python)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
NEEDS_DOCKER = re.compile(r"docker|make build|output/model/|from sagemaker")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What `git clone` gives, with the environment that there is, and CIFAR-10 (a small one) in `cifar10`."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    if Path(sys.prefix, "ready").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    write_cifar(folder / "cifar10")
    return folder


def image_variables() -> dict[str, str]:
    """Return what makes `make build` tag a test's image, and stands in for what is out of reach."""
    return {"IMAGE": "sagemaker-lightning-test", "DOCKER": DOCKER, **build_variables()}


def python_for(text: str) -> Path:
    """Return the Python that has what a program imports: each SDK has an environment of its own."""
    if "import Estimator" in text:
        return python_of("sdk2")
    return python_of("sdk3") if "import Mode, ModelTrainer" in text else Path(sys.executable)


@pytest.mark.parametrize(("language", "text"), FENCES, ids=[text.splitlines()[-1] for _, text in FENCES])
def test_a_command_of_the_readme(checkout: Path, language: str, text: str):
    if text == "make test\n":  # it is what runs these tests; .ci/run calls it
        assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
        return
    needs_docker = NEEDS_DOCKER.search(text)
    if needs_docker and (reason := no_engine()):
        pytest.skip(f"no Docker engine answers: {reason}")
    # The image's name is the user's: a test does not tag one of its own with it.
    text = re.sub(r'\bsagemaker-lightning(?=" *,| train| python| bash)', "sagemaker-lightning-test", text)
    command = [str(python_for(text)), "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    variables = os.environ | (image_variables() if needs_docker else {})
    done = subprocess.run(
        command, cwd=checkout, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-3000:]
    if "--help" not in text and "--dry-run" not in text and language == "sh":
        assert "model.pt" in done.stdout
    if "from sagemaker" in text:
        folder = "output/estimator" if "Estimator" in text else "output/model-trainer"
        (archive,) = (checkout / folder).rglob("model.tar.gz")
        assert "model.pt" in subprocess.check_output(["tar", "-tf", archive], text=True)
    if text == "make train\n":
        assert float(re.search(r"test_acc=(\S+)", done.stdout)[1]) >= 0.95
        assert (checkout / "output/ml/model/model.pt").is_file()


def test_the_readme_has_its_commands():
    assert len(FENCES) == 10


def test_the_file_tree_is_true():
    tree = README.rsplit("```\n", 2)[1]
    for name in re.findall(r"(?:^|  )(\.?[\w./]+[/.\w])  ", tree):
        assert (ROOT / name).exists(), name
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        top = f"{name.split('/')[0]}{'/' if '/' in name else ''}"
        assert top in tree or top in (
            ".dockerignore",
            ".gitignore",
            "LICENSE",
            "README.md",
            "pyproject.toml",
            ".ci/",
        ), name


def test_the_table_of_the_rooms_names_every_module():
    modules = {path.name for path in (ROOT / "app").iterdir() if path.suffix in (".py", ".yaml")} - {"__init__.py"}
    assert {name for name in re.findall(r"^\|.*?`app/([\w.]+)`", README, re.MULTILINE)} | set(
        re.findall(r"`app/([\w.]+)`", README)
    ) >= modules


@pytest.mark.parametrize("target", re.findall(r"`?make ([a-z]+)", README))
def test_a_make_target_of_the_readme_is_there(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
