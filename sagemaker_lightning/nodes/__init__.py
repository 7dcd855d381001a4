"""Notices when a host or a rank of a job is lost. Standard library only."""
