"""Lightning's Tuner finds a learning rate before the training: a program of one's own.

python tuned.py FLAGS
"""

import sys

from basics import BlobsData, Classifier
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.tuner import Tuner

from app import train


def main():
    """Look for the rate, and train with it."""
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    found = Tuner(trainer).lr_find(Classifier(), datamodule=BlobsData(), num_training=8, max_lr=0.1)
    train.main([*sys.argv[1:], f"--model.lr={found.suggestion() or 0.02}"])


if __name__ == "__main__":
    main()
