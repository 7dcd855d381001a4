"""One attempt of a job: its instances, from their start to their end."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rehearsal.jobs import channels, checkpoint_sync, folders, layout, record
from rehearsal.jobs.layout import Layout
from rehearsal.jobs.schedule import Due

if TYPE_CHECKING:
    from rehearsal.jobs.job import Job

PATIENCE = 60.0  # seconds for the last lines of a log


class Ended(Exception):
    """The job is to stop: asked to, or its time is over."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Outcome:
    """How an attempt ended: for good, or to be tried again."""

    status: str = "Completed"  # the final secondary status
    failure: str | None = None
    again: Due | None = None


@dataclass
class Exited:
    """A host's container has ended."""

    host: str
    status: int


@dataclass
class Running:
    """A host that was started."""

    container: object
    instance: record.Instance
    uploader: checkpoint_sync.Uploader | None
    status: int | None = None  # its exit status, when it has ended


class Attempt:
    """The folders, the network and the containers of an attempt; `close` removes all of them."""

    def __init__(self, job: "Job", number: int) -> None:
        self.job, self.engine, self.request = job, job.place.engine, job.request
        self.work = job.work / str(number)
        self.kept = record.Attempt(number)
        self.layouts = {
            host: Layout(self.work / host.name, self._checkpoints(host)) for host in job.hosts
        }
        self.running: dict[str, Running] = {}
        self.network, self.pumps = None, []
        job.record.attempts.append(self.kept)

    @property
    def folders(self) -> dict:
        """Each host's folder, by its name."""
        return {host.name: found.folder for host, found in self.layouts.items()}

    def prepare(self) -> None:
        """Bring the instances, the data, the checkpoints and the image, and start all hosts."""
        job, s3 = self.job, self.job.place.clients("s3")
        job.check()
        job.changed("Starting", "Preparing the instances for training")
        isolated = bool(self.request.get("EnableNetworkIsolation"))
        self.network = self.engine.network(job.record.name, len(job.hosts), isolated)
        for host, found in self.layouts.items():
            self.kept.instances.append(record.Instance(host.name, host.instance_type, time.time()))
            found.make()
            layout.write_config(found, self.request, host, job.hosts, self.network.interface)
        job.changed("Downloading", "Downloading input data")
        channels.deliver(
            s3, self.request, self.layouts, self.work / "shared", job.settings.allow, job.check
        )
        if config := self.request.get("CheckpointConfig"):
            restored = checkpoint_sync.restore(s3, config["S3Uri"], self.work / "checkpoints")
            for instance, found in zip(self.kept.instances, self.layouts.values(), strict=True):
                job.check()
                folders.copy(self.work / "checkpoints", found.folder / "checkpoints")
                instance.restored_files, instance.restored_bytes = restored
            folders.remove(self.work / "checkpoints")
        job.changed("Downloading", "Downloading the training image")
        image = self.engine.image(self.request["AlgorithmSpecification"]["TrainingImage"])
        job.check()
        for number, instance in enumerate(self.kept.instances):
            self._start(number, instance, image)

    def watch(self, until: float) -> Outcome:
        """Return when the attempt has ended: by its hosts, by an interruption, by a wish, or at `until`."""
        job, schedule = self.job, self.job.schedule
        schedule.begin(time.time(), first=self.kept.number == 1)
        while True:
            failed = [one for one in self.running.values() if one.status]
            if failed:
                self._end([*self.running], warned=True)
                return Outcome("Failed", self._failure(failed[0]))
            if all(one.status == 0 for one in self.running.values()):
                return Outcome()
            try:
                job.check()
                if time.time() >= until:
                    raise Ended("MaxRuntimeExceeded")
            except Ended as ended:
                job.changed("Stopping", "Stopping the training job")
                self._end([*self.running], warned=True)
                return Outcome(ended.status)
            if due := schedule.due(
                time.time(), self.kept.points[-1].step if self.kept.points else None
            ):
                return self._interrupt(due)
            message = job.wishes.next(min(filter(None, (until, job.latest, schedule.next()))))
            if isinstance(message, Due):
                return self._interrupt(message)
            self._take(message)

    def close(self) -> None:
        """Leave nothing of it on this machine; what it was stays in the record."""
        with ExitStack() as last_first:  # all of it, even if a part of it fails
            last_first.callback(folders.remove, self.work)
            for instance in self.kept.instances:
                last_first.callback(instance.release)
            for pump in self.pumps:
                last_first.callback(pump.join, PATIENCE)
            for one in self.running.values():
                if one.uploader:
                    last_first.callback(one.uploader.finish)
            if self.network:
                last_first.callback(self._close_network)

    def _close_network(self) -> None:
        if left := self.network.close():
            self.job.note(left)

    def _checkpoints(self, host: layout.Host) -> str | None:
        """Return where the host keeps checkpoints; a process, not a container, finds them in its own folder."""
        path = layout.checkpoint_path(self.request)
        return (
            str(self.work / host.name / "checkpoints")
            if path and self.engine.name == "processes"
            else path
        )

    def _start(self, number: int, instance: record.Instance, image: str) -> None:
        """Start a host, the copy of its checkpoints, and the reading of its log."""
        job, host = self.job, self.job.hosts[number]
        found, algorithm = self.layouts[host], self.request["AlgorithmSpecification"]
        wanted = layout.channels_of(self.request, host)
        read_only = [
            one["ChannelName"] for one in wanted if layout.mode(one, self.request) == "FastFile"
        ]
        command = {"command": algorithm.get("ContainerArguments") or ["train"]}
        if algorithm.get("ContainerEntrypoint"):
            command = {
                "entrypoint": algorithm["ContainerEntrypoint"],
                "command": algorithm.get("ContainerArguments") or [],
            }
        variables = job.place.variables | (self.request.get("Environment") or {})
        # no credentials, and no AWS to reach with them
        if self.request.get("EnableNetworkIsolation"):
            variables = {
                name: value for name, value in variables.items() if not name.startswith("AWS_")
            }
        job.logs.open(host.name)
        config, uploader = self.request.get("CheckpointConfig"), None
        if config:  # before the container: what is there now is what was restored
            s3 = job.place.clients("s3")
            uploader = checkpoint_sync.Uploader(
                s3, config["S3Uri"], found.folder / "checkpoints", job.settings.sync, job.note
            )
        container = self.network.start(
            host.name, number, image, command, found, read_only, variables
        )
        instance.training = time.time()
        if uploader:
            uploader.start()
        self.running[host.name] = Running(container, instance, uploader)
        pump = threading.Thread(
            target=self._pump, args=(host.name, container), name=f"log of {host.name}", daemon=True
        )
        self.pumps.append(pump)
        pump.start()

    def _pump(self, host: str, container) -> None:
        """Read a host's log until it ends."""
        job = self.job
        try:
            for text in container.lines():
                if resumed := record.RESUMED.search(text):
                    self.kept.resumed = int(resumed[1])
                if proved := record.PROVED.search(text):
                    self.kept.proved = proved[1]
                if point := job.logs.line(host, text):
                    self.kept.points.append(point)
                    job.wishes.messages.put(None)
                if said := job.metrics.line(text):
                    job.note(said)
            status = container.wait()
        except Exception as error:  # the engine is gone, or somebody else has removed the container
            job.note(f"{host}: its container is lost: {type(error).__name__}: {error}")
            status = 137
        job.wishes.messages.put(Exited(host, status))

    def _take(self, message) -> None:
        """Take note of a host that has ended; it is dealt with by `watch` or `_end`."""
        if isinstance(message, Exited):
            one = self.running[message.host]
            one.status, one.instance.exit_status, one.instance.ended = (
                message.status,
                message.status,
                time.time(),
            )
            if one.uploader:
                one.uploader.finish()

    def _end(self, hosts: list[str], warned: bool) -> None:
        """End hosts: SIGTERM and some time if they are warned, then SIGKILL."""
        if warned:
            self._signal(hosts, "SIGTERM")
            self._until_ended(hosts, time.time() + self.job.settings.grace)
        self._signal(hosts, "SIGKILL")
        self._until_ended(hosts, None)

    def _signal(self, hosts: list[str], name: str) -> None:
        for host in hosts:
            if self.running[host].status is None:
                self.running[host].container.signal(name)

    def _until_ended(self, hosts: list[str], until: float | None) -> None:
        while any(self.running[host].status is None for host in hosts):
            if until is not None and (time.time() >= until or self.job.wishes.hurry):
                return
            self._take(self.job.wishes.next(until))

    def _interrupt(self, due: Due) -> Outcome:
        """Take instances away; the service then ends the others, too, and starts the job again."""
        self.job.interrupted(due)
        for host in due.hosts:
            self.running[host].instance.reclaimed = True
        self._end(due.hosts, due.warned)
        self._end([*self.running], warned=True)
        return Outcome(again=due)

    def _failure(self, failed: Running) -> str:
        """Return the FailureReason: what the host, or else another one, says of it."""
        said = next(filter(None, (found.failure() for found in self._failed_first(failed))), "")
        end = f", exit code: {failed.status}"
        return f"AlgorithmError: {said}"[: 1024 - len(end)] + end

    def _failed_first(self, failed: Running) -> list[Layout]:
        return sorted(
            self.layouts.values(), key=lambda found: found.folder.name != failed.instance.host
        )
