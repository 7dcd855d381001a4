# /// script
# dependencies = ["lightning-uq-box==0.2.0"]
# ///
"""A mean-variance network and then SWAG from it, as in lightning-uq-box's tutorials.

Two Trainers.
"""

from functools import partial

import torch
from lightning import Trainer
from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import NLL, MVERegression, SWAGRegression

from sagemaker_lightning import ExactResume


def trainer(name, epochs, seed):
    resume = ExactResume(f"checkpoints/{name}", seed=seed, every_n_steps=5)
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[resume],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=5,
    )


first = trainer("mve", 20, 42)
data = ToyHeteroscedasticDatamodule(batch_size=32)
network = MLP(
    n_inputs=1, n_hidden=[16, 16], n_outputs=2, dropout_p=0.1, activation_fn=torch.nn.Tanh()
)
mve = MVERegression(network, optimizer=partial(torch.optim.Adam, lr=1e-3), burnin_epochs=5)
first.fit(mve, data)
swag = SWAGRegression(
    mve.model, max_swag_snapshots=5, snapshot_freq=1, num_mc_samples=5, swag_lr=1e-3, loss_fn=NLL()
)
trainer("swag", 10, 43).fit(swag, data)
torch.save({"mve": mve.state_dict(), "swag": swag.state_dict()}, "weights.pt")
