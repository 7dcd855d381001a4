"""`make docs`: a site of the pages, and a reference that is made from the docstrings."""

import re
import subprocess
from pathlib import Path

import pytest
from containers import ROOT, copy_checkout
from environments import python_of
from pages import PAGES

import sagemaker_lightning

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def make_docs(folder: Path) -> subprocess.CompletedProcess:
    """Run `make docs` on a copy of this checkout, with the environment that is there."""
    return subprocess.run(
        ["make", "docs", "--old-file=.venvs/docs/locked.txt"],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


@pytest.fixture
def checkout(tmp_path) -> Path:
    python_of("docs")
    copy_checkout(tmp_path)
    (tmp_path / ".venvs").symlink_to(ROOT / ".venvs")
    return tmp_path


def test_the_site_has_the_pages_and_the_public_names(checkout):
    """It loads nothing from anywhere else, and names of a package are in its reference."""
    made = make_docs(checkout)
    assert made.returncode == 0, made.stdout
    site = checkout / "output/docs"
    for page in PAGES:
        name = page.removeprefix("docs/").replace("README", "index")
        assert (site / name).with_suffix(".html").is_file(), page
    assert "Five lines" in (site / "index.html").read_text()
    reference = (site / "reference.html").read_text()
    for name, module in sagemaker_lightning.PUBLIC.items():
        assert f'id="sagemaker_lightning.{module}.{name}"' in reference

    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text()
        loaded = re.findall(
            r"""(?:src=|<link[^>]* href=|url\(|@import )["']?((?:https?:)?//)""", text
        )
        assert not loaded, path


@pytest.mark.parametrize("target", ["no-such-page.md", "image.md#no-such-heading"])
def test_a_link_that_leads_nowhere_fails(checkout, target):
    page = checkout / "docs/shards.md"
    page.write_text(page.read_text() + f"\nSee [there]({target}).\n")
    made = make_docs(checkout)
    assert made.returncode != 0 and target.rpartition("#")[2] in made.stdout
