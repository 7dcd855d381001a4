"""Reads the end of a job's log, or what has come to it."""

import os
from dataclasses import dataclass
from pathlib import Path

from sagemaker_lightning.contract.errors import plain

# Bytes of a log that are shown, and that are searched: the last ones.
MAX_SHOWN_BYTES = 256 * 1024
MAX_SEARCHED_BYTES = 16 * 1024 * 1024
# Characters of the text that is searched for.
MAX_FIND_CHARACTERS = 200


@dataclass(frozen=True)
class Excerpt:
    """Lines of a log, without control sequences.

    Attributes:
        lines: The lines.
        end: The offset of what comes after them, in bytes.
        is_cut: Whether lines before them were left out.
    """

    lines: list[str]
    end: int
    is_cut: bool


def read(path: Path, start: int, find: str = "") -> Excerpt:
    """Return the whole lines from an offset on that have a text, whatever its case.

    The last lines of a log that is too long are returned.
    """
    most = MAX_SEARCHED_BYTES if find else MAX_SHOWN_BYTES
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(min(start, size), size - most)
            file.seek(begin)
            content = file.read(size - begin)
    except FileNotFoundError:
        return Excerpt([], 0, False)
    end = begin + content.rfind(b"\n") + 1
    content = content[: end - begin]
    if begin > start:
        content = content[content.find(b"\n") + 1 :]
    needle = find.lower()
    found = [
        line for line in content.decode(errors="replace").split("\n")[:-1] if needle in line.lower()
    ]
    lines: list[str] = []
    room = MAX_SHOWN_BYTES
    for line in reversed(found):
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(plain(line))
    return Excerpt(lines[::-1], end, begin > start or room < 0)
