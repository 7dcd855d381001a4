"""The words of a mistake's line."""

import pytest

from sagemaker_lightning.contract.errors import with_article


@pytest.mark.parametrize(
    ("noun", "says"),
    [
        ("itertools.count", "an itertools.count"),
        ("Adam", "an Adam"),
        ("UntypedStorage", "an UntypedStorage"),
        ("users.Table", "a users.Table"),
        ("function", "a function"),
    ],
)
def test_a_class_is_named_with_its_article(noun, says):
    assert with_article(noun) == says
