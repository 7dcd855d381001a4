"""The command line: flags and their mistakes, the training run, the model's files."""
