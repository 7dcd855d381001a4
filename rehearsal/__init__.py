"""One local address that speaks the AWS APIs a training job needs, and runs the jobs under SageMaker's rules."""
