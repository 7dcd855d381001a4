"""Those of Lightning's callbacks whose own states are not enough to resume."""
