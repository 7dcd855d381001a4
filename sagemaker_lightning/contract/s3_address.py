"""Addresses of S3: s3://BUCKET/KEY."""

SCHEME = "s3://"


def bucket_and_key(address: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// address, or of an https:// one of S3.

    The key is "" if the address is that of a bucket. Whether there can be such a bucket is not
    checked.
    """
    # No urlsplit, because ? and # may be in a key.
    scheme, _, rest = address.partition("://")
    # https://s3.REGION.amazonaws.com/BUCKET/KEY
    if scheme == "https":
        rest = rest.partition("/")[2]
    bucket, _, key = rest.partition("/")
    return bucket, key
