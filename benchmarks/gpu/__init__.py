"""All measurements on one GPU, in one call: `python -m benchmarks.gpu`."""
