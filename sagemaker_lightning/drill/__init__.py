"""Is yours exact? The first steps of a job, interrupted, against the same steps left alone."""
