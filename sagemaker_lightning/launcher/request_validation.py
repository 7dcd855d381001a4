"""Validates the request against botocore's model of SageMaker, without a call.

A mistake found here costs nothing. botocore itself checks only types, required fields and minima;
this module checks maxima, patterns and enumerations.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore.model import Shape
from botocore.validate import ParamValidator

from sagemaker_lightning.contract.job_summary import hidden_variables
from sagemaker_lightning.launcher.services import Request
from sagemaker_lightning.launcher.shapes import parts

# By field of the request: the flag that sets it, and what is allowed, where the model's own pattern
# is hard to read.
FLAGS = {
    "TrainingJobName": ("--job-name", "up to 63 letters, digits and single or inner dashes"),
    "AlgorithmSpecification.TrainingImage": ("--image", None),
    "AlgorithmSpecification.MetricDefinitions": ("--metric", None),
    "RoleArn": (
        "--role",
        "the ARN of a role, arn:aws:iam::ACCOUNT:role/NAME with an ACCOUNT of 12 digits",
    ),
    "OutputDataConfig.KmsKeyId": ("--output-kms-key", "a key's ID, alias or ARN"),
    "OutputDataConfig": ("--output", None),
    "CheckpointConfig": ("--checkpoints", None),
    "ResourceConfig.InstanceGroups": ("--instance-group", None),
    "ResourceConfig.InstancePreferences": ("--instance-preference", None),
    "ResourceConfig.InstanceType": ("--instance-type", None),
    "ResourceConfig.InstanceCount": ("--instance-count", None),
    "ResourceConfig.KeepAlivePeriodInSeconds": ("--keep-alive", None),
    "ResourceConfig.TrainingPlanArn": (
        "--training-plan",
        "the ARN of a training plan, arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
    ),
    "ResourceConfig.VolumeKmsKeyId": ("--volume-kms-key", "a key's ID or ARN"),
    "ResourceConfig.VolumeSizeInGB": ("--volume-size", None),
    "InputDataConfig": ("--channel", None),
    "HyperParameters": ("hyperparameter", None),
    "Environment": ("--env", None),
    "Tags": ("--tag", None),
    "VpcConfig.Subnets": ("--subnet", None),
    "VpcConfig.SecurityGroupIds": ("--security-group", None),
    "RetryStrategy": ("--retries", None),
    "StoppingCondition.MaxRuntimeInSeconds": ("--max-run", None),
    "StoppingCondition.MaxWaitTimeInSeconds": ("--max-wait", None),
}

# What the reference of the API says in words only: 28 days. Its integers have 32 bits.
MAXIMA = {"StoppingCondition.MaxRuntimeInSeconds": 28 * 24 * 60 * 60}
LARGEST_INTEGER = 2**31 - 1

UNITS = {"string": " characters", "list": " entries", "map": " entries"}


def validate(request: Request) -> None:
    """Raise ValueError for the first thing that the service model does not allow.

    The line shows no value of the request's hidden variables.
    """
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    for line in problems(request, shape, ""):
        for name in hidden_variables(request.get("Environment")):
            line = line.replace(shown(request["Environment"][name]), "")
        raise ValueError(line)
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise ValueError(report.generate_report().splitlines()[0])


def problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    """Yield a line for each limit that `value` breaks, of `shape` or inside it."""
    if shape.type_name != "structure":
        yield from limits(value, shape, path)
    for name, part, part_shape in parts(value, shape):
        if shape.type_name == "map":
            yield from limits(name, shape.key, path, of="name")
        inner = path if shape.type_name == "list" else f"{path}.{name}".lstrip(".")
        yield from problems(part, part_shape, inner)


def limits(value: Any, shape: Shape, path: str, of: str = "value") -> Iterator[str]:
    """Yield a line if `value` breaks a limit of `shape` itself.

    Args:
        value: A value of the request.
        shape: Its shape in the model.
        path: Its field, with dots.
        of: What the line calls it.
    """
    name, allowed = flag(path)
    least = shape.metadata.get("min")
    most = MAXIMA.get(path, shape.metadata.get("max"))
    if most is None and shape.type_name == "integer":
        most = LARGEST_INTEGER
    size, unit = (value, "") if isinstance(value, int) else (len(value), UNITS[shape.type_name])
    regex = shape.metadata.get("pattern")
    is_short = least is not None and size < least
    if is_short and allowed:
        yield f"{name}: found {value!r}, expected {allowed}"
    elif is_short or (most is not None and size > most):
        bound = f"{least or 0} to {most}" if most is not None else f"{least} or more"
        size_found = f"{size}{unit} in its {of}{shown(value)}" if unit else size
        yield f"{name}: found {size_found}, expected {bound}{unit}"
    elif shape.metadata.get("enum") and value not in shape.metadata["enum"]:
        yield f"{name}: found {value!r}, expected {choices(value, shape.metadata['enum'])}"
    elif isinstance(value, str) and regex and not re.fullmatch(in_python(regex), value):
        lines = " of one line" if "\n" in value else ""
        yield (
            f"{name}: found {value!r}, expected {allowed or f'a {of}{lines} that matches {regex}'}"
        )


def flag(path: str) -> tuple[str, str | None]:
    """Return the flag that sets a field, and what is allowed in words, else None.

    For a value of a map, the flag is followed by the value's key.
    """
    for start, (name, allowed) in FLAGS.items():
        if path == start or path.startswith(f"{start}."):
            key = (
                path.removeprefix(start).removeprefix(".")
                if start in ("HyperParameters", "Environment")
                else ""
            )
            return f"{name} {key}".strip(), allowed
    return path, None


def shown(value: object) -> str:
    """Return the start of a text, in parentheses, so that the user recognizes it."""
    return (
        f" ({value[:40]}{'...' if len(value) > 40 else ''})"
        if isinstance(value, str) and value
        else ""
    )


def choices(value: str, allowed: list[str]) -> str:
    """Return the allowed values in words: only the closest if there are more than ten."""
    if len(allowed) <= 10:
        return f"one of {', '.join(allowed)}"
    closest = difflib.get_close_matches(value, allowed, n=3, cutoff=0.5)
    suggestion = f", such as {', '.join(closest)}" if closest else ""
    return (
        f"one of the {len(allowed)} that this boto3 knows{suggestion}; pip install --upgrade boto3 "
        "for newer ones"
    )


def in_python(regex: str) -> str:
    r"""Return a pattern of the model with Java's \p{...} classes as Python writes them."""
    return regex.replace(r"\p{L}\p{Z}\p{N}", r"\w\s").replace(r"\p{Alnum}", "a-zA-Z0-9")
