"""Turns the flags of launch.py into the request of SageMaker's CreateTrainingJob.

Names are those of its API reference.
"""

import argparse
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import cast

import botocore.session

from sagemaker_lightning.contract.job_summary import (
    HIDDEN_VARIABLES,
    MASK,
    hidden_variables,
    masked,
)
from sagemaker_lightning.launcher import aws
from sagemaker_lightning.launcher.services import (
    AlgorithmSpecification,
    Channel,
    FileSystemDataSource,
    InstanceGroup,
    InstancePreference,
    Job,
    OutputDataConfig,
    Request,
    ResourceConfig,
    S3DataSource,
    Tag,
)

# CloudWatch metrics of the job: the regular expressions of what the image prints
# (sagemaker_lightning/callbacks/progress.py, and the test's metrics in app/train.py).
NUMBER = r"(-?(?:[0-9.]+(?:e[-+]?[0-9]+)?|inf|nan))"
NAME = r"(?:^|\s)"  # not the end of another name
METRICS = {
    name: f"{NAME}{name}={NUMBER}"
    for name in ("train_loss", "train_acc", "val_loss", "val_acc", "test_loss", "test_acc")
} | {
    "images_per_second": f"{NAME}images/s={NUMBER}",
    "epoch": f"{NAME}epoch=([0-9]+)",
    "step": f"{NAME}step=([0-9]+)",
}

# A shorter value is not a key, whatever its name: TOKENIZERS_PARALLELISM=false.
SHORTEST_KEY_CHARACTERS = 16
OPTION = re.compile(r",(mode|distribution|group|access)=([^,]*)$")
# A folder of a file system in the VPC, as --channel names it, and SageMaker's name of its kind.
FILE_SYSTEM = re.compile(r"(efs|fsx)://([^/]*)(/.*)")
FILE_SYSTEM_TYPES = {"efs": "EFS", "fsx": "FSxLustre"}
JOB_NAME_CHARACTERS = 63
# How the keys of AWS's own tags begin ("Tag naming limits", AWS General Reference).
AWS_TAG = "aws:"
# The time at the end of a name that is made here.
STAMP = re.compile(r"-\d{4}(-\d\d){5}-\d{3}$")


