"""Liveness between the hosts of a job, and of the ranks on a host. Standard library only."""
