"""A local endpoint with the AWS APIs of training jobs; runs them like SageMaker."""
