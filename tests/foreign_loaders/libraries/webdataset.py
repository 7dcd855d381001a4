# /// script
# dependencies = ["webdataset==1.0.2"]
# ///
"""WebDataset: shards by workers, buffers that shuffle, shards drawn with replacement."""

import io
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
    return sample(float(entry["txt"]))


def shards(**options):
    write()
    return wds.WebDataset(URLS, **({"shardshuffle": False} | options))


def buffered(**options):
    return shards(shardshuffle=SHARDS, **options).shuffle(8).decode().map(draw)


def in_pipeline():
    write()
    return wds.DataPipeline(
        wds.SimpleShardList(URLS),
        wds.detshuffle(),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(8),
        wds.decode(),
        wds.map(draw),
    )


def web_loader(**workers):
    batches = buffered().batched(BATCH_SIZE)
    return wds.WebLoader(batches, batch_size=None, **workers).unbatched().shuffle(8).batched(4)


LOADERS = {
    "shards in order": lambda **workers: DataLoader(shards().decode().map(draw), 4, **workers),
    "shards and a buffer, shuffled": lambda **workers: DataLoader(buffered(), 4, **workers),
    "shards shuffled by the epoch": lambda **workers: DataLoader(
        buffered(detshuffle=True), 4, **workers
    ),
    "pipeline": lambda **workers: DataLoader(in_pipeline(), 4, **workers),
    "drawn with replacement, with_epoch": lambda **workers: DataLoader(
        shards(resampled=True).shuffle(8).decode().map(draw).with_epoch(16), 4, **workers
    ),
    "mixed by RandomMix": lambda **workers: DataLoader(
        wds.DataPipeline(wds.RandomMix([buffered(), buffered()], [0.7, 0.3])), 4, **workers
    ),
    "WebLoader": lambda **workers: wds.WebLoader(buffered(), batch_size=4, **workers),
    "WebLoader, shuffled across workers": web_loader,
    "WebLoader, with_epoch": lambda **workers: wds.WebLoader(
        shards(resampled=True).shuffle(8).decode().map(draw).batched(4), batch_size=None, **workers
    ).with_epoch(10),
}

if __name__ == "__main__":
    train(LOADERS, lambda batch: batch[0] if isinstance(batch, (list, tuple)) else batch)
