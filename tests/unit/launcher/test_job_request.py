"""launcher/job_request.py: the parts of a request for a training job."""

from argparse import Namespace

import pytest

from sagemaker_lightning.launcher import job_request

NOTHING = dict.fromkeys(("instance_group", "instance_type", "instance_count", "keep_alive"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}),
        ({"instance_count": 3}, {"InstanceType": "ml.g5.xlarge", "InstanceCount": 3}),
        (
            {"instance_type": "ml.m5.large", "keep_alive": 60},
            {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "KeepAlivePeriodInSeconds": 60,
            },
        ),
    ],
)
def test_the_resources_of_a_job(given, expected):
    args = Namespace(**NOTHING | {"volume_size": 30} | given)
    assert job_request.resources(args) == {"VolumeSizeInGB": 30} | expected
