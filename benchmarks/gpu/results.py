"""The file of results: every measured value; each write replaces the whole file.

It is written after each value, completely or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract.atomic_files import atomic_write

SAME_FIELDS = ("gpu", "driver", "versions", "commit", "miniature")
"""What has to be alike for a run to continue with an earlier one's file."""


@dataclass
class Results:
    """Results in a file.

    `about` says where they come from. For each part, `parts` has its status ("complete",
    "unfinished" or "failed"), a line that says why it is not complete, the seconds it took, and its
    records: {"setting", "round", and the measured values}.
    """

    path: Path
    about: dict[str, Any]
    parts: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Read a file; ValueError says what is wrong with it."""
        try:
            content = json.loads(path.read_text())
            return cls(path, content["about"], content["parts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: cannot be read as results of a GPU ({error!r}); give another file"
            ) from None

    @classmethod
    def opened(cls, folder: Path, about: Mapping[str, Any], date: str) -> "Results":
        """Return the newest results in a folder that this run can continue, or new ones.

        New ones are named by the day.
        """
        earlier = files(folder)
        for path in reversed(earlier):
            results = cls.read(path)
            if all(results.about.get(key) == about[key] for key in SAME_FIELDS):
                hosts = results.about["hosts"]
                hosts += [host for host in about["hosts"] if host not in hosts]
                return results
        name = f"gpu-{date}"
        number = 1
        while folder / f"{name}.json" in earlier:
            number += 1
            name = f"gpu-{date}-{number}"
        return cls(folder / f"{name}.json", dict(about), {})

    def part(self, name: str) -> dict[str, Any]:
        """Return a part, which the caller may change."""
        return self.parts.setdefault(
            name, {"status": "unfinished", "line": "", "seconds": 0.0, "records": []}
        )

    def records(self, part: str, setting: str | None = None) -> list[dict[str, Any]]:
        """Return the records of a part, of one setting if it is given."""
        records = self.parts.get(part, {}).get("records", [])
        return [record for record in records if setting in (None, record["setting"])]

    def write(self) -> None:
        """Write the file."""
        with atomic_write(self.path) as file:
            file.write(
                json.dumps({"about": self.about, "parts": self.parts}, indent=1).encode() + b"\n"
            )


def files(folder: Path) -> list[Path]:
    """Return the files of results in a folder, the newest last."""
    return sorted(
        folder.glob("gpu-*.json"), key=lambda path: (path.name[:14], len(path.name), path.name)
    )
