"""Says what a container has, and what is wrong with it. Standard library only."""
