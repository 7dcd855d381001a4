"""The commands for the jobs of a rehearsal that runs; its jobs are threads."""

import json
import os
import re
import subprocess

import pytest
from containers import ROOT
from endpoint_requests import Endpoint
from environments import python_of
from records import job
from rehearsals import ROLE, run_command, starting

from sagemaker_rehearsal.report import goodput_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """A rehearsal with a rule that no job of these comes to."""
    folder = tmp_path_factory.mktemp("endpoint")
    with Endpoint(folder, "--grace=5", "--interrupt=at step 120") as server:
        yield server


def create(endpoint: Endpoint, **variables: str) -> str:
    """Return the name of a new spot job with checkpoints."""
    checkpoints = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/run"}}
    return endpoint.create("image", spot=True, Environment=variables, **checkpoints)


def done(endpoint: Endpoint, *words: str) -> str:
    """Run a command and return what it prints."""
    completed = run_command(endpoint, *words)
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def refused(endpoint: Endpoint, *words: str) -> str:
    """Run a command that has to fail with one line; return the line."""
    completed = run_command(endpoint, *words)
    assert completed.returncode == 1 and completed.stdout.count("\n") == 1, completed.stdout
    assert completed.stdout.startswith("error: "), completed.stdout
    return completed.stdout


def checkpoints_of(endpoint: Endpoint, name: str) -> str:
    """Return the address of a job's checkpoints."""
    return endpoint.describe(name)["CheckpointConfig"]["S3Uri"]


def test_a_job_that_has_ended(endpoint):
    name = create(endpoint, LEAVE="1", TEXT="a\x1b[2Jb")
    endpoint.wait_until_ended(name)
    assert f"Completed   {name}\n" in done(endpoint, "list")
    for words in (("logs", name), ("logs", name, "--follow")):
        printed = done(endpoint, *words)
        assert "algo-1: LEAVE=1\n" in printed and "algo-1: TEXT=ab\n" in printed
    reason = "never came due: the job's training ended after 0 s, without a line with step="
    printed = done(endpoint, "report", name)
    assert printed.startswith(f"{name}: Completed, ") and f"'at step 120' {reason}\n" in printed
    report = re.search("^report: (.*)$", printed, re.MULTILINE)[1]
    page = (endpoint.folder / name / "report.html").read_text()
    assert report == str(endpoint.folder / name / "report.html") and "never came due" in page
    record = json.loads((endpoint.folder / name / "job.json").read_text())
    assert record["never_due"] == [f"--interrupt='at step 120' {reason}"]
    assert f"{name} --interrupt='at step 120' {reason}\n" in endpoint.output
    again = re.match(r"started (\S+) in ", done(endpoint, "rerun", name))[1]
    ended = endpoint.wait_until_ended(again)
    assert again.startswith(f"{name}-") and ended["Environment"] == {
        "LEAVE": "1",
        "TEXT": "a\x1b[2Jb",
    }
    assert checkpoints_of(endpoint, again) == f"s3://rehearsal/checkpoints/{again}/"
    assert "found" in refused(endpoint, "stop", name)


def test_goodput_for_a_program(endpoint):
    """The endpoint says it, and so does the folder of reports, which needs no rehearsal."""
    name = create(endpoint, LEAVE="1")
    endpoint.wait_until_ended(name)
    printed = done(endpoint, "report", name, "--format=json")
    assert json.loads(printed) == json.loads((endpoint.folder / name / "goodput.json").read_text())
    assert json.loads(printed)["goodput"] is None  # it has no line with step=
    folder = f"--folder={endpoint.folder}"
    nowhere = "--endpoint=http://127.0.0.1:1"
    assert done(endpoint, "report", name, folder, nowhere).startswith(f"{name}: Completed after ")
    assert done(endpoint, "report", name, "--format=csv").count("\n") == 3
    assert "goodput: none, 0 steps lost" in done(endpoint, "report", name)
    completed = run_command(endpoint, "report", name, "--fail-below=90%")
    assert completed.returncode == 1
    assert completed.stdout.endswith(
        "error: goodput: found none, as its log has no line of progress, expected 90% or more "
        "(--fail-below); "
        f"{name} has 0 interruptions and lost 0 steps\n"
    )
    assert "JOB: found no goodput of none in " in refused(endpoint, "report", "none", folder)
    completed = run_command(endpoint, "report", name, "--fail-below=0.9")
    assert completed.returncode == 2
    assert "found '0.9', expected 0% to 100%" in completed.stdout


