"""A plain loop for torchrun, without Lightning: torchvision's ResNet-18 in DDP.

    torchrun ... -m benchmarks.plain SOCKET STEPS BATCH_SIZE

Only `python -m benchmarks.scaling local` starts it. Data, batch, optimizer and thread are those of
our training. On one node there is no DDP, as there is nothing to exchange.
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from benchmarks.ranks import Rank
from benchmarks.training import RandomDataModule


def main(address: str, steps: int, batch_size: int) -> None:
    """Train until the benchmark ends it."""
    # Each rank has another order of the images, which replaces a distributed sampler.
    datamodule = RandomDataModule(batch_size=batch_size, seed=int(os.environ["RANK"]))
    datamodule.setup("fit")
    network = resnet18(num_classes=datamodule.num_classes)
    if int(os.environ["WORLD_SIZE"]) > 1:
        distributed.init_process_group("gloo")
        network = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    rank = Rank(address, steps)
    rank.start(network)
    for images, labels in datamodule.train_dataloader():
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rank.tick(len(labels))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
