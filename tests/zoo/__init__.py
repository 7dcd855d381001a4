"""The conformance zoo: configurations of user code, interrupted at random moments.

Each round says what became of its job. `users` has the code, written as a user writes it who has
read the documentation of Lightning, torch and torchmetrics, and nothing of ours. `table` names the
configurations; their processes run `program`. `rounds` runs, interrupts and compares them. `report`
makes the table of the documentation from the results.
"""
