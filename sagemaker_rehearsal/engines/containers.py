"""Runs a job's hosts as Docker containers.

Each instance is a container, named algo-1 to algo-N, on a network of the job's own.
"""

import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest

from sagemaker_rehearsal.engines import bridge
from sagemaker_rehearsal.faults.clocks import check_shifted, shift_clock
from sagemaker_rehearsal.faults.containers import process_of_container
from sagemaker_rehearsal.jobs.channels import JobFailed
from sagemaker_rehearsal.jobs.layout import CLOCK, Layout
from sagemaker_rehearsal.jobs.logs import lines

LABEL = "sagemaker-lightning.rehearsal"
ECR_IMAGE = re.compile(r"\d{12}\.dkr[.-]ecr[^/]*/(.+)")
# Size of /dev/shm, through which data workers pass batches. Docker's default of 64 MiB is too
# small.
SHARED_MEMORY_BYTES = 2 * 1024**3
# The engine picks the address range of a network; two networks made at once may get the same one.
FIRST_START = threading.Lock()


class Containers:
    """The Docker engine; all that it makes has the label `owner`."""

    name = "docker"

    def __init__(self, owner: str, gpus: bool) -> None:
        self.owner = owner
        self.gpus = gpus
        self.prefix = prefix_of(owner)
        self.client = docker.from_env()
        self.bridge = bridge.of_docker(self.client.networks.get("bridge").attrs)

    def local(self, name: str) -> str | None:
        """Return the id of a local image, None if there is none, or can be none, of this name."""
        try:
            return self.client.images.get(name).id
        except APIError as error:
            if error.status_code in (400, 404):
                return None
            raise

    def image(self, uri: str) -> str:
        """Return the id of the image to run; JobFailed if it cannot be found or pulled.

        An address of Amazon ECR stands for the local image of its name; ECR is never asked.
        """
        in_ecr = ECR_IMAGE.fullmatch(uri)
        for name in (uri, *([in_ecr[1]] if in_ecr else [])):
            try:
                if image_id := self.local(name):
                    return image_id
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

    def check_clock(self, image: str, file: Path, variables: dict[str, str]) -> None:
        """Raise CannotInject unless the programs of an image read a clock that is shifted.

        Args:
            image: The id of the image.
            file: The file of `preload_clock`, whose folder gets mounted.
            variables: Those of `preload_clock`.
        """
        made = self.client.containers.create(
            image,
            entrypoint=["date", "+%s"],
            command=[],
            name=f"{self.prefix}-clock-{uuid.uuid4().hex[:12]}",
            environment=variables,
            volumes=[f"{file.parent}:{CLOCK}:ro"],
            labels={LABEL: self.owner},
            network_mode="none",
        )
        set_right = shift_clock(file)
        now = time.time()
        try:
            made.start()
            made.wait()
            said = made.logs()
        # For example, the image has no such program.
        except APIError as error:
            said = f"{error.explanation}".encode()
        finally:
            set_right()
            Container(made).remove()
        check_shifted(said, now)

    def network(self, job: str, instances: int, isolated: bool) -> "Network":
        """Make the network of a job; an isolated one has no way out."""
        with FIRST_START:
            docker_network = self.client.networks.create(
                f"{self.prefix}-{job}",
                driver="bridge",
                internal=isolated,
                labels={LABEL: self.owner},
            )
        return Network(self, job, docker_network)


