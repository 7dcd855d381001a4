"""Parts of the cases of a test: the others run each night (`make test-thorough`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(always_run: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for `parametrize`; those not in `always_run` are marked as thorough."""
    cases = list(cases)
    assert all(case in cases for case in always_run)
    return [
        case if case in always_run else pytest.param(case, marks=pytest.mark.thorough)
        for case in cases
    ]
