"""A stranger's script: Lightning's documentation, and the lines of docs/your-own-trainer.md.

python train.py [--pause SECONDS] [--export FORMAT]
"""

import argparse
import hashlib
import time

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume, SageMakerEnvironment, report_failures


class Model(pl.LightningModule):
    def __init__(self, pause: float):
        super().__init__()
        self.pause = pause
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)  # in place of a model that takes its time
        inputs, labels = batch
        loss = nn.functional.mse_loss(self.layers(inputs + 0.1 * torch.randn_like(inputs)), labels)
        print(f"step={self.global_step} loss={loss:.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--export")
args = parser.parse_args()

job = SageMakerEnvironment.read()
with report_failures(job):
    resume = ExactResume(job.checkpoint_dir, seed=42, every_n_steps=5)
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(
        TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4, shuffle=True
    )
    model = Model(args.pause)
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        num_nodes=job.num_nodes,
        logger=False,
        enable_progress_bar=False,
        callbacks=[resume],
    )
    trainer.fit(model, loader)
    digest = hashlib.sha256(
        b"".join(weights.numpy().tobytes() for weights in model.state_dict().values())
    )
    print(f"TRAINED {digest.hexdigest()}", flush=True)
    if args.export:
        import onnxruntime  # noqa: F401  (which is not installed)
