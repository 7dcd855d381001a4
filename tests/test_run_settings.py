"""resume/run_settings.py: which flags of its loaders a resumed run may change."""

import pytest

from sagemaker_lightning.resume import run_settings

BEFORE = {"sizes": [8, 32], "workers": [2, 0], "ranks": 2}


@pytest.mark.parametrize(
    ("flag", "before_value", "now_value", "ranks", "now", "allowed"),
    [
        ("--data.batch_size", 8, 4, 4, None, True),
        ("--data.batch_size", 8, 16, 1, None, True),
        ("--model.any_name", 32, 16, 4, None, True),
        ("--data.batch_size", 8, 4, 2, None, False),
        ("--data.batch_size", 8, 16, 4, None, False),
        ("--data.batch_size", 16, 8, 4, None, False),  # no loader had that one
        ("--data.share", 8, 4.0, 4, None, False),
        ("--trainer.max_epochs", 8, 4, 4, None, False),
        ("--data.batch_size", 8, 4, 4, {"sizes": [4, 16], "workers": [2, 0]}, True),
        ("--data.batch_size", 8, 4, 4, {"sizes": [4, 32], "workers": [2, 0]}, False),
        ("--data.workers", 2, 5, 2, None, True),
        ("--data.workers", 3, 5, 2, None, False),
        ("--data.workers", 2, 5, 2, {"sizes": [8, 32], "workers": [5, 0]}, True),
        ("--data.workers", 2, 5, 2, {"sizes": [8, 32], "workers": [2, 0]}, False),
    ],
)
def test_the_samples_of_all_ranks_batches_stay_as_many(
    flag, before_value, now_value, ranks, now, allowed
):
    changed = {flag: (before_value, now_value)}
    found = run_settings._allowed_loader_flags(changed, BEFORE, ranks, now)
    assert found == ({flag} if allowed else set())
