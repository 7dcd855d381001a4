"""rows/partition.py: each row goes to one host, for any total, hosts and order."""

import itertools
import random

import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import partition


def cases(count: int = 2000):
    """Yield totals and numbers of hosts: all small ones, and many others."""
    yield from itertools.product(range(40), range(1, 12))
    draw = random.Random(1)
    for _ in range(count):
        yield (
            draw.choice([draw.randrange(100), draw.randrange(10**6), draw.randrange(10**15)]),
            draw.randint(1, 200),
        )


def once(parts, total: int) -> bool:
    """Return whether parts, in this order, have each row from 0 to `total` once."""
    bounds = [(part.start, part.stop) for part in parts]
    return [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), total]


def test_the_hosts_have_every_row_once():
    for total, hosts in cases():
        host_rows = [partition.rows(total, hosts, host) for host in range(hosts)]
        assert once(host_rows, total)
        # Of 10**15 rows, computed with floats.
        assert max(map(len, host_rows)) - min(map(len, host_rows)) <= (1 if total < 10**9 else 2)


def test_the_rows_are_the_articles():
    for total, hosts in cases():
        for host in random.Random(total).sample(range(hosts), min(hosts, 3)):
            host_rows = partition.rows(total, hosts, host)
            assert (host_rows.start, host_rows.stop) == (
                round(host * total / hosts),
                round((host + 1) * total / hosts),
            )


@pytest.mark.slow
def test_weighted_hosts_share_all_rows():
    draw = random.Random(2)
    for total, hosts in cases(60):
        weights = [draw.choice([0, 0.5, 1, 1, 4, 8.25]) for _ in range(hosts)]
        weights[draw.randrange(hosts)] = 3
        host_rows = partition.weighted(total, weights)
        assert once(host_rows, total)
        for share, weight in zip(host_rows, weights, strict=True):
            assert abs(len(share) - total * weight / sum(weights)) <= 1 + total * 1e-12
        # For more rows, the divisions of floats and of integers may round differently.
        if total < 10**9:
            assert partition.weighted(total, [2.5] * hosts) == [
                partition.rows(total, hosts, k) for k in range(hosts)
            ]


@pytest.mark.parametrize(
    ("total", "weights", "lengths"),
    [
        (10, [0, 1], [0, 10]),
        (10, [1, 0, 1], [5, 0, 5]),
        (10, [0.25, 0.75], [2, 8]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_a_weight_may_be_0_or_a_fraction_and_there_may_be_no_rows(total, weights, lengths):
    assert [len(share) for share in partition.weighted(total, weights)] == lengths


def test_the_devices_of_a_host_share_its_rows():
    for total, hosts in cases(60):
        host_rows = partition.rows(total, hosts, hosts // 2)
        device_rows = partition.devices(host_rows, 8)
        assert once(
            [
                range(share.start - host_rows.start, share.stop - host_rows.start)
                for share in device_rows
            ],
            len(host_rows),
        )


def test_groups_share_by_weight_in_any_order():
    hosts = {"big": ["algo-1", "algo-10"], "small": ["algo-2", "algo-3", "algo-4"]}
    weights = {"big": 4, "small": 1}
    host_rows = partition.groups(1100, hosts, weights)
    assert once([host_rows[host] for host in sorted(host_rows)], 1100)
    assert {host: len(share) for host, share in host_rows.items()} == {
        "algo-1": 400,
        "algo-10": 400,
        "algo-2": 100,
        "algo-3": 100,
        "algo-4": 100,
    }
    turned = {name: hosts[name][::-1] for name in reversed(hosts)}
    assert partition.groups(1100, turned, dict(reversed(weights.items()))) == host_rows


def test_files_are_numbered_on():
    counts = {"b.npy": 5, "a.npy": 3, "c.npy": 0}
    starts = partition.files(counts)
    assert starts == {"a.npy": range(3), "b.npy": range(3, 8), "c.npy": range(8, 8)}


def test_what_is_missing():
    draw = random.Random(3)
    for _ in range(3000):
        host_rows = range(start := draw.randrange(30), start + draw.randrange(30))
        finished = [
            range(position := draw.randrange(70), position + draw.randrange(12))
            for _ in range(draw.randrange(8))
        ]
        missing_rows = sorted(set(host_rows) - set().union(*map(set, finished)))
        missing_ranges = partition.missing(host_rows, finished)
        assert list(itertools.chain(*missing_ranges)) == missing_rows and all(missing_ranges)
        assert all(
            range_before.stop < range_after.start
            for range_before, range_after in itertools.pairwise(missing_ranges)
        )


@pytest.mark.parametrize("wrong", [(-1, 1, 0), (5, 2, 2), (5, 2, -1), (5, 0, 0)])
def test_a_host_that_is_not_there(wrong):
    with pytest.raises(ValueError, match="rows: host"):
        partition.rows(*wrong)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_weights_of_another_form_are_refused(weights):
    with pytest.raises(UserError, match="weights: found"):
        partition.weighted(10, weights)


def test_a_group_without_a_weight():
    with pytest.raises(UserError, match="none for the instance group small"):
        partition.groups(10, {"big": ["a"], "small": ["b"]}, {"big": 1})
