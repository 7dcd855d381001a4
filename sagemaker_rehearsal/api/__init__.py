"""The rehearsal's endpoint: the AWS APIs that a training job needs."""
