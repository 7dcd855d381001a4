"""images/s of the application's training / images/s of a bare PyTorch loop with the same batches.

    python -m benchmarks.step [--n 5] [--steps 10]

The difference is what Lightning, metrics, logging and callbacks cost. Validation is left out.
"""

from functools import partial

import torch
from torch import nn
from torchvision.models import resnet18

from benchmarks import report, training, turns
from benchmarks.training import RandomDataModule
from benchmarks.turns import Clock


def bare(clock: Clock) -> None:
    """Train by the loop that a person would write without Lightning."""
    device = torch.device(training.ACCELERATOR)
    datamodule = RandomDataModule(batch_size=training.BATCH_SIZE)
    datamodule.setup("fit")
    datamodule.sets["train"] = datamodule.sets["train"].to(device)
    network = resnet18(num_classes=datamodule.num_classes).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=device.type == "cpu")
    for _, (images, labels) in zip(range(clock.total_steps), datamodule.train_dataloader(), strict=False):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick(len(labels))


def run(n: int, steps: int) -> report.Comparison:
    """Compare in n pairs of processes, by turns of `steps` timed steps."""
    data = [f"--data={RandomDataModule.__module__}.{RandomDataModule.__name__}"]
    what = f"turns of {steps} steps: our training / bare PyTorch loop, the same batches"
    return turns.compare("step", what, partial(training.train, data=data), bare, n, steps)


if __name__ == "__main__":
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    report.publish([run(**vars(parser.parse_args()))])
