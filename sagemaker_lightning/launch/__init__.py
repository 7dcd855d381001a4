"""Runs in the toolkit's process: chooses, launches and ends the program."""

from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""The folder in which this package is, and with it the image's own programs."""
