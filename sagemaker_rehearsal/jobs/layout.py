"""The folders and files below /opt/ml of a host, as the real service writes them.

Sources: AWS, "How Amazon SageMaker AI provides training information"; the keys that are not on that
page come from a real job's log.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sagemaker_rehearsal.api import rules
from sagemaker_rehearsal.jobs.folders import Folder

CHECKPOINTS = "/opt/ml/checkpoints"


@dataclass(frozen=True)
class Host:
    """One instance of the job: its name, its type and its group."""

    name: str
    instance_type: str
    group: str


def hosts(request: dict) -> list[Host]:
    """Return the instances of a job: algo-1 to algo-N, group by group."""
    instances: list[Host] = []
    for group in rules.groups(request):
        first = len(instances) + 1
        instances += [
            Host(f"algo-{number}", group["InstanceType"], group["InstanceGroupName"])
            for number in range(first, first + group["InstanceCount"])
        ]
    return instances


@dataclass(frozen=True)
class Layout:
    """One host's part of /opt/ml, in a folder of this machine."""

    folder: Path
    # The path of the checkpoints in the container; None if the job keeps none.
    checkpoints: str | None

    def make(self) -> None:
        """Make the folders."""
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
            (self.folder / name).mkdir(parents=True)

    def channel(self, name: str) -> Path:
        """Return the folder of a channel."""
        return self.folder / "input/data" / name

    @property
    def mounts(self) -> dict[Path, str]:
        """The folders of this machine, with their paths in the container."""
        mounts = {self.folder / name: f"/opt/ml/{name}" for name in ("input", "model", "output")}
        return mounts | (
            {self.folder / "checkpoints": self.checkpoints} if self.checkpoints else {}
        )

    def failure(self) -> str:
        """Return the program's message about its failure, at most 1,024 characters."""
        try:
            with Folder(self.folder, "output").open("failure") as file:
                # A character has 4 bytes at most.
                return file.read(4 * 1024).decode(errors="replace")[:1024]
        except OSError:
            return ""


def checkpoint_path(request: dict) -> str | None:
    """Return the path of the checkpoints in the container, None if the job keeps none."""
    config = request.get("CheckpointConfig")
    return (config.get("LocalPath") or CHECKPOINTS) if config else None


def write_config(
    layout: Layout, request: dict, host: Host, everybody: list[Host], interface: str
) -> None:
    """Write the files in /opt/ml/input/config."""
    groups = [
        {
            "instance_group_name": group["InstanceGroupName"],
            "instance_type": group["InstanceType"],
            "hosts": sorted(
                other.name for other in everybody if other.group == group["InstanceGroupName"]
            ),
        }
        for group in rules.groups(request)
    ]
    written = {
        "hyperparameters": request.get("HyperParameters") or {},
        "resourceconfig": {
            "current_group_name": host.group,
            "current_host": host.name,
            "current_instance_type": host.instance_type,
            # As text: algo-10 comes before algo-2.
            "hosts": sorted(other.name for other in everybody),
            "instance_groups": groups,
            "network_interface_name": interface,
            "topology": None,
        },
        "inputdataconfig": {
            channel["ChannelName"]: described(channel, request)
            for channel in channels_of(request, host)
        },
        "debughookconfig": request.get("DebugHookConfig"),
        "profilerconfig": request.get("ProfilerConfig"),
    }
    if layout.checkpoints:
        written["checkpointconfig"] = {"LocalPath": layout.checkpoints}
    for name, content in written.items():
        if content is not None:
            (layout.folder / f"input/config/{name}.json").write_text(json.dumps(content))


def channels_of(request: dict, host: Host) -> list[dict]:
    """Return the channels that a host gets: those of its group, and those of no group."""
    return [
        channel
        for channel in request.get("InputDataConfig") or []
        if host.group
        in (channel["DataSource"]["S3DataSource"].get("InstanceGroupNames") or [host.group])
    ]


def mode(channel: dict, request: dict) -> str:
    """Return a channel's input mode: its own, or the job's."""
    return channel.get("InputMode") or request["AlgorithmSpecification"]["TrainingInputMode"]


def described(channel: dict, request: dict) -> dict:
    """Return a channel's entry in inputdataconfig.json."""
    entry = {
        "TrainingInputMode": mode(channel, request),
        "S3DistributionType": channel["DataSource"]["S3DataSource"].get("S3DataDistributionType")
        or "FullyReplicated",
        "RecordWrapperType": channel.get("RecordWrapperType") or "None",
    }
    return entry | ({"ContentType": channel["ContentType"]} if channel.get("ContentType") else {})
