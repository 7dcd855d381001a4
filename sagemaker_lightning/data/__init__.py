"""Loaders whose batches are functions of (seed, epoch, position).

The ranks share each batch. An iteration begins at the batch that training is at.
"""
