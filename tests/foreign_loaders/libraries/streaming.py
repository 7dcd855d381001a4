# /// script
# dependencies = ["streaming-community==0.14.2"]
# ///
"""Streaming (MDS), by the live fork of mosaicml-streaming: shards shuffled, streams mixed."""

from pathlib import Path

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, sample, train


class Samples(StreamingDataset):
    """Its samples draw."""

    def __getitem__(self, index):
        return sample(super().__getitem__(index)["id"])


def written(name="mds", first=0, size=SAMPLES):
    if not Path(name, "index.json").exists():
        with MDSWriter(out=name, columns={"id": "int"}, size_limit=200) as writer:
            for number in range(first, first + size):
                writer.write({"id": number})
    return name


def loader(kind=StreamingDataLoader, mixed=False, **options):
    def make(**workers):
        source = {"local": str(Path(written()).resolve())}
        if mixed:
            folders = [written("first", 0, 24), written("second", 100, 16)]
            source = {
                "streams": [
                    Stream(local=str(Path(folder).resolve()), proportion=part)
                    for folder, part in zip(folders, (0.6, 0.4), strict=True)
                ],
                "epoch_size": SAMPLES,
            }
        dataset = Samples(**source, batch_size=BATCH_SIZE, **({"shuffle": True} | options))
        return kind(dataset, batch_size=BATCH_SIZE, **workers)

    return make


LOADERS = {
    "StreamingDataset in DataLoader": loader(DataLoader),
    "StreamingDataLoader, in order": loader(shuffle=False),
    "StreamingDataLoader, shuffled": loader(),
    "StreamingDataLoader, py1s": loader(shuffle_algo="py1s", num_canonical_nodes=2),
    "StreamingDataLoader, two streams": loader(mixed=True),
    "StreamingDataLoader, two streams, per_stream": loader(
        mixed=True, batching_method="per_stream"
    ),
}

if __name__ == "__main__":
    train(LOADERS)
