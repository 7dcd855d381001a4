"""What MkDocs adds to the pages of docs/: the pages beside the README, and the reference.

MkDocs calls `on_files`. The README is the site's first page. The reference has the public names of
`sagemaker_lightning`, in the order of its table `PUBLIC`.
"""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {"README.md": "index.md"} | {
    name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
"""The pages in the repository's root, each with its name in the site."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
INTRODUCTION = """# Public names

`from sagemaker_lightning import NAME` gives each of these. A name that is not here may
change without a word.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files of the repository that pages link to."""
    for name, site_name in BESIDE.items():
        text = LINK.sub(lambda link: _in_site(link[1]), (ROOT / name).read_text())
        files.append(File.generated(config, site_name, content=text))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Name a file of the repository that a page links to, where the site does not have it."""
    return re.sub(r"\[([^\]]+)\]\(\.\./(?!\w[\w-]*\.md)[^)]*\)", r"\1", markdown)


def reference() -> str:
    """Return the page of the reference: for each public name, what makes its documentation."""
    tree = ast.parse((ROOT / "sagemaker_lightning/__init__.py").read_text())
    (table,) = (
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PUBLIC"
    )
    public = ast.literal_eval(table)
    return INTRODUCTION + "".join(
        f"::: sagemaker_lightning.{module}.{name}\n\n" for name, module in public.items()
    )


def _in_site(link: str) -> str:
    return BESIDE.get(link) or link.removeprefix("docs/")
