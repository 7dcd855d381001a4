"""One attempt of a job: its instances, from their start to their end."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from sagemaker_rehearsal.faults.clocks import preload_clock
from sagemaker_rehearsal.faults.errors import CannotInject
from sagemaker_rehearsal.faults.rules import Fault
from sagemaker_rehearsal.faults.schedule import DueInterruption
from sagemaker_rehearsal.jobs import channels, checkpoint_sync, folders, layout, record, warm_pools
from sagemaker_rehearsal.jobs.injection import Injector
from sagemaker_rehearsal.jobs.layout import Layout
from sagemaker_rehearsal.jobs.record import Secondary

if TYPE_CHECKING:
    from sagemaker_rehearsal.jobs.job import Job

# Seconds to wait for the last lines of a log.
LOG_WAIT_SECONDS = 60.0


class Ended(Exception):
    """The job must stop: somebody asked for it, or its time is over."""

    def __init__(self, status: Secondary) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Outcome:
    """How an attempt ended, and whether the job is started again."""

    status: Secondary = Secondary.COMPLETED
    failure: str | None = None
    # The interruption after which the job is started again; None if it has ended.
    again: DueInterruption | None = None


@dataclass
class Exited:
    """The message that a host's container has ended."""

    host: str
    status: int


@dataclass
class Running:
    """A host that was started."""

    container: object
    instance: record.Instance
    uploader: checkpoint_sync.Uploader | None
    # The exit status; None while the host runs.
    status: int | None = None

    def end(self, status: int) -> None:
        """Note that the host has ended, and upload what is left."""
        self.status = status
        self.instance.end(status)
        if self.uploader:
            self.uploader.finish()
            self.instance.note_saved(self.uploader.newest())


