"""entrypoint.sh and the toolkit: any command runs unchanged; no failure exits with 0.

A bare folder is prepared.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Job

pytestmark = pytest.mark.slow


@pytest.fixture
def code(job: Job) -> Job:
    """A job with its own program, which prints its arguments."""
    job.write(
        "code/show.py",
        "import json, os, sys\nprint('ARGS', json.dumps(sys.argv[1:]))\nprint(os.getcwd())\n",
    )
    job.write(
        "input/config/hyperparameters.json",
        '{"sagemaker_program": "show.py", "a": "x y", "b": "1.5"}',
    )
    return job


def test_any_command_keeps_its_quoting_and_exit_status(job: Job):
    run = job.run("bash", "-c", 'printf "<%s>" "$@"; exit 7', "_", "a b", "", "$HOME", "'\"", "*")
    assert run.returncode == 7
    assert run.stdout == "<a b><><$HOME><'\"><*>"
    assert not job.base.exists()  # only `train` needs the folders
    assert not job.base.exists()


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["no-such-command"], 127, "'no-such-command': no command that can be run here;"),
        (["serve"], 127, "'serve': this image trains, and serves no model; give train;"),
        (["--"], 127, "'--': no command that can be run here;"),
        (["-x", "y"], 127, "'-x': no command that can be run here;"),
        (
            ["--trainer.max_epochs=1"],
            127,
            "'--trainer.max_epochs=1': found a flag in the place of a command; give python "
            "app/train.py --trainer.max_epochs=1;",
        ),
        ([""], 127, "'': no command that can be run here;"),
        (["a\nb\33[31m"], 127, "$'a\\nb\\E[31m': no command that can be run here;"),
        (["x" * 3000], 127, f"'{'x' * 200}': no command that can be run here;"),
        (["/usr"], 126, "'/usr': no command that can be run here;"),
        (
            [str(ROOT / "app/train.py")],
            126,
            f"'{ROOT}/app/train.py': cannot be run by itself; give python '{ROOT}/app/train.py';",
        ),
        (["train", "a\nb"], 1, "train takes no flags (found: a b);"),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_what_is_not_a_command_is_one_line(job: Job, command, status, says):
    run = job.run(*command)
    assert run.returncode == status
    assert run.stdout.startswith(f"error: {says} ") and run.stdout.count("\n") == 1, run.stdout
    assert run.stdout.endswith(" there is\n")


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_says_what_there_is(job: Job, word):
    run = job.run(word)
    assert run.returncode == 0 and run.stdout.startswith("usage: docker run "), run.stdout
    assert "\n  train  " in run.stdout and "here: app/train_multi_node.py\n" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 120


def test_what_an_earlier_run_left_at_the_failure_file_is_replaced(job: Job):
    """Writing to a FIFO would wait for a reader for ever."""
    for make in (os.mkfifo, Path.mkdir):
        job.write("output/data/file", "")
        make(job.base / "output/failure")
        run = job.run("train", "--x", timeout=30)
        assert run.returncode == 1 and job.failure == run.stdout
        (job.base / "output/failure").unlink()


@pytest.mark.root
def test_all_folders_that_the_user_cannot_write_are_in_one_line(job: Job):
    """Such as in a container that is read-only, or that another user has."""
    for name in ("output", "model", "input/config"):
        (job.base / name).mkdir(parents=True)
        (job.base / name).chmod(0o755)
    for folder in job.base.parents:  # pytest's own folders are for their owner alone
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    command = ["setpriv", "--reuid=54321", "--clear-groups", str(ROOT / "entrypoint.sh"), "train"]
    run = subprocess.run(command, env=job.variables, capture_output=True, text=True, timeout=60)
    names = ", ".join(f"{job.base}/{name}" for name in ("output", "model", "input/config"))
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert f"{names}, " in run.stderr or f"{names}: " in run.stderr, run.stderr
    assert ": no folder that user 54321 can write; mount one at each (docker run " in run.stderr


def test_standard_input_reaches_the_command(job: Job):
    run = subprocess.run(
        [ROOT / "entrypoint.sh", "cat"], input="hello", capture_output=True, text=True
    )
    assert run.stdout == "hello"


def test_a_jobs_own_program_wins_over_the_images(code: Job):
    run = code.run()
    assert run.returncode == 0, run.stdout
    assert 'ARGS ["-a", "x y", "-b", "1.5"]' in run.stdout
    assert f"{code.base}/code" in run.stdout
    assert "\nGPU: " in run.stdout  # what the doctor says in short


def test_a_jobs_source_archive_is_what_runs(code: Job, tmp_path: Path):
    """With `sagemaker_submit_directory`, the code folder stays empty.

    The toolkit unpacks the archive into it.
    """
    source = tmp_path / "sourcedir"
    shutil.move(code.base / "code", source)
    subprocess.run(
        ["tar", "-czf", tmp_path / "sourcedir.tar.gz", "-C", source, "show.py"], check=True
    )
    hyperparameters = {
        "sagemaker_program": "show.py",
        "sagemaker_submit_directory": str(tmp_path / "sourcedir.tar.gz"),
    }
    code.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    run = code.run()
    assert run.returncode == 0, run.stdout
    assert "ARGS []" in run.stdout
    assert not (code.base / "code/app").exists()


def test_files_that_are_there_are_left_alone(code: Job):
    resources = (
        '{"current_host": "localhost", "hosts": ["localhost"], "network_interface_name": "lo"}'
    )
    code.write("input/config/resourceconfig.json", resources)
    code.write("input/config/inputdataconfig.json", '{"mine": {"TrainingInputMode": "File"}}')
    code.write("code/show.py", "import os\nprint('CHANNEL', os.environ['SM_CHANNEL_MINE'])\n")
    run = code.run()
    assert run.returncode == 0, run.stdout
    assert f"CHANNEL {code.base}/input/data/mine" in run.stdout
    assert (code.base / "input/config/resourceconfig.json").read_text() == resources


def test_a_job_s_program_gets_its_own_name_and_not_that_of_the_image_s(code: Job):
    code.write("code/show.py", "import os\nprint('NAME', os.environ['SM_MODULE_NAME'])\n")
    run = code.run(SAGEMAKER_PROGRAM="app/train.py")
    assert run.returncode == 0, run.stdout
    assert "NAME show\n" in run.stdout


def test_a_mounted_folder_is_a_channel(code: Job):
    code.write("input/data/my-data/file", "")
    code.write(
        "code/show.py",
        "import os\nprint(os.environ['SM_CHANNELS'], os.environ['SM_CHANNEL_MY-DATA'])\n",
    )
    assert f'["my-data"] {code.base}/input/data/my-data' in code.run().stdout


def test_a_folder_with_a_name_that_no_channel_has_is_one_line(job: Job):
    job.write('input/data/a"b/file', "")
    run = job.run()
    assert run.returncode == 1 and run.stdout == (
        f'error: {job.base}/input/data/a"b: is not a name of a channel; expected up to 64 '
        "letters, digits and ._-\n"
    )
    assert job.failure == run.stdout
    job.write("input/config/inputdataconfig.json", "[]")  # SageMaker's own says what is a channel
    assert "inputdataconfig.json: found []" in job.run().stdout


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_place_of_a_channel_is_one_line(job: Job, is_link):
    """`docker run --volume FILE:/opt/ml/input/data/training` mounts one there."""
    path = job.base / "input/data/training"
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_link:
        path.symlink_to("nowhere")
    else:
        path.touch()
    run = job.run()
    assert run.returncode == 1 and run.stdout == job.failure == (
        f"error: {path}: is not a folder; expected the folder of a channel: mount one there, "
        f"or mount a file within it ({path}/NAME)\n"
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_without_streams_trains(code: Job, closed):
    code.write("code/show.py", "open('/proc/self/cwd/shown', 'w').write('here')\n")
    status = code.run("bash", "-c", f"{ROOT}/entrypoint.sh train {closed}").returncode
    assert status == 0 and (code.base / "code/shown").read_text() == "here"


def test_no_command_is_train(job: Job):
    """A job that gives this script as its entry point replaces CMD, too."""
    job.write("output", "no folder")
    ends = [
        subprocess.run(
            [ROOT / "entrypoint.sh", *command], env=job.variables, capture_output=True, text=True
        )
        for command in ([], ["train"])
    ]
    assert ends[0].returncode == ends[1].returncode == 1
    assert ends[0].stderr == ends[1].stderr != ""


def test_flags_after_train_are_refused(job: Job):
    run = job.run("train", "--trainer.max_epochs=3")
    assert run.returncode == 1
    assert "train takes no flags (found: --trainer.max_epochs=3)" in run.stdout


def test_a_program_that_fails_fails_the_job(code: Job):
    for body, says in (
        (
            "import sys; sys.exit(7)",
            "show.py ended with exit status 7: nothing on its stderr says why [host localhost]",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "show.py was killed by SIGKILL: most likely out of host memory",
        ),
    ):
        code.write("code/show.py", body)
        run = code.run()
        assert run.returncode == 1
        assert says in code.failure
        assert not (code.base / "output/success").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "hyperparameters.json",
            "{",
            "hyperparameters.json: cannot be read (Expecting property name",
        ),
        (
            "hyperparameters.json",
            '["a"]',
            'hyperparameters.json: found ["a"]; expected a JSON object',
        ),
        ("inputdataconfig.json", "", "inputdataconfig.json: cannot be read (Expecting value"),
        (
            "resourceconfig.json",
            '{"current_host": "a", "hosts": ["b"]}',
            "which is not among hosts",
        ),
        ("resourceconfig.json", "{}", "which is not among hosts"),
    ],
)
def test_a_damaged_configuration_is_one_line(job: Job, name, text, says):
    job.write(f"input/config/{name}", text)
    run = job.run()
    assert run.returncode == 1
    assert (
        run.stdout.startswith(f"error: {job.base}/input/config/{name}: ")
        and run.stdout.count("\n") == 1
    )
    assert says in run.stdout and job.failure == run.stdout


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link"])
@pytest.mark.parametrize("command", [["train"], ["train", "--flag"]], ids=["train", "flags"])
def test_whatever_an_earlier_run_has_left_is_no_hindrance(job: Job, kind, command):
    """A pipe would wait for a reader; a link leads to a file of somebody's own."""
    job.write("mine", "mine")
    job.write("input/config/hyperparameters.json", "{")
    for name in ("failure", "success", ".probe"):
        path = job.base / "output" / name
        if kind == "a folder":
            job.write(f"output/{name}/mine", "mine")
        elif kind == "a pipe":
            path.parent.mkdir(exist_ok=True)
            os.mkfifo(path)
        else:
            path.parent.mkdir(exist_ok=True)
            path.symlink_to("../mine")
    run = job.run(*command, timeout=60, cold=True)
    assert run.returncode == 1 and job.failure == run.stdout
    assert run.stdout.startswith("error: ") and run.stdout.count("\n") == 1
    assert (job.base / "mine").read_text() == "mine"
    if kind == "a folder":
        assert len(list((job.base / "output").glob("failure.*/mine"))) == 1


