"""UserError: a mistake of the user's, raised on purpose. And texts that are right to print."""

import re

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
"""The sequences that a terminal obeys."""


class UserError(ValueError):
    """A mistake in the settings, the data or the machine of a job.

    Its text is one line: which flag or file, what was found, what is allowed, what to do.
    contract/failures.py shows that line alone. It shows any other error, a plain ValueError too,
    with its traceback. A user's own model, data module or callback may raise it as well.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(self._without_traceback(each) for each in args))

    @classmethod
    def _without_traceback(cls, value: object) -> object:
        """Return a text without the traceback that torch puts before a data worker's.

        torch makes the error of a worker again in the process that waits for the data.
        """
        if not isinstance(value, str) or not value.startswith(f"Caught {cls.__name__} in "):
            return value
        mark = rf"^{re.escape(f'{cls.__module__}.{cls.__qualname__}')}: "
        return re.split(mark, value, flags=re.MULTILINE)[-1].rstrip("\n")


def printable(text: str, kept: str = "") -> str:
    """Return a text from elsewhere, with escapes in place of what a terminal would obey.

    Args:
        text: It may have new lines or control sequences.
        kept: Characters that stay as they are.
    """
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1]
        for character in text
    )


def plain(text: str) -> str:
    """Return what a terminal shows of a line in the end, without control sequences."""
    # A progress bar overwrites itself.
    rest = ESCAPES.sub("", text).rstrip("\r\n").rpartition("\r")[2]
    return "".join(letter if letter.isprintable() else " " for letter in rest)


def with_article(noun: str) -> str:
    """Return a noun, such as a class's name, with "a" or "an" before it."""
    takes_an = noun[:1].lower() in tuple("aeio") or noun[:2].lower() == "un"
    return f"{'an' if takes_an else 'a'} {noun}"
