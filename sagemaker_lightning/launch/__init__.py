"""Inside the toolkit's process: chooses the program and its launcher, and handles its end."""
