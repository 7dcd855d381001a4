"""The types of what AWS takes and answers, against botocore's own model of its services."""

from typing import get_args, get_origin, get_type_hints, is_typeddict

import botocore.session
import pytest

from sagemaker_lightning.launcher import services

ANSWERS = {
    services.Job: ("sagemaker", "DescribeTrainingJob"),
    services.JobsPage: ("sagemaker", "ListTrainingJobs"),
    services.TagsPage: ("sagemaker", "ListTags"),
    services.StreamsPage: ("logs", "DescribeLogStreams"),
    services.LogPage: ("logs", "GetLogEvents"),
}
PYTHON = {"string": "str", "integer": "int", "boolean": "bool", "timestamp": "datetime"} | {
    "float": "float",
    "long": "int",
    "map": "dict",
}


def operation(service: str, name: str):
    return botocore.session.get_session().get_service_model(service).operation_model(name)


def differences(type_, shape, path):
    """Yield a line for each field of a type that the model has not, or has of another type."""
    if get_origin(type_) is list:
        assert shape.type_name == "list", path
        yield from differences(get_args(type_)[0], shape.member, f"{path}[]")
    elif is_typeddict(type_):
        for name, hint in get_type_hints(type_).items():
            if name not in shape.members:
                yield f"{path}.{name}"
            else:
                yield from differences(hint, shape.members[name], f"{path}.{name}")
    elif PYTHON.get(shape.type_name) != (get_origin(type_) or type_).__name__:
        yield f"{path} is a {shape.type_name}"


def test_a_request_has_the_fields_of_the_model_and_needs_what_the_model_needs():
    shape = operation("sagemaker", "CreateTrainingJob").input_shape
    assert not list(differences(services.Request, shape, "Request"))
    assert services.Request.__required_keys__ >= set(shape.required_members)
    for name in ("OutputDataConfig", "CheckpointConfig", "VpcConfig", "RetryStrategy"):
        type_ = getattr(services, name)
        assert type_.__required_keys__ >= set(shape.members[name].required_members), name


@pytest.mark.parametrize(("type_", "names"), ANSWERS.items())
def test_an_answer_has_fields_of_the_model(type_, names):
    assert not list(differences(type_, operation(*names).output_shape, type_.__name__))
