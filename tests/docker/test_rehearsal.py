"""Jobs of the rehearsal under the service's rules: real containers, moto's S3 and logs.

The containers run the real image.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError
from containers import ROOT, docker
from environments import python_of
from rehearsals import HANG_SECONDS, LABEL, Rehearsal, run_command, starting

pytestmark = pytest.mark.docker


# Says each step of STEPS, one second each, and saves the step that it has reached; resumes from the
# newest step that it finds.
COUNTING_SCRIPT = """
trap 'exit 143' TERM
cd /opt/ml/checkpoints; step=$(ls | grep -v sagemaker | sort -n | tail -1)
echo "resuming from step ${step:-0}"
for ((i = ${step:-0} + 1; i <= ${STEPS:-6}; i++)); do
    sleep 1; echo "step=$i loss=0.$i"; touch .$i.sagemaker-ignore; mv .$i.sagemaker-ignore $i
done
echo $HOSTNAME >/opt/ml/model/weights
"""
CHECKPOINT_FIELDS = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/run"}}
SECONDARY = "SecondaryStatusTransitions"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal that interrupts nothing on its own."""
    flags = [
        "--grace=5",
        "--sync-every=0.2",
        f"--allow={tmp_path_factory.getbasetemp()}",
        f"--allow={ROOT}",
    ]
    with Rehearsal(tmp_path_factory.mktemp("rehearsal"), *flags) as server:
        yield server


