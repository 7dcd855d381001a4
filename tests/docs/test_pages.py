"""The pages of the documentation are linked with each other.

Each link leads to something, and each page is one click from the README.
"""

import re
import subprocess
import sys
from pathlib import PurePosixPath

import pytest
from containers import ROOT
from pages import FENCE, PAGES

from benchmarks.gpu.report import MAX_COLUMNS

LINK = re.compile(r"\]\(([^)\s]+)\)")
MEASURED = "results/figures.md", "results/zoo.md", "results/gpu.md"
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", PAGES[page]), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[tuple[str, str]]:
    """Return the targets of a page's links within the repository: (path, anchor)."""
    targets = [
        link.partition("#")
        for link in LINK.findall(FENCE.sub("", PAGES[page]))
        if "://" not in link
    ]
    folder = ROOT / PurePosixPath(page).parent
    return [
        (str((folder / path).resolve().relative_to(ROOT)) if path else page, anchor)
        for path, _, anchor in targets
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        assert (ROOT / path).exists(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


def test_each_page_is_one_click_from_the_readme():
    assert {path for path, _ in links("README.md")} >= PAGES.keys() - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_wrapped(page):
    """No line is wider than MAX_COLUMNS; rows of tables and blocks of code cannot be wrapped."""
    lines = FENCE.sub("", PAGES[page]).splitlines()
    assert not [
        line for line in lines if len(line) > MAX_COLUMNS and not line.startswith(("|", "!["))
    ]


def test_the_readme_promises_no_figure_that_is_not_measured():
    """Each figure of the table is one of the pages' that say how it was measured, rounded."""
    (table,) = re.findall(r"^\| promise \|.*?\n\n", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:] if line]
    measured = {number for page in MEASURED for number in re.findall(NUMBER, PAGES[page])}
    for promise, figures, n in rows:
        for figure in re.findall(NUMBER, figures + n):
            decimals = len(figure.partition(".")[2])
            rounded = {f"{float(number):.{decimals}f}" for number in measured}
            assert figure in rounded, (promise, figure)
        assert re.search(NUMBER, figures) and ". " not in promise, promise


def test_the_readme_and_the_page_of_interruptions_cite_the_same_rounds():
    """The rounds of the zoo, and of strangers' programs."""
    rows = re.findall(r"^\| (?:Interrupted jobs|Strangers).*$", PAGES["README.md"], re.MULTILINE)
    table = re.search(
        r"^\| what was interrupted.*?\n\n",
        PAGES["docs/interruptions.md"],
        re.MULTILINE | re.DOTALL,
    )
    assert len(rows) == 3
    assert set(re.findall(NUMBER, " ".join(rows))) <= set(re.findall(NUMBER, table[0]))


def test_the_picture_is_what_its_script_draws():
    drawn = subprocess.run(
        [sys.executable, ROOT / "scripts/draw_interruption.py"], capture_output=True, check=True
    ).stdout
    assert drawn == (ROOT / "docs/interruption.svg").read_bytes()
    assert "docs/interruption.svg" in {path for path, _ in links("README.md")}
