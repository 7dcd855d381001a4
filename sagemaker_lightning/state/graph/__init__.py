"""Users' state, saved and restored as one graph with identity."""
