"""What the service's model does not say of CreateTrainingJob: which fields go together, and which are not emulated.

Words in the service's own name are its own where a user has quoted them (Kenza-AI/sagify#111, for one).
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from botocore.model import StructureShape

from rehearsal.api.errors import Refused, invalid, not_emulated
from rehearsal.api.validation import input_shape

# With all that is below them. A field of the model that is neither here nor in WITHOUT_EFFECT is refused.
EMULATED = {
    "TrainingJobName",
    "RoleArn",  # its form: what the role may do is not checked
    "HyperParameters",
    "Environment",
    "Tags",
    "AlgorithmSpecification.TrainingImage",
    "AlgorithmSpecification.TrainingInputMode",
    "AlgorithmSpecification.MetricDefinitions",
    "AlgorithmSpecification.ContainerEntrypoint",
    "AlgorithmSpecification.ContainerArguments",
    "AlgorithmSpecification.TrainingImageConfig.TrainingRepositoryAccessMode",
    "InputDataConfig.ChannelName",
    "InputDataConfig.DataSource.S3DataSource.S3DataType",
    "InputDataConfig.DataSource.S3DataSource.S3Uri",
    "InputDataConfig.DataSource.S3DataSource.S3DataDistributionType",
    "InputDataConfig.DataSource.S3DataSource.InstanceGroupNames",
    "InputDataConfig.ContentType",
    "InputDataConfig.CompressionType",
    "InputDataConfig.RecordWrapperType",
    "InputDataConfig.InputMode",
    "OutputDataConfig.S3OutputPath",
    "OutputDataConfig.CompressionType",
    "ResourceConfig.InstanceType",
    "ResourceConfig.InstanceCount",
    "ResourceConfig.InstanceGroups",
    "StoppingCondition.MaxRuntimeInSeconds",
    "StoppingCondition.MaxWaitTimeInSeconds",
    "CheckpointConfig",
    "EnableManagedSpotTraining",
    "EnableNetworkIsolation",
    "RetryStrategy",
}
# Accepted without effect on this machine, and said so in the job's notes.
WITHOUT_EFFECT = {
    "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries": "each metric's last value is kept",
    "InputDataConfig.DataSource.S3DataSource.ModelAccessConfig": "no model's licence is asked for",
    "ResourceConfig.VolumeSizeInGB": "a job has what room this machine's disk has",
    "VpcConfig": "the containers are on a network of their own",
    "EnableInterContainerTrafficEncryption": "nothing leaves this machine",
    "ProfilerConfig": "profilerconfig.json is written; no system metrics are collected",
    "DebugHookConfig": "debughookconfig.json is written; what a hook saves is not uploaded",
    "ExperimentConfig": "the run is not added to an experiment",
    "RemoteDebugConfig": "docker exec is at hand",
    "InfraCheckConfig": "there are no accelerators of AWS to check",
    "SessionChainingConfig": "roles are not assumed",
}
MOST_INSTANCES = 250


def check(request: dict) -> list[str]:
    """Raise Refused for fields that do not go together or are not emulated; return what is accepted without effect."""
    notes = {}
    for name, known in others(request, input_shape("CreateTrainingJob")):
        if known and name not in WITHOUT_EFFECT:
            raise not_emulated(name)
        notes[name] = WITHOUT_EFFECT.get(name, "the service's model does not have it")
    _algorithm(request.get("AlgorithmSpecification") or {})
    _resources(request.get("ResourceConfig") or {})
    _stopping(request)
    _channels(request)
    _checkpoints(request.get("CheckpointConfig") or {})
    return [f"{name} has no effect here: {why}" for name, why in notes.items()]


def others(value: dict, shape: StructureShape, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each given field that is not emulated, as `ResourceConfig.VolumeSizeInGB`, and if the model has it."""
    for name, item in value.items():
        inner, member = path + name, shape.members.get(name)
        if not item or inner in EMULATED:
            continue
        if member is None or not any(
            listed.startswith(f"{inner}.") for listed in (*EMULATED, *WITHOUT_EFFECT)
        ):
            yield inner, member is not None
        elif member.type_name == "list":
            for one in item:
                yield from others(one, member.member, f"{inner}.")
        else:
            yield from others(item, member, f"{inner}.")


def groups(request: dict) -> list[dict]:
    """Return the instance groups of a request, one of them where it has none: InstanceGroupName, -Type and -Count."""
    resources = request["ResourceConfig"]
    if resources.get("InstanceGroups"):
        return resources["InstanceGroups"]
    # The name that a job without groups shows in its resourceconfig.json (contract, 1.2).
    return [
        {
            "InstanceGroupName": "homogeneousCluster",
            "InstanceType": resources["InstanceType"],
            "InstanceCount": resources["InstanceCount"],
        }
    ]


