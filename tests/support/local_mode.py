"""SageMaker's local mode for the tests.

A client script runs with its SDK's own python; the tests see what its job left.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from containers import ROOT, docker
from environments import python_of


class Client:
    """A user with an SDK, a home folder and a working folder."""

    def __init__(self, sdk: str, folder: Path) -> None:
        self.sdk = sdk
        self.home = folder / "home"
        for folder in (".sagemaker", "tmp"):
            (self.home / folder).mkdir(parents=True)
        self.local_code(True)
        # Otherwise each call of SDK 2 asks AWS, and prints a hundred lines of why it cannot.
        (self.home / "sdk.yaml").write_text(
            "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
        )

    def local_code(self, mounted: bool) -> None:
        """Let SDK 2 mount a job's source, or send it to S3 as it does for a real job."""
        (self.home / ".sagemaker/config.yaml").write_text(
            f"local: {{local_code: {str(mounted).lower()}}}\n"
        )

    @property
    def variables(self) -> dict[str, str]:
        """The user's environment."""
        return os.environ | {
            "AWS_DEFAULT_REGION": "us-east-1",
            "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(self.home / "sdk.yaml"),
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "PYTHONPATH": "",
        }

    def run(self, script: str, job: dict | list, **variables: str) -> subprocess.CompletedProcess:
        """Run a script of tests/clients on `job`, as JSON, and return it.

        `stdout` has all its output.
        """
        return subprocess.run(
            [python_of(self.sdk), ROOT / "tests/clients" / script, json.dumps(job)],
            env=self.variables | variables,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    def clean(self) -> None:
        """Remove the containers and the network that local mode leaves behind."""
        for folder in {path.parent for path in self.home.rglob("docker-compose.yaml")}:
            label = f"label=com.docker.compose.project.working_dir={folder}"
            for container in docker("ps", "--all", "--quiet", "--filter", label).stdout.split():
                docker("rm", "--force", "--volumes", container)
        docker("network", "rm", "sagemaker-local")  # refused where another job is on it
        shutil.rmtree(self.home, ignore_errors=True)  # gigabytes, of several jobs


def unpacked(archive: Path) -> Path:
    """Return a folder with the contents of model.tar.gz or output.tar.gz."""
    folder = archive.with_suffix("").with_suffix("")
    folder.mkdir()
    # tar is safe by default; Python's tarfile is safe since 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(
        ["tar", "--extract", "--gzip", "--file", archive, "--directory", folder], check=True
    )
    return folder
