"""Which fields of a request are emulated, refused or noted, and which go together."""

import copy
import re
from collections.abc import Iterator

import pytest
from botocore.model import Shape
from checked_requests import (
    ARN,
    JOB,
    REQUEST_SHAPE,
    VALUE_SHAPES,
    answer,
    changed_copy,
    channel,
    group,
    refusal,
    resources,
    sample_value,
    stopping,
)

from sagemaker_rehearsal.api.job_access import Scope, reach
from sagemaker_rehearsal.aws import rules
from sagemaker_rehearsal.aws.errors import Refused
from sagemaker_rehearsal.aws.validation import LEFT_OUT, pruned
from sagemaker_rehearsal.jobs import layout

PLAN = f"{ARN}:training-plan/a"


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
    says = f"The rehearsal does not emulate {re.escape(listed)}; leave it out"
    with pytest.raises(Refused, match=says):
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
        (
            {"Tags": [{"Key": "AWS:x", "Value": "y"}]},
            {},
            "aws: prefixed tag key names are not allo",
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


def algorithm(**more_fields) -> dict:
    return {"AlgorithmSpecification": JOB["AlgorithmSpecification"] | more_fields}


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
    "spot, immediately": (stopping(True, 100, 99), WAIT),
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
