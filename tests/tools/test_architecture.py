"""Rules that import-linter and ruff (`make lint`) cannot check.

They are: who reads and who writes the environment, and which modules shadow a package.
"""

import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_one_module_names_sagemakers_variables():
    readers = {
        path.stem
        for path in modules("app", "sagemaker_lightning")
        if path.parent.name != "launcher"  # it runs in no job, and asks what a job's program says
        and re.search(r"[\"']SM_[A-Z]+[\"'_]", path.read_text())
    }
    assert readers == {"environment"}


def test_only_launchers_write_the_environment():
    writes = r"os\.environ\.update|os\.environ\[[^]]+\] *=|os\.putenv|os\.environ\.setdefault"
    writers = {
        path.stem
        for path in modules("app", "sagemaker_lightning")
        if re.search(writes, path.read_text())
    }
    launchers = {"toolkit_hook", "shell_job", "train_command", "warm_start"}
    watchers = {"outside_process"}  # it sees which variables the user's code sets
    assert writers == {"threads", "requirements"} | launchers | watchers


def test_no_module_shadows_a_package():
    """`python app/train.py` puts app/ first on the path, so its modules shadow packages.

    `python sagemaker_lightning/launch/torchrun.py` does the same with its folder.
    """
    package_names = set(sys.stdlib_module_names) | {
        "sagemaker",
        "torch",
        "lightning",
        "numpy",
        "yaml",
        "tensorboard",
        "boto3",
    }
    assert not package_names & {path.stem for path in modules("app", "sagemaker_lightning/launch")}


def test_unit_tests_mirror_the_runtime():
    """tests/unit/<package>/test_<module>.py, or test_<module>_<subject>.py of a large one.

    So a module's tests are found by its name. pytest imports each file of tests by its own name:
    none may be there twice.
    """
    unit = ROOT / "tests/unit"
    tested = [
        path.with_name(path.stem.removeprefix("test_")).relative_to(unit)
        for path in unit.rglob("test_*.py")
    ]
    runtime = ROOT / "sagemaker_lightning"
    strays = [
        str(path)
        for path in tested
        if not any(
            (runtime / path.parent / name).exists()
            for words in itertools.accumulate(path.name.split("_"), "{}_{}".format)
            for name in (f"{words}.py", f"{words}/__init__.py")
        )
    ]
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert tested and not strays
    assert sorted(names) == sorted(set(names))


def test_no_file_of_tests_is_too_long_to_read():
    """800 lines or so: its subjects go to files of their own."""
    lines = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert lines and not {path: number for path, number in lines.items() if number > 820}