def build(args: argparse.Namespace) -> Request:
    """Return CreateTrainingJob's request; ValueError names the flag that is wrong."""
    request: Request = {
        "TrainingJobName": args.job_name or job_name(args.image),
        "AlgorithmSpecification": algorithm(args),
        "RoleArn": args.role,
        "OutputDataConfig": output(args),
        "ResourceConfig": resources(args),
        "StoppingCondition": {"MaxRuntimeInSeconds": args.max_run},
    }
    if args.channel:
        request["InputDataConfig"] = channels(args)
    if args.hyperparameters:
        request["HyperParameters"] = pairs("hyperparameter", args.hyperparameters)
    if args.env:
        request["Environment"] = variables(args.env)
        if taken := taken_variables(args):
            request["Environment"][HIDDEN_VARIABLES] = ",".join(sorted(taken))
    if args.tag:
        tags = pairs("--tag", args.tag)
        if taken_keys := [key for key in tags if is_of_aws(key)]:
            raise ValueError(
                f"--tag: found {taken_keys[0]!r}, expected a key without {AWS_TAG} at its start, "
                "which only AWS gives"
            )
        request["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    if args.subnet:
        request["VpcConfig"] = {"Subnets": args.subnet, "SecurityGroupIds": args.security_group}
    if args.network_isolation:
        request["EnableNetworkIsolation"] = True
    if args.checkpoints:
        request["CheckpointConfig"] = {"S3Uri": folder("--checkpoints", args.checkpoints)}
    if args.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": args.retries}
    if args.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = args.max_wait or 2 * args.max_run
    return request


def variables(texts: list[str]) -> dict[str, str]:
    """Return the environment variables of --env; NAME alone is taken from this environment."""
    complete = []
    for text in texts:
        if text and "=" not in text:
            if text not in os.environ:
                raise ValueError(
                    f"--env: found {text!r}, which is not set here; set it, or give NAME=VALUE"
                )
            text = f"{text}={os.environ[text]}"
        complete.append(text)
    return pairs("--env", complete)


def taken_variables(args: argparse.Namespace) -> set[str]:
    """Return the names of --env whose values come from this environment: they may be secret."""
    return {text for text in args.env if "=" not in text}


def open_secrets(request: Request) -> list[str]:
    """Return a line for each variable that looks like a secret, and was given with its value."""
    environment = request.get("Environment", {})
    hidden = hidden_variables(environment)
    return [
        f"{name} looks like a secret, and others on this machine see a command line; --env={name} "
        "takes it from your environment, and shows it nowhere"
        for name, value in environment.items()
        if name not in hidden
        and len(value) >= SHORTEST_KEY_CHARACTERS
        and masked(name, value) == MASK
    ]


def without_values(request: Request) -> Request:
    """Return a request to be shown: without the values of its hidden environment variables."""
    environment = request.get("Environment", {})
    hidden = dict.fromkeys(hidden_variables(environment), MASK)
    return {**request, "Environment": environment | hidden} if environment else request


def algorithm(args: argparse.Namespace) -> AlgorithmSpecification:
    """Return AlgorithmSpecification: the image, and the metrics read from its log."""
    metrics = METRICS | own_metrics(args)
    specification: AlgorithmSpecification = {
        "TrainingImage": args.image,
        "TrainingInputMode": "File",
        "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in metrics.items()],
    }
    # SageMaker pulls from a registry other than ECR only through the job's VPC.
    if not aws.ECR.fullmatch(args.image):
        specification["TrainingImageConfig"] = {"TrainingRepositoryAccessMode": "Vpc"}
    return specification


def own_metrics(args: argparse.Namespace) -> dict[str, str]:
    """Return the regular expressions of --metric, by the metrics' names.

    Raises ValueError for one that cannot find a value.
    """
    metrics = pairs("--metric", args.metric)
    for name, regex in metrics.items():
        try:
            groups = re.compile(regex).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"--metric {name}: found {regex!r}, which is not a regular expression ({error}); "
                "correct it, e.g. loss=([0-9.]+)"
            ) from None
        if not groups:
            raise ValueError(
                f"--metric {name}: found {regex!r}, which has no group; put the value into "
                "parentheses, e.g. loss=([0-9.]+)"
            )
    return metrics


def output(args: argparse.Namespace) -> OutputDataConfig:
    """Return OutputDataConfig: where the model goes, and the key that encrypts it."""
    config: OutputDataConfig = {"S3OutputPath": folder("--output", args.output)}
    if args.output_kms_key:
        config["KmsKeyId"] = args.output_kms_key
    return config


def resources(args: argparse.Namespace) -> ResourceConfig:
    """Return ResourceConfig: instances, groups or preferences, volumes, keep-alive period, plan."""
    config: ResourceConfig = {"VolumeSizeInGB": args.volume_size}
    if args.volume_kms_key:
        config["VolumeKmsKeyId"] = args.volume_kms_key
    if args.training_plan:
        config["TrainingPlanArn"] = args.training_plan
    if args.instance_group:
        config["InstanceGroups"] = [group(text) for text in args.instance_group]
    elif args.instance_preference:
        config |= preferences(args.instance_preference, args.instance_count)
    else:
        config |= {
            "InstanceType": args.instance_type or "ml.g5.xlarge",
            "InstanceCount": args.instance_count or 1,
        }
    if args.keep_alive:
        config["KeepAlivePeriodInSeconds"] = args.keep_alive
    return config


def group(text: str) -> InstanceGroup:
    """Return one of InstanceGroups; ValueError unless `text` is NAME=TYPE:COUNT."""
    match = re.fullmatch(r"([^=]+)=([^=:]+):([1-9]\d*)", text)
    if not match:
        raise ValueError(
            f"--instance-group: found {text!r}, expected NAME=TYPE:COUNT with a COUNT above 0, "
            "e.g. workers=ml.g5.xlarge:2"
        )
    return {"InstanceGroupName": match[1], "InstanceType": match[2], "InstanceCount": int(match[3])}


