"""Checks, launches and follows one training job; needs boto3 and no SageMaker SDK."""

import sys

try:
    import boto3  # noqa: F401
except ImportError:
    sys.exit(
        f"error: {sys.executable} has no boto3; pip install boto3, or, in a checkout, run `make "
        "env` and use .venv/bin/python"
    )
