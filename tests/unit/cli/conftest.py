"""What the tests of command lines have in common."""

import pytest
from command_lines import no_flags_of_pytest  # noqa: F401  a fixture for each test

from sagemaker_lightning.cli import suggestions
from sagemaker_lightning.state.object_graph import is_library_class


@pytest.fixture
def only_installed_classes(monkeypatch):
    """Have the classes of other tests, which this process has imported, left out of lists."""
    is_made_by_flags = suggestions._is_made_by_flags
    monkeypatch.setattr(
        suggestions,
        "_is_made_by_flags",
        lambda kind: (
            is_made_by_flags(kind)
            or not (kind.__module__.startswith("app.") or is_library_class(kind))
        ),
    )
