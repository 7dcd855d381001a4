"""What the application costs and gains, as ratios measured in one run: `make benchmark`, or `python -m benchmarks`."""
