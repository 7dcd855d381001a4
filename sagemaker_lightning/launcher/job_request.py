"""Turns the flags of launch.py into the request of SageMaker's CreateTrainingJob.

Names are those of its API reference.
"""

import argparse
import os
import re
from collections.abc import Collection
from datetime import UTC, datetime

import botocore.session

from sagemaker_lightning.launcher import aws

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

OPTION = re.compile(r",(mode|distribution|group)=([^,]*)$")
JOB_NAME_CHARACTERS = 63
# Stands for a value that is not shown.
HIDDEN = "******"
# The time at the end of a name that is made here.
STAMP = re.compile(r"-\d{4}(-\d\d){5}-\d{3}$")


def build(args: argparse.Namespace) -> dict:
    """Return CreateTrainingJob's request; ValueError names the flag that is wrong."""
    request = {
        "TrainingJobName": args.job_name or job_name(args.image),
        "AlgorithmSpecification": algorithm(args),
        "RoleArn": args.role,
        "OutputDataConfig": {"S3OutputPath": folder("--output", args.output)},
        "ResourceConfig": resources(args),
        "StoppingCondition": {"MaxRuntimeInSeconds": args.max_run},
    }
    if args.channel:
        request["InputDataConfig"] = channels(args)
    if args.hyperparameters:
        request["HyperParameters"] = pairs("hyperparameter", args.hyperparameters)
    if args.env:
        request["Environment"] = variables(args.env)
    if args.tag:
        request["Tags"] = [
            {"Key": key, "Value": value} for key, value in pairs("--tag", args.tag).items()
        ]
    if args.subnet:
        request["VpcConfig"] = {"Subnets": args.subnet, "SecurityGroupIds": args.security_group}
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


def without_values(request: dict, names: Collection[str]) -> dict:
    """Return a request to be shown: without the values of these environment variables."""
    shown = {
        name: HIDDEN if name in names else value
        for name, value in request.get("Environment", {}).items()
    }
    return request | ({"Environment": shown} if shown else {})


def algorithm(args: argparse.Namespace) -> dict:
    """Return AlgorithmSpecification: the image, and the metrics read from its log."""
    metrics = METRICS | own_metrics(args)
    specification = {
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
                f"--metric {name}: found {regex!r}, which is no regular expression ({error}); "
                "correct it, e.g. loss=([0-9.]+)"
            ) from None
        if not groups:
            raise ValueError(
                f"--metric {name}: found {regex!r}, which has no group; put the value into "
                "parentheses, e.g. loss=([0-9.]+)"
            )
    return metrics


def resources(args: argparse.Namespace) -> dict:
    """Return ResourceConfig: instances or groups, volumes, keep-alive period."""
    config = {"VolumeSizeInGB": args.volume_size}
    if args.instance_group:
        config["InstanceGroups"] = [group(text) for text in args.instance_group]
    else:
        config |= {
            "InstanceType": args.instance_type or "ml.g5.xlarge",
            "InstanceCount": args.instance_count or 1,
        }
    if args.keep_alive:
        config["KeepAlivePeriodInSeconds"] = args.keep_alive
    return config


def group(text: str) -> dict:
    """Return one of InstanceGroups; ValueError unless `text` is NAME=TYPE:COUNT."""
    match = re.fullmatch(r"([^=]+)=([^=:]+):([1-9]\d*)", text)
    if not match:
        raise ValueError(
            f"--instance-group: found {text!r}, expected NAME=TYPE:COUNT with a COUNT above 0, "
            "e.g. workers=ml.g5.xlarge:2"
        )
    return {"InstanceGroupName": match[1], "InstanceType": match[2], "InstanceCount": int(match[3])}


def channels(args: argparse.Namespace) -> list[dict]:
    """Return InputDataConfig; ValueError if only some channels are bound to a group."""
    groups = [group(text)["InstanceGroupName"] for text in args.instance_group]
    names = pairs("--channel", args.channel)
    configs = [channel(name, text, groups) for name, text in names.items()]
    bound = [
        name
        for name, item in zip(names, configs, strict=True)
        if "InstanceGroupNames" in source(item)
    ]
    if bound and len(bound) < len(configs):
        raise ValueError(
            f"--channel: found a group for {', '.join(bound)} only; expected a group for all "
            "channels or for none"
        )
    return configs


def channel(name: str, text: str, groups: list[str]) -> dict:
    """Return one of InputDataConfig.

    Args:
        name: The channel's name.
        text: An S3 address, with options after commas.
        groups: The names of the instance groups.
    """
    options: dict[str, list[str]] = {"mode": [], "distribution": [], "group": []}
    while match := OPTION.search(text):
        options[match[1]].insert(0, match[2])
        text = text[: match.start()]
    aws.s3_location(f"--channel {name}", text)
    mode, distribution = (
        options[key] or [default]
        for key, default in (("mode", "File"), ("distribution", "FullyReplicated"))
    )
    for key, values, allowed in (
        ("mode", mode, ["File", "FastFile"]),
        ("distribution", distribution, ["FullyReplicated", "ShardedByS3Key"]),
        ("group", options["group"], groups),
    ):
        if refused := [value for value in values if value not in allowed]:
            rule = (
                f"one of {', '.join(allowed)}"
                if allowed
                else "none, as there is no --instance-group"
            )
            raise ValueError(f"--channel {name}: found {key}={refused[0]}, expected {rule}")
    if mode[-1] == "FastFile" and not text.endswith("/"):
        raise ValueError(
            f"--channel {name}: found {text!r}, but FastFile mounts a whole folder; end it with /"
        )
    s3 = {"S3DataType": "S3Prefix", "S3Uri": text, "S3DataDistributionType": distribution[-1]}
    if options["group"]:
        s3["InstanceGroupNames"] = options["group"]
    return {"ChannelName": name, "InputMode": mode[-1], "DataSource": {"S3DataSource": s3}}


def source(item: dict) -> dict:
    """Return a channel's S3DataSource."""
    return item["DataSource"]["S3DataSource"]


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
    values = {}
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


def again(job: dict, tags: list[dict]) -> dict:
    """Return the request of an existing job, under a new name.

    Args:
        job: The answer of DescribeTrainingJob.
        tags: The job's tags; those of AWS's own are left out, as no request may have them.
    """
    model = botocore.session.get_session().get_service_model("sagemaker")
    fields = model.operation_model("CreateTrainingJob").input_shape.members
    request = {name: job[name] for name in fields if name in job}
    request["TrainingJobName"] = renamed(job["TrainingJobName"])
    if own_tags := [tag for tag in tags if not tag["Key"].startswith("aws:")]:
        request["Tags"] = own_tags
    return request
