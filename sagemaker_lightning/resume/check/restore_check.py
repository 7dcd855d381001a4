"""Check that a resumed run has the checkpoint's values again.

These are weights, optimizer states and everything else that is saved. Without this check, something
that cannot be restored, such as an attribute of a class that was renamed, would be missing without
a message.
"""

from collections.abc import Mapping
from typing import Any

from sagemaker_lightning.state import batch_digest


def digests_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Return a digest of each value, by name."""
    return {
        name: batch_digest.combine(int(part) for part in batch_digest.leaf_digests(value))
        for name, value in values.items()
    }
