"""The conformance zoo: configurations of user code, interrupted at random moments, and what comes of each.

`users` has the code, as somebody writes it who has read the documentation of Lightning, torch and torchmetrics, and
nothing of ours; `table` names the configurations; `program` is what their processes run; `rounds` runs, interrupts and
compares them; `report` makes the table of the documentation from the results.
"""