def test_an_output_folder_that_is_a_file(job: Job):
    job.write("output", "in the way")
    run = job.run()
    assert run.returncode == 1
    assert run.stdout.count("\n") == 1
    assert run.stdout.startswith(f"error: {job.base}/output: no folder that user ")


@pytest.mark.root
@pytest.mark.parametrize("options", ["ro", "full"])
def test_a_read_only_or_full_output_is_not_a_success(code: Job, options):
    output = code.base / "output"
    output.mkdir()
    (output / "data").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", output], check=True)
    try:
        (output / "data").mkdir()
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", output], check=True)
        else:
            subprocess.run([sys.executable, "-c", f"{FILL}\nfill({str(output)!r})"], check=True)
        run = code.run()
        assert run.returncode == 1
        says = "no folder that user 0 can write" if options == "ro" else "cannot be written or is"
        assert run.stdout.startswith(f"error: {output}: {says}"), run.stdout
        assert "ARGS" not in run.stdout
    finally:
        subprocess.run(["umount", output], check=True)


@pytest.mark.root
@pytest.mark.parametrize(
    ("status", "says"), [(0, "success"), (3, "show.py ended with exit status 3")]
)
def test_an_output_that_fills_up_while_the_program_runs_is_not_a_success(code: Job, status, says):
    """Here the toolkit alone would exit 0: it cannot write the file that says how the job went."""
    output = code.base / "output"
    output.mkdir()
    code.write("code/show.py", f"import sys\n{FILL}\nfill({str(output)!r})\nsys.exit({status})\n")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=20", "tmpfs", output], check=True
    )
    try:
        run = code.run()
        assert run.returncode == 1, run.stdout
        assert "error: " in run.stdout and "output" in run.stdout and says in run.stdout
    finally:
        subprocess.run(["umount", output], check=True)


FILL = '''
def fill(folder):
    """Use up all space and all file names of a small file system."""
    from pathlib import Path
    try:
        for number in range(100):
            Path(folder, f"filler-{number}").write_bytes(b"x" * 65536)
    except OSError:
        pass
'''
