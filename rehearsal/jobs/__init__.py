"""Training jobs under SageMaker's rules: data, attempts, checkpoints, logs, what is left."""
