"""SageMaker's side: variables and files in, hyperparameters, failures, stops. Standard library only."""
