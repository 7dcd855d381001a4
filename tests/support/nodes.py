"""Several nodes for the tests: containers of the image on their own Docker network.

Each node has its own /opt/ml.
"""

import json
import re
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from containers import docker

HANG_SECONDS = 150  # a job that has not ended by then hangs


def local_rank(pid: str) -> int:
    try:
        variables = Path(f"/proc/{pid}/environ").read_text()
    except OSError:  # it has ended
        return -1
    match = re.search(r"(?:^|\0)LOCAL_RANK=(\d+)\0", variables)
    return int(match[1]) if match else -1


class Nodes:
    """The nodes of a job, by host name.

    Entering it makes the network; leaving it removes everything.

    Args:
        folder: Where each host gets its input, output and model.
        hyperparameters: Those of all hosts, or of each by its name.
        resources: What resourceconfig.json has besides hosts and current host.
        code: Files of the job's source, by name.
        checkpoints: Whether the job has a folder for them.
    """

    def __init__(
        self,
        image: str,
        folder: Path,
        hosts: list[str],
        hyperparameters: Mapping,
        *,
        resources: Mapping = {},
        code: Mapping = {},
        checkpoints: bool = False,
        **variables: str,
    ) -> None:
        self.image = image
        self.folder = folder
        self.hosts = hosts
        self.code = code
        self.checkpoints = checkpoints
        self.variables = variables
        self.network = f"nodes-{uuid.uuid4().hex[:12]}"
        self.containers = {}
        for host in hosts:
            config = folder / host / "input/config"
            config.mkdir(parents=True)
            host_resources = {
                "current_host": host,
                "hosts": sorted(hosts),
                "network_interface_name": "eth0",
            } | resources
            (config / "resourceconfig.json").write_text(json.dumps(host_resources))
            host_hyperparameters = hyperparameters.get(host, hyperparameters)
            (config / "hyperparameters.json").write_text(
                json.dumps({key: str(host_hyperparameters[key]) for key in host_hyperparameters})
            )
            for name in ("output", "model", "code", "checkpoints"):
                (folder / host / name).mkdir()
            for name, text in code.items():
                (folder / host / "code" / name).write_text(text)

    def __enter__(self) -> "Nodes":
        assert docker("network", "create", self.network).returncode == 0
        return self

    def __exit__(self, *_) -> None:
        self.remove()
        docker("network", "rm", self.network)

    def remove(self) -> None:
        """Remove the containers; their folders stay."""
        while self.containers:
            docker("rm", "--force", "--volumes", self.containers.popitem()[1])

    def start(self) -> "Nodes":
        """Start all hosts."""
        for host in self.hosts:
            mounted = [
                "input",
                "output",
                "model",
                "code",
                *(["checkpoints"] if self.checkpoints else []),
            ]
            options = [f"--volume={self.folder / host / name}:/opt/ml/{name}" for name in mounted]
            options += [f"--env={key}={value}" for key, value in self.variables.items()]
            options += [
                f"--hostname={host}",
                f"--network-alias={host}",
                f"--network={self.network}",
            ]
            started = docker(
                "run", "--detach", "--env=OMP_NUM_THREADS=1", *options, self.image, "train"
            )
            assert started.returncode == 0, started.stdout
            self.containers[host] = started.stdout.strip().splitlines()[-1]
        return self

    def wait_for(self, text: str, host: str) -> None:
        """Return when a host has printed `text`."""
        deadline = time.monotonic() + HANG_SECONDS
        while text not in (output := self.output(host)):
            assert time.monotonic() < deadline and self.runs(host), output[-3000:]
            time.sleep(0.2)

    def end(self) -> dict[str, int]:
        """Wait until all hosts that were started have ended, and return their exit statuses."""
        deadline = time.monotonic() + HANG_SECONDS
        while any(self.runs(host) for host in self.containers):
            assert time.monotonic() < deadline, {
                host: self.output(host)[-1500:] for host in self.containers if self.runs(host)
            }
            time.sleep(0.2)
        return {host: int(self._inspect(host, "{{.State.ExitCode}}")) for host in self.containers}

    def output(self, host: str) -> str:
        return docker("logs", self.containers[host]).stdout

    def failure(self, host: str) -> str:
        """Return the text that becomes the host's FailureReason."""
        return (self.folder / host / "output/failure").read_text()[:1024]

    def stop(self, host: str) -> None:
        """Tell a host to stop, as SageMaker does; `end` waits until it has."""
        docker("kill", "--signal=TERM", self.containers[host])

    def kill_last_rank(self, host: str) -> None:
        """Kill the rank of a host that has the highest local rank."""
        process_lines = docker("top", self.containers[host], "-eo", "pid,ppid").stdout.splitlines()[
            1:
        ]
        parents = dict(line.split() for line in process_lines)
        local_ranks = {pid: local_rank(pid) for pid in parents}
        last_rank = max(local_ranks.values())
        assert last_rank > 0, local_ranks
        ranks = [
            pid
            for pid, number in local_ranks.items()
            if number == last_rank and local_ranks.get(parents[pid]) != last_rank
        ]
        subprocess.run(["kill", "-KILL", *ranks], check=True)

    def runs(self, host: str) -> bool:
        """Return whether a host's container runs."""
        return self._inspect(host, "{{.State.Running}}") == "true"

    def _inspect(self, host: str, template: str) -> str:
        return docker("inspect", "--format", template, self.containers[host]).stdout.strip()
