"""Checks that a job resumes exactly: interrupts its first steps and compares."""
