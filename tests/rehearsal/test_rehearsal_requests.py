"""Requests to the rehearsal: each limit of the service's model, in the service's words.

And which fields go together.
"""

import base64
import copy
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace

import botocore.session
import pytest
from botocore.model import Shape
from botocore.validate import ParamValidator
from records import attempt, interrupted
from records import job as ended_job

from sagemaker_rehearsal.api import rules
from sagemaker_rehearsal.api.errors import Refused
from sagemaker_rehearsal.api.job_access import Scope, reach
from sagemaker_rehearsal.api.service import Service
from sagemaker_rehearsal.api.validation import LEFT_OUT, pruned
from sagemaker_rehearsal.jobs import layout
from sagemaker_rehearsal.jobs.metrics import Metrics
from sagemaker_rehearsal.jobs.record import Record, Transition

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
PLAN = f"{ARN}:training-plan/a"


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


def service_path(path: tuple) -> str:
    """Return a path as the service writes it."""
    steps = [
        f"{step + 1}.member" if isinstance(step, int) else step[0].lower() + step[1:]
        for step in path
    ]
    return ".".join(steps)


VALUE_SHAPES = {path: shape for path, shape in value_shapes(REQUEST_SHAPE, FULL_REQUEST) if path}


def parent(path: tuple) -> Shape:
    """Return the shape that contains the value at a path."""
    return VALUE_SHAPES.get(path[:-1], REQUEST_SHAPE)


def string_of_size(shape: Shape, size: int) -> str:
    """Return a string of this size.

    It satisfies the pattern if an obvious string of this size does.
    """
    sample_text = sample_value(shape)
    candidates = [
        sample_text + "a" * (size - len(sample_text)),
        sample_text + "0" * (size - len(sample_text)),
        "1" * (size - len(sample_text)) + sample_text,
    ]
    candidates = [candidate[:size] for candidate in candidates]
    return next(
        (
            candidate
            for candidate in candidates
            if matches(shape.metadata.get("pattern", ".*"), candidate)
        ),
        candidates[0],
    )


def broken_values(path: tuple, shape: Shape) -> Iterator[tuple[object, str]]:
    """Yield values that break one limit of a shape's own, each with the service's words for it."""
    least = shape.metadata.get("min")
    most = shape.metadata.get("max")
    if shape.type_name in ("integer", "long"):
        if most is not None:
            yield most + 1, f"Member must have value less than or equal to {most}"
        if least is not None:
            yield least - 1, f"Member must have value greater than or equal to {least}"
        return
    if most is not None:
        value = value_of_size(path, shape, most + 1)
        if shape.metadata.get("enum") is None:
            yield value, f"Member must have length less than or equal to {most}"
    if least:
        yield (
            value_of_size(path, shape, least - 1),
            f"Member must have length greater than or equal to {least}",
        )
    if "enum" in shape.metadata:
        yield (
            "nonsense",
            f"Member must satisfy enum value set: [{', '.join(shape.metadata['enum'])}]",
        )
    pattern = shape.metadata.get("pattern")
    if pattern and "enum" not in shape.metadata and not matches(pattern, "\n" * max(1, least or 1)):
        yield (
            "\n" * max(1, least or 1),
            f"Member must satisfy regular expression pattern: {pattern}",
        )


def value_of_size(path: tuple, shape: Shape, size: int):
    """Return a value of a shape with so many items or characters."""
    if shape.type_name == "list":
        return sample_value(shape) * size
    if shape.type_name == "map":
        return {f"k{number}": sample_value(shape.value) for number in range(size)}
    return string_of_size(shape, size)


def complaint(value, path: tuple, limit_text: str) -> str:
    """Return the service's words about a value at a path; "null" stands for no value."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}={item}" for key, item in value.items()) + "}"
    else:
        text = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
    shown = text if value == "null" else f"'{text if len(text) <= 300 else text[:297] + '...'}'"
    return f"Value {shown} at '{service_path(path)}' failed to satisfy constraint: {limit_text}"


def constraints_text(shape: Shape) -> str:
    """Return all limits of the items of a list or a map, as the service lists them."""
    limits = shape.metadata
    texts = []
    if "max" in limits:
        texts.append(f"Member must have length less than or equal to {limits['max']}")
    if "min" in limits:
        texts.append(f"Member must have length greater than or equal to {limits['min']}")
    if "enum" in limits:
        texts.append(f"Member must satisfy enum value set: [{', '.join(limits['enum'])}]")
    if "pattern" in limits:
        texts.append(f"Member must satisfy regular expression pattern: {limits['pattern']}")
    return f"[{', '.join(texts)}]"


def broken_requests() -> Iterator[tuple[dict, str]]:
    """Yield requests that break one limit, each with the service's words for it."""
    for path, shape in VALUE_SHAPES.items():
        holder = parent(path)
        if holder.type_name == "structure" and path[-1] in holder.required_members:
            yield (
                changed_copy(FULL_REQUEST, path, ABSENT),
                complaint("null", path, "Member must not be null"),
            )
        for value, limit_text in broken_values(path, shape):
            request = changed_copy(FULL_REQUEST, path, value)
            if holder.type_name == "list" and shape.type_name != "structure":
                yield (
                    request,
                    complaint(
                        [value],
                        path[:-1],
                        f"Member must satisfy constraint: {constraints_text(shape)}",
                    ),
                )
            elif holder.type_name == "map":
                limit_text = f"Map value must satisfy constraint: {constraints_text(shape)}"
                yield request, complaint({path[-1]: value}, path[:-1], limit_text)
            else:
                yield request, complaint(value, path, limit_text)
        for key, _ in broken_values(path, shape.key) if shape.type_name == "map" else ():
            value = {key: sample_value(shape.value)}
            limit_text = f"Map key must satisfy constraint: {constraints_text(shape.key)}"
            yield changed_copy(FULL_REQUEST, path, value), complaint(value, path, limit_text)


