"""Whole shards on a disk: bounded, shared by processes, and never wrong."""

import fcntl
import os
import re
import threading

import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import disk_cache
from sagemaker_lightning.shards.disk_cache import DiskCache
from sagemaker_lightning.shards.index import Shard
from sagemaker_lightning.shards.sources import Folder

SIZE = 1000


@pytest.fixture
def origin(tmp_path):
    (tmp_path / "origin").mkdir()
    for number in range(5):
        (tmp_path / "origin" / f"{number}.tar").write_bytes(bytes([number]) * SIZE)
    return Folder(str(tmp_path / "origin"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "PIECE", 64)
    return DiskCache(tmp_path / "cache", 2 * SIZE + 500, 7)


def fetch(cache, origin, number, in_use=()):
    return cache.fetch(number, Shard(f"{number}.tar", SIZE, 3), origin, in_use)


def numbers(cache):
    return [number for number in range(5) if cache.path(number).exists()]


def test_a_shard_is_fetched_in_pieces(cache, origin):
    assert cache.read(3, 10, 20) is None
    assert fetch(cache, origin, 3) and fetch(cache, origin, 3)
    assert cache.read(3, 10, 20) == b"\x03" * 10 and cache.path(3).stat().st_size == SIZE
    assert [path.name for path in cache.folder.glob("*.part")] == []


def test_what_is_not_in_use_goes_first(cache, origin):
    assert fetch(cache, origin, 0) and fetch(cache, origin, 1)
    assert not fetch(cache, origin, 2, in_use=[0, 1])  # no room
    cache.release([1])
    assert fetch(cache, origin, 2, in_use=[0]) and numbers(cache) == [0, 2]


def test_what_another_process_uses_stays(cache, origin):
    assert fetch(cache, origin, 0) and fetch(cache, origin, 1)
    assert not fetch(cache, origin, 2)
    cache.release([0, 1])
    cache.keep([0])
    assert fetch(cache, origin, 2) and numbers(cache) == [0, 2]


def test_files_of_others_in_the_folder_stay(cache, origin):
    cache.folder.mkdir()
    others = ["model-best.ckpt", "2024-01-01.log", "0-0000001.shard", "abcdef012345678-1.shard"]
    for name in others:
        (cache.folder / name).write_bytes(b"x" * 4 * SIZE)
        os.utime(cache.folder / name, (0, 0))
    for number in range(4):
        assert fetch(cache, origin, number)
        cache.release([number])
    assert len(numbers(cache)) == 2 and all((cache.folder / name).exists() for name in others)


def test_a_shard_larger_than_the_cache_is_left(cache, origin):
    small = DiskCache(cache.folder, SIZE - 1, 7)
    assert not fetch(small, origin, 0) and not list(cache.folder.glob("*-*"))


def test_what_another_process_is_fetching_is_left_to_it(cache, origin):
    cache.folder.mkdir()
    with cache.path(0).with_suffix(".part").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(SIZE)
        assert not fetch(cache, origin, 0)
        assert fetch(cache, origin, 1) and not fetch(cache, origin, 2, in_use=[1])
    # It was killed: what it has left makes room.
    assert fetch(cache, origin, 2, in_use=[1]) and numbers(cache) == [1, 2]
    assert not list(cache.folder.glob("*.part"))


def test_a_shard_that_is_there_waits_for_no_other_process(cache, origin):
    assert fetch(cache, origin, 0)
    with cache.path(0).with_suffix(".part").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert fetch(cache, origin, 0)


def test_a_shard_that_is_wanted_is_in_use_at_once(cache, origin):
    assert fetch(cache, origin, 0)
    cache.release([0])
    disk_cache.Prefetcher(cache, origin, [Shard("0.tar", SIZE, 3)]).want([0])
    assert cache.path(0).stat().st_mtime > 0


def test_a_shard_that_ends_early_is_one_line_and_leaves_nothing(cache, origin, tmp_path):
    (tmp_path / "origin/0.tar").write_bytes(b"short")
    with pytest.raises(UserError, match=r"0.tar: found its end before byte \d+, expected 1000"):
        fetch(cache, origin, 0)
    assert not list(cache.folder.glob("*-*"))


def test_a_fetch_that_fails_is_tried_again(cache, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "RETRY_SECONDS", 0.01)
    path = tmp_path / "origin/0.tar"
    content = path.read_bytes()
    path.unlink()
    prefetcher = disk_cache.Prefetcher(cache, origin, [Shard("0.tar", SIZE, 3)])
    prefetcher.want([0])
    path.write_bytes(content)
    wait_for(lambda: cache.read(0, 0, 4))
    assert cache.read(0, 0, 4) == bytes(4)


def wait_for(claim):
    for _ in range(3000):
        if claim():
            return
        disk_cache.time.sleep(0.01)
    raise AssertionError("it did not come")


def test_a_full_disk_is_said_once_by_the_names_of_the_folder_and_the_shard(
    cache, origin, monkeypatch, capsys
):
    monkeypatch.setattr(disk_cache, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(disk_cache, "LONGEST_RETRY_SECONDS", 0.01)
    room = threading.Event()
    copy = origin.copy
    refused = []

    def full(*arguments):
        if room.is_set():
            return copy(*arguments)
        refused.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(origin, "copy", full)
    prefetcher = disk_cache.Prefetcher(cache, origin, [Shard("0.tar", SIZE, 3)])
    prefetcher.want([0])
    wait_for(lambda: len(refused) > 3)
    room.set()
    wait_for(lambda: cache.read(0, 0, 4))
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: .*/cache: found No space left .* while .*/origin/0.tar was", line)


def test_pauses_grow_while_nothing_can_be_fetched(cache, origin, tmp_path, monkeypatch):
    (tmp_path / "origin/0.tar").unlink()
    prefetcher = disk_cache.Prefetcher(cache, origin, [Shard("0.tar", SIZE, 3)])
    for _ in range(9):
        assert not prefetcher._fetch(0, (0,))
    assert prefetcher.pause == disk_cache.LONGEST_RETRY_SECONDS
    (tmp_path / "origin/0.tar").write_bytes(bytes(SIZE))
    assert prefetcher._fetch(0, (0,)) and prefetcher.pause == disk_cache.RETRY_SECONDS