def channel(name: str, uri: str, distribution: str = "FullyReplicated", **more_fields) -> dict:
    """Return a channel for InputDataConfig."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": distribution}
    groups = more_fields.pop("groups", None)
    return {
        "ChannelName": name,
        "DataSource": {"S3DataSource": source | ({"InstanceGroupNames": groups} if groups else {})},
    } | more_fields


def statuses(job: dict) -> list[str]:
    """Return the secondary statuses that a job went through."""
    all_statuses = [transition["Status"] for transition in job[SECONDARY]]
    return [
        status
        for status, previous in zip(all_statuses, [None, *all_statuses], strict=False)
        if status != previous
    ]


def test_a_host_finds_what_the_service_gives_it(rehearsal, image, tmp_path):
    for name in ("a", "b", "c/d"):
        rehearsal.s3.put_object(Bucket="rehearsal", Key=f"data/{name}", Body=name.encode())
    (tmp_path / "local").mkdir()
    (tmp_path / "local/file").write_text("local")
    script = """
    cd /opt/ml/input; for f in config/*; do echo "$f $(cat $f)"; done; find data -type f | sort
    touch data/fast/x || echo "fast: read-only"; touch data/local/x && echo "local: writable"
    echo $TRAINING_JOB_NAME $TRAINING_JOB_ARN; echo "shm $(df --output=size -m /dev/shm | tail -1)"
    """
    groups = [
        {"InstanceGroupName": "big", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "small", "InstanceType": "ml.m5.xlarge", "InstanceCount": 2},
    ]
    name = rehearsal.create(
        image,
        script,
        ResourceConfig={"InstanceGroups": groups, "VolumeSizeInGB": 1},
        HyperParameters={"a.b": "1", "c": '"x"'},
        InputDataConfig=[
            channel("sharded", "s3://rehearsal/data/", "ShardedByS3Key", groups=["small"]),
            channel("fast", "s3://rehearsal/data", InputMode="FastFile", groups=["small", "big"]),
            channel("local", f"file://{tmp_path}/local", ContentType="text/plain", groups=["big"]),
        ],
        CheckpointConfig={"S3Uri": "s3://rehearsal/none/", "LocalPath": "/opt/ml/kept"},
    )
    job = rehearsal.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Completed", job
    host_lines = rehearsal.lines(name)
    config = {
        line.split(" ")[0][7:]: json.loads(line.partition(" ")[2])
        for line in host_lines["algo-2"]
        if "config/" in line
    }
    assert config["hyperparameters.json"] == {"a.b": "1", "c": '"x"'}
    assert config["checkpointconfig.json"] == {"LocalPath": "/opt/ml/kept"}
    assert config["resourceconfig.json"] == {
        "current_group_name": "small",
        "current_host": "algo-2",
        "current_instance_type": "ml.m5.xlarge",
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "instance_groups": [
            {"instance_group_name": "big", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1"]},
            {
                "instance_group_name": "small",
                "instance_type": "ml.m5.xlarge",
                "hosts": ["algo-2", "algo-3"],
            },
        ],
        "network_interface_name": "eth0",
        "topology": None,
    }
    assert config["inputdataconfig.json"]["sharded"]["S3DistributionType"] == "ShardedByS3Key"
    assert set(config["inputdataconfig.json"]) == {"sharded", "fast"}
    files = {
        host: [line for line in lines if line.startswith("data/")]
        for host, lines in host_lines.items()
    }
    fast = ["data/fast/a", "data/fast/b", "data/fast/c/d"]
    assert files == {
        "algo-1": [*fast, "data/local/file"],
        "algo-2": [*fast, "data/sharded/a", "data/sharded/c/d"],
        "algo-3": [*fast, "data/sharded/b"],
    }
    assert {"fast: read-only", "local: writable"} <= set(host_lines["algo-1"])
    assert f"{name} {job['TrainingJobArn']}" in host_lines["algo-3"]
    (shared_memory,) = (line for line in host_lines["algo-1"] if line.startswith("shm "))
    assert int(shared_memory.split()[1]) >= 1024  # MiB of /dev/shm


def test_outputs_are_gathered_over_hosts(rehearsal, image):
    script = """
    host=$(grep -o '"current_host": "[^"]*' /opt/ml/input/config/resourceconfig.json | cut -d'"' -f4)
    cd /opt/ml/model; echo $host >shared; echo $host >$host; cd /opt/ml/output/data; mkdir deep; echo x >deep/$host
    [[ $host == algo-1 ]] && sleep 4 || true
    """  # noqa: E501
    name = rehearsal.create(
        image,
        script,
        hosts=2,
        AlgorithmSpecification={"MetricDefinitions": [{"Name": "x", "Regex": "x"}]},
    )
    job = rehearsal.wait_until_ended(name)
    assert statuses(job) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert (
        job["ModelArtifacts"]["S3ModelArtifacts"]
        == f"s3://rehearsal/output/{name}/output/model.tar.gz"
    )
    # A worker that has ended is waited for.
    assert job["TrainingTimeInSeconds"] >= 2
    assert job["BillableTimeInSeconds"] >= 2
    assert rehearsal.archive(name) == {
        "shared": b"algo-2\n",
        "algo-1": b"algo-1\n",
        "algo-2": b"algo-2\n",
    }
    assert set(rehearsal.archive(name, "output")) == {"deep/algo-1", "deep/algo-2"}
    record = json.loads((rehearsal.folder / name / "job.json").read_text())
    assert any("shared of algo-2 replaces that of algo-1" in note for note in record["notes"])


def test_metrics_and_logs(rehearsal, image):
    definitions = [
        {"Name": "loss", "Regex": "loss=([0-9.]+)"},
        {"Name": "none", "Regex": "nothing=(.*)"},
    ]
    script = (
        'for i in 3 2 1; do echo "step=$i loss=0.$i"; done; printf "no end of line"; printf '
        '"\\n\\n"; echo "ü"'
    )
    name = rehearsal.create(
        image, script, AlgorithmSpecification={"MetricDefinitions": definitions}
    )
    (metric,) = rehearsal.wait_until_ended(name)["FinalMetricDataList"]
    assert (metric["MetricName"], round(metric["Value"], 3)) == ("loss", 0.1)
    assert rehearsal.lines(name)["algo-1"][-2:] == ["no end of line", "ü"]
    assert "step=3 loss=0.3\n" in (rehearsal.folder / name / "logs/algo-1.log").read_text()
    assert "loss" in (rehearsal.folder / name / "report.html").read_text()


def test_a_failure_says_why_and_ends_the_others(rehearsal, image):
    script = """
    trap 'echo stopped; exit 0' TERM; echo m >/opt/ml/model/m
    cd /opt/ml; grep -q 'current_host": "algo-2' input/config/r*.json && { echo "error: why" >output/failure; exit 3; }
    sleep 100 & wait
    """  # noqa: E501
    name = rehearsal.create(image, script, hosts=2)
    job = rehearsal.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"] == "AlgorithmError: error: why\n, exit code: 3"
    assert rehearsal.lines(name)["algo-1"] == ["stopped"]
    assert rehearsal.archive(name) == {"m": b"m\n"}  # uploaded on a failure, too


FAILURES = {
    "no data": (
        {"InputDataConfig": [channel("training", "s3://rehearsal/nothing/")]},
        "ClientError: Data download failed:No S3 objects found under S3 URL "
        '"s3://rehearsal/nothing/"',
    ),
    "no bucket": (
        {"InputDataConfig": [channel("training", "s3://no-such-bucket/x")]},
        "ClientError: Data download failed:No S3 objects found under S3 URL "
        '"s3://no-such-bucket/x"',
    ),
    "no folder": (
        {"InputDataConfig": [channel("training", f"file://{ROOT}/no-such")]},
        f"ClientError: Data download failed: file://{ROOT}/no-such is not a file, nor a folder "
        "with files in it",
    ),
    "no image": (
        {
            "AlgorithmSpecification": {
                "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/none:1"
            }
        },
        "ClientError: Cannot pull image 123456789012.dkr.ecr.us-east-1.amazonaws.com/none:1: "
        "there is no local image",
    ),
    "no program": (
        {"AlgorithmSpecification": {"ContainerEntrypoint": ["/no/such/program"]}},
        "ClientError: the container of algo-1 cannot be started",
    ),
    "no bucket for the model": (
        {"OutputDataConfig": {"S3OutputPath": "s3://no-such-bucket/x"}, "script": "true"},
        "ClientError: Artifact upload failed",
    ),
    "many words": (
        {"script": "head -c 3000 /dev/zero | tr '\\0' x >/opt/ml/output/failure; exit 1"},
        "AlgorithmError: xxx",
    ),
    "killed": ({"script": "bash -c 'kill -9 $$'"}, "AlgorithmError: , exit code: 137"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_a_job(rehearsal, image, case):
    arguments, reason = FAILURES[case]
    job = rehearsal.wait_until_ended(rehearsal.create(image, **arguments))
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].startswith(reason) and len(job["FailureReason"]) <= 1024


def test_stop(rehearsal, image):
    script = "trap 'echo saved >/opt/ml/model/m; exit 5' TERM; echo ready; sleep 100 & wait"
    name = rehearsal.create(image, script, hosts=2)
    rehearsal.wait_for_line(name, "ready", "algo-2")
    rehearsal.sagemaker.stop_training_job(TrainingJobName=name)
    job = rehearsal.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Stopped"
    assert statuses(job)[-4:] == ["Training", "Stopping", "Uploading", "Stopped"]
    assert "FailureReason" not in job
    assert rehearsal.archive(name) == {"m": b"saved\n"}
    with pytest.raises(ClientError, match="training job is in status Stopped"):
        rehearsal.sagemaker.stop_training_job(TrainingJobName=name)


def test_max_runtime_ends_even_who_does_not_listen(rehearsal, image):
    name = rehearsal.create(
        image,
        "trap '' TERM; while true; do sleep 1; done",
        StoppingCondition={"MaxRuntimeInSeconds": 2},
    )
    job = rehearsal.wait_until_ended(name)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert job["TrainingTimeInSeconds"] >= 2 + 5  # the grace period


def test_checkpoints_are_copied_while_it_runs_and_restored(rehearsal, image):
    """Checkpoints are copied while the job runs, and restored when it starts.

    There are markers beside the files; files to be ignored are left out, a deletion is passed on,
    and a changed file is copied again.
    """
    rehearsal.s3.put_object(Bucket="rehearsal", Key="ck/before/old", Body=b"old\n")
    script = """
    cd /opt/ml/checkpoints; cat old; echo one >1; echo temporary >2.sagemaker-ignore
    until [[ -e 1.sagemaker-uploaded ]]; do sleep 0.1; done; ls; rm old; echo more >>1; echo "synced"; sleep 3
    """  # noqa: E501
    name = rehearsal.create(image, script, CheckpointConfig={"S3Uri": "s3://rehearsal/ck/before"})
    rehearsal.wait_for_line(name, "synced")
    rehearsal.wait_until_ended(name)
    assert rehearsal.lines(name)["algo-1"][0] == "old"
    assert {"1", "1.sagemaker-uploaded", "1.sagemaker-uploading"} <= set(
        rehearsal.lines(name)["algo-1"]
    )
    assert rehearsal.keys("ck/before/") == ["ck/before/1"]
    assert (
        rehearsal.s3.get_object(Bucket="rehearsal", Key="ck/before/1")["Body"].read()
        == b"one\nmore\n"
    )


def test_an_interruption_by_hand(rehearsal, image):
    name = rehearsal.create(
        image, COUNTING_SCRIPT, spot=True, hosts=2, Environment={"STEPS": "10"}, **CHECKPOINT_FIELDS
    )
    on_demand = run_command(rehearsal, "interrupt", rehearsal.create(image, "sleep 2"))
    assert on_demand.returncode == 1 and "is not a spot job; create it with" in on_demand.stdout
    rehearsal.wait_for_line(name, "step=3")
    completed = run_command(
        rehearsal, "interrupt", name, "--host=algo-2", "--unwarned", "--gap=1.5"
    )
    assert completed.returncode == 0 and "algo-2" in completed.stdout, completed.stdout
    job = rehearsal.wait_until_ended(name)
    expected = [
        "Starting",
        "Downloading",
        "Training",
        "Interrupted",
        "Starting",
        "Downloading",
        "Training",
        "Uploading",
    ]
    assert statuses(job) == [*expected, "Completed"]
    log_lines = rehearsal.lines(name)["algo-1"]
    resumed_steps = [int(line.split()[-1]) for line in log_lines if line.startswith("resuming")]
    assert len(resumed_steps) == 2 and 2 <= resumed_steps[1] < 10
    record = json.loads((rehearsal.folder / name / "job.json").read_text())
    first_instance, second_instance = (attempt["instances"][0] for attempt in record["attempts"])
    # The time between is not billed.
    assert second_instance["started"] - first_instance["released"] >= 1.5
    (interruption,) = record["interruptions"]
    assert interruption["hosts"] == ["algo-2"]
    assert interruption["warned"] is False
    assert interruption["why"] == "by hand"
    assert [instance["reclaimed"] for instance in record["attempts"][0]["instances"]] == [
        False,
        True,
    ]
    report = (rehearsal.folder / name / "report.html").read_text()
    assert "goodput" in report.lower() and f"step {resumed_steps[1]}" in report


def test_ten_jobs_at_once(rehearsal, image):
    script = 'echo m >/opt/ml/model/$TRAINING_JOB_NAME; sleep 1; echo "step=1 loss=0.1"'
    with ThreadPoolExecutor(10) as pool:
        names = list(pool.map(lambda _: rehearsal.create(image, script), range(10)))
        jobs = list(pool.map(rehearsal.wait_until_ended, names))
    assert [job["TrainingJobStatus"] for job in jobs] == ["Completed"] * 10
    assert all(list(rehearsal.archive(name)) == [name] for name in names)
    summaries = rehearsal.sagemaker.list_training_jobs(MaxResults=100, StatusEquals="Completed")[
        "TrainingJobSummaries"
    ]
    assert set(names) <= {summary["TrainingJobName"] for summary in summaries}
    first_page = rehearsal.sagemaker.list_training_jobs(
        MaxResults=3, SortBy="Name", SortOrder="Ascending"
    )
    second_page = rehearsal.sagemaker.list_training_jobs(
        MaxResults=3, SortBy="Name", SortOrder="Ascending", NextToken=first_page["NextToken"]
    )
    names_on_pages = [
        summary["TrainingJobName"]
        for page in (first_page, second_page)
        for summary in page["TrainingJobSummaries"]
    ]
    assert len(names_on_pages) == 6 and names_on_pages == sorted(names_on_pages)


def test_names_and_tags(rehearsal, image):
    name = rehearsal.create(image, "true", Tags=[{"Key": "a", "Value": "1"}])
    with pytest.raises(ClientError) as refused:
        rehearsal.create(image, "true", TrainingJobName=name)
    assert refused.value.response["Error"]["Code"] == "ResourceInUse"
    arn = rehearsal.describe(name)["TrainingJobArn"]
    rehearsal.sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "b", "Value": "2"}])
    rehearsal.sagemaker.delete_tags(ResourceArn=arn, TagKeys=["a"])
    assert rehearsal.sagemaker.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "b", "Value": "2"}]
    with pytest.raises(ClientError, match="Requested resource not found"):
        rehearsal.describe("no-such-job")
    with pytest.raises(ClientError, match="does not emulate CreateModel"):
        rehearsal.sagemaker.create_model(
            ModelName="x", ExecutionRoleArn="arn:aws:iam::123456789012:role/x"
        )
    rehearsal.wait_until_ended(name)


@pytest.mark.parametrize("isolated", [False, True])
def test_network_isolation(rehearsal, image, isolated):
    """An isolated host reaches only the other hosts, and gets no variables of AWS."""
    script = 'getent ahostsv4 algo-1 | head -1; echo "endpoint ${AWS_ENDPOINT_URL-none}"; sleep 2'
    name = rehearsal.create(image, script, EnableNetworkIsolation=isolated)
    rehearsal.wait_for(name, "Training")
    name_filter = f"name=-{name}$"
    internal = docker(
        "network", "ls", "--filter", name_filter, "--format", "{{.Internal}}"
    ).stdout.strip()
    rehearsal.wait_until_ended(name)
    host_line, endpoint_line = rehearsal.lines(name)["algo-1"]
    assert "algo-1" in host_line
    assert internal == str(isolated).lower()
    assert (endpoint_line == "endpoint none") == isolated


def test_a_strangers_container_on_a_jobs_network(rehearsal, image):
    """The rehearsal disconnects the container, removes the network, and the job completes."""
    name = rehearsal.create(image, "echo ready; sleep 5")
    rehearsal.wait_for_line(name, "ready")
    (network,) = docker("network", "ls", "--quiet", "--filter", f"name=-{name}$").stdout.split()
    stranger = docker(
        "run", "--detach", "--network", network, "--entrypoint=sleep", image, "100"
    ).stdout.strip()
    try:
        assert rehearsal.wait_until_ended(name)["TrainingJobStatus"] == "Completed"
        assert docker("network", "ls", "--quiet", "--filter", f"name=-{name}$").stdout == ""
        assert (
            docker("inspect", "--format", "{{.State.Running}}", stranger).stdout.strip() == "true"
        )
    finally:
        docker("rm", "--force", stranger)


# A real network whose list once names a container that has left since: a test cannot hit that
# moment.
LEAVING_PROGRAM = """
import docker
from sagemaker_rehearsal.engines.containers import remove

network = docker.from_env().networks.create(NAME)
reloads = []
real_reload = network.reload


def reload_late():
    real_reload()
    reloads.append(None)
    if len(reloads) == 1:
        network.attrs["Containers"] = {"left": {"Name": "left-since"}}


network.reload = reload_late
print(remove(network))
"""


def test_a_container_that_leaves_a_network_by_itself(tmp_path):
    name = f"rehearsal-test-{tmp_path.name}-{os.getpid()}"
    command = [python_of("rehearsal"), "-c", LEAVING_PROGRAM.replace("NAME", repr(name))]
    try:
        completed = subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        assert completed.stdout == "True\n"
        assert docker("network", "ls", "--quiet", "--filter", f"name={name}").stdout == ""
    finally:
        docker("network", "rm", name)


# For a user who is not root and may not remove the files of a container's root.
EMPTYING_PROGRAM = """
import sys
from pathlib import Path
import docker
from sagemaker_rehearsal import owner

client = docker.from_env()
volumes_seen = []
collection = type(client.containers)
run = collection.run


def note_and_run(self, *arguments, volumes, **options):
    volumes_seen.extend(volumes)
    return run(self, *arguments, volumes=volumes, **options)


collection.run = note_and_run
owner.shutil.rmtree = lambda *arguments, **options: None
folder = Path(sys.argv[1])
owner.empty(folder, client)
remaining = sorted(path.name for path in folder.parent.rglob("*"))
print([*{volume.partition(":")[0] == str(folder) for volume in volumes_seen}], remaining)
"""


def test_what_a_containers_root_has_left_is_removed_by_one_that_sees_nothing_else(tmp_path, image):
    for name in ("one/jobs/file", "another/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    command = [python_of("rehearsal"), "-c", EMPTYING_PROGRAM, tmp_path / "one"]
    completed = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert completed.stdout == "[True] ['another', 'file', 'one']\n"


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        pytest.param(
            "at step 3 unwarned", ["Interrupted", "Completed"], marks=pytest.mark.thorough
        ),
        pytest.param(
            "every 2s 2 times of any warned gap 0.5s",
            ["Interrupted", "Interrupted", "Completed"],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "every 1s", ["Interrupted", "MaxWaitTimeExceeded"], marks=pytest.mark.thorough
        ),
        pytest.param(
            "every 0.5s unwarned gap 60s",
            ["Interrupted", "MaxWaitTimeExceeded"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_spot_by_a_rule(tmp_path, image, rule, wanted):
    flags = [
        f"--interrupt={rule}",
        "--sync-every=0.1",
        "--grace=2",
        "--price=3.06",
        "--spot-price=0.92",
    ]
    with Rehearsal(tmp_path, *flags) as server:
        limits = (
            {"MaxRuntimeInSeconds": 4, "MaxWaitTimeInSeconds": 6}
            if wanted[-1] != "Completed"
            else None
        )
        stopping = {"StoppingCondition": limits} if limits else {}
        name = server.create(
            image, COUNTING_SCRIPT, spot=True, hosts=2, **CHECKPOINT_FIELDS, **stopping
        )
        job = server.wait_until_ended(name)
        end_statuses = [
            status for status in statuses(job) if status in ("Interrupted", job["SecondaryStatus"])
        ]
        assert end_statuses[-1] == wanted[-1], job
        assert end_statuses.count("Interrupted") >= wanted.count("Interrupted"), job
        if wanted[-1] == "Completed":
            assert end_statuses == wanted
            steps = [
                line.split()[0] for line in server.lines(name)["algo-1"] if line.startswith("step=")
            ]
            assert set(steps) == {f"step={step}" for step in range(1, 7)}
            assert "cost on spot" in (server.folder / name / "report.html").read_text()


@pytest.mark.thorough
def test_retries_are_spent(tmp_path, image):
    with Rehearsal(tmp_path, "--interrupt=every 0.5s unwarned") as server:
        name = server.create(
            image, "sleep 60", spot=True, RetryStrategy={"MaximumRetryAttempts": 1}
        )
        job = server.wait_until_ended(name)
        assert job["TrainingJobStatus"] == "Failed"
        assert "MaximumRetryAttempts is 1" in job["FailureReason"]
        assert statuses(job).count("Interrupted") == 2


@pytest.mark.thorough  # the copies alone: test_rehearsal_checkpoint_sync.py
def test_a_copy_that_stalls_lags_and_brings_its_markers_back(tmp_path, image):
    flags = [
        "--sync-stall-after=2.5",
        "--sync-markers-uploaded",
        "--sync-keep-deleted",
        "--sync-lag=0.5",
        "--sync-every=0.1",
    ]
    with Rehearsal(tmp_path, *flags) as server:
        script = (
            "cd /opt/ml/checkpoints; ls; echo 1 >1; sleep 2; rm 1; echo 2 >2; sleep 2; echo 3 "
            ">3; sleep 1"
        )
        server.wait_until_ended(server.create(image, script, **CHECKPOINT_FIELDS))
        keys = server.keys("checkpoints/run/")
        assert "checkpoints/run/1" in keys and "checkpoints/run/1.sagemaker-uploaded" in keys
        assert "checkpoints/run/3" not in keys
        second_job = server.create(image, script, **CHECKPOINT_FIELDS)
        server.wait_until_ended(second_job)
        assert {"1", "1.sagemaker-uploaded"} <= set(server.lines(second_job)["algo-1"])


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("the same folder", marks=pytest.mark.thorough),
        pytest.param("a folder of its own", marks=pytest.mark.thorough),
        pytest.param("its folder is gone", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_rehearsal_leaves_orphans_that_the_next_one_ends(tmp_path, image, folder):
    name = "orphans"  # the same for both
    killed, at_work, following = (
        Rehearsal(tmp_path / folder_name) for folder_name in ("first", "other", "next")
    )
    if folder == "the same folder":
        at_work.cache = following.cache = killed.cache
    with at_work:
        killed.start()
        try:
            for server in (killed, at_work):
                server.create(
                    image,
                    "trap exit TERM; echo up; sleep 600 & wait",
                    hosts=2,
                    TrainingJobName=name,
                )
                server.wait_for_line(name, "up", "algo-2")
        except BaseException:
            killed.process.kill()
            raise
        with starting(alone=True):
            killed.kill(guard=True)
            assert len(containers_of(name)) == 4 and "ended what" not in at_work.output
            if folder == "its folder is gone":
                shutil.rmtree(killed.cache)
            following.start()
        following.process.send_signal(signal.SIGINT)
        assert following.process.wait(timeout=60) == 0
        assert following.output.count("ended what a killed rehearsal had left") == 1
        # They are the containers of the other rehearsal, which is at work.
        assert len(containers_of(name)) == 2
        at_work.sagemaker.stop_training_job(TrainingJobName=name)
        assert at_work.wait_until_ended(name)["TrainingJobStatus"] == "Stopped"
    assert killed.leftovers() == []


def test_the_guard_of_a_killed_rehearsal_ends_what_it_leaves(tmp_path, image):
    killed = Rehearsal(tmp_path)
    killed.start()
    script = "trap exit TERM; echo up; sleep 600 & wait"
    name = killed.create(image, script, hosts=2)
    killed.wait_for_line(name, "up", "algo-2")
    killed.kill(guard=False)
    deadline = time.monotonic() + HANG_SECONDS
    while containers_of(name) or killed.leftovers():
        assert time.monotonic() < deadline, killed.leftovers()
        time.sleep(0.1)


def containers_of(job: str) -> list[str]:
    """Return the containers of the jobs with this name."""
    return docker(
        "ps", "--all", "--quiet", f"--filter={LABEL}", f"--filter=name=-{job}-"
    ).stdout.split()


def test_ctrl_c_ends_the_jobs(tmp_path, image):
    server = Rehearsal(tmp_path, "--grace=1")
    with server:
        name = server.create(image, "trap '' TERM; while true; do sleep 1; done")
        server.wait_for(name, "Training")
    record = json.loads((server.folder / name / "job.json").read_text())
    assert record["status"] == "Stopped" and (server.folder / name / "report.html").exists()


def test_repairs_of_a_gpu_instance(tmp_path, image):
    with Rehearsal(tmp_path, "--repairs=1", "--sync-every=0.1") as server:
        script = "cd /opt/ml/checkpoints; [[ -e 1 ]] || { echo 1 >1; sleep 1; exit 9; }"
        resources = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1}
        job = server.wait_until_ended(
            server.create(image, script, ResourceConfig=resources, **CHECKPOINT_FIELDS)
        )
        assert job["TrainingJobStatus"] == "Completed" and "Restarting" in statuses(job)


@pytest.mark.parametrize(
    "endpoint", ["https://api.sagemaker.us-east-1.amazonaws.com", "http://127.0.0.1:9", "nonsense"]
)
def test_a_client_is_not_started_without_a_rehearsal(endpoint):
    command = [
        python_of("rehearsal"),
        "-m",
        "sagemaker_rehearsal",
        "exec",
        f"--endpoint={endpoint}",
        "--",
        "echo",
        "started",
    ]
    completed = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert completed.returncode == 1 and "started" not in completed.stdout
    assert completed.stdout.startswith("error: --endpoint: ") and completed.stdout.count("\n") == 1


def test_jobs_of_a_warm_pool_share_a_folder(rehearsal, image):
    script = """
    cache=/opt/ml/sagemaker/warmpoolcache; [[ $SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY == $cache ]] || exit 1
    echo "found: $(ls $cache | wc -l)"; touch $cache/$TRAINING_JOB_NAME
    """  # noqa: E501
    resources = {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1}
    for found in range(2):
        pool = resources | {"KeepAlivePeriodInSeconds": 600}
        name = rehearsal.create(image, script, ResourceConfig=pool)
        assert rehearsal.wait_until_ended(name)["TrainingJobStatus"] == "Completed"
        assert rehearsal.lines(name)["algo-1"] == [f"found: {found}"]
