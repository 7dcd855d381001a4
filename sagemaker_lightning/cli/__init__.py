"""LightningCLI on top of all that: flags, what is wrong with them, the run, the files of the model."""
