"""A local endpoint with the AWS APIs of training jobs, which it runs like SageMaker."""
