"""Installs what a job's source asks for, and explains what pip could not."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sagemaker_training import entry_point, errors, modules

from sagemaker_lightning.contract.errors import UserError

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:,.]+ ")  # in front of each line of pip's log
PACKAGE = re.compile(r"\s*(?:Collecting|Processing|Obtaining|Building wheel for) (\S+)")
NO_MATCH = re.compile(r"No matching distribution found for (.+)")
CONFLICT = re.compile(r"Cannot install (.+?) because (.+)")
# A program that pip ran; pip marked such lines with "[present-rich]" before 26.
PROGRAM_FAILED = re.compile(r"\[present-rich\] (.+)|(.+ exited with -?\d+)$")
INVALID = re.compile(r"Invalid requirement: ('.*?')")
NOT_REACHED = re.compile(
    r"connection broken by|Max retries exceeded|Could not fetch URL|Failed to connect"
)
RAISED = re.compile(r"[\w.]+(Error|Exception): ")
INSTALL_ERRORS = errors.InstallModuleError, errors.InstallRequirementsError
CREDENTIALS = re.compile(r"://[^/\s@]+@")
# Lines that pip also marks as errors, but that do not give the reason.
NOT_THE_REASON = (
    "Ignored the following",
    "ResolutionImpossible",
    "pip's dependency resolver does not currently",
)


def install(source: Path, name: str, own: bool) -> None:
    """Install what the job's source asks for, as the toolkit does.

    That is its requirements.txt, or the source itself if it is a package.

    Args:
        source: Folder of the job's source.
        name: Name of the program.
        own: Whether the program is the source's own. For one of the image's programs, only
            requirements.txt is installed.

    Raises UserError, which says what pip could not install, and why.
    """
    with _pip_log() as (log, start):
        try:
            if own:
                entry_point.install(name, str(source))
            elif modules.has_requirements(str(source)):
                modules.install_requirements(str(source))
        # The error's own text has pip's command line, which may have the password of an index.
        except INSTALL_ERRORS as error:
            new_log = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
            file = "requirements.txt" if modules.has_requirements(str(source)) else "setup.py"
            raise UserError(f"{file}: {explain(new_log, error.return_code)}") from None


@contextmanager
def _pip_log() -> Iterator[tuple[Path, int]]:
    """Make pip write a log; yield its path and the byte at which the new part begins.

    If the user has set PIP_LOG, pip appends to the user's log.
    """
    if users_log := os.environ.get("PIP_LOG"):
        log = Path(users_log)
        yield log, log.stat().st_size if log.is_file() else 0
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIP_LOG"] = str(Path(folder, "pip.log"))
        try:
            yield Path(folder, "pip.log"), 0
        finally:
            del os.environ["PIP_LOG"]


def explain(log: str, status: str = "1") -> str:
    """Return in one line what pip could not install, why, and what to do.

    Args:
        log: What pip has logged.
        status: pip's exit status.
    """
    lines = [STAMP.sub("", line).rstrip() for line in log.splitlines()]
    packages = [match[1] for line in lines if (match := PACKAGE.match(line))]
    package = packages[-1] if packages else "what it asks for"
    why = ""
    for number, line in enumerate(lines):
        text = line.strip().removeprefix("ERROR: ")
        if text == line.strip() or text.startswith(NOT_THE_REASON):
            continue
        if match := NO_MATCH.match(text):
            package = match[1]
            why = text
        elif match := CONFLICT.match(text):
            package = match[1]
            why = match[2].rstrip(".")
        elif match := INVALID.match(text):
            package = match[1]
            why = "it is neither a requirement nor a file of the source"
        # A program that pip has run failed; the last line that it wrote says more than pip.
        elif match := PROGRAM_FAILED.match(text):
            last_line = next(
                (previous.strip() for previous in reversed(lines[:number]) if previous.strip()), ""
            )
            why = why or f"{last_line} ({match[1] or match[2]})"
        # The traceback follows, and at its end the exception.
        elif text == "Exception:":
            why = next((candidate for candidate in reversed(lines) if RAISED.match(candidate)), "")
        else:
            why = why or text
    advice = "correct or remove that line"
    if NOT_REACHED.search(log):
        why = f"{why or 'no answer'} (the package index was not reached)"
        advice = (
            "give the job a network that reaches the index (with network isolation it has none), "
            "or remove that line"
        )
    why = " ".join(why.split()) or f"pip ended with exit status {status}, and its log says no more"
    # Before they are cut: half an address shows its password.
    package, why = (CREDENTIALS.sub("://******@", text) for text in (package, why))
    return f"pip could not install {package[:200]}: {why[:500]}; {advice}"
