"""What runs a job's hosts: Docker containers, or processes of this machine."""
