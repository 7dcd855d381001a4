# /// script
# dependencies = ["anomalib==2.7.0"]
# ///
"""Ganomaly of anomalib's, by its Engine and its data module for a folder of images."""

from pathlib import Path

import numpy as np
import torch
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Ganomaly
from PIL import Image

from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=3)
draws = np.random.default_rng(0)
if not Path("images/done").exists():
    for kind, count, level in (("good", 24, 90), ("bad", 6, 200)):
        Path("images", kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = draws.normal(level, 20, (64, 64, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(f"images/{kind}/{number:02}.png")
    Path("images/done").touch()
data = Folder(
    name="parts",
    root="images",
    normal_dir="good",
    abnormal_dir="bad",
    train_batch_size=4,
    eval_batch_size=4,
    num_workers=0,
    seed=1,
)
pre_processor = Ganomaly.configure_pre_processor(image_size=(64, 64))
model = Ganomaly(batch_size=4, n_features=8, latent_vec_size=8, pre_processor=pre_processor)
engine = Engine(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    callbacks=[resume],
    logger=False,
    default_root_dir="results",
)
engine.fit(model=model, datamodule=data)
results = engine.test(model=model, datamodule=data)
torch.save({"weights": model.state_dict(), "results": results}, "weights.pt")
