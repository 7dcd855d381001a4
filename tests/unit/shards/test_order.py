"""The order of shards' samples: a function of (seed, epoch), each sample once."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tar_shards
from torch.utils.data import DataLoader

from sagemaker_lightning import make_deterministic
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import order
from sagemaker_lightning.shards.dataset import ShardedDataset
from sagemaker_lightning.shards.order import ShardBatches


class Sized:
    """What the order needs of a dataset: shards of so many samples; it notes what is fetched."""

    location = "here"

    def __init__(self, *sizes, owned=()):
        self.index = SimpleNamespace(first=np.cumsum([0, *sizes]))
        self.owned = owned
        self.asked = []

    def __len__(self):
        return int(self.index.first[-1])

    def prefetch(self, shards):
        self.asked.append(list(dict.fromkeys(shards)))


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_once_in_an_epoch(streams, batch_size, shuffle):
    data = Sized(13, 1, 20, 9, 30)
    batches = ShardBatches(data, batch_size, window=8, streams=streams, shuffle=shuffle)
    epochs = [list(batches) for _ in range(2)]
    assert epochs[0] == epochs[1] and len(epochs[0]) == len(batches)
    assert sorted(sample for batch in epochs[0] for sample in batch) == list(range(73))
    sizes = [len(batch) for batch in epochs[0]]
    assert set(sizes[:-streams]) <= {batch_size} and max(sizes[-streams:]) < 2 * batch_size + 1
    batches.set_epoch(1)
    assert (list(batches) != epochs[0]) == shuffle


def test_in_order_the_batches_are_a_file_after_another():
    batches = ShardBatches(Sized(3, 4), 2, shuffle=False)
    assert list(batches) == [[0, 1], [2, 3], [4, 5], [6]]
    assert list(ShardBatches(Sized(3, 4), 2, shuffle=False, drop_last=True)) == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_any_batch_is_known_without_those_before_it():
    drawn = ShardBatches(Sized(40, 40, 40), 8, window=32, streams=2).placed(11)
    expected = list(drawn)
    drawn = ShardBatches(Sized(40, 40, 40), 8, window=32, streams=2).placed(11)
    assert [drawn[batch] for batch in (14, 3, 0)] == [expected[14], expected[3], expected[0]]
    with pytest.raises(IndexError):
        drawn[len(drawn)]


def test_a_window_is_shuffled_and_needs_few_shards():
    batches = ShardBatches(Sized(*[10] * 12), 5, window=20)
    drawn = batches.placed(3)
    for window in range(0, len(drawn), 4):
        samples = [sample for batch in range(window, window + 4) for sample in drawn[batch]]
        assert len({sample // 10 for sample in samples}) == 2 and samples != sorted(samples)


def test_a_stream_has_shards_of_its_own():
    batches = ShardBatches(Sized(*[10] * 8), 5, window=10, streams=4)
    drawn = batches.placed(3)
    shards = [
        {sample // 10 for batch in range(stream, len(drawn), 4) for sample in drawn[batch]}
        for stream in range(4)
    ]
    assert [len(each) for each in shards] == [2] * 4
    assert set.union(*shards) == set(range(8))


def test_the_shards_of_this_window_and_the_next_are_fetched_first():
    data = Sized(*[10] * 6)
    batches = ShardBatches(data, 5, window=20, shuffle=False)
    list(batches)
    assert data.asked == [[0, 1, 2, 3]] * 4 + [[2, 3, 4, 5]] * 4 + [[4, 5]] * 4


def test_hosts_with_shards_of_their_own(monkeypatch):
    """Two ranks have shards 0 and 2, one has shard 1; the epoch ends with the shortest stream."""
    ranks = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 3)
    monkeypatch.setattr(order, "distributed", ranks)
    data = Sized(12, 8, 12, owned=((0, 2), (0, 2), (1,)))
    drawn = ShardBatches(data, 4, window=6).placed(1)
    assert len(drawn) == 6
    for stream, allowed in enumerate([{0, 2}, {0, 2}, {1}]):
        samples = [sample for batch in range(stream, 6, 3) for sample in drawn[batch]]
        assert set(np.searchsorted([12, 20, 32], samples, side="right").tolist()) <= allowed
    seen = [sample for batch in drawn for sample in batch]
    assert len(seen) == len(set(seen)) == 24
    with pytest.raises(UserError, match="found streams=2, expected 3, the number of ranks"):
        ShardBatches(data, 4, streams=2)


def test_too_few_samples_for_the_streams():
    with pytest.raises(UserError, match="found 2 samples for 5 streams"):
        ShardBatches(Sized(2), 1, streams=5, drop_last=True)


def test_a_deterministic_loader_begins_at_any_batch_with_any_number_of_ranks(tmp_path):
    data = ShardedDataset(tar_shards.write(tmp_path), tar_shards.number)

    def drawn(rank=0, ranks=1, batch=0, workers=0, streams=2):
        batches = ShardBatches(data, 4, window=16, streams=streams)
        loader = make_deterministic(
            DataLoader(data, batch_sampler=batches, num_workers=workers), 7, rank, ranks
        )
        loader.begin_epoch(3, batch)
        return [each.tolist() for each in loader]

    whole = drawn()
    assert sorted(sum(whole, [])) == list(range(40))
    assert drawn(batch=4) == whole[4:] and drawn(workers=2) == whole
    assert drawn(0, 2) == whole[::2] and drawn(1, 2) == whole[1::2]
    assert drawn(1, 2, batch=2) == whole[1::2][2:]
    assert drawn(streams=1) != whole


def test_what_tells_an_order_from_others():
    data = Sized(13, 20)
    data.identity = 5
    batches = ShardBatches(data, 4, window=8, streams=2, shuffle=False, drop_last=True)
    marks = batches.marks
    assert marks.pop("shards of hosts") != ShardBatches(other_hosts(), 4).marks["shards of hosts"]
    expected = {"streams": 2, "batch_size": 4, "window": 8, "shuffle": 0, "drop_last": 1}
    assert marks == {order.indexes.NAME: 5} | expected


def other_hosts() -> Sized:
    data = Sized(13, 20, owned=((0,), (1,)))
    data.identity = 5
    return data


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ({}, ""),
        ({"batch_size": 4, "streams": 2}, ""),
        ({"batch_size": 5}, "^ShardBatches: found batch_size=4, expected batch_size=5, as the run"),
        ({"shards of hosts": 1}, "^ShardBatches: found others, expected shards of hosts, as the "),
        ({order.indexes.NAME: 6}, "^here: found other shards than the interrupted run had"),
    ],
)
def test_another_order_is_refused_within_an_epoch_and_other_shards_always(marks, says):
    data = Sized(13, 20)
    data.identity = 5
    batches = ShardBatches(data, 4, window=8, streams=2)
    for within in (True, False):
        is_refused = says and (within or order.indexes.NAME in marks)
        with pytest.raises(UserError, match=says) if is_refused else nullcontext():
            batches.check_same(marks, within)
