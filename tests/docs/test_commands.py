"""Every command of the pages is run by a test, in blocks of code and in sentences.

Blocks of commands are run unchanged. For a command in a sentence, the table says which test runs
it: with smaller numbers if it takes hours; with a stand-in if it needs AWS or a GPU. All of these
commands are parsed here.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from containers import ROOT, copy_checkout
from pages import FENCE, PAGES, TESTS

COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:make|python3?|\.venvs?/\S+|docker|torchrun|tensorboard|pip|scripts/\S+(?= ))(?= |$)"
)

RUNS_BLOCK = "test_readme.py::test_a_block_of_a_page"
RATIOS = "test_benchmarks.py::test_a_benchmark_prints_ratios_and_where_they_were_measured"
FOR_DEVELOPERS = "test_commands.py::test_what_make_runs_for_developers"
RUNS_SDK_JOB = "test_readme.py::test_a_job_by_an_sdk"
LAUNCH = TESTS["docs/drill.md"][2]
DRILL = TESTS["docs/drill.md"][0]
GPU = TESTS["results/gpu.md"]
GPU_REPORT = "test_gpu.py::test_a_report_is_printed_or_put_into_the_docs"
BETWEEN_THE_LINES = {
    "make": "test_commands.py::test_make_prints_its_targets",
    "make train": RUNS_BLOCK,
    "make env": RUNS_BLOCK,  # make train does it first
    "make build": RUNS_BLOCK,
    "make rehearsal": RUNS_BLOCK,
    "make test-fast": FOR_DEVELOPERS,
    "make test-thorough": "test_commands.py::test_what_continuous_integration_runs",
    "make soak": FOR_DEVELOPERS,
    "make mutants": FOR_DEVELOPERS,
    "make strangers": FOR_DEVELOPERS,
    'make strangers FLAGS="a.py b.py"': FOR_DEVELOPERS,
    "pip install .": "test_package.py::test_a_wheel_installs_into_an_empty_environment",
    "pip install . torch pytorch-lightning": (
        "test_package.py::test_a_wheel_installs_into_an_empty_environment"
    ),
    "python exact.py": "test_readme.py::test_the_five_lines_say_what_the_page_says",
    "make compat": FOR_DEVELOPERS,
    "make compat LIGHTNING=2.5.2": FOR_DEVELOPERS,
    "make compat PACKAGE=lightning LIGHTNING=2.6.6": FOR_DEVELOPERS,
    "make test": "test_commands.py::test_what_continuous_integration_runs",
    "make lint": "test_commands.py::test_what_continuous_integration_runs",
    "make docs": "test_docs_site.py::test_the_site_has_the_pages_and_the_public_names",
    "make format": "test_commands.py::test_format_and_clean",
    "make clean": "test_commands.py::test_format_and_clean",
    "COMPILER=1 make build": "test_container.py::test_a_compiler_is_a_build_argument",
    "LIGHTNING_BOLTS=0 make build": "test_container.py::test_lightning_bolts_can_be_left_out",
    "LOGGERS=mlflow make build": "test_container.py::test_loggers_are_a_build_argument",
    "docker run IMAGE --help": "test_container.py::test_help_says_what_runs",
    "docker run -it IMAGE": "test_container.py::test_training_at_a_terminal",
    "docker run -it IMAGE bash": "test_container.py::test_a_shell_at_a_terminal",
    "python -m debugpy --listen 0.0.0.0:5678 my_train.py": (
        "test_container.py::test_a_debugger_that_a_job_brings"
    ),
    "docker exec": "test_container.py::test_a_session_beside_the_job",
    "make lock": "test_locks.py::test_make_lock_changes_nothing_where_lock_and_list_agree",
    "make lock TORCH=cpu": "test_builds.py::test_the_cpu_build_of_torch",
    "make build TORCH=cpu": "test_builds.py::test_the_cpu_build_of_torch",
    "make lock-conda": "test_builds.py::test_what_conda_installed_is_locked",
    "EFA=1 make build": "test_builds.py::test_efa_is_a_build_argument",
    "make sbom": "test_workflows.py::test_the_lists_of_an_image_are_copied",
    "make audit": "test_locks.py::test_an_audit",
    "make test-wheel": "test_package.py::test_a_wheel_installs_into_an_empty_environment",
    "make version-tag": "test_workflows.py::test_only_a_tagged_version_is_published",
    "make publish": "test_workflows.py::test_only_a_tagged_version_is_published",
    "python -m sagemaker_lightning.doctor": (
        "unit/doctor/test_checks_program.py::test_the_program_on_a_machine_without_a_gpu"
    ),
    "SAGEMAKER_PROGRAM=app/train_torchrun.py make build": (
        "test_container.py::test_the_program_is_a_build_argument"
    ),
    "make benchmark": RATIOS,
    "make scaling": "test_scaling.py::test_two_cores_are_compared_as_nodes",
    # Need a GPU.
    'make gpu FLAGS="--data_dir cifar10"': GPU[0],
    "python -m benchmarks.accuracy fast --data_dir cifar10 --n 25": (
        "test_benchmarks.py::test_a_recipe_is_measured"
    ),
    # Need AWS.
    "make push REPOSITORY=sagemaker-lightning": "test_scripts.py::test_a_push_to_amazon_ecr",
    "make push REPOSITORY=...": "test_scripts.py::test_a_push_to_amazon_ecr",
    "make push REPOSITORY=HOST/NAME": "test_scripts.py::test_a_push_to_a_registry",
    "scripts/upload_data.sh s3://BUCKET/cifar10": (
        "test_scripts.py::test_the_data_is_fetched_once_and_copied"
    ),
    "scripts/launch.py --drill": LAUNCH,
    "tensorboard --logdir s3://my-bucket/logs": (
        "test_live_outputs.py::test_tensorboard_on_s3_while_the_job_runs"
    ),
    "python -m benchmarks.scaling sagemaker --instances 1 2 4 8 -- FLAGS": (
        "test_scaling.py::test_the_jobs_of_a_table"
    ),
    "python app/train.py": RUNS_BLOCK,
    ".venv/bin/python app/train.py": RUNS_BLOCK,
    "python app/train_torchrun.py --trainer.devices=2": "test_drill.py::test_two_ranks_by_torchrun",
    "torchrun --nproc-per-node=2 app/train.py": "test_drill.py::test_two_ranks_by_torchrun",
    "docker run": RUNS_BLOCK,
    "docker run IMAGE train": RUNS_BLOCK,
    "docker run IMAGE python app/train.py": RUNS_BLOCK,
    "scripts/merge_parts.py MODEL... --output=FOLDER": RUNS_BLOCK,
    "python -m sagemaker_lightning.drill -- python my_train.py": DRILL,
    "python -m sagemaker_lightning.shards index FOLDER": (
        "unit/shards/test_command.py::test_an_index_that_is_made_anew_is_of_the_same_samples"
    ),
    "python -m sagemaker_lightning.drill -- python my_script.py": (
        "test_drill.py::test_a_script_with_a_trainer_of_its_own"
    ),
    ".venvs/rehearsal/bin/python -m sagemaker_rehearsal exec -- python my_estimator.py": (
        "test_rehearsal_endpoint.py::test_the_key_of_a_rehearsal"
    ),
    ".venvs/rehearsal/bin/python -m sagemaker_rehearsal interrupt JOB --host=algo-2 --unwarned": (
        "test_rehearsal.py::test_an_interruption_by_hand"
    ),
    "python -m benchmarks.carry --data FOLDER": GPU[1],
    "python -m benchmarks.gpu report FILE": GPU_REPORT,
    "python -m benchmarks.gpu report --write": GPU_REPORT,
    "python -m benchmarks.image IMAGE": (
        "test_benchmarks.py::test_the_image_and_a_change_of_it_are_measured"
    ),
    "python -m benchmarks.interruptions soak KIND --rounds=20 --seed=1": (
        "test_benchmarks.py::test_an_interrupted_job_is_compared"
    ),
    "python -m benchmarks.checkpoint_cost": RATIOS,
    "python -m benchmarks.data_shards": RATIOS,
    "python -m benchmarks.hangs": (
        "test_benchmarks.py::test_hangs_are_seen_and_long_steps_are_not_hangs"
    ),
    "python -m benchmarks.original": RATIOS,
    "python tests/tools/sharded_soak.py": (
        "test_sharded.py::test_random_interruptions_leave_the_same_bits"
    ),
    "python -m benchmarks.sharded": "test_benchmarks.py::test_a_sharded_model_is_measured",
    "python -m benchmarks.malloc": RATIOS,
    "python -m benchmarks.proof": RATIOS,
    "python -m benchmarks.restart": RATIOS,
    "python -m benchmarks.scaling predict --step=SECONDS": (
        "test_scaling.py::test_two_cores_are_compared_as_nodes"
    ),
    "python -m benchmarks.side_by_side": RATIOS,
    "python -m benchmarks.small_steps": RATIOS,
    "python -m benchmarks.spot": (
        "test_benchmarks.py::test_a_spot_job_ends_with_the_bits_of_one_left_alone"
    ),
    "python -m benchmarks.yardstick": "test_benchmarks.py::test_processor_time_is_counted",
}
PLACEHOLDER_VALUES = {
    "SECONDS": "0.1",
    "FILE": "results.json",
    "FOLDER": "cifar10",
    "KIND": "process",
    "FLAGS": "--image=x",
}
PLACEHOLDERS = re.compile("|".join(PLACEHOLDER_VALUES))


def commands_in_sentences() -> set[str]:
    spans = [
        " ".join(span.split())
        for page in PAGES.values()
        for span in re.findall(r"`([^`]+)`", FENCE.sub("", page))
    ]
    return {span for span in spans if COMMAND.match(span)}


def test_every_command_between_the_lines_is_in_the_table():
    """A new one needs a test that runs it; one that no page has any more goes."""
    assert commands_in_sentences() == set(BETWEEN_THE_LINES)


def test_every_block_of_commands_is_run():
    """A page with tests of its own has such blocks.

    A block that shows output has no language, and is not a command.
    """
    for page in TESTS:
        assert any(language == "sh" for language, _ in FENCE.findall(PAGES[page])), page
    for name, page in PAGES.items():
        for language, text in FENCE.findall(page):
            assert language in ("sh", "python", ""), (name, language)
            assert language or not all(map(COMMAND.match, text.splitlines())), (name, text)


def path_of(file: str) -> Path:
    """Return a file of tests by its name, which no other has."""
    (path,) = (ROOT / "tests").rglob(file)
    return path


def test_the_tests_of_the_table_are_there():
    for test in {
        *BETWEEN_THE_LINES.values(),
        RUNS_BLOCK,
        RUNS_SDK_JOB,
        *(test for tests in TESTS.values() for test in tests),
    }:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", path_of(file).read_text(), re.MULTILINE), test


def lines(command: str) -> list[list[str]]:
    """Return the command lines that a command of the docs runs.

    For make, they are the ones that make prints.
    """
    shell_words = shlex.split(command)
    if "make" not in shell_words:
        return [shell_words]
    completed = subprocess.run(
        ["make", "--dry-run", *shell_words[shell_words.index("make") + 1 :]],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return [
        shlex.split(line, comments=True)
        for line in completed.stdout.replace("\\\n", " ").splitlines()
    ]


FENCED = [
    line for page in PAGES.values() for _, text in FENCE.findall(page) for line in text.splitlines()
]
PARSED = {
    line
    for line in {*commands_in_sentences(), *FENCED}
    if COMMAND.match(line) and re.search(r"^(\w+=\S+ )*make\b|python -m benchmarks", line)
}


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(PARSED))
def test_the_words_of_a_command_are_known(command):
    """Nothing is done, as there is one more word that is not."""
    for words in lines(command):
        if "-m" not in words or not (module := words[words.index("-m") + 1]).startswith(
            "benchmarks"
        ):
            continue
        arguments = [
            PLACEHOLDERS.sub(lambda match: PLACEHOLDER_VALUES[match[0]], word)
            for word in words[words.index("-m") + 2 :]
        ]
        own = arguments.index("--") if "--" in arguments else len(arguments)
        completed = warm.run(
            ["python", "-m", module, *arguments[:own], "--no-such-flag", *arguments[own:]], ROOT
        )
        assert completed.returncode == 2, completed.stdout
        assert "unrecognized arguments: --no-such-flag\n" in completed.stdout, completed.stdout


def test_make_prints_its_targets():
    """The pages' targets are among them."""
    # This test may itself run inside a make.
    printed = subprocess.check_output(["make", "--no-print-directory"], cwd=ROOT, text=True)
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in printed.splitlines()] == targets.split()
    named = {
        target
        for text in (*commands_in_sentences(), *FENCED)
        for target in re.findall(r"^(?:\S+=\S+ )*make ([a-z-]+)", text)
    }
    assert named <= set(targets.split())