def breaks_a_limit(value, shape: Shape) -> bool:
    """Return whether a value breaks a limit that botocore does not check.

    Such limits are a greatest size, an enum and a pattern.
    """
    type_name = shape.type_name
    most = shape.metadata.get("max")
    if type_name == "structure":
        return any(
            breaks_a_limit(value[name], member)
            for name, member in shape.members.items()
            if name in value
        )
    if type_name == "string":
        return not satisfied(value, shape)
    if type_name in ("integer", "long"):
        return most is not None and value > most
    if type_name in ("list", "map") and most is not None and len(value) > most:
        return True
    if type_name == "list":
        return any(breaks_a_limit(item, shape.member) for item in value)
    return type_name == "map" and any(
        breaks_a_limit(key, shape.key) or breaks_a_limit(item, shape.value)
        for key, item in value.items()
    )


def model_allows(request: dict) -> bool:
    """Return whether the model allows a request, as botocore and `breaks_a_limit` see it."""
    return not ParamValidator().validate(
        request, REQUEST_SHAPE
    ).has_errors() and not breaks_a_limit(request, REQUEST_SHAPE)


def test_a_request_with_all_fields_is_allowed():
    assert len(VALUE_SHAPES) > 150 and model_allows(FULL_REQUEST)
    assert refusal(FULL_REQUEST) is None


@pytest.mark.slow
def test_each_limit_that_is_broken_is_told():
    requests = list(broken_requests())
    assert len(requests) > 250
    mismatches = []
    for request, expected_text in requests:
        code, message = refusal(request) or ("accepted", "")
        head_of_message, _, details = message.partition(" detected: ")
        count = len(re.findall(r"failed to satisfy constraint", message))
        expected = f"{count} validation error{'s' if count > 1 else ''}"
        if (
            model_allows(request)
            or code != "ValidationException"
            or expected_text not in details.split("; ")
            or head_of_message != expected
        ):
            mismatches.append((expected_text, message))
    assert mismatches == []


@pytest.mark.slow
def test_each_bound_may_be_reached():
    reached = 0
    for path, shape in VALUE_SHAPES.items():
        for bound in ("min", "max"):
            size = shape.metadata.get(bound)
            if (
                size is None
                or "enum" in shape.metadata
                or path[-1:] == (0,)
                and parent(path).type_name != "list"
            ):
                continue
            number = shape.type_name in ("integer", "long")
            request = changed_copy(
                FULL_REQUEST, path, size if number else value_of_size(path, shape, size)
            )
            # All but the strings whose pattern no obvious string of that length satisfies.
            if model_allows(request):
                reached += 1
                assert refusal(request) is None, (path, size)
    assert reached > 150


WRONG_TYPES = {
    "string": [1, 1.5, True, [], {}],
    "integer": ["1", 1.5, False, [], {}, 2**31, -(2**31) - 1],
    "long": ["1", 1.5, True, [], {}, 2**63],
    "boolean": ["true", 1, 0.0, [], {}],
    "list": ["x", 1, True, {}],
    "map": ["x", 1, 1.5, False, []],
    "structure": ["x", 1, 1.5, True, []],
}


@pytest.mark.slow
def test_a_value_of_the_wrong_type_is_refused():
    for path, shape in VALUE_SHAPES.items():
        for value in WRONG_TYPES[shape.type_name]:
            code, message = refusal(changed_copy(FULL_REQUEST, path, value)) or ("accepted", "")
            assert code == "SerializationException", (path, value, message)
            assert re.fullmatch(
                r"\w+_VALUE can not be converted to an? \w+|Start of .*|Expected .* or null",
                message,
            )
    for body in ("x", 1, 1.5, True, [], [JOB], None):
        assert refusal(body)[0] == "SerializationException"


def test_null_is_as_good_as_absent():
    for path in VALUE_SHAPES:
        if parent(path).type_name == "structure":
            assert refusal(changed_copy(FULL_REQUEST, path, None)) == refusal(
                changed_copy(FULL_REQUEST, path, ABSENT)
            ), path
    request = JOB | {
        "InputDataConfig": [
            channel("a", CompressionType=None, RecordWrapperType=None, InputMode=None)
        ],
        "StoppingCondition": {"MaxRuntimeInSeconds": None, "MaxWaitTimeInSeconds": 100000},
        "EnableManagedSpotTraining": True,
        "CheckpointConfig": None,
        "AlgorithmSpecification": JOB["AlgorithmSpecification"] | {"TrainingImageConfig": None},
    }
    assert answer(request) == []
    assert refusal(JOB | {"HyperParameters": {"a": None}}) == (
        "SerializationException",
        "NULL_VALUE can not be converted to a String",
    )


