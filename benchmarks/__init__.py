"""Costs and gains of the application, as ratios of values measured in one run.

`make benchmark`, or `python -m benchmarks`.
"""
