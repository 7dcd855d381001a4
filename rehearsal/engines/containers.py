"""A job's hosts as Docker containers: one an instance, on a network of the job's own, named algo-1 to algo-N."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import PurePath

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest

from rehearsal.engines import bridge
from rehearsal.jobs.channels import JobFailed
from rehearsal.jobs.layout import Layout
from rehearsal.jobs.logs import lines

LABEL = "sagemaker-lightning.rehearsal"
ECR = re.compile(r"\d{12}\.dkr[.-]ecr[^/]*/(.+)")
# /dev/shm: data workers pass batches through it; Docker's own 64 MiB are too few for them
SHARED_MEMORY = 2 * 1024**3
# the engine picks the address range of a network; two at once may get the same one
FIRST_START = threading.Lock()


class Containers:
    """The Docker engine; `owner` is the label of all that it makes."""

    name = "docker"

    def __init__(self, owner: str, gpus: bool) -> None:
        self.owner, self.gpus = owner, gpus
        # Two rehearsals may have jobs of one name.
        self.prefix = f"rehearsal-{PurePath(owner).name[:6]}"
        self.client = docker.from_env()
        self.bridge = bridge.of_docker(self.client.networks.get("bridge").attrs)

    def local(self, name: str) -> str | None:
        """Return a local image, if it is there."""
        try:
            return self.client.images.get(name).id
        except (ImageNotFound, NotFound):
            return None

    def image(self, uri: str) -> str:
        """Return the image to run; an address of Amazon ECR, never asked, stands for the local image of its name."""
        in_ecr = ECR.fullmatch(uri)
        for name in (uri, *([in_ecr[1]] if in_ecr else [])):
            try:
                if found := self.local(name):
                    return found
            except APIError as error:
                raise JobFailed(
                    f"ClientError: Cannot pull image {uri}: {error.explanation}"
                ) from error
        if in_ecr:
            raise JobFailed(
                f"ClientError: Cannot pull image {uri}: there is no local image {uri} or "
                f"{in_ecr[1]}, and the rehearsal never asks AWS; build it or tag it"
            )
        try:
            return self.client.images.pull(*uri.split("@") if "@" in uri else (uri,)).id
        except DockerException as error:
            reason = getattr(error, "explanation", None) or error
            raise JobFailed(f"ClientError: Cannot pull image {uri}: {reason}") from error

    def network(self, job: str, instances: int, isolated: bool) -> "Network":
        """Make the network of a job; an isolated one has no way out."""
        with FIRST_START:
            made = self.client.networks.create(
                f"{self.prefix}-{job}",
                driver="bridge",
                internal=isolated,
                labels={LABEL: self.owner},
            )
        return Network(self, job, made)


class Network:
    """A job's network and the containers on it; `close` removes what is left of them."""

    interface = "eth0"

    def __init__(self, engine: Containers, job: str, made) -> None:
        self.engine, self.job, self.made = engine, job, made
        self.containers: list[Container] = []

    def start(
        self,
        host: str,
        number: int,
        image: str,
        command: dict,
        layout: Layout,
        read_only: list,
        variables: dict,
    ) -> "Container":
        """Start a host; `command` is Docker's entrypoint and command, `read_only` the names of FastFile channels."""
        engine = self.engine
        volumes = [f"{folder}:{target}" for folder, target in layout.mounts.items()]
        volumes += [f"{layout.channel(name)}:/opt/ml/input/data/{name}:ro" for name in read_only]
        address = {self.made.name: engine.client.api.create_endpoint_config(aliases=[host])}
        made = engine.client.containers.create(
            image,
            name=f"{engine.prefix}-{self.job}-{host}",
            hostname=f"ip-10-0-{number // 250}-{number % 250 + 1}.ec2.internal",  # as the service's
            environment=variables,
            volumes=volumes,
            labels={LABEL: engine.owner},
            network=self.made.name,
            networking_config=address,
            shm_size=SHARED_MEMORY,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])]
            if engine.gpus
            else None,
            **command,
        )
        container = Container(made)
        self.containers.append(container)
        try:
            made.start()
        except APIError as error:
            raise JobFailed(
                f"ClientError: the container of {host} cannot be started: {error.explanation}"
            ) from error
        return container

    def close(self) -> str | None:
        """Remove the containers and the network, and return what the person should know if the engine does not."""
        while self.containers:
            self.containers.pop().remove()
        if remove(self.made):
            return None
        return f"the engine holds on to the network {self.made.name}; the next rehearsal removes it"


class Container:
    """A running host."""

    def __init__(self, made) -> None:
        self.made = made

    def lines(self) -> Iterator[str]:
        """Yield what it prints, line by line, until it ends."""
        return lines(self.made.logs(stream=True, follow=True))

    def wait(self) -> int:
        """Return its exit status when it has ended."""
        return self.made.wait()["StatusCode"]

    def signal(self, name: str) -> None:
        """Send SIGTERM or SIGKILL to its first process; nothing, if it has ended."""
        try:
            self.made.kill(signal=name)
        except (APIError, NotFound) as error:
            if error.status_code not in (404, 409):
                raise

    def remove(self) -> None:
        """Leave nothing of it."""
        try:
            self.made.remove(force=True, v=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # gone, or already going
                raise


def remove(network) -> bool:
    """Remove a network with whatever is on it, and return whether it is gone.

    Somebody may have put a container of theirs on it, and the engine may count one that is gone for a while, or until
    it is taken off by force (https://github.com/moby/moby/issues/42119).
    """
    for _ in range(100):
        try:
            network.reload()
        except NotFound:
            return True
        try:
            for there in network.attrs["Containers"].values():
                network.disconnect(there["Name"], force=True)
            network.remove()
        except APIError:
            # also where a container has left by itself since: it is NotFound, not the network
            time.sleep(0.1)
    return False


def owners(client) -> set[str]:
    """Return the owners of the containers and networks that are there."""
    everything = {"label": LABEL}
    found = {
        made.labels[LABEL]
        for made in client.containers.list(all=True, filters=everything, ignore_removed=True)
    }
    return found | {
        network.attrs["Labels"][LABEL] for network in client.networks.list(filters=everything)
    }


def remove_all(client, owner: str) -> int:
    """Remove the containers and networks of an owner, and return how many that were."""
    chosen = {"label": f"{LABEL}={owner}"}
    found = client.containers.list(all=True, filters=chosen, ignore_removed=True)
    for made in found:
        Container(made).remove()
    return len(found) + sum(remove(network) for network in client.networks.list(filters=chosen))
