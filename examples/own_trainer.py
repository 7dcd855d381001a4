"""A program with a Trainer of its own, which resumes exactly after an interruption.

    python examples/own_trainer.py --epochs=5

Stop it (Ctrl-C, SIGTERM, SIGKILL) and start it again: it continues where it was, says whether the
steps that it repeats are the same bit for bit, and prints the same loss at the end. As a SageMaker
job, in our image or in another one that has torch: docs/your-own-trainer.md.
"""

import argparse

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures


class Regression(pl.LightningModule):
    """Learns y = sin(x), with dropout and a schedule."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean squared error of a batch: float32 [batch, 1] each."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
        }


def main() -> None:
    """Train, and save the weights where SageMaker takes the model from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="processes, or GPUs, of this host")
    arguments = parser.parse_args()
    job = SageMakerEnvironment.read()
    with report_failures(job):
        resume = ExactResume(job.checkpoint_dir, seed=42, every_n_steps=20)
        inputs = torch.linspace(-3, 3, 4096)[:, None]
        data = DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=64, shuffle=True)
        trainer = pl.Trainer(
            max_epochs=arguments.epochs,
            devices=arguments.devices,
            num_nodes=job.num_nodes,
            callbacks=[resume],
            logger=False,
        )
        model = Regression()
        trainer.fit(model, data)
        if trainer.is_global_zero:
            job.model_dir.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), job.model_dir / "model.pt")
            print(f"loss={trainer.callback_metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