def longest(request: dict) -> int:
    """Return the seconds that a job may train: a day unless it says otherwise (AWS: StoppingCondition)."""
    return (request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds", 86400)


def _algorithm(algorithm: dict) -> None:
    if not algorithm.get("TrainingImage"):
        raise invalid(
            "You must specify either TrainingImage or AlgorithmName in AlgorithmSpecification"
        )
    if algorithm.get("TrainingImageConfig", {}).get("TrainingRepositoryAccessMode") == "Vpc":
        raise not_emulated("TrainingImageConfig with TrainingRepositoryAccessMode Vpc")
    if algorithm["TrainingInputMode"] == "Pipe":
        raise not_emulated("TrainingInputMode Pipe; File and FastFile are emulated")


def _resources(resources: dict) -> None:
    single = resources.get("InstanceType"), resources.get("InstanceCount")
    if found := resources.get("InstanceGroups"):
        if any(value is not None for value in single):
            raise invalid(
                "InstanceGroups cannot be given together with InstanceType or InstanceCount"
            )
        names = [group["InstanceGroupName"] for group in found]
        if len(set(names)) < len(names):
            raise invalid("InstanceGroupName must be unique within ResourceConfig.InstanceGroups")
        counts = [group["InstanceCount"] for group in found]
    elif None in single:
        raise invalid(
            "You must specify InstanceType and InstanceCount, or InstanceGroups, in ResourceConfig"
        )
    else:
        counts = [single[1]]
    if min(counts) < 1:
        raise invalid("InstanceCount must be greater than or equal to 1")
    if sum(counts) > MOST_INSTANCES:
        raise Refused(
            "ResourceLimitExceeded",
            f"The rehearsal runs jobs of {MOST_INSTANCES} instances at most",
        )


def _stopping(request: dict) -> None:
    stopping = request.get("StoppingCondition") or {}
    wait = stopping.get("MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining"):
        if wait is None or wait < longest(request):
            raise invalid(
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to "
                "MaxRuntimeInSeconds"
            )
    elif wait is not None:
        raise invalid(
            "Invalid MaxWaitTimeInSeconds. It is only supported when EnableManagedSpotTraining is "
            "set to true"
        )


def _checkpoints(config: dict) -> None:
    if (path := config.get("LocalPath")) is None:
        return
    below = PurePosixPath(path).parts[3:]
    taken = not below or below[0] in ("input", "model", "output", "code")
    if not path.startswith("/opt/ml/") or taken or ".." in below or ":" in path:
        allowed = "a folder below /opt/ml/ that has no other use"
        raise invalid(
            f"Invalid CheckpointConfig.LocalPath: the rehearsal found {path!r}, allowed is "
            f"{allowed}"
        )


def _channels(request: dict) -> None:
    channels = request.get("InputDataConfig") or []
    names = [channel["ChannelName"] for channel in channels]
    if len(set(names)) < len(names):
        raise invalid("Channel names must be unique in InputDataConfig")
    known = {
        group["InstanceGroupName"]
        for group in (request.get("ResourceConfig") or {}).get("InstanceGroups") or []
    }
    bound = 0
    for channel in channels:
        name, source = (
            f"channel {channel['ChannelName']}",
            channel["DataSource"].get("S3DataSource"),
        )
        if channel["ChannelName"] in (".", ".."):
            raise invalid(f"{name} has a name that no folder can have")
        if source is None:
            raise not_emulated(f"{name}: a DataSource other than S3DataSource")
        if source["S3DataType"] != "S3Prefix":
            raise not_emulated(f"{name}: S3DataType {source['S3DataType']}; S3Prefix is emulated")
        if channel.get("InputMode") == "Pipe":
            raise not_emulated(f"{name}: InputMode Pipe; File and FastFile are emulated")
        for field in ("CompressionType", "RecordWrapperType"):
            if channel.get(field, "None") != "None":
                raise not_emulated(f"{name}: {field} {channel[field]}")
        if wrong := set(source.get("InstanceGroupNames") or []) - known:
            raise invalid(
                f"InstanceGroupNames {sorted(wrong)} of {name} are not in "
                "ResourceConfig.InstanceGroups"
            )
        bound += bool(source.get("InstanceGroupNames"))
    if 0 < bound < len(channels):
        raise invalid(
            "InstanceGroupNames must be given for all channels of InputDataConfig, or for none"
        )
