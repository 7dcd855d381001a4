"""ShardedDataset: the samples of a folder of shards, or of a place on S3, by their numbers."""

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from sagemaker_lightning.contract.atomic_files import atomic_write
from sagemaker_lightning.contract.environment import failure_file, host_and_rank
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import report_uncaught
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data import host_shards
from sagemaker_lightning.data.gather import gather
from sagemaker_lightning.shards import index as indexes
from sagemaker_lightning.shards.disk_cache import DiskCache, Prefetcher
from sagemaker_lightning.shards.index import Index, Shard
from sagemaker_lightning.shards.sources import Bucket, Source, source
from sagemaker_lightning.shards.threads import mapped

THREADS = 16  # ranges that a process reads from S3 at a time


class ShardedDataset(Dataset[Any]):
    """The samples of the shards that `python -m sagemaker_lightning.shards` has indexed.

        data = ShardedDataset("/opt/ml/input/data/train", decode)
        loader = DataLoader(data, batch_sampler=ShardBatches(data, 64), num_workers=4)

    It has an item for each sample, by its number. A sample is read by its byte range and compared
    with its checksum. It has no state and opens nothing: data workers read for themselves.

    Args:
        location: A folder, such as a channel in File or FastFile mode; or s3://BUCKET/PREFIX.
        transform: Gets a sample's fields, such as {"cls": b"7", "jpg": b"..."}, and returns the
            item; they are the item if it is None.
        cache_dir: Folder for whole shards that are fetched before they are needed, of S3 or of a
            folder that is slow. "" for none; by default, one below the temporary folder for S3.
        cache_bytes: Size of that folder, at most: it has room for what `ShardBatches` asks for on
            all ranks of the host, or what is left is read from its source sample by sample.
        divided: Whether each host has other shards (ShardedByS3Key): then all ranks make the
            dataset, once torch.distributed is initialized, as in a data module's `setup`.

    Raises UserError if the index or a shard is missing, or another one. If `transform` raises an
    error, an item raises RuntimeError with the name of its sample.
    """

    def __init__(
        self,
        location: str | Path,
        transform: Callable[[dict[str, bytes]], Any] | None = None,
        *,
        cache_dir: str | Path | None = None,
        cache_bytes: int = 32 * 2**30,
        divided: bool = False,
    ) -> None:
        report_uncaught(failure_file(), host_and_rank())  # in a loop without a Trainer, too
        self.location = str(location)
        self.transform = transform
        origin = source(self.location)
        if cache_dir is None:
            is_remote = isinstance(origin, Bucket)
            cache_dir = Path(_temporary_folder(origin), "shards") if is_remote else ""
        self.cache_dir = str(cache_dir)
        self.cache_bytes = cache_bytes
        self.index_file, index = _find_index(origin, divided)
        self.identity = index.identity
        self.owned = _owned(origin, self.index, divided)
        """The numbers of the shards that each rank's host has; () if all hosts have all."""

    @property
    def index(self) -> Index:
        """The index."""
        return indexes.known(self.index_file, self.identity)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if the shards were made of a folder of them."""
        return self.index.classes

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample: int) -> Any:
        if not 0 <= sample < len(self.index):
            raise IndexError(
                f"{self.location} has {len(self)} samples, and none of number {sample}"
            )
        return self._item(sample, self._cached(sample) or self._read(sample))

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Return the items of a batch; all is read first, what is not here at the same time."""
        # Reading one after the other, with nothing between, takes half the time.
        contents = self._all_contents(samples[:])
        # The numbers are gone through beside the items: each of them seeds what its item draws.
        return [self._item(*each) for each in zip(samples, contents, strict=True)]

    def prefetch(self, shards: Iterable[int]) -> None:
        """Have shards fetched in the background, the first one first; without a cache, nothing."""
        if self.cache_dir:
            prefetcher = _prefetcher(os.getpid(), self._cache, self.location, self.index.shards)
            prefetcher.want(list(dict.fromkeys(shards)))

    @property
    def _cache(self) -> DiskCache:
        return DiskCache(Path(self.cache_dir), self.cache_bytes, self.identity)

    def _item(self, sample: int, contents: dict[str, bytes]) -> Any:
        """Return the item of a sample's fields; RuntimeError, with its name, if there is none."""
        if not self.transform:
            return contents
        try:
            return self.transform(contents)
        except Exception as error:
            index = self.index
            number = index.place(sample).shard
            raise RuntimeError(
                f"{source(self.location).name_of(index.shards[number].name)}: sample "
                f"{sample - int(index.first[number])} could not be converted: fields "
                f"{', '.join(contents)} ({type(error).__name__}: {error})"
            ) from error

    def _all_contents(self, samples: Sequence[int]) -> list[dict[str, bytes]]:
        """Return the fields of samples; those that are on S3 alone are read at the same time."""
        origin = source(self.location)
        if not isinstance(origin, Bucket):
            return [self._cached(sample) or self._read(sample) for sample in samples]
        contents = [self._cached(sample) for sample in samples]
        left = [sample for sample, found in zip(samples, contents, strict=True) if not found]
        if left:
            origin.connect()
        read = iter(mapped(self._read, left, THREADS))
        return [found or next(read) for found in contents]

    def _cached(self, sample: int) -> dict[str, bytes] | None:
        """Return a sample's fields; None if they are not in the cache, whole."""
        if not self.cache_dir:
            return None
        place = self.index.place(sample)
        if (data := self._cache.read(place.shard, place.start, place.stop)) is None:
            return None
        contents = place.contents(data)
        if contents is None:
            self._cache.drop(place.shard)
        return contents

    def _read(self, sample: int) -> dict[str, bytes]:
        """Return a sample's fields; UserError if they are not what the index says."""
        index = self.index
        place = index.place(sample)
        number, start, stop, _, _ = place
        origin = source(self.location)
        name = index.shards[number].name
        for _ in range(2):  # damage on the way passes
            data = origin.read(name, start, stop)
            if (contents := place.contents(data)) is not None:
                return contents
        raise UserError(
            f"{origin.name_of(name)}: found other bytes at {start} to {stop} than "
            f"{indexes.NAME} describes (sample {sample - int(index.first[number])} of it): it is "
            "damaged, or the index is of other shards; upload it again, or make the index again"
        )


