"""The files of a resumable run: the folder of its checkpoints, and what may be read from them."""
