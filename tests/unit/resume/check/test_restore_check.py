"""Equal values have equal digests."""

from types import SimpleNamespace

import pytest

from sagemaker_lightning.resume.check.restore_check import digests_of
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start
from sagemaker_lightning.state.graph.state import digests


def graph(**values) -> dict:
    """Return the record of a model that has got these attributes."""
    model = SimpleNamespace()
    start = Start({"model": model})
    vars(model).update(values)
    record, *_ = encode({"model": model}, start)
    return record


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [(3, 3, True), (3, 4, False), ({1, 2, 3}, {3, 2, 1}, True), ([1, 2], [2, 1], False)],
)
def test_equal_values_have_equal_digests(first, second, same):
    found = [digests_of(digests(graph(x=value))) for value in (first, second)]
    assert found[0].keys() == {"model.x"} and (found[0] == found[1]) is same
