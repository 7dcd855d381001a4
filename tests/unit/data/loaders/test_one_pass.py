"""data/loaders/one_pass.py: an iterator that cannot begin again."""

import itertools

from loader_epochs import begin, rest, train


def test_all_epochs_go_through_it_once():
    seen = train(lambda: iter(range(10)), limit=4)
    assert [int(batch) for _, _, batch in seen] == list(range(10))
    assert [epoch for epoch, _, _ in seen] == [0] * 4 + [1] * 4 + [2] * 2


def test_a_resumed_run_draws_from_its_beginning():
    seen = train(lambda: itertools.count(), [(0, 3), (2, 1)], limit=4)
    assert [int(batch) for _, _, batch in seen] == list(range(12))


def test_no_batch_of_it_is_drawn_twice_to_compare():
    combined, fetcher = begin(lambda: iter(range(3)))
    combined.begin(fetcher, 0, 0, proves=True)
    assert [batch for batch, _, _ in rest(fetcher)] == [0, 1, 2]
