"""The loaders of a training: one class for each kind, which begins where training is.

`kinds.py` has the table of the kinds, and `several.py` the loaders of an epoch together.
"""
