"""state/graph/kinds/containers.py: weak dictionaries and sets."""

import functools
import weakref

import pytest
from graph_records import Thing, train

WEAK = {
    "keys": (
        weakref.WeakKeyDictionary,
        lambda held, key: held.update({key: 2}),
        lambda held: [(key.name, value) for key, value in held.items()],
    ),
    "values": (
        weakref.WeakValueDictionary,
        lambda held, key: held.update({"newest": key}),
        lambda held: [(key, value.name) for key, value in held.items()],
    ),
    "a set": (
        weakref.WeakSet,
        lambda held, key: held.add(key),
        lambda held: [each.name for each in held],
    ),
}


@pytest.mark.parametrize(("make", "change", "shown"), WEAK.values(), ids=WEAK)
def test_weak_containers_hold_the_same_objects_again(make, change, shown):
    def begin():
        thing = Thing(first=Thing(name="first"), second=Thing(name="second"), held=make())
        change(thing.held, thing.first)
        return thing

    def trains(thing):
        thing.held.clear()
        change(thing.held, thing.second)
        thing.other = make()
        change(thing.other, thing.first)

    trained, resumed = train(begin, trains)
    assert shown(resumed.held) == shown(trained.held) != []
    assert shown(resumed.other) == shown(trained.other) != []
    del resumed.first, resumed.second
    assert shown(resumed.held) == shown(resumed.other) == []


def test_what_is_kept_by_class_is_left_as_it_is():
    def begin():
        return Thing(held=weakref.WeakKeyDictionary({int: "whole"}), key=Thing())

    def trains(thing):
        thing.held[str] = "text"
        thing.held[thing.key] = 1

    trained, resumed = train(begin, trains)
    assert dict(resumed.held) == {int: "whole", resumed.key: 1} and trained.held[str] == "text"


def test_a_function_that_chooses_by_class_chooses_the_same_again():
    def begin():
        return Thing(show=functools.singledispatch(lambda value: repr(value)), n=0)

    def trains(thing):
        thing.n = len(thing.show(3))

    _, resumed = train(begin, trains)
    assert resumed.n == 1 and resumed.show("a") == "'a'"
