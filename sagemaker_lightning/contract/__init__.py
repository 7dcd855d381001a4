"""What SageMaker gives a container and expects of it. Standard library only.

Variables and files, hyperparameters, failures, and stops on request.
"""
