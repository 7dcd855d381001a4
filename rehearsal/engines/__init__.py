"""What a job's hosts are: containers, or processes of this machine."""
