"""Samples of shards, of a folder and of S3, and what is wrong with them in one line."""

import contextlib
import os
import pickle
import re
import tempfile
import time

import boto3
import pytest
import ranks
import tar_shards
from torch import distributed
from torch.utils.data import DataLoader

from sagemaker_lightning import ShardBatches
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import dataset, index, sources
from sagemaker_lightning.shards.dataset import ShardedDataset
from sagemaker_lightning.shards.sources import Bucket

LOCATION = f"s3://{tar_shards.BUCKET}/train"


@pytest.fixture
def folder(tmp_path):
    return tar_shards.write(tmp_path / tar_shards.BUCKET / "train")


@pytest.fixture
def bucket(tmp_path, folder, monkeypatch):
    with tar_shards.on_s3(tmp_path, monkeypatch) as server:
        yield server


def flip(path, at=513):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_samples_by_their_numbers(folder):
    data = ShardedDataset(folder, tar_shards.number)
    assert len(data) == 40 and [data[number] for number in range(40)] == list(range(40))
    assert data.__getitems__([7, 31, 7]) == [7, 31, 7]
    assert data.owned == ()
    assert ShardedDataset(folder)[1] == {"txt": b"1", "x.bin": b"\x01" * 101}
    for number in (40, -1):
        with pytest.raises(IndexError):
            data[number]


def test_a_dataset_is_small_and_travels_to_workers(folder):
    data = ShardedDataset(folder, tar_shards.number)
    assert data[3] == 3
    copied = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000 and copied[39] == 39


def test_a_missing_index_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"shards.index: found no index; make it with `python -m"):
        ShardedDataset(tmp_path)
    with pytest.raises(UserError, match="No such file|found no index"):
        ShardedDataset(tmp_path / "nothing")


def test_a_shard_that_the_index_does_not_name_is_named(folder, capsys):
    ShardedDataset(folder)
    assert capsys.readouterr().out == ""
    (folder / "later.tar").write_bytes((folder / "shard-1.tar").read_bytes())
    ShardedDataset(folder)
    assert "later.tar is not in shards.index, and is not used (1 of" in capsys.readouterr().out


def test_an_index_that_is_damaged_on_the_way_is_read_again(folder, bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read = Bucket.read
    damaged = [1]

    def reads(self, *arguments):
        content = read(self, *arguments)
        return content[:-1] if damaged and damaged.pop() else content

    monkeypatch.setattr(Bucket, "read", reads)
    assert len(ShardedDataset(LOCATION)) == 40
    damaged += [1, 1]
    with pytest.raises(UserError, match=rf"^{LOCATION}/shards.index: found no index of shards"):
        ShardedDataset(LOCATION)
    assert len([*tmp_path.glob("shards-*.index")]) == 1  # no damaged copy stays


def test_a_full_temporary_folder_is_named_with_what_needs_it(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @contextlib.contextmanager
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(dataset, "atomic_write", full)
    says = rf"^{tmp_path}: found No space left on device while {LOCATION}/shards.index was copied"
    with pytest.raises(UserError, match=says):
        ShardedDataset(LOCATION)

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(UserError, match=rf"^{LOCATION}: found No usable temporary directory"):
        ShardedDataset(LOCATION)


def test_an_index_that_s3_does_not_give_is_asked_for_once(bucket):
    bucket.fault = lambda key, number: (404, "NoSuchKey")
    with pytest.raises(UserError, match=f"^{LOCATION}/shards.index: S3 says"):
        ShardedDataset(LOCATION, cache_dir="")
    assert bucket.requests == {"get": 1}


@pytest.mark.parametrize("error", [StopIteration, KeyError("cls")])
def test_a_sample_of_which_no_item_is_made_is_named(folder, error):
    """A StopIteration would end the epoch without a word."""

    def failing(sample):
        if sample["txt"] == b"31":
            raise error
        return 0

    with pytest.raises(RuntimeError, match=r"shard-.*tar: sample \d could not be converted"):
        ShardedDataset(folder, failing).__getitems__(range(40))


def missing(folder):
    (folder / "shard-2.tar").unlink()


def truncated(folder):
    path = folder / "shard-2.tar"
    path.write_bytes(path.read_bytes()[:-1])


def of_another(folder):
    """The index of other shards of the same sizes and names."""
    (folder / "shard-1.tar").rename(folder / "t")
    (folder / "shard-2.tar").rename(folder / "shard-1.tar")
    (folder / "t").rename(folder / "shard-2.tar")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (missing, "/shard-2.tar is missing, which shards.index names"),
        (truncated, r"/shard-2.tar: found \d+ bytes, expected \d+ by shards.index: it is trunc"),
    ],
)
@pytest.mark.parametrize("location", ["folder", LOCATION])
def test_a_shard_that_is_missing_or_truncated_is_reported_at_once(
    folder, bucket, damage, says, location
):
    damage(folder)
    with pytest.raises(UserError, match=says):
        ShardedDataset(folder if location == "folder" else location)


