"""Fine-tuning of a few weights beside a net that stays as it is: low-rank adapters (LoRA).

    python examples/partial_weights.py --trainer.max_epochs=3

The checkpoints and the model have the adapters alone: some kB in place of the whole net. The
pretrained weights come from a file (`--model.pretrained`), or here from a seed. After Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import SageMakerCLI


class LowRank(nn.Module):
    """A linear layer that stays as it is, plus B A x, which is trained; B begins as 0.

    Args:
        layer: The layer, [inputs] -> [outputs].
        rank: Rows of A, columns of B.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter_a = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.adapter_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., outputs] of float32 [..., inputs]."""
        return self.layer(inputs) + inputs @ self.adapter_a.T @ self.adapter_b.T


class FineTuning(pl.LightningModule):
    """Classifies with a pretrained net, of which the adapters are trained.

    Args:
        rank: Rank of the adapters.
        pretrained: A file with the net's state dict; "" for weights from a seed.
    """

    def __init__(self, rank: int = 4, pretrained: str = "") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
        if pretrained:
            net.load_state_dict(torch.load(pretrained, weights_only=True))
        self.net = nn.Sequential(LowRank(net[0], rank), net[1], LowRank(net[2], rank))
        self.strict_loading = False  # a checkpoint has the adapters alone

    def state_dict(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        """Return the adapters."""
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "adapter" in name}

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of inputs, float32 [batch, 16], and classes, int64 [batch]."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        """Return batches of 1,024 inputs, whose class is the largest of their first four."""
        inputs = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), 32, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the adapters."""
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), 1e-2)


if __name__ == "__main__":
    SageMakerCLI(FineTuning)
