# /// script
# dependencies = ["litdata==0.2.76"]
# ///
"""litdata: its loader of one dataset, of several together, and torch's of its dataset."""

from pathlib import Path

from litdata import (
    CombinedStreamingDataset,
    ParallelStreamingDataset,
    StreamingDataLoader,
    StreamingDataset,
)
from litdata.streaming import Cache
from torch.utils.data import DataLoader

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, sample, train


def write(name, first, size):
    folder = Path(name)
    if not (folder / "index.json").exists():
        cache = Cache(str(folder), chunk_size=6)
        for number in range(size):
            cache[number] = first + number
        cache.done()
        cache.merge()


def dataset(name="samples", first=0, size=SAMPLES, **options):
    write(name, first, size)
    return StreamingDataset(name, **({"shuffle": True, "transform": sample} | options))


def two():
    return [dataset("first", 0, 24), dataset("second", 100, 16)]


def loader(data, kind=StreamingDataLoader, **options):
    return lambda **workers: kind(data(), batch_size=BATCH_SIZE, **options, **workers)


LOADERS = {
    "StreamingDataLoader": loader(lambda: dataset(shuffle=False)),
    "StreamingDataLoader, shuffled": loader(dataset),
    "StreamingDataset in DataLoader": loader(dataset, DataLoader),
    "CombinedStreamingDataset, all": loader(
        lambda: CombinedStreamingDataset(two(), seed=5, iterate_over_all=True)
    ),
    "CombinedStreamingDataset, weights": loader(
        lambda: CombinedStreamingDataset(two(), seed=5, weights=[0.6, 0.4], iterate_over_all=False)
    ),
    "CombinedStreamingDataset, per stream": loader(
        lambda: CombinedStreamingDataset(
            two(), seed=5, weights=[0.6, 0.4], iterate_over_all=False, batching_method="per_stream"
        )
    ),
    "ParallelStreamingDataset": loader(
        lambda: ParallelStreamingDataset(two(), transform=lambda pair: pair[0] + pair[1])
    ),
    "ParallelStreamingDataset, length": loader(
        lambda: ParallelStreamingDataset(two(), length=28, transform=lambda pair: pair[0] + pair[1])
    ),
}

if __name__ == "__main__":
    train(LOADERS)
