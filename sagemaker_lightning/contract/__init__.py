"""SageMaker's contract: its variables and files, failures and stops. Standard library only."""
