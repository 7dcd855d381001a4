"""Sets up one process: its start, imports, threads, memory and children."""
