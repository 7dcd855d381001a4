"""A small language model of characters, by DDP or sharded by FSDP2; docs/sharded.md is its page.

    python examples/language_model.py --trainer.devices=2 --trainer.accelerator=cpu \
        --trainer.strategy=ModelParallelStrategy --trainer.strategy.data_parallel_size=2

With `--trainer.strategy=ddp` each rank has all of it. The text is Python's own reference manual,
which comes with Python.
"""

from pydoc_data.topics import topics

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from sagemaker_lightning import SageMakerCLI


class Text(Dataset):
    """The passages of a text, as numbers of characters: int64 of shape (length + 1,).

    Args:
        length: Characters of a passage, but for the last one, which is only predicted.
    """

    def __init__(self, length: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.text = torch.tensor([numbers[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1]


class Block(nn.Module):
    """A layer of a transformer: each character sees those before it.

    Args:
        width: Numbers for each character.
        heads: Heads of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        parts = self.queries_keys_values(self.norms[0](inputs)).chunk(3, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        inputs = inputs + self.attended(seen.transpose(1, 2).flatten(-2))
        return inputs + self.feed_forward(self.norms[1](inputs))


class Transformer(nn.Module):
    """Predicts the next character; the first and the last layer have the same weights.

    Args:
        characters: Number of different characters.
        length: Characters of a passage.
        width: Numbers for each character.
        layers: Number of blocks.
    """

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.characters.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, length, characters), of the characters after each."""
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        hidden = (self.characters(numbers) + self.positions(positions)) / 10
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class LanguageModel(pl.LightningModule):
    """A transformer that shards itself if the strategy is ModelParallelStrategy.

    Args:
        length: Characters of a passage.
        width: Numbers for each character.
        layers: Number of blocks.
        lr: Learning rate.
        batch_size: Passages of a rank.
    """

    def __init__(
        self,
        length: int = 128,
        width: int = 128,
        layers: int = 4,
        lr: float = 1e-3,
        batch_size: int = 16,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.text = Text(length)
        self.network: Transformer | None = None

    def configure_model(self) -> None:
        """Make the network, unless it is there already."""
        if self.network is not None:
            return
        is_sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        with torch.device("meta" if is_sharded else "cpu"):  # no rank ever has all of it
            options = {name: self.hparams[name] for name in ("length", "width", "layers")}
            self.network = Transformer(len(self.text.characters), **options)
        if is_sharded:
            for part in (*self.network.blocks, self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def loss(self, passages: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the passages' characters, of shape ()."""
        logits = self.network(passages[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)

    def train_dataloader(self) -> DataLoader:
        """Return the loader of the passages."""
        return DataLoader(self.text, self.hparams.batch_size, shuffle=True)


if __name__ == "__main__":
    SageMakerCLI(LanguageModel)
