"""The versions of Lightning that this program works with.

Standard library only: it is used before Lightning is imported.
"""

import re
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "pytorch-lightning"
OLDEST = "2.5.2"
BELOW = "2.7"
"""The oldest version, and the first one that is too new.

`make compat` runs the tests with any of them.

LightningCLI(load_from_checkpoint_support=...), which cli/lightning_cli.py needs, came with 2.5.2.
"""


def installed() -> str:
    """Return the installed version of Lightning; "" if it is not installed.

    It reads a file, and does not import Lightning.
    """
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


def unsupported(installed_version: str) -> str:
    """Return one line that says what is wrong with a version of Lightning.

    It is "" if nothing is wrong, or if the version is "".
    """
    if not installed_version or _numbers(OLDEST) <= _numbers(installed_version) < _numbers(BELOW):
        return ""
    return (
        f"requirements.txt: found {PACKAGE} {installed_version}, expected {OLDEST} or later and "
        f"below {BELOW}; give {PACKAGE}>={OLDEST},<{BELOW} there, or leave it out to have the "
        "image's own"
    )


def _numbers(text: str) -> list[int]:
    """Return the first three numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", text)[:3]]
