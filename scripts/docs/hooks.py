"""What MkDocs adds to the pages of docs/: the README, the results, and the reference.

MkDocs calls `on_files` and `on_page_markdown`. The README is the site's first page. The reference
has the public names of `sagemaker_lightning`, in the order of its table `PUBLIC`.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {"README.md": "index.md"} | {
    name: name
    for name in (
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(f"results/{path.name}" for path in (ROOT / "results").glob("*.md")),
    )
}
"""The pages that are not in docs/, each with its name in the site."""
SOURCES = {site_name: name for name, site_name in BESIDE.items()}

LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
INTRODUCTION = """# Public names

`from sagemaker_lightning import NAME` gives each of these. A name that is not here may
change without a word.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the reference."""
    for name, site_name in BESIDE.items():
        files.append(File.generated(config, site_name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page whose links lead to pages of the site; other files it names without a link."""
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def in_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if not (ROOT / path).exists():  # MkDocs says so
            return link[0]
        if path not in BESIDE and not path.startswith("docs/"):
            return link[1]
        target = BESIDE.get(path, path.removeprefix("docs/"))
        target = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{link[1]}]({target}{link[3] or ''})"

    return LINK.sub(in_site, markdown)


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
