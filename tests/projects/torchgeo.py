# /// script
# dependencies = ["torchgeo==0.8.1"]
# ///
"""Semantic segmentation of torchgeo's, on GeoTIFFs that its random sampler cuts patches from."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import rasterio
import torch
from rasterio.transform import from_origin
from torch.utils.data import DataLoader
from torchgeo.datasets import RasterDataset, stack_samples
from torchgeo.samplers import GridGeoSampler, RandomBatchGeoSampler
from torchgeo.trainers import SemanticSegmentationTask

from sagemaker_lightning import ExactResume


class Images(RasterDataset):
    filename_glob = "image-*.tif"
    is_image = True


class Masks(RasterDataset):
    filename_glob = "mask-*.tif"
    is_image = False


def draw_map(folder):
    draws = np.random.default_rng(0)
    image = draws.integers(0, 255, (3, 96, 96), dtype=np.uint8)
    mask = (image[:1] > 127).astype(np.uint8)
    for name, bands in (("image", image), ("mask", mask)):
        profile = {
            "driver": "GTiff",
            "height": 96,
            "width": 96,
            "count": len(bands),
            "dtype": "uint8",
            "crs": "EPSG:32633",
            "transform": from_origin(500000, 5000000, 10, 10),
        }
        with rasterio.open(folder / f"{name}-1.tif", "w", **profile) as file:
            file.write(bands)


class Scaled(SemanticSegmentationTask):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"image": batch["image"].float() / 255, "mask": batch["mask"]}


resume = ExactResume("checkpoints", seed=42, every_n_steps=5)
with tempfile.TemporaryDirectory() as folder:
    draw_map(Path(folder))
    data = Images(folder) & Masks(folder)
    train = DataLoader(
        data,
        batch_sampler=RandomBatchGeoSampler(data, size=32, batch_size=4, length=48),
        collate_fn=stack_samples,
    )
    val = DataLoader(
        data,
        sampler=GridGeoSampler(data, size=32, stride=32),
        batch_size=4,
        collate_fn=stack_samples,
    )
    task = Scaled(
        model="unet",
        backbone="resnet18",
        weights=None,
        in_channels=3,
        task="binary",
        loss="bce",
        lr=1e-3,
    )
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[resume],
        logger=False,
        enable_progress_bar=False,
        default_root_dir="out",
    )
    trainer.fit(task, train, val)
torch.save(task.state_dict(), "weights.pt")
