"""Whether a run is the same as the one that saved a checkpoint: its settings and arguments."""
