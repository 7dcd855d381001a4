"""Rules for CreateTrainingJob that the service's model does not contain.

They say which fields go together, and which are not emulated. Messages in the service's name are
its own where a user has quoted them (Kenza-AI/sagify#111, for one).
"""

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from botocore.model import StructureShape

from sagemaker_rehearsal.aws.errors import Refused, invalid, not_emulated
from sagemaker_rehearsal.aws.validation import input_shape

# Fields that are emulated, with all below them. A field of the model that is neither here nor in
# WITHOUT_EFFECT is refused.
EMULATED = {
    "TrainingJobName",
    # Only its form is checked, not what the role may do.
    "RoleArn",
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
    "ResourceConfig.InstancePreferences.InstanceType",
    "ResourceConfig.InstancePreferences.InstanceCount",
    "ResourceConfig.KeepAlivePeriodInSeconds",
    "StoppingCondition.MaxRuntimeInSeconds",
    "StoppingCondition.MaxWaitTimeInSeconds",
    "CheckpointConfig",
    "EnableManagedSpotTraining",
    "EnableNetworkIsolation",
    "RetryStrategy",
}
# Fields that are accepted without effect on this machine. The job's notes say so, with these words.
WITHOUT_EFFECT = {
    "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries": "each metric's last value is kept",
    "InputDataConfig.DataSource.S3DataSource.ModelAccessConfig": "no model's licence is asked for",
    "OutputDataConfig.KmsKeyId": "nothing leaves this machine",
    "ResourceConfig.VolumeSizeInGB": "a job has what room this machine's disk has",
    "ResourceConfig.VolumeKmsKeyId": "the disk is this machine's",
    "ResourceConfig.TrainingPlanArn": "the instances are this machine",
    "ResourceConfig.InstancePreferences.TrainingPlanArns": "the instances are this machine",
    "StoppingCondition.MaxPendingTimeInSeconds": "jobs never wait here",
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
# Fields of ResourceConfig that are an answer's alone: what was chosen from InstancePreferences.
CHOSEN = ("SelectedInstanceType", "SelectedInstanceCount")


def check(request: dict) -> list[str]:
    """Check the rules for a request; return a line for each field without effect.

    Raises Refused for fields that do not go together or are not emulated.
    """
    notes = {}
    for name, known in others(request, input_shape("CreateTrainingJob")):
        if known and name not in WITHOUT_EFFECT:
            raise not_emulated(name)
        notes[name] = WITHOUT_EFFECT.get(name, "the service's model does not have it")
    if any(tag["Key"].lower().startswith("aws:") for tag in request.get("Tags") or []):
        raise invalid("aws: prefixed tag key names are not allowed for external use.")
    _check_algorithm(request.get("AlgorithmSpecification") or {})
    _check_resources(
        request.get("ResourceConfig") or {}, bool(request.get("EnableManagedSpotTraining"))
    )
    _check_stopping(request)
    _check_channels(request)
    _check_checkpoints(request.get("CheckpointConfig") or {})
    return [f"{name} has no effect here: {effect}" for name, effect in notes.items()]


def others(value: dict, shape: StructureShape, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each field that is not emulated, and whether the service's model has it.

    Fields are named with their path, e.g. `ResourceConfig.VolumeSizeInGB`.
    """
    for name, item in value.items():
        name_inside = path + name
        member = shape.members.get(name)
        if not item or name_inside in EMULATED:
            continue
        if member is None or not any(
            listed.startswith(f"{name_inside}.") for listed in (*EMULATED, *WITHOUT_EFFECT)
        ):
            yield name_inside, member is not None
        elif member.type_name == "list":
            for element in item:
                yield from others(element, member.member, f"{name_inside}.")
        else:
            yield from others(item, member, f"{name_inside}.")


def groups(request: dict) -> list[dict]:
    """Return a request's instance groups; one group if the request has none.

    Each has InstanceGroupName, InstanceType and InstanceCount.
    """
    resources = request["ResourceConfig"]
    if resources.get("InstanceGroups"):
        return resources["InstanceGroups"]
    instance_type, count = chosen(resources)
    # SageMaker gives the only group of a job without groups this name in resourceconfig.json.
    return [
        {
            "InstanceGroupName": "homogeneousCluster",
            "InstanceType": instance_type,
            "InstanceCount": count,
        }
    ]


def chosen(resources: dict, lacking: Collection[str] = ()) -> tuple[str, int]:
    """Return the type and the number of the instances of a job without groups.

    It is the first of InstancePreferences that is not in `lacking`, the types without capacity; the
    first of all if each is.
    """
    if CHOSEN[0] in resources:
        return resources[CHOSEN[0]], resources[CHOSEN[1]]
    preferences = resources.get("InstancePreferences") or [resources]
    first = next(
        (each for each in preferences if each["InstanceType"] not in lacking), preferences[0]
    )
    return first["InstanceType"], first.get("InstanceCount") or resources["InstanceCount"]


def with_chosen(request: dict, lacking: Collection[str]) -> dict:
    """Return a request, and in it, as the service answers it, what was chosen.

    Args:
        request: The request of a job.
        lacking: The types of instances without capacity.
    """
    resources = request.get("ResourceConfig") or {}
    if not resources.get("InstancePreferences"):
        return request
    found = dict(zip(CHOSEN, chosen(resources, lacking), strict=True))
    return request | {"ResourceConfig": resources | found}


def without_chosen(request: dict) -> dict:
    """Return the request that with_chosen was given."""
    resources = request.get("ResourceConfig") or {}
    own = {name: value for name, value in resources.items() if name not in CHOSEN}
    return request | ({"ResourceConfig": own} if resources else {})


def longest(request: dict) -> int:
    """Return how many seconds a job may train, by default a day (StoppingCondition)."""
    return (request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds", 86400)


def _check_algorithm(algorithm: dict) -> None:
    if not algorithm.get("TrainingImage"):
        raise invalid(
            "You must specify either TrainingImage or AlgorithmName in AlgorithmSpecification"
        )
    if algorithm.get("TrainingImageConfig", {}).get("TrainingRepositoryAccessMode") == "Vpc":
        raise not_emulated("TrainingImageConfig with TrainingRepositoryAccessMode Vpc")
    if algorithm["TrainingInputMode"] == "Pipe":
        raise not_emulated("TrainingInputMode Pipe; File and FastFile are emulated")


def _check_resources(resources: dict, is_spot: bool) -> None:
    if resources.get("KeepAlivePeriodInSeconds") and (is_spot or resources.get("InstanceGroups")):
        raise invalid(
            "KeepAlivePeriodInSeconds cannot be given together with InstanceGroups or "
            "EnableManagedSpotTraining"
        )
    single = (resources.get("InstanceType"), resources.get("InstanceCount"))
    if preferences := resources.get("InstancePreferences"):
        counts = _count_preferred(preferences, resources, is_spot)
    elif instance_groups := resources.get("InstanceGroups"):
        if any(value is not None for value in single):
            raise invalid(
                "InstanceGroups cannot be given together with InstanceType or InstanceCount"
            )
        names = [group["InstanceGroupName"] for group in instance_groups]
        if len(set(names)) < len(names):
            raise invalid("InstanceGroupName must be unique within ResourceConfig.InstanceGroups")
        counts = [group["InstanceCount"] for group in instance_groups]
    elif None in single:
        raise invalid(
            "You must specify InstanceType and InstanceCount, or InstanceGroups, in ResourceConfig"
        )
    else:
        counts = [single[1]]
    if min(counts) < 1:
        raise invalid("InstanceCount must be greater than or equal to 1")
    # One of those that are preferred is chosen.
    if (max(counts) if preferences else sum(counts)) > MOST_INSTANCES:
        raise Refused(
            "ResourceLimitExceeded",
            f"The rehearsal runs jobs of {MOST_INSTANCES} instances at most",
        )


def _count_preferred(preferences: list[dict], resources: dict, is_spot: bool) -> list[int]:
    """Return the numbers of instances in InstancePreferences; Refused if they cannot be.

    The rules are those of the reference of ResourceConfig and InstancePreference.
    """
    if is_spot or resources.get("InstanceType") or resources.get("InstanceGroups"):
        raise invalid(
            "InstancePreferences cannot be given together with InstanceType, InstanceGroups or "
            "EnableManagedSpotTraining"
        )
    types = [each["InstanceType"] for each in preferences]
    if len(set(types)) < len(types):
        raise invalid("An instance type can appear only once in InstancePreferences")
    plans = [each for each in preferences if each.get("TrainingPlanArns")]
    if plans and resources.get("TrainingPlanArn"):
        raise invalid("TrainingPlanArns cannot be given together with TrainingPlanArn")
    for_job = resources.get("InstanceCount")
    counts = [each["InstanceCount"] for each in preferences if "InstanceCount" in each]
    if (for_job is None and len(counts) < len(preferences)) or (for_job is not None and counts):
        raise invalid(
            "InstanceCount must be given for every entry of InstancePreferences, or for none and "
            "in ResourceConfig"
        )
    return counts or [for_job]


def _check_stopping(request: dict) -> None:
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


def _check_checkpoints(config: dict) -> None:
    if (path := config.get("LocalPath")) is None:
        return
    parts_below = PurePosixPath(path).parts[3:]
    is_taken = not parts_below or parts_below[0] in ("input", "model", "output", "code")
    if not path.startswith("/opt/ml/") or is_taken or ".." in parts_below or ":" in path:
        allowed = "a folder below /opt/ml/ that has no other use"
        raise invalid(
            f"Invalid CheckpointConfig.LocalPath: the rehearsal found {path!r}, expected {allowed}"
        )


def _check_channels(request: dict) -> None:
    channels = request.get("InputDataConfig") or []
    names = [channel["ChannelName"] for channel in channels]
    if len(set(names)) < len(names):
        raise invalid("Channel names must be unique in InputDataConfig")
    group_names = {
        group["InstanceGroupName"]
        for group in (request.get("ResourceConfig") or {}).get("InstanceGroups") or []
    }
    bound = 0
    for channel in channels:
        name = f"channel {channel['ChannelName']}"
        source = channel["DataSource"].get("S3DataSource")
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
        if unknown := set(source.get("InstanceGroupNames") or []) - group_names:
            raise invalid(
                f"InstanceGroupNames {sorted(unknown)} of {name} are not in "
                "ResourceConfig.InstanceGroups"
            )
        bound += bool(source.get("InstanceGroupNames"))
    if 0 < bound < len(channels):
        raise invalid(
            "InstanceGroupNames must be given for all channels of InputDataConfig, or for none"
        )
