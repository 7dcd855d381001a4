"""All that is to be measured on one GPU, in one call: `python -m benchmarks.gpu`."""
