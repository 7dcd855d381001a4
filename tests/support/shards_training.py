"""What trains on shards, interrupted: loaders of one process, and ranks.

SHARDS, a variable, is the place of 40 samples.
"""

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from sagemaker_lightning import ExactResume, ShardBatches, ShardedDataset
from tests.foreign_loaders.training import BATCH_SIZE, Interrupting, Model, sample, train


def numbered(contents: dict[str, bytes]) -> torch.Tensor:
    """Return a sample, float32 [2]: its number, and noise."""
    return sample(int(contents["txt"]))


def loader(shuffle: bool = True, streams: int | None = None, **options) -> DataLoader:
    """Return a loader of the samples in SHARDS."""
    data = ShardedDataset(os.environ["SHARDS"], numbered, cache_bytes=60000)
    batches = ShardBatches(data, BATCH_SIZE, window=12, shuffle=shuffle, streams=streams)
    return DataLoader(data, batch_sampler=batches, **options)


LOADERS = {
    "shuffled": loader,
    "in order": lambda **options: loader(shuffle=False, **options),
    "three streams": lambda **options: loader(streams=3, **options),
}


class Numbers(Model):
    """Notes the numbers of each step of this rank, in a file of its own.

    Args:
        streams: As ShardBatches'.
    """

    def __init__(self, streams: int | None) -> None:
        super().__init__(lambda batch: batch, set_epoch=False)
        self.streams = streams

    def train_dataloader(self) -> DataLoader:
        return loader(streams=self.streams)

    def training_step(self, batch, batch_idx):
        """Note the numbers, and return the loss."""
        with Path(f"seen-{self.global_rank}").open("a") as file:
            print(self.global_step, *map(int, batch[:, 0].tolist()), file=file)
        pair = torch.stack([batch.mean(), batch.std()]) / 40
        return ((pair * self.weight).sum() - 1) ** 2


def ranks_trained(checkpoints: str, moment: str = "", streams: int | None = None) -> list[float]:
    """Train as a rank, and return the weights; `moment` is that of an interruption."""
    import ranks

    callbacks = [ExactResume(checkpoints, seed=1, every_n_steps=1)]
    if moment:
        callbacks.append(Interrupting(moment))
    model = Numbers(streams)
    ranks.trainer(callbacks).fit(model)
    return model.weight.tolist()


if __name__ == "__main__":
    train(LOADERS)
