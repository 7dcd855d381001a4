"""Batches that are functions of (seed, epoch, position): shared out among ranks, begun where training is."""