@functools.lru_cache(maxsize=8)
def _prefetcher(
    process: int, cache: DiskCache, location: str, shards: tuple[Shard, ...]
) -> Prefetcher:
    """Return this process's thread that fetches; it is not part of a dataset, so none is copied."""
    return Prefetcher(cache, source(location), shards)


def _find_index(origin: Source, divided: bool) -> tuple[str, Index]:
    """Return the path of the index, or that of a copy of one that is elsewhere, and the index."""
    if not isinstance(origin, Bucket) and not divided:
        path = Path(origin.location, indexes.NAME)
        if not path.is_file():
            raise UserError(
                f"{path}: found no index; make it with `python -m sagemaker_lightning.shards index "
                f"{origin.location}`, and give it in the channel"
            )
        return str(path), indexes.read(path)
    if not isinstance(origin, Bucket):
        content = host_shards.share(lambda: Path(origin.location, indexes.NAME).read_bytes())
        return _copied_index(origin, content)
    content = origin.read(indexes.NAME, 0, indexes.LARGEST_SHARD)
    with suppress(UserError):
        return _copied_index(origin, content)
    # Damage on the way passes.
    return _copied_index(origin, origin.read(indexes.NAME, 0, indexes.LARGEST_SHARD))


def _temporary_folder(origin: Source) -> str:
    """Return the temporary folder; UserError if no such folder can be written to."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            f"{origin.location}: found {error.strerror}; make room there, or set TMPDIR"
        ) from None


def _copied_index(origin: Source, content: bytes) -> tuple[str, Index]:
    """Return the path of a copy of an index, and the index."""
    # One name for one content: other processes, and other trainings, have the same or another one.
    path = Path(_temporary_folder(origin), f"shards-{indexes.digest(content)}.index")
    if not path.exists():
        try:
            with atomic_write(path, sync=False) as file:
                file.write(content)
        except OSError as error:
            raise UserError(
                f"{path.parent}: found {error.strerror} while {origin.name_of(indexes.NAME)} was "
                f"copied to it, expected room for {len(content)} bytes; make room, or set TMPDIR"
            ) from None
    try:
        return str(path), indexes.read(path, origin.name_of(indexes.NAME))
    except UserError:
        path.unlink(missing_ok=True)
        raise


def _warn_of_others(origin: Source, names: Iterable[str], index: Index) -> None:
    """Warn of shards that an index does not name, such as one that was made before they came."""
    known = {shard.name for shard in index.shards}
    others = sorted(name for name in names if name.endswith(".tar") and name not in known)
    if others:
        log.warning(
            f"{origin.name_of(others[0])} is not in {indexes.NAME}, and is not used "
            f"({len(others)} of such shards); make the index again"
        )


def _owned(origin: Source, index: Index, divided: bool) -> tuple[tuple[int, ...], ...]:
    """Return which shards each rank's host has; () if all have all.

    Raises UserError, on all ranks, if one is missing, on several hosts, or of another size.
    """
    problem = ""
    present: list[int] = []
    try:
        sizes = origin.sizes()
        _warn_of_others(origin, sizes, index)
        for number, shard in enumerate(index.shards):
            if shard.name in sizes:
                present.append(number)
                if sizes[shard.name] != shard.bytes and not problem:
                    problem = (
                        f"{origin.name_of(shard.name)}: found {sizes[shard.name]} bytes, expected "
                        f"{shard.bytes} by {indexes.NAME}: it is truncated, or the index is of "
                        "other shards; upload it again, or make the index again"
                    )
            elif not divided and not problem:
                problem = (
                    f"{origin.name_of(shard.name)} is missing, which {indexes.NAME} names; upload "
                    "it, or make the index again; if each host has other shards (ShardedByS3Key), "
                    "give divided=True"
                )
    except UserError as error:
        problem = str(error)
    if not divided:
        if problem:
            raise UserError(problem)
        return ()
    host = host_and_rank().partition(",")[0]
    answers = gather((host, problem, tuple(present)))
    for other, text, _ in answers:
        if text:
            raise UserError(f"{text} (on {other})")
    if idle := [other for other, _, numbers in answers if not numbers]:
        raise UserError(
            f"{origin.location}: found no shard on {idle[0]}, expected one or more on each host; "
            "use more shards, fewer hosts, or the channel as FullyReplicated"
        )
    hosts: dict[int, str] = {}
    for other, _, numbers in answers:
        for number in numbers:
            if hosts.setdefault(number, other) != other:
                raise UserError(
                    f"{origin.name_of(index.shards[number].name)} is on {hosts[number]} and on "
                    f"{other}; with divided=True, give the channel as ShardedByS3Key"
                )
    if missing := set(range(len(index.shards))) - hosts.keys():
        raise UserError(
            f"{origin.name_of(index.shards[min(missing)].name)} is on no host; upload it again, or "
            "make the index again"
        )
    return tuple(numbers for _, _, numbers in answers)