@pytest.mark.parametrize("damage", [lambda folder: flip(folder / "shard-2.tar", 512), of_another])
@pytest.mark.parametrize("location", ["folder", LOCATION])
def test_other_bytes_than_the_index_says_are_reported(folder, bucket, tmp_path, damage, location):
    if damage is of_another:
        tar_shards.write(folder, each=8)  # all have one size
    damage(folder)
    where = folder if location == "folder" else location
    data = ShardedDataset(where, cache_dir="")
    says = r"/shard-2.tar: found other bytes at 512 to \d+ than shards.index describes \(sample 0"
    with pytest.raises(UserError, match=says):
        data[len(data) // 2]


@pytest.mark.parametrize("damaged", [1, 2])
def test_bytes_that_are_damaged_on_the_way_are_read_once_more(folder, monkeypatch, damaged):
    data = ShardedDataset(folder, cache_dir="")
    expected = data[0]
    read = sources.Folder.read
    reads = []

    def read_damaged(self, name, start, stop):
        reads.append(name)
        content = read(self, name, start, stop)
        return bytes(len(content)) if len(reads) <= damaged else content

    monkeypatch.setattr(sources.Folder, "read", read_damaged)
    with (
        pytest.raises(UserError, match="found other") if damaged == 2 else contextlib.nullcontext()
    ):
        assert data[0] == expected
    assert len(reads) == 2


def test_a_shard_that_vanishes_is_reported_by_its_name(folder):
    data = ShardedDataset(folder)
    (folder / "shard-0.tar").unlink()
    with pytest.raises(UserError, match=r"/shard-0.tar cannot be read \(No such file"):
        data[0]


def test_an_index_that_is_replaced_is_reported(folder):
    data = ShardedDataset(folder)
    tar_shards.write(folder, each=9)
    copied = pickle.loads(pickle.dumps(data))
    index.known.cache_clear()  # as in another process
    with pytest.raises(UserError, match="found another index than before"):
        copied[0]


def test_the_same_samples_from_s3(folder, bucket, tmp_path):
    data = ShardedDataset(LOCATION, tar_shards.number, cache_dir="")
    assert bucket.requests == {"get": 1, "list": 1}
    assert data.__getitems__(list(range(40))) == list(range(40))
    assert bucket.requests["get"] == 41
    assert data.identity == ShardedDataset(folder).identity


def test_threads_that_read_share_one_client(folder, bucket, monkeypatch):
    made = []
    make = boto3.session.Session.client
    monkeypatch.setattr(
        boto3.session.Session,
        "client",
        lambda *given, **more: made.append(0) or make(*given, **more),
    )
    data = ShardedDataset(LOCATION, tar_shards.number, cache_dir="")
    sources._client.cache_clear()
    assert data.__getitems__(list(range(40))) == list(range(40)) and len(made) == 2


def test_shards_are_fetched_whole_and_once(folder, bucket, tmp_path):
    options = {"cache_dir": tmp_path / "cache", "cache_bytes": 2**20}
    data = ShardedDataset(LOCATION, tar_shards.number, **options)
    data.prefetch([0, 2])
    wait_for(lambda: (data._cache.path(2)).exists())
    asked = bucket.requests["get"]
    assert data.__getitems__([3, 25]) == [3, 25] and bucket.requests["get"] == asked
    assert data[15] == 15 and bucket.requests["get"] == asked + 1


def test_a_shard_that_was_damaged_in_the_cache_is_read_again(folder, bucket, tmp_path):
    data = ShardedDataset(LOCATION, tar_shards.number, cache_dir=tmp_path / "cache")
    data.prefetch([1])
    path = data._cache.path(1)
    wait_for(path.exists)
    flip(path, 512)
    assert data[10] == 10 and not path.exists()


def wait_for(claim, seconds=30):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def bytes_in(folder):
    """Return the bytes of a folder's files; one may get its name, or go, meanwhile."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_s3_in_a_cache_that_is_smaller(folder, bucket, tmp_path, workers):
    cache = tmp_path / "cache"
    size = (folder / "shard-0.tar").stat().st_size
    data = ShardedDataset(LOCATION, tar_shards.number, cache_dir=cache, cache_bytes=5 * size // 2)
    loader = DataLoader(data, batch_sampler=ShardBatches(data, 4, window=10), num_workers=workers)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        assert bytes_in(cache) <= 5 * size // 2
    assert sorted(seen) == list(range(40))


def divided_among_hosts(folders, shards):
    """Return what a rank finds on its host: its samples' numbers, read, and the batches."""
    distributed.init_process_group("gloo")
    try:
        data = ShardedDataset(
            folders[int(os.environ["GROUP_RANK"])], tar_shards.number, divided=True
        )
        batches = ShardBatches(data, 2, window=8)
        order = batches.placed(5)
        rank = distributed.get_rank()
        return [
            data.__getitems__(order[batch])
            for batch in range(rank, len(order), distributed.get_world_size())
        ]
    finally:
        distributed.destroy_process_group()


def spread(tmp_path, moved):
    """Put the shards on two hosts; return their folders."""
    hosts = [tar_shards.write(tmp_path / "host-0"), tmp_path / "host-1"]
    hosts[1].mkdir()
    for name in moved:
        (hosts[0] / name).rename(hosts[1] / name)
    return hosts


def on_hosts(tmp_path, hosts):
    return ranks.run(
        divided_among_hosts,
        [str(host) for host in hosts],
        None,
        nodes=(2, 1),
        folder=tmp_path / "ranks",
        variables=lambda node: {"SM_CURRENT_HOST": f"algo-{node + 1}"},
    )


@pytest.mark.slow
def test_each_host_reads_its_own_shards(tmp_path):
    """The index is on one host alone."""
    ended = on_hosts(tmp_path, spread(tmp_path, ["shard-1.tar", "shard-3.tar"]))
    assert not any(each.error for each in ended), ended[0].error
    seen = [[sample for batch in each.value for sample in batch] for each in ended]
    assert {sample // 10 for sample in [*seen[0], *seen[1]]} == {0, 2}
    assert {sample // 10 for sample in seen[2]} == {1, 3}
    everything = sum(seen, [])
    assert len(everything) == len(set(everything)) == 30  # the shortest streams have 5 batches


@pytest.mark.slow
def test_a_host_with_a_damaged_shard_ends_all_ranks(tmp_path):
    hosts = spread(tmp_path, ["shard-1.tar", "shard-3.tar"])
    truncated_path = hosts[1] / "shard-3.tar"
    truncated_path.write_bytes(truncated_path.read_bytes()[:-1])
    ended = on_hosts(tmp_path, hosts)
    says = re.compile(r"shard-3.tar: found \d+ bytes, expected \d+ .*\(on host algo-2\)")
    assert all(says.search(each.error) for each in ended), ended[0].error


@pytest.mark.slow
def test_a_host_without_a_shard_ends_all_ranks(tmp_path):
    ended = on_hosts(tmp_path, spread(tmp_path, []))
    assert all("found no shard on host algo-2" in each.error for each in ended), ended[0].error
