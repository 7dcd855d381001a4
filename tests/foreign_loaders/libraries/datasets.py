# /// script
# dependencies = ["datasets==5.2.0"]
# ///
"""Hugging Face's datasets: tables, and streams in shards, shuffled by a buffer or interleaved."""

from pathlib import Path

from datasets import Dataset, concatenate_datasets, interleave_datasets, load_dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, sample, train


def draw(row):
    return {"x": sample(row["id"]).tolist()}


def draw_batch(rows):
    return {"x": [sample(number) for number in rows["id"]]}


def table(first=0, size=SAMPLES):
    return Dataset.from_dict({"id": list(range(first, first + size))})


def stream(first=0, size=SAMPLES, shards=4):
    return table(first, size).to_iterable_dataset(num_shards=shards)


def drawn(dataset):
    return dataset.map(draw, remove_columns="id").with_format("torch")


def shuffled(**options):
    return stream(**options).shuffle(seed=7, buffer_size=8)


def interleaved():
    return interleave_datasets(
        [shuffled(size=24), stream(100, 16)],
        probabilities=[0.6, 0.4],
        seed=3,
        stopping_strategy="all_exhausted",
    )


def parquet():
    for number in range(4):
        if not (file := Path(f"part-{number}.parquet")).exists():
            table(10 * number, 10).to_parquet(str(file))
    return load_dataset("parquet", data_files="part-*.parquet", split="train", streaming=True)


def loader(dataset, kind=DataLoader, batch_size=BATCH_SIZE, **options):
    return lambda **workers: kind(dataset(), batch_size, **options, **workers)


LOADERS = {
    "table, shuffled by DataLoader": loader(
        lambda: table().with_transform(draw_batch), shuffle=True
    ),
    "table, shuffled by itself": loader(
        lambda: table().shuffle(seed=7).with_transform(draw_batch), shuffle=True
    ),
    "stream of 4 shards": loader(lambda: drawn(stream())),
    "stream, shuffled by a buffer": loader(lambda: drawn(shuffled())),
    "stream, shuffled, with set_epoch": loader(lambda: drawn(shuffled())),
    "stream of Parquet files, shuffled": loader(
        lambda: drawn(parquet().shuffle(seed=7, buffer_size=8))
    ),
    "streams, interleaved": loader(lambda: drawn(interleaved())),
    "streams, one after the other": loader(
        lambda: drawn(concatenate_datasets([shuffled(size=24), stream(100, 16)]))
    ),
    "stream that makes its batches": loader(
        lambda: drawn(shuffled()).batch(BATCH_SIZE), batch_size=None
    ),
    "stream in StatefulDataLoader": loader(lambda: drawn(stream()), StatefulDataLoader),
    "stream, shuffled, in StatefulDataLoader": loader(
        lambda: drawn(shuffled()), StatefulDataLoader
    ),
}

if __name__ == "__main__":
    train(LOADERS, lambda batch: batch["x"], set_epoch=("stream, shuffled, with set_epoch",))
