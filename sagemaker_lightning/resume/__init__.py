"""Exact resume: an interrupted run ends with the weights of an uninterrupted one."""
