"""data/seeding.py: what a run draws by, and that it leaves the process as it was."""

import pytest

from sagemaker_lightning.data.seeding import Seeding


@pytest.mark.parametrize("ends", ["on_exception", "teardown"])
def test_a_run_that_ends_or_fails_leaves_the_process_as_it_was(ends):
    undone = []
    seeding = Seeding(7)
    seeding.changed.callback(undone.append, "entropy")
    getattr(seeding, ends)(None, None, "validate")
    assert undone == ["entropy"]
