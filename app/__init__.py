"""The example, yours to replace: a model, its data, and the programs that train it."""
