"""Which versions of Lightning this program works with. Standard library only: it is asked
before Lightning is imported.
"""

import re
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "pytorch-lightning"
OLDEST, BELOW = (2, 5), (2, 7)
"""The oldest minor version, and the first one that is too new; `make compat` tests both ends."""


def installed() -> str:
    """Return the installed version of Lightning, "" if it is not installed. A file is read;
    nothing is imported.
    """
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


def unsupported(found: str) -> str:
    """Return one line that says what is wrong with a version of Lightning, "" if nothing is or
    if none was `found`.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if not numbers or OLDEST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        return ""
    oldest, below = (".".join(map(str, one)) for one in (OLDEST, BELOW))
    return (
        f"requirements.txt: found {PACKAGE} {found}, expected {oldest} or later and below {below}; give "
        f"{PACKAGE}>={oldest},<{below} there, or leave it out to have the image's own"
    )
