"""What is said of an image that is not there helps whoever has a checkout, and who has none."""

import importlib

import pytest

from sagemaker_lightning.launcher import hyperparameter_check, images

URI = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/x:1"


@pytest.mark.parametrize("is_checkout", [True, False])
def test_how_an_image_is_pushed_and_named(monkeypatch, is_checkout):
    monkeypatch.setattr(hyperparameter_check, "IS_CHECKOUT", is_checkout)
    here = importlib.reload(images)
    try:
        said = here.how_to_push(URI)
        assert ("scripts/" in said) == ("scripts/" in here.HOW_TO_NAME) == is_checkout
        assert (f"`docker push {URI}`" in said) != is_checkout
        assert ("get-login-password --region eu-west-1 |" in said) != is_checkout
    finally:
        monkeypatch.undo()
        importlib.reload(images)
