"""What takes a PyTorch Lightning application to SageMaker and brings it to its end, whatever interrupts it."""
