"""One training job, checked, launched and followed, without an SDK; it needs boto3 alone."""

import sys

try:
    import boto3  # noqa: F401
except ImportError:
    sys.exit(
        f"error: {sys.executable} has no boto3; run `make env` and use .venv/bin/python, or pip "
        "install boto3"
    )
