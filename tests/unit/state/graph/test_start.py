"""What a program makes again is found by its path, whichever name it was reached by first."""

import pytest
from graph_records import Thing

from sagemaker_lightning.state.graph.state import GraphState, names_in


def begun(*orders: list[str]) -> tuple[Thing, GraphState]:
    """Return an object of a table of an object, and the state of both, which learns the roots so.

    Args:
        orders: The names of the roots that are there at each moment of the start.
    """
    counted = Thing(count=0, rows=[1])
    roots = {"holder": Thing(table={"first": Thing(counted=counted)}), "own": counted}
    present: list[str] = []
    state = GraphState(lambda: {name: roots[name] for name in present})
    for names in orders:
        present[:] = names
        state.begin()
        state.include()
    state.mark()
    state.end_start()
    return counted, state


HOLDER_FIRST = ["holder"], ["holder", "own"]
ROOT_FIRST = ["own"], ["own", "holder"]


@pytest.mark.parametrize(
    ("saved", "restored", "path"),
    [
        (HOLDER_FIRST, ROOT_FIRST, "holder.table['first'].counted"),
        (ROOT_FIRST, HOLDER_FIRST, "own"),
    ],
)
def test_an_object_that_was_reached_by_another_name_first_comes_back(saved, restored, path):
    counted, state = begun(*saved)
    counted.count, counted.rows[:] = 5, [1, 2]
    record = state.encode()
    assert {f"{path}.count", f"{path}.rows"} <= set(names_in(record))
    resumed, again = begun(*restored)
    again.restore(record)
    assert (resumed.count, resumed.rows) == (5, [1, 2])
    resumed.count = 6
    assert f"{path}.count" in names_in(again.encode())  # known by that name from now on


@pytest.mark.parametrize("path", ["holder.gone", "gone.own", "holder" + ".table" * 9_000, ""])
def test_a_path_to_nothing_is_the_path_of_nothing(path):
    _, state = begun(["holder"])
    assert state.begin().node_at(path) is None
