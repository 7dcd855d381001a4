"""Whether the hosts of a job and the ranks of a host are alive. Standard library only."""
