"""images/s of the application's training / images/s of a bare PyTorch loop with the same batches.

    python -m benchmarks.step [--n 5] [--steps 10]

The difference is what Lightning, metrics, logging and callbacks cost. Validation is left out.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import report, training, turns
from benchmarks.training import RandomDataModule
from benchmarks.turns import Clock

from app.model import ResNet18


@dataclass(frozen=True)
class Setting:
    """The settings with which both sides train."""

    batch_size: int = training.BATCH_SIZE
    precision: str = "32-true"
    compile: bool = False
    channels_last: bool = False
    stem: str = "imagenet"
    images: int = 50_000

    @property
    def flags(self) -> list[str]:
        """The flags of our training."""
        flags = [
            f"--data={RandomDataModule.__module__}.{RandomDataModule.__name__}",
            f"--data.images={self.images}",
        ]
        flags += [f"--trainer.precision={self.precision}", f"--model.stem={self.stem}"]
        return [
            *flags,
            f"--model.compile={self.compile}",
            f"--model.channels_last={self.channels_last}",
        ]


def ours(clock: Clock, setting: Setting) -> None:
    """Train as the application does."""
    training.train(clock, setting.flags, setting.batch_size)


def bare(clock: Clock, setting: Setting) -> None:
    """Train with a loop as a person would write it without Lightning."""
    device = torch.device(training.accelerator())
    datamodule = RandomDataModule(batch_size=setting.batch_size, images=setting.images)
    datamodule.setup("fit")
    datamodule.sets["train"] = datamodule.sets["train"].to(device)
    # Only the network: torchvision's, with the memory format and compilation that are asked for.
    network = ResNet18(
        datamodule.num_classes, setting.stem, 0.0, setting.channels_last, setting.compile
    ).network
    network.to(device)
    layout = torch.channels_last if setting.channels_last else torch.contiguous_format
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16-mixed")
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=device.type == "cpu" or None)
    for _, (images, labels) in zip(
        range(clock.total_steps), datamodule.train_dataloader(), strict=False
    ):
        with mixed:
            loss = nn.functional.cross_entropy(
                network(images.contiguous(memory_format=layout)), labels
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick(len(labels))


def run(n: int, steps: int) -> report.Comparison:
    """Compare in n pairs of processes, by turns of `steps` timed steps."""
    setting = Setting()
    quantities = f"turns of {steps} steps: our training / bare PyTorch loop, the same batches"
    sides = [partial(side, setting=setting) for side in (ours, bare)]
    return turns.compare("step", quantities, *sides, n, steps)


if __name__ == "__main__":
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    report.publish([run(**vars(parser.parse_args()))])
