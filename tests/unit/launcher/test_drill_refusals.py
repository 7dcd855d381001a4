"""Drills before a launch that cannot be."""

import pytest
from launches import IMAGE

from sagemaker_lightning.launcher import drill, hyperparameter_check


def test_without_a_checkout_one_line_says_what_it_has(monkeypatch):
    """As in the wheel, which has neither app/ nor .venv."""
    for module in (hyperparameter_check, drill):
        monkeypatch.setattr(module, "IS_CHECKOUT", False)
    (line,) = hyperparameter_check.check({}, "local")
    assert "app/train.py, is in a checkout" in line and "--check-hyperparameters=image" in line
    with pytest.raises(ValueError, match="--drill: the application to drill is in a checkout"):
        drill.run({}, "local", {})


def test_what_a_drill_cannot_have(tmp_path):
    (tmp_path / "file").touch()
    source = {"S3DataSource": {"S3Uri": "s3://bucket/x"}}
    request = {"InputDataConfig": [{"ChannelName": "a", "DataSource": source}]}
    for data, says in (
        ({}, "found none for the channel a, which is at s3://bucket/x"),
        ({"a": str(tmp_path / "file")}, "found .*file for the channel a"),
        ({"a": str(tmp_path), "b": "."}, "found b, expected the channels: a$"),
    ):
        with pytest.raises(ValueError, match=f"--drill-data: {says}"):
            drill.run(request, "image", data)
    with pytest.raises(ValueError, match="--drill-data: found b, expected the channels: none"):
        drill.run({}, "image", {"b": "."})
    for text in ("a\nb", "a\rb"):
        image = {"AlgorithmSpecification": {"TrainingImage": IMAGE}, "Environment": {"KEY": text}}
        with pytest.raises(ValueError, match="found a line break in the variable KEY"):
            drill.run(image, "image", {})
