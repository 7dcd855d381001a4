"""The commands for the jobs of a rehearsal that runs; its jobs are threads."""

import json
import re
import subprocess

import pytest
from containers import ROOT
from environments import python_of
from rehearsals import run_command
from test_rehearsal_endpoint import Endpoint

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


def test_a_job_that_runs(endpoint):
    name = create(endpoint)
    endpoint.wait_for(name, "Training")
    assert f"InProgress  {name}\n" in done(endpoint, "list", "--last=1")
    assert "its report is written at its end" in refused(endpoint, "report", name)
    assert "which is InProgress; expected a job that has ended" in refused(endpoint, "resume", name)
    assert "is stopping; it has" in done(endpoint, "stop", name)
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
    for command in ("logs", "stop", "report", "rerun", "resume"):
        assert "JOB: found none, expected a training job in us-east-1 of the re" in refused(
            endpoint, command, "none"
        )


@pytest.mark.parametrize(
    "name", ["list", "logs", "stop", "report", "rerun", "resume", "interrupt", "exec"]
)
def test_the_help_of_a_command_has_an_example(name):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", name, "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert f"example: python -m sagemaker_rehearsal {name}" in " ".join(printed.split())


def test_without_a_rehearsal_one_line_says_so(tmp_path):
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "list"]
    command += ["--endpoint=http://127.0.0.1:1"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 1 and completed.stderr.count("\n") == 1
    assert completed.stderr.startswith("error: --endpoint: no rehearsal answers at http://127")