WORDS = [
    (
        {
            "ResourceConfig": {"InstanceType": "ml.m5", "InstanceCount": -1},
            "TrainingJobName": "a_b",
        },
        r"3 validation errors detected: Value 'a_b' at 'trainingJobName' failed to satisfy "
        r"constraint: Member must satisfy regular expression pattern: "
        r"\[a-zA-Z0-9\]\(-\*\[a-zA-Z0-9\]\)\{0,62\}; Value 'ml.m5' at "
        r"'resourceConfig.instanceType' failed to satisfy constraint: Member must satisfy enum "
        r"value set: \[ml\.\S+(, ml\.\S+)+\]; Value '-1' at 'resourceConfig.instanceCount' "
        r"failed to satisfy constraint: Member must have value greater than or equal to 0",
    ),
    (
        {
            "InputDataConfig": [
                {"DataSource": {"S3DataSource": {"S3Uri": "s3://b/x"}}, "ChannelName": ""}
            ]
        },
        r"3 validation errors detected: Value '' at 'inputDataConfig.1.member.channelName' "
        r"failed to satisfy constraint: Member must have length greater than or equal to 1; "
        r"Value '' at .*pattern.*; Value null at "
        r"'inputDataConfig.1.member.dataSource.s3DataSource.s3DataType' failed to satisfy "
        r"constraint: Member must not be null",
    ),
    (
        {"HyperParameters": {"a": "x" * 2501}},
        r"1 validation error detected: Value '\{a=x{294}\.\.\.' at 'hyperParameters' failed to "
        r"satisfy constraint: Map value must satisfy constraint: \[Member must have length "
        r"less than or equal to 2500, Member must have length greater than or equal to 0, "
        r"Member must satisfy regular expression pattern: \.\*\]",
    ),
    (
        {"HyperParameters": {"a": "1", "b\0": "2"}},
        r"1 validation error detected: Value '\{a=1, b\\u0000=2\}' at 'hyperParameters' failed "
        r"to satisfy constraint: Map key must satisfy constraint: \[.*, Member must be text "
        r"without NUL characters and lone surrogates\]",
    ),
    (
        {"Environment": {"A": "x\ud800"}, "HyperParameters": {"a": "\udfff"}},
        r"2 validation errors detected: Value '\{a=\\udfff\}' at 'hyperParameters' failed .* "
        r"without NUL characters and lone surrogates\]; Value '\{A=x\\ud800\}' at "
        r"'environment' failed .* Map value must satisfy constraint: \[.*, Member must be text "
        r"without NUL characters and lone surrogates\]",
    ),
    (
        {
            "AlgorithmSpecification": JOB["AlgorithmSpecification"]
            | {"ContainerArguments": ["train", "\0"]}
        },
        r"1 validation error detected: Value '\[train, \\u0000\]' at "
        r"'algorithmSpecification.containerArguments' failed to satisfy constraint: Member "
        r"must satisfy constraint: \[.*, Member must be text without NUL .*\]",
    ),
    (
        {"VpcConfig": {"SecurityGroupIds": ["sg 1", "sg-2"], "Subnets": []}},
        r"2 validation errors detected: Value '\[sg 1, sg-2\]' at 'vpcConfig.securityGroupIds' "
        r"failed to satisfy constraint: Member must satisfy constraint: \[Member must have "
        r"length less than or equal to 32, Member must have length greater than or equal to 0, "
        r"Member must satisfy regular expression pattern: \S+\]; Value '\[\]' at "
        r"'vpcConfig.subnets' failed to satisfy constraint: Member must have length greater "
        r"than or equal to 1",
    ),
]


@pytest.mark.parametrize(("fields", "words"), WORDS)
def test_the_words_of_a_refusal(fields, words):
    code, message = refusal(JOB | fields)
    assert code == "ValidationException" and re.fullmatch(words, message), message


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"Tags": [{"Key": "ключ é_1", "Value": "\u00a0٣ +-@=/:."}]}, True),
        ({"Tags": [{"Key": "a\tb", "Value": ""}]}, False),
        ({"Tags": [{"Key": "a", "Value": "a\n"}]}, False),
        ({"Tags": [{"Key": "a", "Value": "a!"}]}, False),
        ({"RoleArn": "arn:aws:iam::١٢٣٤٥٦٧٨٩٠١٢:role/x"}, False),  # digits, but not Java's \d
        ({"HyperParameters": {"a": "two\nlines"}}, False),
        ({"Environment": {"a": "two\nlines"}}, True),
        ({"Environment": {"1a": "x"}}, False),
    ],
)
def test_patterns_are_javas(fields, is_allowed):
    assert (refusal(JOB | fields) is None) == is_allowed


# The fields that are refused because nothing here emulates them. Each of the other fields is in one
# of the lists of rules.py.
REFUSED_FIELDS = [
    "AlgorithmSpecification.AlgorithmName",
    "AlgorithmSpecification.TrainingImageConfig.TrainingRepositoryAuthConfig",
    "InputDataConfig.DataSource.S3DataSource.AttributeNames",
    "InputDataConfig.DataSource.S3DataSource.HubAccessConfig",
    "InputDataConfig.DataSource.FileSystemDataSource",
    "InputDataConfig.DataSource.DatasetSource",
    "InputDataConfig.ShuffleConfig",
    "ResourceConfig.InstancePlacementConfig",
    "ResourceConfig.SelectedInstanceType",
    "ResourceConfig.SelectedInstanceCount",
    "DebugRuleConfigurations",
    "TensorBoardOutputConfig",
    "ProfilerRuleConfigurations",
    "ServerlessJobConfig",
    "MlflowConfig",
    "ModelPackageConfig",
]
LISTED_FIELDS = [*rules.EMULATED, *rules.WITHOUT_EFFECT, *REFUSED_FIELDS]


