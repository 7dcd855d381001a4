"""Callbacks and loggers, each usable alone."""
