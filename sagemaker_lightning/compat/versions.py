"""Which versions of Lightning this program works with.

Standard library only: it is asked before Lightning is imported.
"""

import re
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "pytorch-lightning"
OLDEST = "2.5.2"
BELOW = "2.7"
"""The oldest version, and the first one that is too new. `make compat` runs tests with any of them.

LightningCLI(load_from_checkpoint_support=...), which cli/lightning_cli.py needs, came with 2.5.2.
"""


def installed() -> str:
    """Return the installed version of Lightning, "" if it is not installed; a file is read."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


def unsupported(found: str) -> str:
    """Return one line that says what is wrong with a version; "" if nothing is, or it is ""."""
    if not found or _numbers(OLDEST) <= _numbers(found) < _numbers(BELOW):
        return ""
    return (
        f"requirements.txt: found {PACKAGE} {found}, expected {OLDEST} or later and below {BELOW}; "
        f"give {PACKAGE}>={OLDEST},<{BELOW} there, or leave it out to have the image's own"
    )


def _numbers(found: str) -> list[int]:
    """Return the first three numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", found)[:3]]
