# /// script
# dependencies = ["scvi-tools==1.4.2"]
# ///
"""scVI and then scANVI from it, as in scvi-tools' tutorials.

Each `train` makes a Trainer of its own.
"""

import numpy as np
import scvi
import torch
from anndata import AnnData

from sagemaker_lightning import ExactResume

scvi.settings.seed = 0
draws = np.random.default_rng(0)
rates = draws.gamma(2.0, 1.0, (3, 40))
kinds = draws.integers(0, 3, 400)
cells = AnnData(draws.poisson(rates[kinds]).astype(np.float32))
cells.obs["batch"] = [f"batch {n % 2}" for n in range(400)]
cells.obs["kind"] = [f"kind {kind}" if n % 4 else "unknown" for n, kind in enumerate(kinds)]

scvi.model.SCVI.setup_anndata(cells, batch_key="batch", labels_key="kind")
model = scvi.model.SCVI(cells, n_latent=5, n_hidden=16)
model.train(
    max_epochs=8,
    batch_size=64,
    accelerator="cpu",
    early_stopping=True,
    check_val_every_n_epoch=1,
    enable_progress_bar=False,
    callbacks=[ExactResume("checkpoints/scvi", seed=42, every_n_steps=5)],
)
labelled = scvi.model.SCANVI.from_scvi_model(model, unlabeled_category="unknown")
labelled.train(
    max_epochs=4,
    batch_size=64,
    accelerator="cpu",
    enable_progress_bar=False,
    callbacks=[ExactResume("checkpoints/scanvi", seed=43, every_n_steps=5)],
)
torch.save(
    {"scvi": model.module.state_dict(), "scanvi": labelled.module.state_dict()}, "weights.pt"
)