class Attempt:
    """The folders, the network and the containers of an attempt; `close` removes them."""

    def __init__(self, job: "Job", number: int) -> None:
        self.job = job
        self.engine = job.place.engine
        self.request = job.request
        self.work = job.work / str(number)
        self.kept = record.Attempt(number)
        self.layouts = {
            host: Layout(self.work / host.name, self._checkpoint_path(host), self._cache(host))
            for host in job.hosts
        }
        self.running: dict[str, Running] = {}
        self.network = None
        self.pumps = []
        self.injector = Injector(self, job.faults.random)
        # Why the clocks of the hosts cannot be shifted; empty where they can.
        self.fixed_clocks = "its library is loaded as a host starts: it needs a rule of --fault"
        # When the log last had a new step, or a line at all where it has no steps.
        self.moved = time.time()
        job.record.attempts.append(self.kept)

    @property
    def folders(self) -> dict:
        """Each host's folder, by the host's name."""
        return {host.name: layout_of_host.folder for host, layout_of_host in self.layouts.items()}

    @property
    def in_containers(self) -> bool:
        """Whether a host finds its folders where the service has them."""
        return self.engine.name == "docker"

    def layout_of(self, name: str) -> Layout:
        """Return the layout of a host, given its name."""
        return next(layout for host, layout in self.layouts.items() if host.name == name)

    def prepare(self) -> None:
        """Prepare instances, data, checkpoints and image, and start all hosts."""
        job = self.job
        s3 = job.place.clients("s3")
        job.check()
        job.changed(Secondary.STARTING, "Preparing the instances for training")
        isolated = bool(self.request.get("EnableNetworkIsolation"))
        self.network = self.engine.network(job.record.name, len(job.hosts), isolated)
        if any(host_layout.cache for host_layout in self.layouts.values()):
            warm_pools.make_cache(job.record, job.place.work, self.kept.number == 1)
        for host, host_layout in self.layouts.items():
            self.kept.instances.append(record.Instance(host.name, host.instance_type, time.time()))
            host_layout.make()
            layout.write_config(host_layout, self.request, host, job.hosts, self.network.interface)
        job.changed(Secondary.DOWNLOADING, "Downloading input data")
        channels.deliver(
            s3, self.request, self.layouts, self.work / "shared", job.settings.allow, job.check
        )
        if config := self.request.get("CheckpointConfig"):
            restored = checkpoint_sync.restore(s3, config["S3Uri"], self.work / "checkpoints")
            for instance, host_layout in zip(
                self.kept.instances, self.layouts.values(), strict=True
            ):
                job.check()
                folders.copy(self.work / "checkpoints", host_layout.folder / "checkpoints")
                instance.note_restored(*restored)
            folders.remove(self.work / "checkpoints")
        job.changed(Secondary.DOWNLOADING, "Downloading the training image")
        image = self.engine.image(self.request["AlgorithmSpecification"]["TrainingImage"])
        job.check()
        for number, instance in enumerate(self.kept.instances):
            self._start(number, instance, image)

    def watch(self, until: float) -> Outcome:
        """Wait for the end of the attempt; return how it ended.

        Its hosts, an interruption, a request to stop, or the time `until` end it.
        """
        job = self.job
        schedule = self.job.schedule
        self.moved = time.time()
        for each in (schedule, job.faults.schedule):
            each.begin(self.moved, first=self.kept.number == 1)
        while True:
            failed = [running_host for running_host in self.running.values() if running_host.status]
            if failed:
                self._end_hosts([*self.running], warned=True)
                return Outcome(Secondary.FAILED, self._failure_reason(failed[0]))
            if all(running_host.status == 0 for running_host in self.running.values()):
                return Outcome()
            try:
                job.check()
                if time.time() >= until:
                    raise Ended(Secondary.MAX_RUNTIME_EXCEEDED)
            except Ended as ended:
                job.changed(Secondary.STOPPING, "Stopping the training job")
                self._end_hosts([*self.running], warned=True)
                return Outcome(ended.status)
            now = time.time()
            self.injector.end_due(now)
            while fault := job.faults.due(now, self.kept.step):
                job.injected(self.injector.inject(*fault))
            if due := schedule.due(now, self.kept.step):
                return self._interrupt(due)
            if (hangs := self._hangs_at()) is not None and now >= hangs:
                return self._end_hung()
            moments = (
                until,
                job.latest,
                schedule.next(),
                job.faults.schedule.next(),
                self.injector.next(),
                hangs,
            )
            message = job.control.next(min(filter(None, moments)))
            if isinstance(message, DueInterruption):
                return self._interrupt(message)
            if isinstance(message, Fault):
                job.injected(self.injector.inject(message, job.faults.now(message)))
            self._note_exit(message)

    def close(self) -> None:
        """Remove everything of the attempt from this machine, except for its record."""
        # The stack calls all of these, last first, even if one fails.
        with ExitStack() as last_first:
            last_first.callback(folders.remove, self.work)
            for instance in self.kept.instances:
                last_first.callback(instance.release)
            for pump in self.pumps:
                last_first.callback(pump.join, LOG_WAIT_SECONDS)
            for running_host in self.running.values():
                if running_host.uploader:
                    last_first.callback(running_host.uploader.finish)
            if self.network:
                last_first.callback(self._close_network)
            last_first.callback(self.injector.close)

    def _close_network(self) -> None:
        if line := self.network.close():
            self.job.note(line)

    def _checkpoint_path(self, host: layout.Host) -> str | None:
        """Return where the host keeps checkpoints, None if it keeps none.

        A process, unlike a container, finds them in its own folder of this machine.
        """
        path = layout.checkpoint_path(self.request)
        return (
            str(self.work / host.name / "checkpoints")
            if path and self.engine.name == "processes"
            else path
        )

    def _cache(self, host: layout.Host) -> Path | None:
        """Return the folder of the host's cache, which a warm pool has."""
        record = self.job.record
        folder = warm_pools.cache_of(record.name, self.job.place.work) / host.name
        return folder if warm_pools.has_cache(record) else None

    def _start(self, number: int, instance: record.Instance, image: str) -> None:
        """Start a host, the upload of its checkpoints, and the thread that reads its log."""
        job = self.job
        host = self.job.hosts[number]
        host_layout = self.layouts[host]
        algorithm = self.request["AlgorithmSpecification"]
        host_channels = layout.channels_of(self.request, host)
        read_only = [
            channel["ChannelName"]
            for channel in host_channels
            if layout.mode(channel, self.request) == "FastFile"
        ]
        command = {"command": algorithm.get("ContainerArguments") or ["train"]}
        if algorithm.get("ContainerEntrypoint"):
            command = {
                "entrypoint": algorithm["ContainerEntrypoint"],
                "command": algorithm.get("ContainerArguments") or [],
            }
        variables = job.place.variables | (self.request.get("Environment") or {})
        # An isolated host has no credentials, and no AWS to reach with them.
        if self.request.get("EnableNetworkIsolation"):
            variables = {
                name: value for name, value in variables.items() if not name.startswith("AWS_")
            }
        if host_layout.cache:
            path = warm_pools.CACHE if self.in_containers else str(host_layout.cache)
            variables[warm_pools.CACHE_VARIABLE] = path
        variables |= self._preload_clock(host_layout, image)
        job.logs.open(host.name)
        config = self.request.get("CheckpointConfig")
        uploader = None
        # Made before the container starts: what is in the folder now was restored from S3.
        if config:
            s3 = job.place.clients("s3")
            uploader = checkpoint_sync.Uploader(
                s3,
                config["S3Uri"],
                host_layout.folder / "checkpoints",
                job.settings.sync,
                job.note,
                instance.note_checkpoint,
            )
        container = self.network.start(
            host.name, number, image, command, host_layout, read_only, variables
        )
        instance.begin_training()
        if uploader:
            uploader.start()
        self.running[host.name] = Running(container, instance, uploader)
        pump = threading.Thread(
            target=self._read_log,
            args=(host.name, container),
            name=f"log of {host.name}",
            daemon=True,
        )
        self.pumps.append(pump)
        pump.start()

    def _preload_clock(self, host_layout: Layout, image: str) -> dict[str, str]:
        """Return the variables of a host whose clock a rule is to shift; none where it cannot."""
        if not any(fault.kind == "shift clock" for fault in self.job.faults.faults):
            return {}
        is_first = not self.running
        if is_first:
            self.fixed_clocks = ""
        if self.fixed_clocks:
            return {}
        file = host_layout.clock
        try:
            file.parent.mkdir()
            variables = preload_clock(file, PurePath(layout.CLOCK) if self.in_containers else None)
            if self.in_containers and is_first:
                self.engine.check_clock(image, file, variables)
        # The fault says so when it is due.
        except CannotInject as error:
            self.fixed_clocks = str(error)
            return {}
        return variables

    def _read_log(self, host: str, container) -> None:
        """Read a host's log until it ends."""
        job = self.job
        try:
            for text in container.lines():
                self.kept.note_resume(text)
                job.record.note_results(text)
                if not self.kept.points:
                    self.moved = time.time()
                if point := job.logs.line(host, text):
                    if point.step != self.kept.step:
                        self.moved = point.time
                    self.kept.points.append(point)
                    job.control.messages.put(None)
                if line := job.metrics.line(text):
                    job.note(line)
                # The job itself is well, whatever becomes of its log.
                try:
                    job.logs.write(host, text)
                except OSError as error:
                    job.note(f"the log of {host} could not be written: {error.strerror}")
            status = container.wait()
        # The engine is gone, or somebody else has removed the container.
        except Exception as error:
            job.note(f"{host}: its container is lost: {type(error).__name__}: {error}")
            status = 137
        job.control.messages.put(Exited(host, status))

    def _note_exit(self, message) -> None:
        """Note the end of a host; `watch` or `_end_hosts` acts on it."""
        if isinstance(message, Exited):
            running_host = self.running[message.host]
            running_host.end(message.status)

    def _end_hosts(self, hosts: list[str], warned: bool) -> None:
        """End hosts with SIGKILL; if warned, SIGTERM and some time come before it."""
        if warned:
            self._signal(hosts, "SIGTERM")
            self._wait_until_ended(hosts, time.time() + self.job.settings.grace)
        self._signal(hosts, "SIGKILL")
        self._wait_until_ended(hosts, None)

    def _signal(self, hosts: list[str], name: str) -> None:
        for host in hosts:
            if self.running[host].status is None:
                self.running[host].container.signal(name)

    def _wait_until_ended(self, hosts: list[str], until: float | None) -> None:
        while any(self.running[host].status is None for host in hosts):
            if until is not None and (time.time() >= until or self.job.control.immediately):
                return
            self._note_exit(self.job.control.next(until))

    def _interrupt(self, due: DueInterruption) -> Outcome:
        """Take instances away.

        The service then ends the other instances, too, and starts the job again.
        """
        self.job.interrupted(due)
        for host in due.hosts:
            self.running[host].instance.reclaim()
        self._end_hosts(due.hosts, due.warned)
        self._end_hosts([*self.running], warned=True)
        return Outcome(again=due)

    def _hangs_at(self) -> float | None:
        """Return when the job hangs unless it moves; None if no fault has happened."""
        times = [fault.time for fault in self.job.record.faults if fault.applied]
        return max(self.moved, *times) + self.job.settings.hang_after if times else None

    def _end_hung(self) -> Outcome:
        """End a job that hangs after a fault, which the service would not do."""
        self.job.record.note_hung()
        self._end_hosts([*self.running], warned=False)
        return Outcome(
            Secondary.FAILED,
            "InternalServerError: the rehearsal has ended the job, which hung: no new step for "
            f"{self.job.settings.hang_after:g} s (--hang-after) after the last fault",
        )

    def _failure_reason(self, failed: Running) -> str:
        """Return the FailureReason: the failed host's message, or another host's."""
        message = next(
            filter(
                None,
                (layout_of_host.failure() for layout_of_host in self._layouts_failed_first(failed)),
            ),
            "",
        )
        end = f", exit code: {failed.status}"
        return f"AlgorithmError: {message}"[: 1024 - len(end)] + end

    def _layouts_failed_first(self, failed: Running) -> list[Layout]:
        return sorted(
            self.layouts.values(),
            key=lambda layout_of_host: layout_of_host.folder.name != failed.instance.host,
        )
