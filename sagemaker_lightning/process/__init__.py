"""One process: what it says while it starts, its imports, its threads, its memory, its children."""