def preferences(texts: list[str], count: int | None) -> ResourceConfig:
    """Return InstancePreferences, and InstanceCount where the preferences have none.

    Args:
        texts: TYPE[:COUNT][,plan=ARN], the best first.
        count: --instance-count.

    Raises ValueError for what the reference of InstancePreference does not allow.
    """
    listed = [preference(text) for text in texts]
    types = [each["InstanceType"] for each in listed]
    counted = [name for name, each in zip(types, listed, strict=True) if "InstanceCount" in each]
    if len(set(types)) < len(types):
        raise ValueError(
            f"--instance-preference: found {', '.join(types)}, expected each type once"
        )
    if counted and (count or len(counted) < len(listed)):
        raise ValueError(
            f"--instance-preference: found a COUNT for {', '.join(counted)}, expected one for all "
            "types and no --instance-count, or none"
        )
    config: ResourceConfig = {"InstancePreferences": listed}
    if not counted:
        config["InstanceCount"] = count or 1
    return config


def preference(text: str) -> InstancePreference:
    """Return one of InstancePreferences; ValueError unless it is TYPE[:COUNT][,plan=ARN]."""
    match = re.fullmatch(r"([^=:,]+)(?::([1-9]\d*))?(?:,plan=([^,]+))?", text)
    if not match:
        raise ValueError(
            f"--instance-preference: found {text!r}, expected TYPE[:COUNT][,plan=ARN] with a COUNT "
            "above 0, e.g. ml.p5.48xlarge:2"
        )
    config: InstancePreference = {"InstanceType": match[1]}
    if match[2]:
        config["InstanceCount"] = int(match[2])
    if match[3]:
        config["TrainingPlanArns"] = [match[3]]
    return config


def channels(args: argparse.Namespace) -> list[Channel]:
    """Return InputDataConfig; ValueError if only some channels are bound to a group."""
    groups = [group(text)["InstanceGroupName"] for text in args.instance_group]
    names = pairs("--channel", args.channel)
    configs = [channel(name, text, groups) for name, text in names.items()]
    bound = [
        name
        for name, item in zip(names, configs, strict=True)
        if "InstanceGroupNames" in item["DataSource"].get("S3DataSource", {})
    ]
    if bound and len(bound) < len(configs):
        raise ValueError(
            f"--channel: found a group for {', '.join(bound)} only; expected a group for all "
            "channels or for none"
        )
    return configs


def channel(name: str, text: str, groups: list[str]) -> Channel:
    """Return one of InputDataConfig.

    Args:
        name: The channel's name.
        text: An S3 address, or a file system's, with options after commas.
        groups: The names of the instance groups.
    """
    options: dict[str, list[str]] = {"mode": [], "distribution": [], "group": [], "access": []}
    while match := OPTION.search(text):
        options[match[1]].insert(0, match[2])
        text = text[: match.start()]
    if is_file_system(text):
        return file_system_channel(name, text, options)
    aws.s3_location(f"--channel {name}", text)
    mode, distribution = (
        options[key] or [default]
        for key, default in (("mode", "File"), ("distribution", "FullyReplicated"))
    )
    for key, allowed, otherwise in (
        ("mode", ["File", "FastFile"], ""),
        ("distribution", ["FullyReplicated", "ShardedByS3Key"], ""),
        ("group", groups, "none, as there is no --instance-group"),
        ("access", [], "none, as only a file system has it"),
    ):
        check_option(name, key, options[key], allowed, otherwise)
    if mode[-1] == "FastFile" and not text.endswith("/"):
        raise ValueError(
            f"--channel {name}: found {text!r}, but FastFile mounts a whole folder; end it with /"
        )
    s3: S3DataSource = {
        "S3DataType": "S3Prefix",
        "S3Uri": text,
        "S3DataDistributionType": distribution[-1],
    }
    if options["group"]:
        s3["InstanceGroupNames"] = options["group"]
    return {"ChannelName": name, "InputMode": mode[-1], "DataSource": {"S3DataSource": s3}}


def check_option(name: str, key: str, values: list[str], allowed: list[str], rule: str) -> None:
    """Raise ValueError for a value of a channel's option that is not allowed.

    Args:
        name: The channel's name.
        key: The option.
        values: Its values.
        allowed: Those that it may have.
        rule: What is expected if it may have none.
    """
    if refused := [value for value in values if value not in allowed]:
        rule = f"one of {', '.join(allowed)}" if allowed else rule
        raise ValueError(f"--channel {name}: found {key}={refused[0]}, expected {rule}")


