"""A rehearsal for the tests: the real server in its own process, and its clients."""

import contextlib
import fcntl
import io
import os
import re
import signal
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import aws_services
import psutil
from containers import ROOT, docker, no_engine
from environments import python_of

LABEL = "label=sagemaker-lightning.rehearsal"
ROLE = "arn:aws:iam::123456789012:role/rehearsal"
ENDED = ("Completed", "Failed", "Stopped")
HANG_SECONDS = 300  # a job that has not ended by then hangs


STARTS_LOCK = Path(tempfile.gettempdir(), "tests-rehearsal-starts")


@contextlib.contextmanager
def starting(alone: bool = False) -> Iterator[None]:
    """Wait for the turn to start a rehearsal, and hold it while the block lasts.

    With `alone`, no other test starts a rehearsal meanwhile.

    A rehearsal that starts also ends what killed rehearsals have left behind.
    """
    with STARTS_LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Rehearsal:
    """The server of a rehearsal, while it is entered.

    When it is left, nothing of its jobs may be there any more.

    Args:
        folder: Gets its reports, and what it keeps while jobs run.
        flags: Its flags.
    """

    program = ("-m", "sagemaker_rehearsal")
    root = ROOT
    """Its working folder, which has its modules, too."""

    @property
    def python(self) -> Path:
        return python_of("rehearsal")

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder / "reports"
        self.cache = folder / "cache"
        self.flags = [f"--folder={self.folder}", *flags]
        self.log = folder / "rehearsal.log"

    def __enter__(self) -> "Rehearsal":
        with starting():
            self.start()
        self.s3.create_bucket(Bucket="rehearsal")
        return self

    def start(self) -> None:
        """Start the server, and wait for its address."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [self.python, *self.program, "--port=0", *self.flags]
        with self.log.open("w") as log:
            environment = os.environ | {
                "XDG_CACHE_HOME": str(self.cache),
                "PYTHONPATH": str(self.root),
                "PYTHONUNBUFFERED": "1",
            }
            self.process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 60
        while not (
            match := re.search(r"^endpoint: (\S+)(?s:.*)^reports: ", self.output, re.MULTILINE)
        ):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.1)
        self.endpoint = match[1]
        self.variables = dict(re.findall(r"(AWS_\w+)=(\S+)", self.output))  # the printed line's
        self.key = self.variables["AWS_ACCESS_KEY_ID"], self.variables["AWS_SECRET_ACCESS_KEY"]
        self.s3, self.sagemaker, self.logs = (
            aws_services.client(name, self.endpoint, key=self.key)
            for name in ("s3", "sagemaker", "logs")
        )

    def kill(self, *, guard: bool) -> None:
        """Kill it at once; with `guard`, what would end its leftovers, too."""
        for child in psutil.Process(self.process.pid).children():
            if guard and "sagemaker_rehearsal.guard" in child.cmdline():
                child.kill()
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=200) == 0, self.output
        assert self.leftovers() == []

    @property
    def output(self) -> str:
        """What the server has printed."""
        return self.log.read_text()

    def leftovers(self) -> list[str]:
        """Return what is left of this rehearsal: containers, networks, folders."""
        # A guard may remove folders meanwhile: `walk` leaves out what is gone.
        leftovers = [
            f"{folder}/{name}" for folder, _, names in os.walk(self.cache) for name in names
        ]
        if no_engine() is None:
            own_label = (
                f"{LABEL}={self.cache}"  # the label continues with the name of a folder in it
            )
            for command in (["ps", "--all"], ["network", "ls"]):
                labels = docker(
                    *command,
                    "--filter",
                    LABEL,
                    "--format",
                    '{{.Label "sagemaker-lightning.rehearsal"}}',
                ).stdout
                leftovers += [
                    label for label in labels.split() if f"{LABEL}={label}".startswith(own_label)
                ]
        return leftovers

    def create(self, image: str, script: str | None = None, **fields) -> str:
        """Create a job that runs a shell script in the image, or `train`, and return its name."""
        algorithm = {"TrainingImage": image, "TrainingInputMode": "File"} | fields.pop(
            "AlgorithmSpecification", {}
        )
        if script is not None:
            algorithm["ContainerEntrypoint"] = ["/bin/bash", "-c", 'eval "$SCRIPT"']
            fields["Environment"] = fields.get("Environment", {}) | {"SCRIPT": script}
        spot = fields.pop("spot", False)
        hosts = fields.pop("hosts", 1)
        request = {
            "TrainingJobName": f"job-{uuid.uuid4().hex[:12]}",
            "RoleArn": ROLE,
            "AlgorithmSpecification": algorithm,
            "OutputDataConfig": {"S3OutputPath": "s3://rehearsal/output/"},
            "ResourceConfig": {
                "InstanceType": "ml.m5.xlarge",
                "InstanceCount": hosts,
                "VolumeSizeInGB": 1,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": 600}
            | ({"MaxWaitTimeInSeconds": 900} if spot else {}),
            "EnableManagedSpotTraining": spot,
        } | fields
        self.sagemaker.create_training_job(**request)
        return request["TrainingJobName"]

    def describe(self, name: str) -> dict:
        """Return DescribeTrainingJob's answer for a job."""
        return self.sagemaker.describe_training_job(TrainingJobName=name)

    def wait_for(self, name: str, *statuses: str) -> dict:
        """Return the job's description when it has one of these secondary statuses."""
        deadline = time.monotonic() + HANG_SECONDS
        while (job := self.describe(name))["SecondaryStatus"] not in statuses:
            assert job["TrainingJobStatus"] not in ENDED and time.monotonic() < deadline, (
                job,
                self.output[-3000:],
            )
            time.sleep(0.1)
        return job

    def wait_until_ended(self, name: str, seconds: float = HANG_SECONDS) -> dict:
        """Return the job's description when it has ended; wait at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (job := self.describe(name))["TrainingJobStatus"] not in ENDED:
            assert time.monotonic() < deadline, (job, self.output[-3000:])
            time.sleep(0.1)
        return job

    def lines(self, name: str) -> dict[str, list[str]]:
        """Return each host's log, from CloudWatch Logs."""
        group = "/aws/sagemaker/TrainingJobs"
        host_lines = {}
        try:
            streams = self.logs.describe_log_streams(
                logGroupName=group, logStreamNamePrefix=f"{name}/"
            )
        except self.logs.exceptions.ResourceNotFoundException:  # no job has logged yet
            return {}
        for stream in streams["logStreams"]:
            key = {
                "logGroupName": group,
                "logStreamName": stream["logStreamName"],
                "startFromHead": True,
            }
            events = self.logs.get_log_events(**key)["events"]
            host = stream["logStreamName"].split("/")[1].rpartition("-")[0]
            host_lines[host] = [event["message"] for event in events]
        return host_lines

    def wait_for_line(self, name: str, text: str, host: str = "algo-1") -> None:
        """Return when a host has printed `text`."""
        deadline = time.monotonic() + HANG_SECONDS
        while not any(text in line for line in self.lines(name).get(host, [])):
            assert time.monotonic() < deadline, self.lines(name)
            assert self.describe(name)["TrainingJobStatus"] not in ENDED, self.lines(name)
            time.sleep(0.2)

    def keys(self, prefix: str = "") -> list[str]:
        objects = self.s3.list_objects_v2(Bucket="rehearsal", Prefix=prefix)
        return [entry["Key"] for entry in objects.get("Contents", [])]

    def archive(self, name: str, kind: str = "model") -> dict[str, bytes]:
        """Return the contents of the job's model.tar.gz or output.tar.gz."""
        key = f"output/{name}/output/{kind}.tar.gz"
        content = self.s3.get_object(Bucket="rehearsal", Key=key)["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            return {
                member.name: tar.extractfile(member).read() for member in tar if member.isfile()
            }


def run(rehearsal: Rehearsal, *words, **options) -> subprocess.CompletedProcess:
    """Run a client by `rehearsal exec`, and return it with all its output in `stdout`."""
    command = [
        python_of("rehearsal"),
        "-m",
        "sagemaker_rehearsal",
        "exec",
        f"--endpoint={rehearsal.endpoint}",
        "--",
        *words,
    ]
    environment = options.pop("env", os.environ) | {"XDG_CACHE_HOME": str(rehearsal.cache)}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_SECONDS,
        **options,
    )


def run_command(rehearsal: Rehearsal, *words: str) -> subprocess.CompletedProcess:
    """Run a command of the rehearsal's own."""
    command = [
        python_of("rehearsal"),
        "-m",
        "sagemaker_rehearsal",
        words[0],
        f"--endpoint={rehearsal.endpoint}",
        *words[1:],
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(rehearsal.cache)}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
