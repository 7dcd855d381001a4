"""What a checkpoint has: the table of parts, and the docs' table that is made from it.

python tests/unit/resume/test_parts.py      writes the table to docs/architecture.md
"""

import inspect
import re
from pathlib import Path

from sagemaker_lightning.resume.parts import PARTS
from sagemaker_lightning.resume.parts.part import Place
from sagemaker_lightning.resume.snapshot import LIGHTNING_KEYS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/architecture.md"
MARKS = r"(<!-- begin: tests/unit/resume/test_parts.py -->\n\n)", r"(\n<!-- end -->)"
TABLE = re.compile("(?:.*?)".join(MARKS), re.DOTALL)


def table() -> str:
    """Return the docs' table of what a checkpoint has."""
    rows = ["| key | what it has | where | when it comes back | file |", "| --- " * 5 + "|"]
    for part in PARTS:
        path = Path(inspect.getfile(part)).relative_to(ROOT / "sagemaker_lightning/resume/parts")
        when = "; ".join(moment.value for moment in part.moments) or part.when
        rows.append(f"| `{part.key}` | {part.what} | {part.place.value} | {when} | `{path}` |")
    return "\n".join(rows) + "\n"


def test_the_page_has_the_table_of_parts():
    found = TABLE.search(PAGE.read_text())
    assert found and found[0] == f"{found[1]}{table()}{found[2]}"


def test_no_two_parts_have_one_key():
    keys = [part.key for part in PARTS]
    assert all(keys) and len(keys) == len(set(keys)) and all(part.what for part in PARTS)
    assert all(bool(part.moments) is not bool(part.when) for part in PARTS)


def test_what_is_lightnings_is_saved_by_lightning():
    """Or by its callbacks, such as an average."""
    of_lightning = {part.key for part in PARTS if part.place is Place.LIGHTNING}
    assert of_lightning - {"averaging_state"} <= LIGHTNING_KEYS


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text))
