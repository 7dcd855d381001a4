"""Requests to the rehearsal: each limit of the service's model, in the service's words."""

import copy
import random
import re
from collections.abc import Iterator

import pytest
from botocore.model import Shape
from botocore.validate import ParamValidator
from checked_requests import (
    ABSENT,
    FULL_REQUEST,
    JOB,
    REQUEST_SHAPE,
    VALUE_SHAPES,
    answer,
    changed_copy,
    channel,
    group,
    matches,
    refusal,
    resources,
    sample_value,
    satisfied,
    stopping,
)

from sagemaker_rehearsal.aws.errors import Refused


def service_path(path: tuple) -> str:
    steps = [
        f"{step + 1}.member" if isinstance(step, int) else step[0].lower() + step[1:]
        for step in path
    ]
    return ".".join(steps)


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
def test_each_limit_that_is_broken_is_reported():
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


def random_json(draw: random.Random, depth: int = 0):
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
