# /// script
# dependencies = ["webdataset==1.0.2"]
# ///
"""WebDataset: shards by workers, buffers that shuffle, shards drawn with replacement."""

import io
import random
import tarfile
from pathlib import Path

import webdataset as wds
from torch.utils.data import DataLoader

from tests.foreign_loaders.training import BATCH_SIZE, sample, train

SHARDS = 4
URLS = f"shard-{{0..{SHARDS - 1}}}.tar"


def write():
    for shard in range(SHARDS):
        if Path(f"shard-{shard}.tar").exists():
            continue
        with tarfile.open("part.tar", "w") as archive:
            for number in range(10 * shard, 10 * shard + 10):
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03}.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        Path("part.tar").rename(f"shard-{shard}.tar")


def draw(entry):
    return (sample(float(entry["txt"])),)


def shards(**options):
    write()
    return wds.WebDataset(URLS, **({"shardshuffle": False} | options))


def buffered(**options):
    return shards(detshuffle=True, shardshuffle=SHARDS).shuffle(8, **options).decode().map(draw)


def resampled():
    write()
    return wds.DataPipeline(
        wds.ResampledShards(URLS, deterministic=True),
        wds.tarfile_to_samples(),
        wds.shuffle(8, seed=7),
        wds.decode(),
        wds.map(draw),
    )


def in_pipeline():
    write()
    return wds.DataPipeline(
        wds.SimpleShardList(URLS),
        wds.detshuffle(),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.detshuffle(8, 4),
        wds.decode(),
        wds.map(draw),
    )


def web_loader(**workers):
    batches = buffered(seed=7).batched(BATCH_SIZE)
    return (
        wds.WebLoader(batches, batch_size=None, **workers).unbatched().shuffle(8, seed=3).batched(4)
    )


LOADERS = {
    "shards in order": lambda **workers: DataLoader(shards().decode().map(draw), 4, **workers),
    "shuffle(8), seeded by the clock": lambda **workers: DataLoader(buffered(), 4, **workers),
    "shuffle(8, seed=7)": lambda **workers: DataLoader(buffered(seed=7), 4, **workers),
    "shuffle(8, rng=random.Random(7))": lambda **workers: DataLoader(
        buffered(rng=random.Random(7)), 4, **workers
    ),
    "DataPipeline, detshuffle": lambda **workers: DataLoader(in_pipeline(), 4, **workers),
    "shards drawn again, by the clock": lambda **workers: DataLoader(
        shards(resampled=True).decode().map(draw).with_epoch(16), 4, **workers
    ),
    "shards drawn again, by a seed": lambda **workers: DataLoader(
        resampled().with_epoch(16), 4, **workers
    ),
    "mixed by RandomMix": lambda **workers: DataLoader(
        wds.DataPipeline(wds.RandomMix([buffered(seed=1), buffered(seed=2)], [0.7, 0.3])),
        4,
        **workers,
    ),
    "WebLoader": lambda **workers: wds.WebLoader(buffered(seed=7), batch_size=4, **workers),
    "WebLoader, shuffled across workers": web_loader,
    "WebLoader, with_epoch": lambda **workers: wds.WebLoader(
        resampled().compose(wds.batched(4)), batch_size=None, **workers
    ).with_epoch(10),
}

if __name__ == "__main__":
    train(LOADERS, lambda batch: batch[0])
