"""What runs inside the training toolkit's process: which program, by which launcher, and its end."""
