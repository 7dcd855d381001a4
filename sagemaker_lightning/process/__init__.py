"""What a process sets up for itself: its start, imports, threads, memory and child processes."""