def is_file_system(text: str) -> bool:
    """Return whether the address of a channel is that of a file system."""
    return text.startswith(tuple(f"{kind}://" for kind in FILE_SYSTEM_TYPES))


def file_system_channel(name: str, text: str, options: dict[str, list[str]]) -> Channel:
    """Return one of InputDataConfig, for a folder of a file system.

    Args:
        name: The channel's name.
        text: efs://fs-ID/FOLDER or fsx://fs-ID/MOUNT-NAME/FOLDER.
        options: The values of each option.
    """
    match = FILE_SYSTEM.fullmatch(text)
    if not match:
        raise ValueError(
            f"--channel {name}: found {text!r}, expected efs://fs-ID/FOLDER, or "
            "fsx://fs-ID/MOUNT-NAME/FOLDER"
        )
    for key, values in options.items():
        allowed = ["ro", "rw"] if key == "access" else []
        check_option(name, key, values, allowed, "none, as a file system has only access=ro|rw")
    system: FileSystemDataSource = {
        "FileSystemId": match[2],
        "FileSystemAccessMode": (options["access"] or ["ro"])[-1],
        "FileSystemType": FILE_SYSTEM_TYPES[match[1]],
        "DirectoryPath": match[3],
    }
    return {
        "ChannelName": name,
        "InputMode": "File",
        "DataSource": {"FileSystemDataSource": system},
    }


def address(item: Channel) -> str:
    """Return where a channel's data are, as a user knows it."""
    source = item["DataSource"]
    if "S3DataSource" in source:
        return source["S3DataSource"]["S3Uri"]
    system = source["FileSystemDataSource"]
    return f"{system['FileSystemId']}:{system['DirectoryPath']}"


def folder(flag: str, uri: str) -> str:
    """Return the S3 address with a / at its end.

    Without it, s3://b/run-1 would restore the checkpoints of s3://b/run-10, too.
    """
    aws.s3_location(flag, uri)
    return uri if uri.endswith("/") else f"{uri}/"


def pairs(flag: str, texts: list[str]) -> dict[str, str]:
    """Return KEY=VALUE texts as a dictionary; a value may contain `=`.

    Raises ValueError for a text without `=`, and for a key that comes twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"{flag}: found {text!r}, expected KEY=VALUE")
        if key in values:
            raise ValueError(f"{flag}: found {key} twice, expected once")
        values[key] = value
    return values


def job_name(image: str) -> str:
    """Return a job name from the image's name and the time."""
    last = re.split(r"[:@]", image.rsplit("/", 1)[-1])[0]
    return renamed(re.sub(r"[^a-zA-Z0-9]+", "-", last))


def renamed(name: str) -> str:
    """Return a job's name with the time in place of its own, if it has one.

    The time has milliseconds, because the names of an account's jobs must differ.
    """
    stamp = datetime.now(UTC).strftime("%Y-%m-%d-%H-%M-%S-%f")[:-3]
    name = STAMP.sub("", name)[: JOB_NAME_CHARACTERS - 1 - len(stamp)].strip("-")
    return f"{name or 'job'}-{stamp}"


def is_of_aws(key: str) -> bool:
    """Return whether a tag's key is one that no request may have."""
    return key.lower().startswith(AWS_TAG)


def again(job: Job, tags: list[Tag]) -> Request:
    """Return the request of an existing job, under a new name.

    Args:
        job: The answer of DescribeTrainingJob.
        tags: The job's tags; those of AWS's own are left out, as no request may have them.
    """
    model = botocore.session.get_session().get_service_model("sagemaker")
    fields = model.operation_model("CreateTrainingJob").input_shape.members
    answers: Mapping[str, object] = job
    # As the model says, an answer has these fields as a request has them.
    request = cast(Request, {name: answers[name] for name in fields if name in answers})
    request["TrainingJobName"] = renamed(job["TrainingJobName"])
    # What the service has chosen from InstancePreferences is an answer's alone.
    if "ResourceConfig" in request:
        request["ResourceConfig"] = config = request["ResourceConfig"].copy()
        config.pop("SelectedInstanceType", None)
        config.pop("SelectedInstanceCount", None)
    if own_tags := [tag for tag in tags if not is_of_aws(tag["Key"])]:
        request["Tags"] = own_tags
    return request
