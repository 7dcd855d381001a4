"""The moments of a training at which a checkpoint is saved and a run resumes."""

from enum import StrEnum


class ResumePoint(StrEnum):
    """When a checkpoint was saved; a checkpoint has the value."""

    BATCH = "batch"
    """At the end of a batch, within an epoch."""
    VALIDATION = "validation"
    """Before a validation, which a resumed run repeats."""
    EPOCH = "epoch"
    """At the end of an epoch."""