def field_paths(shape: Shape, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each field, and stop at the fields that are listed."""
    for name, member in shape.members.items():
        inner = (*path, name)
        if any(listed_field.startswith(f"{dotted(inner)}.") for listed_field in LISTED_FIELDS):
            yield from field_paths(member.member if member.type_name == "list" else member, inner)
        else:
            yield inner


def dotted(path: tuple) -> str:
    """Return a path as the lists of rules.py write it."""
    return ".".join(step for step in path if isinstance(step, str))


def test_each_field_of_the_model_is_emulated_or_refused_or_noted():
    """A new field of botocore is refused, and fails this test until a list has it."""
    assert sorted(dotted(path) for path in field_paths(REQUEST_SHAPE)) == sorted(LISTED_FIELDS)


PREFERRED = {
    "InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}, {"InstanceType": "ml.m5.xlarge"}],
    "InstanceCount": 2,
}


def with_field(listed: str) -> dict:
    """Return a job with one more field, and the fields that it needs."""
    request = JOB | {"InputDataConfig": [channel("a")]}
    if "InstancePreferences" in listed:
        request |= {"ResourceConfig": PREFERRED}
    path = next(path for path in VALUE_SHAPES if dotted(path) == listed)
    inner = request = copy.deepcopy(request)
    for step in path[:-1]:
        if isinstance(inner, dict):
            inner.setdefault(step, {})
        inner = inner[step]
    inner[path[-1]] = sample_value(VALUE_SHAPES[path])
    if "TrainingImageConfig" in listed:
        inner["TrainingRepositoryAccessMode"] = "Platform"
    return request


@pytest.mark.parametrize("listed", REFUSED_FIELDS)
def test_a_field_that_is_not_emulated_is_refused(listed):
    with pytest.raises(
        Refused, match=f"The rehearsal does not emulate {re.escape(listed)}; leave it out"
    ):
        answer(with_field(listed))


COUNTED = [
    {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1},
    {"InstanceType": "ml.g5.xlarge", "InstanceCount": 8},
]


@pytest.mark.parametrize(
    ("resources", "lacking", "chosen"),
    [
        (PREFERRED, [], ("ml.g5.xlarge", 2)),
        (PREFERRED, ["ml.g5.xlarge"], ("ml.m5.xlarge", 2)),
        (PREFERRED, ["ml.g5.xlarge", "ml.m5.xlarge"], ("ml.g5.xlarge", 2)),
        ({"InstancePreferences": COUNTED}, ["ml.p5.48xlarge"], ("ml.g5.xlarge", 8)),
    ],
)
def test_the_first_preferred_type_with_capacity_is_chosen(resources, lacking, chosen):
    request = JOB | {"ResourceConfig": resources}
    assert answer(request) == []
    made = rules.with_chosen(request, lacking)
    names = ("SelectedInstanceType", "SelectedInstanceCount")
    assert made["ResourceConfig"] == resources | dict(zip(names, chosen, strict=True))
    assert [(host.instance_type, len(layout.hosts(made))) for host in layout.hosts(made)[:1]] == [
        chosen
    ]
    assert rules.without_chosen(made) == request
    assert rules.with_chosen(JOB, ["ml.m5.xlarge"]) == rules.without_chosen(JOB) == JOB


@pytest.mark.parametrize(
    ("fields", "resources", "says"),
    [
        ({}, {"InstanceType": "ml.m5.xlarge"}, "cannot be given together with InstanceType, Ins"),
        (
            {
                "EnableManagedSpotTraining": True,
                "StoppingCondition": {"MaxWaitTimeInSeconds": 86400},
            },
            {},
            "cannot be given together with InstanceType, InstanceGroups or EnableManagedSpot",
        ),
        ({}, {"InstancePreferences": COUNTED}, "InstanceCount must be given for every entry of In"),
        ({}, {"InstanceCount": None}, "InstanceCount must be given for every entry"),
        (
            {},
            {"InstancePreferences": [COUNTED[0], {"InstanceType": "ml.g5.xlarge"}]}
            | {"InstanceCount": None},
            "InstanceCount must be given for every entry",
        ),
        ({}, {"InstancePreferences": [COUNTED[0]] * 2, "InstanceCount": None}, "only once in Inst"),
        (
            {},
            {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge", "TrainingPlanArns": [PLAN]}]}
            | {"TrainingPlanArn": PLAN},
            "TrainingPlanArns cannot be given together with TrainingPlanArn",
        ),
        ({}, {"InstanceCount": 251}, "runs jobs of 250 instances at most"),
        ({}, {"InstanceCount": 0}, "InstanceCount must be greater than or equal to 1"),
        ({}, {"SelectedInstanceType": "ml.g5.xlarge"}, "does not emulate ResourceConfig.Selected"),
    ],
)
def test_preferences_that_the_service_refuses(fields, resources, says):
    resources = {k: v for k, v in (PREFERRED | resources).items() if v is not None}
    with pytest.raises(Refused, match=says):
        answer(JOB | {"ResourceConfig": resources} | fields)


@pytest.mark.parametrize("listed", rules.WITHOUT_EFFECT)
def test_a_field_without_effect_is_noted(listed):
    assert answer(with_field(listed)) == [
        f"{listed} has no effect here: {rules.WITHOUT_EFFECT[listed]}"
    ]


def test_a_field_that_the_model_does_not_have_is_noted():
    request = changed_copy(JOB | {"News": 1, "Empty": []}, ("ResourceConfig", "Colour"), "blue")
    notes = ["ResourceConfig.Colour", "News"]
    assert answer(request) == [
        f"{name} has no effect here: the service's model does not have it" for name in notes
    ]


def test_what_the_hosts_of_a_job_reach_in_s3():
    """The prefix of a channel may end within a name; an address elsewhere is that of one name."""
    request = JOB | {
        "CheckpointConfig": {"S3Uri": "s3://kept/run"},
        "InputDataConfig": [channel("a", source={"S3Uri": "s3://data/set"}), channel("b")],
        "HyperParameters": {
            "sagemaker_submit_directory": '"s3://code/a.tar.gz"',
            "logger.save_dir": "s3://logs/run",
            "all": "s3://x",
        },
        "Environment": {"TWO": "s3://y/1,s3://y/2/", "OTHER": "https://y/3"},
        "Tags": [{"Key": "a", "Value": "s3://tag/x"}],
    }
    request["InputDataConfig"][1]["DataSource"]["S3DataSource"]["S3Uri"] = "file:///data"
    allowed = reach(request)
    assert allowed.writes == (
        Scope("bucket", "output/job/"),
        Scope("kept", "run/"),
        Scope("logs", "run/", "run"),
        Scope("y", "1/", "1"),
        Scope("y", "2/", "2/"),
    )
    assert allowed.reads == (Scope("data", "set"), Scope("code", "a.tar.gz/", "a.tar.gz"))
    assert allowed.may_read("kept", "run/x") and allowed.may_read("data", "set-2/x")
    assert allowed.may_read("code", "a.tar.gz") and not allowed.may_read("code", "a.tar.gz2")
    assert not allowed.may_write("data", "set/x") and not allowed.may_write("kept", "run-2/x")
    assert not allowed.may_write("code", "a.tar.gz") and allowed.may_write("logs", "run/x")
    assert allowed.listed("kept", "run/x") == "run/x" and allowed.listed("data", "set") == "set"
    assert allowed.listed("kept", "run") == "run/" and allowed.listed("kept", "ru") is None
    assert not reach(JOB).may_read("bucket", "output/job-2/x")


def nested(levels: int) -> list:
    """Return a list in a list in a list, and so on."""
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [900, 100_000])
def test_a_request_as_deep_as_json_can_be(levels):
    """What the model does not have is left out; what it has is refused by its type."""
    assert answer(JOB | {"News": [nested(levels)]}) == [
        "News has no effect here: the service's model does not have it"
    ]
    for field in (
        "HyperParameters",
        "InputDataConfig",
        "TrainingJobName",
        "AlgorithmSpecification",
    ):
        assert refusal(JOB | {field: nested(levels)})[0] == "SerializationException", field
    data = {"S3DataSource": {"S3Uri": nested(levels), "S3DataType": "S3Prefix"}}
    deep_channel = {"ChannelName": "training", "DataSource": data, "News": nested(levels)}
    assert refusal(JOB | {"InputDataConfig": [deep_channel]})[0] == "SerializationException"
    request = {"TrainingJobName": "job", "News": nested(levels)}
    with pytest.raises(Refused, match="Requested resource not found"):
        answer(request, "DescribeTrainingJob")


def test_what_the_model_does_not_have_is_not_kept():
    request = pruned(JOB | {"News" * 100: {"a": "b" * 10**6}, "Tags": None}, REQUEST_SHAPE)
    assert request == JOB | {("News" * 100)[:100]: LEFT_OUT}


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
    """Return an instance group."""
    return {"InstanceGroupName": name, "InstanceType": "ml.m5.xlarge", "InstanceCount": count}


def resources(*groups: dict, **more_fields) -> dict:
    """Return a ResourceConfig of groups."""
    return {"ResourceConfig": {"InstanceGroups": list(groups)} | more_fields}


def algorithm(**more_fields) -> dict:
    """Return an AlgorithmSpecification."""
    return {"AlgorithmSpecification": JOB["AlgorithmSpecification"] | more_fields}


def stopping(spot: bool, longest: int | None, wait: int | None) -> dict:
    """Return the fields StoppingCondition and EnableManagedSpotTraining of a request."""
    limits = {"MaxRuntimeInSeconds": longest, "MaxWaitTimeInSeconds": wait}
    return {"EnableManagedSpotTraining": spot, "StoppingCondition": limits}


WAIT = (
    "MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
)
FIELDS_TOGETHER = {
    "no image": (
        {"AlgorithmSpecification": {"TrainingInputMode": "File"}},
        "TrainingImage or AlgorithmName",
    ),
    "no algorithm": ({"AlgorithmSpecification": None}, "TrainingImage or AlgorithmName"),
    "fast file": (algorithm(TrainingInputMode="FastFile"), None),
    "pipe": (algorithm(TrainingInputMode="Pipe"), "does not emulate TrainingInputMode Pipe"),
    "platform": (algorithm(TrainingImageConfig={"TrainingRepositoryAccessMode": "Platform"}), None),
    "registry in a VPC": (
        algorithm(TrainingImageConfig={"TrainingRepositoryAccessMode": "Vpc"}),
        "AccessMode Vpc",
    ),
    "command": (algorithm(ContainerEntrypoint=["a"], ContainerArguments=["b"]), None),
    "metrics": (algorithm(MetricDefinitions=[{"Name": "a", "Regex": "a=(.*)"}]), None),
    "no pattern": (algorithm(MetricDefinitions=[{"Name": "a", "Regex": "("}]), "the Regex of 'a'"),
    "long pattern": (
        algorithm(MetricDefinitions=[{"Name": "a", "Regex": "a{9999999999}"}]),
        "the Regex of 'a'",
    ),
    "no resources": ({"ResourceConfig": None}, "InstanceType and InstanceCount, or InstanceGroups"),
    "no count": (
        {"ResourceConfig": {"InstanceType": "ml.m5.xlarge"}},
        "InstanceType and InstanceCount, or",
    ),
    "no type": ({"ResourceConfig": {"InstanceCount": 1}}, "InstanceType and InstanceCount, or"),
    "no instance": (
        {"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 0}},
        "InstanceCount must be",
    ),
    "most instances": (
        {"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 250}},
        None,
    ),
    "too many": (
        {"ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 251}},
        "250 instances at most",
    ),
    "groups": (resources(group("a"), group("b", 3)), None),
    "an empty group": (resources(group("a"), group("b", 0)), "InstanceCount must be"),
    "many in groups": (resources(group("a", 200), group("b", 51)), "250 instances at most"),
    "one name": (resources(group("a"), group("a")), "InstanceGroupName must be unique"),
    "groups and a type": (
        resources(group("a"), InstanceType="ml.m5.xlarge"),
        "cannot be given together",
    ),
    "groups and a count": (resources(group("a"), InstanceCount=0), "cannot be given together"),
    "spot": (stopping(True, 100, 100), None),
    "spot that may wait": (stopping(True, 100, 101), None),
    "spot in a hurry": (stopping(True, 100, 99), WAIT),
    "spot without a wait": (stopping(True, 100, None), WAIT),
    "spot of a day": (stopping(True, None, 86400), None),
    "spot below a day": (stopping(True, None, 86399), WAIT),
    "spot without limits": ({"EnableManagedSpotTraining": True}, WAIT),
    "a wait on demand": (
        stopping(False, 100, 200),
        "only supported when EnableManagedSpotTraining is set",
    ),
    "on demand": (stopping(False, 100, None), None),
    "channels": ({"InputDataConfig": [channel("a"), channel("b", InputMode="FastFile")]}, None),
    "channels of one name": (
        {"InputDataConfig": [channel("a"), channel("a")]},
        "Channel names must be unique",
    ),
    "channel .": ({"InputDataConfig": [channel(".")]}, "no folder can have"),
    "channel ..": ({"InputDataConfig": [channel("..")]}, "no folder can have"),
    "channel ...": ({"InputDataConfig": [channel("...")]}, None),
    "channel of nothing": (
        {"InputDataConfig": [{"ChannelName": "a", "DataSource": {}}]},
        "other than S3DataSource",
    ),
    "manifest": (
        {"InputDataConfig": [channel("a", source={"S3DataType": "ManifestFile"})]},
        "S3DataType ManifestFile",
    ),
    "pipe channel": (
        {"InputDataConfig": [channel("a", InputMode="Pipe")]},
        "channel a: InputMode Pipe",
    ),
    "gzip": (
        {"InputDataConfig": [channel("a", CompressionType="Gzip")]},
        "channel a: CompressionType Gzip",
    ),
    "records": (
        {"InputDataConfig": [channel("a", RecordWrapperType="RecordIO")]},
        "RecordWrapperType RecordIO",
    ),
    "plain": (
        {"InputDataConfig": [channel("a", CompressionType="None", RecordWrapperType="None")]},
        None,
    ),
    "sharded": (
        {"InputDataConfig": [channel("a", source={"S3DataDistributionType": "ShardedByS3Key"})]},
        None,
    ),
    "a folder": ({"InputDataConfig": [channel("a", source={"S3Uri": "file:///data"})]}, None),
    "a folder elsewhere": (
        {"InputDataConfig": [channel("a", source={"S3Uri": "file://host/data"})]},
        "s3Uri",
    ),
    "channel of a group": (
        resources(group("g")) | {"InputDataConfig": [channel("a", ["g"])]},
        None,
    ),
    "channel of no group": (
        resources(group("g")) | {"InputDataConfig": [channel("a", ["h"])]},
        r"\['h'\] of",
    ),
    "group without groups": ({"InputDataConfig": [channel("a", ["g"])]}, r"\['g'\] of channel a"),
    "some of groups": (
        resources(group("g")) | {"InputDataConfig": [channel("a", ["g"]), channel("b")]},
        "for all channels of InputDataConfig, or for none",
    ),
}
CHECKPOINT_PATHS = {
    "/opt/ml/checkpoints": True,
    "/opt/ml/checkpoints/": True,
    "/opt/ml/a/b": True,
    "/opt/ml/inputs": True,
}
CHECKPOINT_PATHS |= dict.fromkeys(
    ["/tmp/a", "/opt/ml", "/opt/ml/", "/opt/ml/.", "/opt/ml/model", "/opt/ml/input/", ""], False
)
USED = [
    "input/config",
    "input/data/a",
    "input/config/a",
    "model/a",
    "output/data",
    "output/failure",
    "code",
    "./input/a",
]
CHECKPOINT_PATHS |= dict.fromkeys(
    [*(f"/opt/ml/{name}" for name in USED), "/opt/ml//model", "//opt/ml/a", "/"], False
)
CHECKPOINT_PATHS |= dict.fromkeys(
    ["/opt/ml/../a", "/opt/ml/a/../../../etc", "/opt/ml/a:ro", "/opt/mlx/a", "a"], False
)


@pytest.mark.parametrize("case", FIELDS_TOGETHER)
def test_fields_that_go_together(case):
    fields, refused = FIELDS_TOGETHER[case]
    if refused is None:
        assert answer(JOB | fields) == []
    else:
        with pytest.raises(Refused, match=refused):
            answer(JOB | fields)


@pytest.mark.parametrize("path", CHECKPOINT_PATHS)
def test_where_checkpoints_may_be(path):
    request = JOB | {"CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints", "LocalPath": path}}
    if CHECKPOINT_PATHS[path]:
        assert answer(request) == []
    else:
        with pytest.raises(Refused, match=r"Invalid CheckpointConfig\.LocalPath"):
            answer(request)


def random_json(draw: random.Random, depth: int = 0):
    """Return a random JSON value."""
    scalars = [
        "",
        "x",
        ".",
        "..",
        "s3://",
        "s3://[",
        "file:///",
        "a" * 70,
        "1",
        "\n",
        "ml.m5.xlarge",
        "Pipe",
        "\ud800",
    ]
    scalars += [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        [],
        {},
    ]
    if depth > 2 or draw.random() < 0.7:
        return draw.choice(scalars)
    items = [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    return (
        items
        if draw.random() < 0.5
        else {draw.choice(["S3Uri", "ChannelName", "x", ""]): item for item in items}
    )


@pytest.mark.slow
def test_no_request_makes_the_service_stumble():
    draw = random.Random(0)
    groups = resources(group("g"), group("h", 2)) | {
        "InputDataConfig": [channel("a", ["g"]), channel("b", ["h"])]
    }
    more_fields = stopping(True, 10, 20) | {
        "CheckpointConfig": {"S3Uri": "s3://b/c", "LocalPath": "/opt/ml/c"},
        "Tags": [],
    }
    bases = [
        JOB | more_fields | {"InputDataConfig": [channel("a")], "HyperParameters": {"a": "1"}},
        JOB | groups,
        FULL_REQUEST,
    ]
    accepted = refused = 0
    for _ in range(2000):
        request = copy.deepcopy(draw.choice(bases))
        for _ in range(draw.choice([1, 1, 2])):
            inner = request
            while isinstance(inner, dict | list) and inner:
                key = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
                if draw.random() < 0.35 or not isinstance(inner[key], dict | list):
                    inner[key] = random_json(draw)
                    break
                inner = inner[key]
        try:
            answer(request)
            accepted += 1
        except Refused as error:
            refused += 1
            assert str(error) and error.code in ("ValidationException", "SerializationException")
    assert accepted > 20 and refused > 1500


OTHER_OPERATIONS = [
    (
        "ListTrainingJobs",
        {"MaxResults": 0},
        "Value '0' at 'maxResults' failed .* greater than or equal to 1$",
    ),
    (
        "ListTrainingJobs",
        {"MaxResults": 101},
        "Value '101' at 'maxResults' failed .* less than or equal to 100$",
    ),
    ("ListTrainingJobs", {"MaxResults": "10"}, "STRING_VALUE can not be converted to an Integer"),
    ("ListTrainingJobs", {"NextToken": "nonsense"}, "Invalid NextToken"),
    ("ListTrainingJobs", {"NextToken": "ä"}, "Invalid NextToken"),
    ("ListTrainingJobs", {"NextToken": base64.b64encode(b"-5").decode()}, "Invalid NextToken"),
    (
        "ListTrainingJobs",
        {"NextToken": "x" * 8193},
        "at 'nextToken' .* less than or equal to 8192$",
    ),
    (
        "ListTrainingJobs",
        {"SortBy": "Colour"},
        r"at 'sortBy' .*enum value set: \[Name, CreationTime, Status\]",
    ),
    (
        "ListTrainingJobs",
        {"NameContains": "a" * 64},
        "at 'nameContains' .* less than or equal to 63",
    ),
    (
        "ListTrainingJobs",
        {"CreationTimeAfter": "yesterday"},
        "STRING_VALUE can not be converted to a Date",
    ),
    ("DescribeTrainingJob", {}, "^1 validation error detected: Value null at 'trainingJobName'"),
    ("DescribeTrainingJob", {"TrainingJobName": "a" * 64}, "less than or equal to 63"),
    ("DescribeTrainingJob", {"TrainingJobName": "a" * 63}, "^Requested resource not found.$"),
    ("StopTrainingJob", {"TrainingJobName": ""}, "greater than or equal to 1"),
    ("StopTrainingJob", {"TrainingJobName": "none"}, "^Requested resource not found.$"),
    ("AddTags", {"ResourceArn": f"{ARN}:training-job/none"}, "Value null at 'tags'"),
    ("AddTags", {"ResourceArn": "nonsense", "Tags": []}, "at 'resourceArn' .*regular expression"),
    (
        "AddTags",
        {"ResourceArn": f"{ARN}:model/a", "Tags": []},
        "tags of anything but jobs",
    ),
    (
        "DeleteTags",
        {"ResourceArn": f"{ARN}:training-job/none", "TagKeys": []},
        "at 'tagKeys' .* or equal to 1$",
    ),
    (
        "DeleteTags",
        {"ResourceArn": f"{ARN}:training-job/none", "TagKeys": ["a!"]},
        "^1 .*'tagKeys'.*must satisfy",
    ),
    ("ListTags", {"ResourceArn": f"{ARN}:training-job/none"}, "does not exist"),
    ("CreateModel", {}, "The rehearsal does not emulate CreateModel; it runs training jobs only"),
    ("Nonsense", {}, "The rehearsal knows no operation Nonsense"),
    ("answer", {}, "knows no operation"),
]


@pytest.mark.parametrize(("operation", "request_", "refused"), OTHER_OPERATIONS)
def test_other_operations(operation, request_, refused):
    with pytest.raises(Refused, match=refused):
        answer(request_, operation)


@pytest.fixture
def service() -> Service:
    """A service with 25 jobs of one region, one second apart, and one of another region."""
    checked_service = Checked(None, None)
    status = ["InProgress", "Completed", "Failed"]
    for number in range(26):
        record = Record(
            f"job-{number * 7 % 26:02}",
            {},
            1000.0 + number,
            status[number % 3],
            modified=2000.0 + number,
        )
        record.transitions.append(Transition("Training", "", 0.0))
        region = "us-east-1" if number < 25 else "eu-west-1"
        arn = f"arn:aws:sagemaker:{region}:123456789012:training-job/{record.name}"
        checked_service.jobs[arn] = SimpleNamespace(record=record)
    return checked_service


def listed_names(service: Service, **request) -> list[str]:
    """Return the names on all pages; each page has the size that the request asks for."""
    names = []
    size = request.get("MaxResults", 10)
    while True:
        page = service.answer("ListTrainingJobs", request, "us-east-1")
        names += [summary["TrainingJobName"] for summary in page["TrainingJobSummaries"]]
        if "NextToken" not in page:
            assert len(page["TrainingJobSummaries"]) <= size
            return names
        assert len(page["TrainingJobSummaries"]) == size
        request["NextToken"] = page["NextToken"]


def test_lists_of_jobs(service):
    records = [job.record for job in service.jobs.values()][:25]
    names = [record.name for record in records]
    assert (
        listed_names(service)
        == names[::-1]
        == listed_names(service, MaxResults=5, NameContains=None)
    )
    assert listed_names(service, MaxResults=100, SortOrder="Ascending") == names
    for size in (1, 5, 7, 24, 25, 26):
        assert listed_names(
            service, MaxResults=size, SortBy="Name", SortOrder="Ascending"
        ) == sorted(names)
    page = service.answer("ListTrainingJobs", {"MaxResults": 25}, "us-east-1")
    assert len(page["TrainingJobSummaries"]) == 25 and "NextToken" not in page  # no page is empty
    assert listed_names(service, SortBy="Name") == sorted(names, reverse=True)
    failed = [record.name for record in records if record.status == "Failed"]
    assert listed_names(service, StatusEquals="Failed", SortOrder="Ascending") == failed
    order = [record.status for record in records]
    by_status = {record.name: record.status for record in records}
    assert [
        by_status[name] for name in listed_names(service, SortBy="Status", SortOrder="Ascending")
    ] == sorted(order)
    tens = [name for name in sorted(names) if "-1" in name]
    assert (
        listed_names(service, NameContains="-1", SortBy="Name", SortOrder="Ascending") == tens
        and len(tens) > 5
    )
    assert (
        listed_names(service, CreationTimeAfter=1003, CreationTimeBefore=1005.5) == names[3:6][::-1]
    )
    assert listed_names(service, LastModifiedTimeAfter=2024) == names[24:]
    assert listed_names(service, CreationTimeAfter=5000) == []


def test_a_filter_includes_its_bounds(service):
    names = [job.record.name for job in service.jobs.values()][:25]
    assert (
        listed_names(service, CreationTimeAfter=1003, CreationTimeBefore=1005) == names[3:6][::-1]
    )
    for number in (-1, "x"):
        token = base64.b64encode(str(number).encode()).decode()
        with pytest.raises(Refused, match="Invalid NextToken"):
            service.answer("ListTrainingJobs", {"NextToken": token}, "us-east-1")


def described(record: Record, longest: int = 9) -> dict:
    """Return what DescribeTrainingJob says of a job."""
    described_service = Service(None, None)
    job = SimpleNamespace(record=record, longest=longest, metrics=SimpleNamespace(found={}))
    arn = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{record.name}"
    described_service.jobs[arn] = job
    request = {"TrainingJobName": record.name}
    return described_service.answer("DescribeTrainingJob", request, "us-east-1")


BILLS = {
    "two attempts": (interrupted(), 120),
    "less than half a second": (ended_job(attempt(1, 0.0, 0.4, [])), 1),
    "more than a half": (ended_job(attempt(1, 0.0, 7.6, [])), 8),
    "never started": (ended_job(status="Failed"), 0),
}


@pytest.mark.parametrize(("record", "seconds"), BILLS.values(), ids=BILLS)
def test_the_seconds_that_are_billed(record, seconds):
    record.transitions = record.transitions or [Transition("Starting", "", 0.0)]
    description = described(record)
    assert description["BillableTimeInSeconds"] == seconds
    assert "TrainingTimeInSeconds" not in description
    record.status = "InProgress"
    assert "BillableTimeInSeconds" not in described(record)


def test_the_seconds_of_training_are_those_so_far(monkeypatch):
    record = interrupted()
    record.training_start, record.training_end = 10.0, 99.6
    assert described(record)["TrainingTimeInSeconds"] == 90
    record.training_end = None
    monkeypatch.setattr("time.time", lambda: 31.0)
    assert described(record)["TrainingTimeInSeconds"] == 21
    assert "TrainingEndTime" not in described(record)


def test_what_a_description_has_of_the_request():
    record = interrupted()
    record.request |= {"Tags": [{"Key": "a", "Value": "b"}], "Environment": None}
    description = described(record)
    assert "Tags" not in description and "Environment" not in description
    assert description["StoppingCondition"] == {"MaxRuntimeInSeconds": 9}
    assert description["EnableManagedSpotTraining"] is True
    assert description["EnableNetworkIsolation"] is False
    assert "ModelArtifacts" not in description and "FinalMetricDataList" not in description
    record.artifacts = "s3://b/model.tar.gz"
    record.request["StoppingCondition"] = {"MaxRuntimeInSeconds": 7}
    description = described(record)
    assert description["ModelArtifacts"] == {"S3ModelArtifacts": "s3://b/model.tar.gz"}
    assert description["StoppingCondition"] == {"MaxRuntimeInSeconds": 7}
    assert [change.get("EndTime") for change in description["SecondaryStatusTransitions"]] == [
        55.0, None
    ]  # fmt: skip


def test_the_longest_training_is_a_day_by_default():
    assert rules.longest({}) == rules.longest({"StoppingCondition": None}) == 86400
    assert rules.longest({"StoppingCondition": {"MaxRuntimeInSeconds": 5}}) == 5
