"""Faults of the rehearsal in real containers: what the program in one of them notices."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from containers import docker
from environments import python_of
from rehearsals import Rehearsal, run_command
from waiting import wait_until

pytestmark = pytest.mark.docker

# Says, five times a second, whether the endpoint is reached and the checkpoints' folder takes a
# file, and names a pause of its own. It ends when its host has a file `end` there.
NOTICING_SCRIPT = """
address=${AWS_ENDPOINT_URL#http://}; last=$SECONDS
while [[ ! -e /opt/ml/checkpoints/end ]]; do
    net=cut; timeout 1 bash -c "exec 3<>/dev/tcp/${address/:/\\/}" 2>/dev/null && net=open
    disk=full; (echo x >/opt/ml/checkpoints/.x.sagemaker-ignore) 2>/dev/null && disk=free
    echo "net=$net disk=$disk"
    ((SECONDS - last > 3)) && echo "paused"; last=$SECONDS; sleep 0.2
done
"""
CLOCK_SCRIPT = """
echo "$(($(date +%s) - $(cut -d. -f1 /proc/uptime)))" >/tmp/then
for ((i = 0; i < 60; i++)); do
    ahead=$(($(date +%s) - $(cut -d. -f1 /proc/uptime) - $(cat /tmp/then)))
    echo "ahead=$(((ahead + 5) / 3600))"; sleep 0.2
done
"""
CHECKPOINTS = {"CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints/faults"}}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Iterator[Rehearsal]:
    """A rehearsal in which one clock is shifted by rule; all else happens by hand."""
    rule = "--fault=shift clock at 2s of algo-2 for 4s"
    with Rehearsal(tmp_path_factory.mktemp("rehearsal"), "--grace=2", rule) as server:
        yield server


def faults_of(rehearsal: Rehearsal, name: str) -> list[dict]:
    """Return the faults in the record of a job that has ended."""
    return json.loads((rehearsal.folder / name / "job.json").read_text())["faults"]


def wait_for_new_line(rehearsal: Rehearsal, name: str, text: str, host: str) -> None:
    """Wait for a line that comes after those that are there."""
    before = len(rehearsal.lines(name)[host])
    wait_until(lambda: any(text in line for line in rehearsal.lines(name)[host][before:]), text)


@pytest.mark.thorough  # without containers: test_rehearsal_processes.py
def test_networks_disks_and_ranks_of_containers(rehearsal, image):
    name = rehearsal.create(image, NOTICING_SCRIPT, hosts=2, **CHECKPOINTS)
    rehearsal.wait_for_line(name, "net=open disk=free", "algo-1")
    for fault, notices in {
        "cut network of algo-1 for 6s": "net=cut",
        "fill disk of algo-1 for 4s": "disk=full",
        "freeze rank of algo-1 for 5s": "paused",
    }.items():
        done = run_command(rehearsal, "fault", name, fault)
        assert done.returncode == 0, done.stdout
        wait_for_new_line(rehearsal, name, notices, "algo-1")
        wait_for_new_line(rehearsal, name, "net=open disk=free", "algo-1")
    for fault in ("slow network of algo-1", "lossy network of algo-2", "slow rank of algo-2"):
        assert run_command(rehearsal, "fault", name, fault).returncode == 0
    assert not any(
        "disk=full" in line or "net=cut" in line for line in rehearsal.lines(name)["algo-2"][:20]
    )
    run_command(rehearsal, "fault", name, "kill rank of algo-1")
    job = rehearsal.wait_until_ended(name)
    assert job["TrainingJobStatus"] == "Failed" and "exit code: 137" in job["FailureReason"]
    faults = [fault for fault in faults_of(rehearsal, name) if fault["why"] == "by hand"]
    assert len(faults) == 7 and [fault["failed"] for fault in faults] == [""] * 7


def test_the_clock_of_a_container(rehearsal, image):
    found = subprocess.run(
        [python_of("rehearsal"), "-c", "import libfaketime"], capture_output=True
    )
    if found.returncode:
        pytest.skip("it takes a C compiler to install libfaketime")
    name = rehearsal.create(image, CLOCK_SCRIPT, hosts=2)
    assert rehearsal.wait_until_ended(name)["TrainingJobStatus"] == "Completed"
    lines = rehearsal.lines(name)
    assert {*lines["algo-1"]} == {"ahead=0"}
    assert [*dict.fromkeys(lines["algo-2"])] == ["ahead=0", "ahead=1"]
    assert lines["algo-2"][-1] == "ahead=0"
    (fault,) = faults_of(rehearsal, name)
    assert (fault["target"], fault["failed"]) == ("3600 s ahead", "")
    assert docker("ps", "--all", "--quiet", "--filter", "name=-clock-").stdout == ""
