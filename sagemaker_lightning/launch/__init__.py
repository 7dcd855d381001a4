"""Runs in the toolkit's process: chooses, launches and ends the program."""
