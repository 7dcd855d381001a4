"""The versions of Lightning and torch that this program works with.

Standard library only: it is used before Lightning is imported.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from sagemaker_lightning.compat import namespaces
from sagemaker_lightning.contract.environment import failure_file, host_and_rank
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import report_uncaught

OLDEST_LIGHTNING = "2.5.2"
TOO_NEW_LIGHTNING = "2.7"
"""The oldest version of Lightning, and the first one that is too new.

`make compat` runs the tests with any of them.

LightningCLI(load_from_checkpoint_support=...), which cli/lightning_cli.py needs, came with 2.5.2.
"""
OLDEST_TORCH = "2.11"


def check() -> None:
    """Raise UserError if the installed Lightning and torch are not what this program works with.

    It reads files, and imports neither. If nobody catches the error, it is reported as
    report_failures does: a program imports our names before it can enter that.
    """
    try:
        _check()
    except UserError:
        report_uncaught(failure_file(), host_and_rank())
        raise


def _check() -> None:
    namespaces.refuse_malicious()
    if len(namespaces.imported()) > 1:
        raise UserError(
            "import lightning, import pytorch_lightning: found both before import "
            "sagemaker_lightning, which makes them one; put import sagemaker_lightning above them"
        )
    if not (name := namespaces.distribution()):
        raise UserError(
            f"Lightning: not installed in {sys.prefix}; pip install "
            f'"pytorch-lightning>={OLDEST_LIGHTNING},<{TOO_NEW_LIGHTNING}", or the same versions '
            "of lightning"
        )
    if problem := unsupported(name, _installed(name)):
        raise UserError(problem)
    torch = _installed("torch")
    if torch and _numbers(torch) < _numbers(OLDEST_TORCH):
        raise UserError(f"torch: found {torch}, expected {OLDEST_TORCH} or later; install one")


def unsupported(name: str, installed_version: str) -> str:
    """Return one line that says what is wrong with a version of Lightning.

    It is "" if nothing is wrong, or if the version is "".

    Args:
        name: Its distribution, pytorch-lightning or lightning.
        installed_version: The version.
    """
    oldest = _numbers(OLDEST_LIGHTNING)
    if not installed_version or oldest <= _numbers(installed_version) < _numbers(TOO_NEW_LIGHTNING):
        return ""
    return (
        f"{name}: found {installed_version}, expected {OLDEST_LIGHTNING} or later and below "
        f'{TOO_NEW_LIGHTNING}; pip install "{name}>={OLDEST_LIGHTNING},<{TOO_NEW_LIGHTNING}", or '
        "leave it out of requirements.txt if the job runs in our image, which has one"
    )


def _installed(name: str) -> str:
    """Return the version of a distribution; "" if it is not known."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> list[int]:
    """Return the numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", text)]
