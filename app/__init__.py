"""sagemaker-lightning: a PyTorch Lightning application that trains on SageMaker or a desk from one image."""