class Network:
    """A job's network, and the containers on it; `close` removes what is left of them."""

    interface = "eth0"

    def __init__(self, engine: Containers, job: str, made) -> None:
        self.engine = engine
        self.job = job
        self.made = made
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
        """Start a host's container; JobFailed if it cannot be started.

        Args:
            host: The host's name.
            number: The host's number, from 0.
            image: The id of the image.
            command: Docker's `entrypoint` and `command`.
            layout: The host's folders.
            read_only: The names of the FastFile channels.
            variables: The environment variables.
        """
        engine = self.engine
        volumes = [f"{folder}:{target}" for folder, target in layout.mounts.items()]
        volumes += [f"{layout.channel(name)}:/opt/ml/input/data/{name}:ro" for name in read_only]
        address = {self.made.name: engine.client.api.create_endpoint_config(aliases=[host])}
        docker_container = engine.client.containers.create(
            image,
            name=f"{engine.prefix}-{self.job}-{host}",
            # As in the service.
            hostname=f"ip-10-0-{number // 250}-{number % 250 + 1}.ec2.internal",
            environment=variables,
            volumes=volumes,
            labels={LABEL: engine.owner},
            network=self.made.name,
            networking_config=address,
            shm_size=SHARED_MEMORY_BYTES,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])]
            if engine.gpus
            else None,
            **command,
        )
        container = Container(docker_container)
        self.containers.append(container)
        try:
            docker_container.start()
        except APIError as error:
            raise JobFailed(
                f"ClientError: the container of {host} cannot be started: {error.explanation}"
            ) from error
        return container

    def close(self) -> str | None:
        """Remove containers and network; return a line if the engine keeps the network."""
        while self.containers:
            self.containers.pop().remove()
        if remove(self.made):
            return None
        return f"the engine holds on to the network {self.made.name}; the next rehearsal removes it"


class Container:
    """A host's container."""

    def __init__(self, made) -> None:
        self.made = made

    def lines(self) -> Iterator[str]:
        """Yield the container's output line by line, until it ends."""
        return lines(self.made.logs(stream=True, follow=True))

    def wait(self) -> int:
        """Wait for the container's end; return its exit status."""
        return self.made.wait()["StatusCode"]

    def signal(self, name: str) -> None:
        """Send SIGTERM or SIGKILL to the container's first process, if it still runs."""
        try:
            self.made.kill(signal=name)
        except (APIError, NotFound) as error:
            # The engine says 500 of a process that has ended, and that it has not waited for yet.
            if error.status_code not in (404, 409) and "is zombie" not in str(error):
                raise

    def first_process(self) -> int | None:
        """Return the container's first process, None if it is not on this machine."""
        try:
            self.made.reload()
        except APIError:
            return None
        return process_of_container(self.made.attrs["State"]["Pid"], self.made.id)

    def remove(self) -> None:
        """Remove the container and its volumes."""
        try:
            self.made.remove(force=True, v=True)
        except APIError as error:
            # 404 and 409: it is gone, or already going.
            if error.status_code not in (404, 409):
                raise


def remove(network) -> bool:
    """Remove a network with whatever is on it; return whether it is gone.

    Somebody may have put a container of theirs on it. The engine may also count a container that is
    gone for a while, or until it is disconnected by force
    (https://github.com/moby/moby/issues/42119).
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
            # This includes NotFound for a container that has left in the meantime, which says
            # nothing of the network.
            time.sleep(0.1)
    return False


def prefix_of(owner: str) -> str:
    """Return how the names of an owner's containers and networks begin.

    Two rehearsals may have jobs of the same name.
    """
    return f"rehearsal-{PurePath(owner).name[:6]}"


def owners(client) -> set[str]:
    """Return the owners of all containers and networks that exist."""
    everything = {"label": LABEL}
    owners_found = {
        container.labels[LABEL]
        for container in client.containers.list(all=True, filters=everything, ignore_removed=True)
    }
    return owners_found | {
        network.attrs["Labels"][LABEL] for network in client.networks.list(filters=everything)
    }


def remove_all(client, owner: str) -> int:
    """Remove an owner's containers and networks; return how many.

    They are known by label and name: a person's own container has the labels of its image.
    """
    filters = {"label": f"{LABEL}={owner}"}

    def owned(things: list) -> list:
        return [thing for thing in things if thing.name.startswith(f"{prefix_of(owner)}-")]

    containers = owned(client.containers.list(all=True, filters=filters, ignore_removed=True))
    for container in containers:
        Container(container).remove()
    return len(containers) + sum(map(remove, owned(client.networks.list(filters=filters))))
