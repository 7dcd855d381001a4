"""One training job, checked, launched and followed, without an SDK; it needs boto3 alone."""