def test_what_continuous_integration_runs():
    run = (ROOT / ".ci/run").read_text()
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert re.search(r"^run make lint$", run, re.MULTILINE)
    assert re.search(r"^run make test$", run, re.MULTILINE)
    # Nothing that is left out runs nowhere: pyproject.toml names the markers.
    assert "target: [test, test-thorough, soak]" in nightly


@pytest.mark.slow
def test_format_and_clean(tmp_path):
    """They change and remove files: this is a copy of the checkout."""
    copy_checkout(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "app/train.py").write_text("a = ( 1,)\n")
    (tmp_path / "output/model").mkdir(parents=True)
    # What a lock asks for is there already: nothing is installed.
    made = ["make", "--old-file=.venv/ready"]
    subprocess.run([*made, "format"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "app/train.py").read_text() == "a = (1,)\n"
    subprocess.run([*made, "clean"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "output").exists() and not (tmp_path / ".venv").is_symlink()
    assert (tmp_path / "app/train.py").is_file()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "flags", "says"),
    [
        ("test-fast", "tests/unit/contract/test_atomic_files.py", r"\d+ passed"),
        ("soak", "tests/docs/test_commands.py -k mutants", r"no tests ran|\d+ deselected"),
        ("compat", "-k test_no_private_name_has_moved", r"1 passed"),
        (
            "compat PACKAGE=lightning LIGHTNING=2.6.6",
            "-k test_no_private_name_has_moved",
            r"1 passed",
        ),
        (
            "mutants",
            "--n 1 --only sagemaker_lightning/compat/jsonargparse_types.py"
            " --tests tests/unit/compat/test_jsonargparse_types.py"
            " tests/unit/cli/test_lightning_cli.py",
            r"1 mutants \(seed 1\): 0 survived",
        ),
    ],
)
def test_what_make_runs_for_developers(target, flags, says):
    command = ["make", *target.split(), f"FLAGS={flags}"]
    completed = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert re.search(says, completed.stdout), completed.stdout[-3000:]
