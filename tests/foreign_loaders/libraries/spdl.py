# /// script
# dependencies = ["spdl==0.8.0"]
# ///
"""SPDL: loaders that draw in threads, or in processes of their own."""

import torch
from spdl.dataloader import CacheDataLoader, DataLoader, get_pytorch_dataloader
from spdl.source import DistributedRandomSampler

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, sample, train


class Table(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


def pipeline(source=range(SAMPLES), preprocessor=sample, output_order="input"):
    def make(num_workers, persistent_workers):
        return DataLoader(
            source() if callable(source) else source,
            preprocessor=preprocessor,
            batch_size=BATCH_SIZE,
            aggregator=torch.stack,
            num_threads=max(1, num_workers),
            output_order=output_order,
        )

    return make


def plain(number):
    return torch.tensor([float(number), 0.5])


LOADERS = {
    "DataLoader, nothing drawn": pipeline(preprocessor=plain),
    "DataLoader, shuffled, nothing drawn": pipeline(
        lambda: DistributedRandomSampler(SAMPLES, rank=0, world_size=1), plain
    ),
    "DataLoader, samples that draw": pipeline(),
    "DataLoader, in order of completion": pipeline(output_order="completion"),
    "PyTorchDataLoader": lambda num_workers, persistent_workers: get_pytorch_dataloader(
        Table(), batch_size=BATCH_SIZE, shuffle=True, num_workers=max(1, num_workers)
    ),
    "CacheDataLoader": lambda **workers: CacheDataLoader(
        pipeline(preprocessor=plain)(**workers), num_caches=4, return_caches_after=10
    ),
}

if __name__ == "__main__":
    train(LOADERS)
