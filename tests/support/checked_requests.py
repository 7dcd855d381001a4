"""What the rehearsal's service answers to requests; it starts no job."""

import copy
import re
from collections.abc import Iterator

import botocore.session
from botocore.model import Shape

from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.aws import rules
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.jobs import layout
from sagemaker_rehearsal.jobs.metrics import Metrics

MODEL = botocore.session.get_session().get_service_model("sagemaker")
REQUEST_SHAPE = MODEL.operation_model("CreateTrainingJob").input_shape
ARN = "arn:aws:sagemaker:us-east-1:123456789012"
# Strings for the model's patterns; each string field gets the first that breaks none of its limits.
STRINGS = [
    "a",
    "a" * 20,
    "10K",
    "fs-12345678",
    "s3://bucket/key",
    "arn:aws:iam::123456789012:role/rehearsal",
    f"{ARN}:training-plan/a",
    f"{ARN}:mlflow-app/a",
    f"{ARN}:model-package-group/a",
    f"{ARN}:model-package/a",
    f"{ARN}:hub-content/hub/Model/a",
    f"{ARN}:hub-content/hub/DataSet/a",
    "arn:aws:lambda:us-east-1:123456789012:function:a",
]
JOB = {
    "TrainingJobName": "job",
    "RoleArn": "arn:aws:iam::123456789012:role/rehearsal",
    "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
    "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1},
}
ABSENT = object()


class Checked(Service):
    """The service up to the start of a job.

    It does not start the job, and returns the job's notes.
    """

    def CreateTrainingJob(self, request: dict, region: str) -> list[str]:  # noqa: N802
        notes = rules.check(request)
        Metrics(request["AlgorithmSpecification"].get("MetricDefinitions") or [])
        for host in layout.hosts(request):
            [layout.described(channel, request) for channel in layout.channels_of(request, host)]
        layout.checkpoint_path(request)
        return notes


def answer(request, operation: str = "CreateTrainingJob"):
    """Return the service's answer."""
    return Checked(None, None).answer(operation, request, "us-east-1")


def refusal(request, operation: str = "CreateTrainingJob") -> tuple[str, str] | None:
    """Return the code and the message of a refusal, or None if there is none.

    The rules of rules.py are left out.
    """
    only_validated = type("OnlyValidated", (Service,), {operation: lambda *_: None})(None, None)
    try:
        only_validated.answer(operation, request, "us-east-1")
    except Refused as refused:
        return refused.code, str(refused)
    return None


def matches(pattern: str, text: str) -> bool:
    """Return whether a text satisfies a pattern of the model; its patterns are Java's."""
    python_pattern = pattern.replace(r"\p{Alnum}", "a-zA-Z0-9").replace(
        r"[\p{L}\p{Z}\p{N}", "[a-zA-Z0-9äé "
    )
    return re.fullmatch(python_pattern, text) is not None


def satisfied(value: str, shape: Shape) -> bool:
    """Return whether a string breaks no limit."""
    limits = shape.metadata
    return (
        limits.get("min", 0) <= len(value) <= limits.get("max", len(value))
        and value in limits.get("enum", [value])
        and matches(limits.get("pattern", "(?s).*"), value)
    )


def sample_value(shape: Shape):
    """Return a value with all fields that a shape has: each list and each map with one item."""
    type_name = shape.type_name
    if type_name == "structure":
        return {name: sample_value(member) for name, member in shape.members.items()}
    if type_name == "list":
        return [sample_value(shape.member)]
    if type_name == "map":
        return {sample_value(shape.key): sample_value(shape.value)}
    if type_name == "string":
        return next(
            text for text in [*shape.metadata.get("enum", []), *STRINGS] if satisfied(text, shape)
        )
    return True if type_name == "boolean" else max(1, shape.metadata.get("min", 1))


FULL_REQUEST = sample_value(REQUEST_SHAPE)


def value_shapes(shape: Shape, value, path: tuple = ()) -> Iterator[tuple[tuple, Shape]]:
    """Yield the path and the shape of each value in `value`; `{}` in a path is a map's value."""
    yield path, shape
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            yield from value_shapes(member, value[name], (*path, name))
    elif shape.type_name == "list":
        yield from value_shapes(shape.member, value[0], (*path, 0))
    elif shape.type_name == "map":
        (key,) = value
        yield from value_shapes(shape.value, value[key], (*path, key))


def changed_copy(request: dict, path: tuple, value) -> dict:
    """Return a copy of the request with another value at a path, or without it."""
    copied = copy.deepcopy(request)
    inner = copied
    for step in path[:-1]:
        inner = inner[step]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


VALUE_SHAPES = {path: shape for path, shape in value_shapes(REQUEST_SHAPE, FULL_REQUEST) if path}


def channel(
    name: str, groups: list[str] | None = None, source: dict | None = None, **more_fields
) -> dict:
    """Return a channel for InputDataConfig."""
    s3_source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data"} | (source or {})
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": s3_source | ({"InstanceGroupNames": groups} if groups else {})
        },
    } | more_fields


def group(name: str, count: int = 1) -> dict:
    return {"InstanceGroupName": name, "InstanceType": "ml.m5.xlarge", "InstanceCount": count}


def resources(*groups: dict, **more_fields) -> dict:
    """Return a ResourceConfig of groups."""
    return {"ResourceConfig": {"InstanceGroups": list(groups)} | more_fields}


def stopping(spot: bool, longest: int | None, wait: int | None) -> dict:
    """Return the fields StoppingCondition and EnableManagedSpotTraining of a request."""
    limits = {"MaxRuntimeInSeconds": longest, "MaxWaitTimeInSeconds": wait}
    return {"EnableManagedSpotTraining": spot, "StoppingCondition": limits}
