"""The one parser of S3 addresses."""

import pytest

from sagemaker_lightning.contract.s3_address import bucket_and_key


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/a/b.tar.gz", ("bucket", "a/b.tar.gz")),
        # S3 gives none of these characters a meaning.
        ("s3://bucket/a b%20?c#d", ("bucket", "a b%20?c#d")),
        ("s3://bucket//a", ("bucket", "/a")),  # a key may begin with a slash
        ("https://s3.us-east-1.amazonaws.com/bucket/a/b", ("bucket", "a/b")),
        ("https://s3.us-east-1.amazonaws.com", ("", "")),
    ],
)
def test_bucket_and_key(address, parts):
    assert bucket_and_key(address) == parts
