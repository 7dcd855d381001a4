"""The pages of the documentation and of the results, and the blocks of code in them."""

import re

from containers import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in (ROOT, ROOT / "docs", ROOT / "results")
    for path in sorted(folder.glob("*.md"))
}
"""The text of each page by its path."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of code: its language, "" for what shows output, and its text."""

TESTS = {
    "docs/drill.md": [
        "test_drill.py::test_the_page_drills_a_program_of_a_users_own",
        "test_container.py::test_a_job_is_drilled_in_the_image",
        "test_drill.py::test_the_page_drills_before_it_launches",
    ],
    "docs/from-the-tutorial.md": [
        # The page's own command needs a GPU.
        "test_from_the_tutorial.py::test_the_tutorials_command_and_hyperparameters_parse",
    ],
    "results/gpu.md": [  # with --miniature
        "test_gpu.py::test_a_rehearsal_has_every_part_and_the_next_call_does_what_is_missing",
        "test_gpu.py::test_what_travels_is_installed_without_a_network",
    ],
    "results/real-projects.md": [
        "test_real_projects.py::test_the_command_of_the_page"
    ],  # it installs packages
    "results/zoo.md": ["test_zoo.py::test_the_commands_of_the_page"],
}
"""Pages whose blocks need tests of their own; test_readme.py runs the others unchanged."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page that are run, each as (language, text)."""
    return [
        (language, text)
        for language, text in FENCE.findall(PAGES[page])
        if language in ("sh", "python")
    ]
