"""Whether a folder can be written to, before any time is spent."""

import tempfile
from pathlib import Path


def check_writable(folder: Path, what: str) -> None:
    """Create `folder` if need be; ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder}: {what} cannot be written there ({error.strerror}); allowed is a writable folder"
        ) from None
