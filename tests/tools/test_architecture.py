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


TESTED_ELSEWHERE = {
    "callbacks/gradient_weighting.py": "of several ranks: test_rank_consistency.py",
    "callbacks/heartbeat.py": "its watchdog hears it: test_watchdog.py",
    "callbacks/loggers/base.py": "its loggers: test_csv_file.py and those beside it",
    "cli/export.py": "with the ends of runs: test_training_end.py",
    "compat/csv_logger.py": "its logger: test_csv_file.py",
    "compat/dtensors.py": "a sharded model: test_safetensors_files.py, test_sharded.py",
    "compat/names.py": "a table: test_compat.py",
    "compat/torch_unpickler.py": "the files that it reads: test_checkpoint_file_forged.py",
    "contract/job_summary.py": "what shows it: test_job_config.py",
    "contract/reporting.py": "the failures that it reports: test_failures.py",
    "data/loaders/resumable.py": "each kind of loader: test_stateful.py and those beside it",
    "data/partition.py": "with the data of the example: test_data.py",
    "launch/job_watch.py": "the toolkit's process: test_toolkit_hook.py",
    "launch/requirements.py": "the toolkit's process: test_toolkit_hook.py",
    "launch/standby.py": "with the process that it forks: test_warm_start.py",
    "launch/torchrun_command.py": "one of the programs: test_user_program.py",
    "launcher/command.py": "whole commands: tests/launcher",
    "nodes/waits.py": "the watch that waits: test_hang_watch.py",
    "resume/files/entries.py": "types alone",
    "resume/logs.py": "with the starts that continue them: test_run.py, test_tracking.py",
    "resume/parts/modes.py": "with the objects that have modes: test_user_objects.py",
    "resume/parts/part.py": "each part: the files beside this one",
    "resume/parts/roots.py": "the objects that it finds: test_user_objects.py",
    "resume/parts/stateful_objects.py": "with the other objects: test_user_objects.py",
    "rows/job.py": "with the tables that it reads: test_table.py",
    "state/graph/atoms.py": "the values that are made of them: test_values.py",
    "state/graph/kinds/base.py": "each kind: the files beside this one",
    "state/graph/kinds/containers.py": "with the other kinds: test_encoding_kinds.py",
    "state/graph/kinds/optimizers.py": "in whole trainings: test_optimizers_forged.py",
}
"""Modules above 60 lines that have no file of tests of their own, and which file has theirs."""


def test_unit_tests_mirror_the_runtime():
    """tests/unit/<package>/test_<module>.py, or test_<module>_<subject>.py of a large one.

    So a module's tests are found by its name, or in TESTED_ELSEWHERE. pytest imports each file of
    tests by its own name: none may be there twice.
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
    untested = {
        str(path.relative_to(runtime))
        for path in runtime.rglob("*.py")
        if not path.name.startswith("__")
        and path.read_text().count("\n") > 60
        and not [
            *unit.glob(f"{path.parent.relative_to(runtime)}/test_{path.stem}.py"),
            *unit.glob(f"{path.parent.relative_to(runtime)}/test_{path.stem}_*.py"),
        ]
    }
    assert tested and not strays
    assert untested == set(TESTED_ELSEWHERE)
    assert sorted(names) == sorted(set(names))


def test_no_file_of_tests_is_too_long_to_read():
    """800 lines or so: its subjects go to files of their own."""
    lines = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert lines and not {path: number for path, number in lines.items() if number > 820}