def test_a_report_says_why_a_job_failed(tmp_path):
    """It does so without a rehearsal, too; with one, the launcher's lines say it."""
    record = job(status="Failed", failure="AlgorithmError: no such\x1b[2J flag")
    folder = tmp_path / record.name
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(record.as_json()))
    (folder / goodput_data.FILE_NAME).write_text(json.dumps(goodput_data.describe(record)))
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "report", record.name]
    shown = subprocess.run(
        [*command, f"--folder={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    first, second, third, *_ = shown.stdout.splitlines()
    assert first.startswith("job: Failed after ") and third.startswith("goodput: none")
    assert second == "AlgorithmError: no such flag"


def test_a_job_is_compared_with_one_that_is_left_alone(endpoint):
    """These hosts leave no model; test_rehearsal_processes.py compares bits."""
    name = create(endpoint, LEAVE="1")
    endpoint.wait_until_ended(name)
    completed = run_command(endpoint, "compare", name)
    assert completed.returncode == 1
    verdict = "no verdict: there is no file in either model artifact\n"
    assert completed.stdout == (
        f"{name}-left-alone runs without interruptions, for the comparison\n{verdict}"
    )
    assert checkpoints_of(endpoint, f"{name}-left-alone").endswith(f"/{name}-left-alone/")
    assert verdict in done(endpoint, "report", name)
    assert "already exists" in refused(endpoint, "compare", name)


def test_a_job_that_runs(endpoint):
    name = create(endpoint)
    endpoint.wait_for(name, "Training")
    assert f"InProgress  {name}\n" in done(endpoint, "list", "--last=1")
    assert "its report is written at its end" in refused(endpoint, "report", name)
    assert "which is InProgress; expected a job that has ended" in refused(endpoint, "resume", name)
    assert "is stopping; SageMaker gives it" in done(endpoint, "stop", name)
    assert endpoint.wait_until_ended(name)["TrainingJobStatus"] == "Stopped"
    followed = run_command(endpoint, "logs", name, "--follow")
    assert followed.returncode == 1
    line = re.search("to continue where it was: .* (resume .*)", followed.stdout)[1]
    words = [*line.split(), "--max-run=500"]
    resumed = re.match(r"started (\S+) in ", done(endpoint, *words))[1]
    assert endpoint.describe(resumed)["StoppingCondition"]["MaxRuntimeInSeconds"] == 500
    assert checkpoints_of(endpoint, resumed) == "s3://rehearsal/checkpoints/run"
    done(endpoint, "stop", resumed)
    endpoint.wait_until_ended(resumed)


def test_a_job_that_is_not_there(endpoint):
    assert "JOB: found 'none', expected one of: " in refused(endpoint, "compare", "none")
    for command in ("logs", "stop", "report", "rerun", "resume"):
        assert "JOB: found none, expected a training job in us-east-1 of the re" in refused(
            endpoint, command, "none"
        )


def rehearse(folder, *flags: str, **fields: object) -> subprocess.CompletedProcess:
    """Rehearse one job from a file, whose host ends at once, and return how that ended."""
    request = {
        "TrainingJobName": "one",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": "s3://rehearsal/output/"},
        "ResourceConfig": {
            "InstanceType": "ml.m5.xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 1,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 600},
        "EnableManagedSpotTraining": True,
        "Environment": {"LEAVE": "1"},
    } | fields
    (folder / "request.json").write_text(json.dumps(request))
    command = [python_of("rehearsal"), "tests/support/rehearsal_endpoint.py"]
    command += ["--port=0", "--grace=5"]
    command += [f"--folder={folder / 'reports'}", f"--run={folder / 'request.json'}", *flags]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    with starting():
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )


def test_the_goodput_of_one_job_fails_a_ci(tmp_path):
    completed = rehearse(tmp_path, "--fail-below=90%", "--compare")
    assert completed.returncode == 1, completed.stdout
    assert completed.stderr.startswith("error: goodput: found none, as its log has no line of prog")
    assert "\nnot compared: nothing has disturbed the job\n" in completed.stdout


def test_one_job_is_compared_after_its_end(tmp_path):
    """The rule takes its instance at once; its host leaves no model to compare."""
    completed = rehearse(tmp_path, "--interrupt=at 0s unwarned", "--compare")
    assert completed.returncode == 0, completed.stderr
    assert "\nno verdict: there is no file in either model artifact\n" in completed.stdout
    assert re.search(r"^one-\d\d-\d\d-\d\d-left-alone Completed ", completed.stdout, re.MULTILINE)


def test_a_limit_of_the_goodput_is_for_one_job(tmp_path):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "--fail-below=90%"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 1 and completed.stderr.count("\n") == 1
    assert completed.stderr.startswith("error: --fail-below: found without --run, which it is for")


@pytest.mark.parametrize(
    "name",
    ["list", "logs", "stop", "report", "rerun", "resume", "compare", "interrupt", "fault", "exec"]
    + ["completion"],
)
def test_the_help_of_a_command_has_an_example_of_one_line(name):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", name, "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(rf"\n\nexample: python -m sagemaker_rehearsal {name}.*\n(\n|$)", printed)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--port=x"], 2, "argument --port: invalid int value: 'x'; --help lists all flags"),
        (
            ["--fail-below=90"],
            2,
            "argument --fail-below: found '90', expected 0% to 100%, e.g. 90%",
        ),
        (["--stray", "word"], 2, "unrecognized arguments: --stray word; --help lists all flags"),
        (["lst"], 2, "found 'lst', expected a flag, or a command: list, logs, stop, report, "),
        (["report"], 2, "the following arguments are required: JOB; --help lists all flags"),
        (["list", "--last=0"], 2, "argument --last: found '0', expected a whole number above 0"),
        (
            ["--folder=/dev/null/x"],
            1,
            "--folder: found /dev/null/x, where reports cannot be written",
        ),
    ],
)
def test_a_mistake_takes_one_line(words, status, says):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", *words]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (status, "")
    assert completed.stderr.startswith(f"error: {says}") and completed.stderr.count("\n") == 1


def test_a_port_that_is_taken_takes_one_line(endpoint, tmp_path):
    command = [python_of("rehearsal"), *Endpoint.program, f"--port={endpoint.port}"]
    command.append(f"--folder={tmp_path}")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 1 and completed.stderr.count("\n") == 1
    assert completed.stderr.startswith(
        f"error: --port: found {endpoint.port}, which cannot be had at 127.0.0.1 (Address already"
    )


@pytest.mark.parametrize("fields", [{"TrainingJobName": "no blanks"}, {"RoleArn": 1, "Tags": 2}])
def test_a_job_that_is_refused_has_no_report(tmp_path, fields):
    completed = rehearse(tmp_path, **fields)
    assert completed.returncode == 1 and "report: " not in completed.stdout
    assert completed.stderr.startswith("error: --run: ") and completed.stderr.count("\n") == 1


def test_without_a_rehearsal_one_line_says_so(tmp_path):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "list"]
    command += ["--endpoint=http://127.0.0.1:1"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 1 and completed.stderr.count("\n") == 1
    assert completed.stderr.startswith("error: --endpoint: no rehearsal answers at http://127")
