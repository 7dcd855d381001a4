"""Clients of the endpoint: the SDKs, the AWS CLI and the project's own commands."""

import argparse
import json
import os
import re
import stat
import subprocess
import sys
import time

import nightly
import pytest
from aws_services import client
from botocore.exceptions import ClientError
from containers import ROOT
from endpoint_requests import Endpoint, job, start_job
from environments import python_of
from rehearsals import HANG_SECONDS, ROLE, run, run_command
from test_rehearsal_clients import Person

from sagemaker_rehearsal import settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["serve", "--help"]])
def test_help_lists_all_flags(words):
    """`make rehearsal FLAGS=--help` gives no command."""
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", *words]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    parser = argparse.ArgumentParser(add_help=False)
    settings.add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions]
    assert len(flags) > 15 and [flag for flag in flags if f"  {flag}" not in printed] == []
    assert "'every ~20s 100 times'" in printed


def test_an_error_hands_no_control_sequence_to_the_terminal():
    """It may be what a job's program has written."""
    command = [python_of("rehearsal"), "-m", "sagemaker_rehearsal", "--run=\x1b[2Jü"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr
    assert printed.startswith("error: --run: \\x1b[2Jü cannot be read")


@pytest.mark.parametrize("levels", [900, 100_000])
def test_a_request_in_a_file_that_is_too_deep_is_reported_without_a_traceback(tmp_path, levels):
    file = tmp_path / "request.json"
    file.write_text('{"InputDataConfig": ' + "[" * levels + "]" * levels + "}")
    command = [python_of("rehearsal"), *Endpoint.program, "--port=0"]
    completed = subprocess.run(
        [*command, f"--folder={tmp_path}/reports", f"--run={file}"],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 1 and completed.stderr.startswith("error: --run: ")
    assert "Traceback" not in completed.stderr


def test_a_terminal_of_few_letters_ends_no_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    with Endpoint(tmp_path / "ü", "--grace=5") as endpoint:
        assert f"reports: {ascii(str(endpoint.folder))[1:-1]}\n" in endpoint.output
        name = endpoint.create("image", Environment={"LEAVE": "ü"})
        endpoint.wait_until_ended(name)
    assert f"{name} Completed after " in endpoint.output


# Clients, unmodified

SDK_2_JOB = {
    "image_uri": "image",
    "role": ROLE,
    "instance_type": "ml.m5.xlarge",
    "instance_count": 1,
    "job_name": "by-sdk-2",
    "input_path": "s3://rehearsal/secret",
    "output_path": "s3://rehearsal/output",
    "environment": {"LEAVE": "1"},
}
SDK_3_JOB = {
    "training_image": "image",
    "role": ROLE,
    "base_job_name": "by-sdk-3",
    "environment": {"LEAVE": "1"},
    "compute": {"instance_type": "ml.m5.xlarge", "instance_count": 1},
    "stopping": {"max_runtime_in_seconds": 600},
    "output": "s3://rehearsal/output",
    "checkpoints": "s3://rehearsal/checkpoints",
    "inputs": {"training": "s3://rehearsal/secret"},
}


@pytest.mark.parametrize("sdk", nightly.all_but(["sdk3"], ["sdk2", "sdk3"]))
def test_an_sdk(endpoint, tmp_path, sdk):
    job_arguments = SDK_2_JOB if sdk == "sdk2" else SDK_3_JOB
    completed = Person(sdk, tmp_path, endpoint).run(f"{sdk}_session.py", [job_arguments])
    assert completed.returncode == 0 and re.search(
        "model: s3://rehearsal/output/.*/output/model.tar.gz", completed.stdout
    ), completed.stdout
    if sdk == "sdk2":  # SDK 3 may look when the job is over, and shows no log then
        assert "AWS_ENDPOINT_URL=" in completed.stdout


def test_launch(endpoint, tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts/launch.py",
        "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
    ]
    command += [
        f"--role={ROLE}",
        "--poll=1",
        "--output=s3://rehearsal/output",
        "--channel=training=s3://rehearsal/secret",
    ]
    completed = subprocess.run(
        [*map(str, command), "--env=LEAVE=1"],
        env=Person("launch", tmp_path, endpoint).variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
    )
    assert completed.returncode == 0 and "AWS_ENDPOINT_URL=" in completed.stdout, completed.stdout


@pytest.mark.thorough
def test_a_spot_job_without_instances_continues_on_demand(tmp_path):
    with Endpoint(tmp_path, "--interrupt=at 0.5s gap 1000s") as endpoint:
        command = [
            sys.executable,
            ROOT / "scripts/launch.py",
            "--image=123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
            f"--role={ROLE}",
            "--output=s3://rehearsal/output",
            "--spot",
            "--checkpoints=s3://rehearsal/checkpoints",
            "--max-run=600",
            "--poll=1",
            "--on-demand-after=2",
        ]
        launcher = subprocess.Popen(
            [*map(str, command)],
            env=Person("launch", tmp_path, endpoint).variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + HANG_SECONDS
            while len(jobs := endpoint.sagemaker.list_training_jobs()["TrainingJobSummaries"]) < 2:
                assert time.monotonic() < deadline and launcher.poll() is None
                time.sleep(0.1)
            on_demand, spot = (endpoint.describe(job["TrainingJobName"]) for job in jobs)
            endpoint.sagemaker.stop_training_job(TrainingJobName=on_demand["TrainingJobName"])
            output, _ = launcher.communicate(timeout=HANG_SECONDS)
        finally:
            launcher.kill()
    assert spot["EnableManagedSpotTraining"] and spot["TrainingJobStatus"] == "Stopped"
    assert not on_demand["EnableManagedSpotTraining"]
    assert on_demand["CheckpointConfig"] == spot["CheckpointConfig"]
    assert 590 <= on_demand["StoppingCondition"]["MaxRuntimeInSeconds"] <= 600
    assert "it has waited for spot instances for 2 s" in output, output
    assert "it continues on demand" in output


def test_the_aws_cli(endpoint, tmp_path):
    aws = python_of("cli").with_name("aws")
    person = Person("aws", tmp_path, endpoint)
    (tmp_path / "request.json").write_text(
        json.dumps(job(TrainingJobName="by-the-cli", Environment={"LEAVE": "1"}))
    )
    for arguments in (
        ["sagemaker", "create-training-job", "--cli-input-json", f"file://{tmp_path}/request.json"],
        ["s3", "cp", "--recursive", str(ROOT / "examples"), "s3://rehearsal/examples"],
        ["s3", "ls", "s3://rehearsal/examples/"],
        ["sts", "get-caller-identity"],
    ):
        completed = subprocess.run(
            [aws, *arguments],
            env=person.variables,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert completed.returncode == 0, completed.stderr
    assert endpoint.wait_until_ended("by-the-cli")["TrainingJobStatus"] == "Completed"


# The key


def test_the_key_of_a_rehearsal(endpoint, tmp_path):
    (file,) = endpoint.cache.glob("*/*/key")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(endpoint.key[1]) >= 40 and endpoint.key[1] in file.read_text()
    code = "import os; print(os.environ['AWS_ACCESS_KEY_ID'], os.environ['AWS_SECRET_ACCESS_KEY'])"
    completed = run(endpoint, python_of("rehearsal"), "-c", code)
    assert completed.stdout.split() == list(endpoint.key)
    completed = run_command(endpoint, "interrupt", "no-such-job")
    assert completed.stdout.startswith("error: JOB: found 'no-such-job', expected ")
    command = [
        python_of("rehearsal"),
        "-m",
        "sagemaker_rehearsal",
        "exec",
        f"--endpoint={endpoint.endpoint}",
        "--",
        "true",
    ]
    completed = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
    )
    assert (completed.returncode, completed.stdout.count("\n")) == (1, 1)
    assert "as this user" in completed.stdout


def test_each_rehearsal_has_a_key_of_its_own(endpoint, tmp_path):
    with Endpoint(tmp_path) as another_endpoint:
        assert another_endpoint.key[0] != endpoint.key[0]
        assert another_endpoint.key[1] != endpoint.key[1]
        with pytest.raises(ClientError, match="is not this rehearsal's"):
            client("s3", another_endpoint.endpoint, key=endpoint.key).list_buckets()


def test_a_folder_of_reports_that_is_gone_is_one_line_for_the_client(tmp_path):
    with Endpoint(tmp_path) as server:
        server.folder.rmdir()
        server.folder.write_text("")
        says = "InternalFailure.*the rehearsal failed: .*File exist"
        with pytest.raises(ClientError, match=says):
            server.create("image")
        assert "Traceback" not in server.output
        server.folder.unlink()
        assert server.wait_until_ended(server.create("image", Environment={"LEAVE": "1"}))


def test_two_rehearsals_at_once_do_not_meet_in_the_folder_of_reports(endpoint, tmp_path):
    reports = endpoint.folder
    name, _ = start_job(endpoint)
    with Endpoint(tmp_path, f"--folder={reports}") as other:
        with pytest.raises(ClientError, match="ResourceInUse.*Another rehearsal that runs has its"):
            other.create("image", TrainingJobName=name)
        others_own = other.create("image", Environment={"LEAVE": "1"})
        other.wait_until_ended(others_own)
    endpoint.sagemaker.stop_training_job(TrainingJobName=name)
    endpoint.wait_until_ended(name)
    assert (reports / name / "report.html").exists() and not (reports / f"{name}.1").exists()
    listed = (reports / "index.html").read_text()
    assert f'href="{name}/report.html"' in listed and f'href="{others_own}/report.html"' in listed
    # A rehearsal that has ended writes there no more.
    endpoint.wait_until_ended(
        endpoint.create("image", TrainingJobName=others_own, Environment={"LEAVE": "1"})
    )
    assert (reports / f"{others_own}.1/report.html").exists()


def test_a_warm_pool_goes_from_job_to_job(endpoint):
    resources = {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 1,
        "KeepAlivePeriodInSeconds": 600,
    }
    leave = {"ResourceConfig": resources, "Environment": {"LEAVE": "1"}}
    names = []
    for _ in range(2):
        names.append(endpoint.create("image", **leave))
        endpoint.wait_until_ended(names[-1])
    first, second = (endpoint.describe(name)["WarmPoolStatus"] for name in names)
    assert (first["Status"], first["ReusedByJob"]) == ("Reused", names[1])
    assert second["Status"] == "Available"
    listed = endpoint.sagemaker.list_training_jobs(WarmPoolStatusEquals="Available")
    assert [job["TrainingJobName"] for job in listed["TrainingJobSummaries"]] == names[1:]
    give_back = {"KeepAlivePeriodInSeconds": 0}
    endpoint.sagemaker.update_training_job(TrainingJobName=names[1], ResourceConfig=give_back)
    assert endpoint.describe(names[1])["WarmPoolStatus"]["Status"] == "Terminated"
    with pytest.raises(ClientError, match="has no warm pool that is Available"):
        endpoint.sagemaker.update_training_job(TrainingJobName=names[1], ResourceConfig=give_back)
    with pytest.raises(ClientError, match="does not emulate RemoteDebugConfig of UpdateTraining"):
        endpoint.sagemaker.update_training_job(
            TrainingJobName=names[1], RemoteDebugConfig={"EnableRemoteDebug": True}
        )
    with pytest.raises(ClientError, match="KeepAlivePeriodInSeconds cannot be given together"):
        endpoint.create(
            "image",
            **leave,
            EnableManagedSpotTraining=True,
            StoppingCondition={"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
        )


@pytest.mark.thorough
def test_a_client_sees_which_of_the_preferred_types_was_chosen(tmp_path):
    """And the launcher's commands start the same request again."""
    preferred = [
        {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1},
        {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
    ]
    with Endpoint(tmp_path, "--no-capacity=ml.p5.48xlarge") as endpoint:
        resources = {"InstancePreferences": preferred, "VolumeSizeInGB": 1}
        name = endpoint.create("image", ResourceConfig=resources, Environment={"LEAVE": "1"})
        job = endpoint.wait_until_ended(name)
        assert job["TrainingJobStatus"] == "Completed"
        chosen = {"SelectedInstanceType": "ml.g5.xlarge", "SelectedInstanceCount": 2}
        assert job["ResourceConfig"] == resources | chosen
        completed = run_command(endpoint, "rerun", name)
        assert completed.returncode == 0, completed.stdout
        (again, _) = endpoint.sagemaker.list_training_jobs()["TrainingJobSummaries"]
        endpoint.wait_until_ended(again["TrainingJobName"])
        with pytest.raises(ClientError, match="does not emulate ResourceConfig.SelectedInstanceT"):
            endpoint.create("image", ResourceConfig=resources | chosen)
        completed = run_command(endpoint, "compare", name)
        assert f"{name}-left-alone runs without interruptions" in completed.stdout
