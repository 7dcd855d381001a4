"""A job's secrets: what is kept and shown of it hides what the job's own log hides (job_summary.py of the runtime)."""

import re
from typing import Any

from sagemaker_lightning.contract.job_summary import MASK, masked

# Fields that hold whatever their user likes. In the others a commit's name or a path may look like a key.
FREE = {"HyperParameters", "Environment", "Tags"}
COMMANDS = {"ContainerEntrypoint", "ContainerArguments"}
WORD = re.compile(r"-----BEGIN.*?(?:-----END[^-]*-----|\Z)|\S+", re.DOTALL)
# letters of a secret that is looked for in other texts: a shorter one is in many words
SHORTEST = 6


class Mask:
    """The secrets of one request.

    Attributes:
        request: The request without them.
    """

    def __init__(self, request: dict) -> None:
        self.secrets: set[str] = set()
        self.request = self._hidden(request)

    def text(self, text: str) -> str:
        """Return a text without the request's secrets, and without what looks like one."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, MASK) if len(secret) >= SHORTEST else text
        return WORD.sub(lambda found: self._word(found[0]), text)

    def _hidden(self, value: Any, name: str = "", free: bool = False) -> Any:
        """Return a field, and all in it, without secrets; `free`: its value may be one whatever its name is."""
        if isinstance(value, dict) and set(value) == {"Key", "Value"}:  # a tag
            return value | {"Value": self._hidden(value["Value"], str(value["Key"]), free)}
        if isinstance(value, dict):
            return {
                key: self._hidden(inner, key, free or key in FREE) for key, inner in value.items()
            }
        if isinstance(value, list):
            return (
                self._command(value)
                if name in COMMANDS
                else [self._hidden(inner, name, free) for inner in value]
            )
        if value is None or isinstance(value, bool) or masked(name, value if free else "") != MASK:
            return value
        self.secrets.add(str(value).strip("\"' "))
        return MASK

    def _command(self, line: list) -> list:
        """Return a command line whose flags hide their values, which may come after them."""
        flags = [
            str(before) if str(before).startswith("-") and "=" not in str(before) else ""
            for before in line
        ]
        return [
            self._hidden(word, flag, free=True)
            if masked(flag, "") == MASK
            else self.text(str(word))
            for word, flag in zip(line, ["", *flags], strict=False)
        ]

    def _word(self, word: str) -> str:
        """Return `name=value`, or any other word, without a secret."""
        name, sign, value = word.partition("=")
        if not sign or word.startswith("-----BEGIN"):
            return masked("", word)
        if masked(name, value) == MASK:
            self.secrets.add(value.strip("\"' "))
            return f"{masked('', name)}={MASK}"
        return f"{masked('', name)}={self._word(value)}"
