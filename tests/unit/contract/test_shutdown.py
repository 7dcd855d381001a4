"""contract/shutdown.py: who hears a signal. test_interruptions.py has the effect."""

import os

import pytest

from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.process_stat import PARENT


@pytest.mark.parametrize(("parent", "looked_at"), [("0", 1), (None, 1), ("7", 2)])
def test_the_search_for_a_stop_ends_with_the_first_process_or_one_that_is_gone(
    monkeypatch, parent, looked_at
):
    """No process has the number 7 that has a parent, too."""
    seen = []

    def stat(pid: int) -> list[str]:
        seen.append(pid)
        fields = ["0"] * (PARENT + 1)
        if pid == os.getppid() and parent:
            fields[PARENT] = parent
        return fields if parent else []

    monkeypatch.setattr(shutdown, "process_stat", stat)
    assert not shutdown.ancestor_has_stop()
    assert len(seen) == looked_at and seen[0] == os.getppid()
