"""Installs what a job's source asks for, and says which package pip could not install, and why."""

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
INVALID = re.compile(r"Invalid requirement: ('.*?')")
NOT_REACHED = re.compile(
    r"connection broken by|Max retries exceeded|Could not fetch URL|Failed to connect"
)
RAISED = re.compile(r"[\w.]+(Error|Exception): ")
FAILED = errors.InstallModuleError, errors.InstallRequirementsError
CREDENTIALS = re.compile(r"://[^/\s@]+@")
# What pip calls an error beside the one that counts.
BESIDES = (
    "Ignored the following",
    "ResolutionImpossible",
    "pip's dependency resolver does not currently",
)


def install(source: Path, name: str, own: bool) -> None:
    """Install requirements.txt in `source`, or the package that it is, as the toolkit does.

    UserError says what pip could not install and why. `own` says that program `name` is the source's own; for the
    image's, requirements.txt alone counts.
    """
    with _pips_log() as (log, start):
        try:
            if own:
                entry_point.install(name, str(source))
            elif modules.has_requirements(str(source)):
                modules.install_requirements(str(source))
        except FAILED as error:  # its text has pip's command line, with the password of an index
            said = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
            file = "requirements.txt" if modules.has_requirements(str(source)) else "setup.py"
            raise UserError(f"{file}: {explain(said, error.return_code)}") from None


@contextmanager
def _pips_log() -> Iterator[tuple[Path, int]]:
    """Have pip write a log, where its user has not; yield its path and where what is to come begins."""
    if given := os.environ.get("PIP_LOG"):
        log = Path(given)
        yield log, log.stat().st_size if log.is_file() else 0
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIP_LOG"] = str(Path(folder, "pip.log"))
        try:
            yield Path(folder, "pip.log"), 0
        finally:
            del os.environ["PIP_LOG"]


def explain(log: str, status: str = "1") -> str:
    """Return what pip could not install, why, and what to do, from pip's log of it."""
    lines = [STAMP.sub("", line).rstrip() for line in log.splitlines()]
    packages = [match[1] for line in lines if (match := PACKAGE.match(line))]
    package, why = packages[-1] if packages else "what it asks for", ""
    for number, line in enumerate(lines):
        text = line.strip().removeprefix("ERROR: ")
        if text == line.strip() or text.startswith(BESIDES):
            continue
        if match := NO_MATCH.match(text):
            package, why = match[1], text
        elif match := CONFLICT.match(text):
            package, why = match[1], match[2].rstrip(".")
        elif match := INVALID.match(text):
            package, why = match[1], "it is neither a requirement nor a file of the source"
        elif text.startswith(
            "[present-rich]"
        ):  # a program that pip ran: its own last words say more
            own = next((said.strip() for said in reversed(lines[:number]) if said.strip()), "")
            why = why or f"{own} ({text.removeprefix('[present-rich] ')})"
        elif text == "Exception:":  # and its traceback
            why = next((said for said in reversed(lines) if RAISED.match(said)), "")
        else:
            why = why or text
    advice = "correct or remove that line"
    if NOT_REACHED.search(log):
        why = f"{why or 'no answer'} (the package index was not reached)"
        advice = "give the job a network that reaches the index, or remove that line"
    why = " ".join(why.split()) or f"pip ended with exit status {status}, and its log says no more"
    return CREDENTIALS.sub(
        "://******@", f"pip could not install {package[:200]}: {why[:500]}; {advice}"
    )
