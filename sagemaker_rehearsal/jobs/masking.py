"""Hides a job's secrets in what is kept and shown of it.

The rules are those of the job's own log (job_summary.py of the runtime).
"""

import re
from typing import Any

from sagemaker_lightning.contract.job_summary import MASK, hidden_variables, masked

# Fields with any content of the user's. In the others, the name of a commit or a path may look like
# a key.
FREE_FIELDS = {"HyperParameters", "Environment", "Tags"}
COMMAND_FIELDS = {"ContainerEntrypoint", "ContainerArguments"}
WORD = re.compile(r"-----BEGIN.*?(?:-----END[^-]*-----|\Z)|\S+", re.DOTALL)
# Characters of a secret that is searched for in other texts: a shorter one occurs in many words.
SHORTEST_SECRET = 6


class Mask:
    """The secrets of one request.

    Attributes:
        request: The request without them.
    """

    def __init__(self, request: dict) -> None:
        self.secrets: set[str] = set()
        variables = request.get("Environment")
        if hidden := hidden_variables(variables):
            self.secrets.update(variables[name] for name in hidden)
            request = request | {"Environment": variables | dict.fromkeys(hidden, MASK)}
        self.request = self._mask_value(request)

    def text(self, text: str) -> str:
        """Return a text without the request's secrets and what else looks like one."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, MASK) if len(secret) >= SHORTEST_SECRET else text
        return WORD.sub(lambda match: self._mask_word(match[0]), text)

    def _mask_value(self, value: Any, name: str = "", free: bool = False) -> Any:
        """Return a field, and everything in it, without secrets.

        Args:
            value: The field's value.
            name: The field's name.
            free: Whether the value may be a secret whatever its name is.
        """
        # A tag.
        if isinstance(value, dict) and set(value) == {"Key", "Value"}:
            return value | {"Value": self._mask_value(value["Value"], str(value["Key"]), free)}
        if isinstance(value, dict):
            return {
                key: self._mask_value(inner, key, free or key in FREE_FIELDS)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return (
                self._mask_command(value)
                if name in COMMAND_FIELDS
                else [self._mask_value(inner, name, free) for inner in value]
            )
        if value is None or isinstance(value, bool) or masked(name, value if free else "") != MASK:
            return value
        self.secrets.add(str(value).strip("\"' "))
        return MASK

    def _mask_command(self, line: list) -> list:
        """Return a command line without the values of secret flags, also as next words."""
        flags = [
            str(word) if str(word).startswith("-") and "=" not in str(word) else "" for word in line
        ]
        return [
            self._mask_value(word, flag, free=True)
            if masked(flag, "") == MASK
            else self.text(str(word))
            for word, flag in zip(line, ["", *flags], strict=False)
        ]

    def _mask_word(self, word: str) -> str:
        """Return `name=value`, `name=name=value` or any other word, without a secret."""
        parts = word.split("=")
        if len(parts) == 1 or word.startswith("-----BEGIN"):
            return masked("", word)
        named = (place for place, name in enumerate(parts[:-1]) if masked(name, "") == MASK)
        # What looks like a secret is found anywhere behind the first sign, so one look is enough.
        secret = 0 if masked("", word.partition("=")[2]) == MASK else next(named, None)
        if secret is None:
            return "=".join(masked("", part) for part in parts)
        self.secrets.add("=".join(parts[secret + 1 :]).strip("\"' "))
        return "=".join([*(masked("", part) for part in parts[: secret + 1]), MASK])
