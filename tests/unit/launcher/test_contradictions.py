"""Flags of the launcher that contradict each other."""

import pytest
from launches import parsed

from sagemaker_lightning.launcher import contradictions


@pytest.mark.parametrize("max_wait", [None, 100, 101, 200])
def test_a_wait_as_long_as_the_run_is_allowed(max_wait):
    flags = ["--spot", "--checkpoints=s3://b/c", "--max-run=100"]
    flags += [f"--max-wait={max_wait}"] if max_wait else []
    contradictions.check_flags(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep-alive=9", "--instance-group=a=ml.x:1"], "--keep-alive: not allowed with --inst"),
        (["--instance-group=a=ml.x:1", "--instance-count=1"], "--instance-group: not allowed with"),
        (
            ["--instance-group=a=ml.x:1", "--instance-type=ml.x"],
            "--instance-group: not allowed with",
        ),
        (["--drill-data=a=."], "--drill-data: found without --drill"),
        (["--drill-data=a=.", "--drill"], ""),
        (["--keep-alive=9"], ""),
        (["--subnet=a", "--security-group=b"], ""),
    ],
)
def test_flags_that_exclude_each_other(flags, says):
    if not says:
        contradictions.check_flags(parsed(*flags))
        return
    with pytest.raises(ValueError, match=f"^{says}"):
        contradictions.check_flags(parsed(*flags))


def test_a_role_may_be_a_name():
    """What is not an ARN is the request's to judge; a part of one, too."""
    for role in ("SageMaker", "arn:aws", "arn:aws:iam::123456789012:role/x"):
        contradictions.check_places(parsed(f"--role={role}"), "us-east-1")
    china = parsed("--image=x")
    with pytest.raises(ValueError, match="found a role in aws, but region cn-north-1 is in aws-cn"):
        contradictions.check_places(china, "cn-north-1")
