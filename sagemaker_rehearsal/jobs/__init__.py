"""Jobs by SageMaker's rules: data, attempts, checkpoints, logs, artifacts."""
