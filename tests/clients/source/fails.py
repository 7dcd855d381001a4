"""Ends in an error."""

raise KeyError("the cause")
