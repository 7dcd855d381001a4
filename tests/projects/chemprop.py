# /// script
# dependencies = ["chemprop==2.3.1"]
# ///
"""A message passing network on small molecules, as in chemprop's notebook on training."""

import torch
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=5)
molecules = [
    start + "C" * length + end
    for start in ("", "O", "N", "Cl")
    for length in range(1, 11)
    for end in ("", "O", "C=C", "c1ccccc1")
]
points = [
    data.MoleculeDatapoint.from_smi(smiles, [len(smiles) + smiles.count("O")])
    for smiles in molecules
]
mols = [point.mol for point in points]
train, val, test = data.make_split_indices(mols, "random", (0.8, 0.1, 0.1), seed=0)
train, val, test = data.split_data_by_indices(points, train, val, test)
featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
train = data.MoleculeDataset(train[0], featurizer)
scaler = train.normalize_targets()
val = data.MoleculeDataset(val[0], featurizer)
val.normalize_targets(scaler)
test = data.MoleculeDataset(test[0], featurizer)
train_loader = data.build_dataloader(train, batch_size=8, num_workers=0)
val_loader = data.build_dataloader(val, batch_size=8, num_workers=0, shuffle=False)
test_loader = data.build_dataloader(test, batch_size=8, num_workers=0, shuffle=False)

network = models.MPNN(
    nn.BondMessagePassing(d_h=16, dropout=0.1),
    nn.MeanAggregation(),
    nn.RegressionFFN(
        input_dim=16,
        hidden_dim=16,
        output_transform=nn.UnscaleTransform.from_standard_scaler(scaler),
    ),
    batch_norm=True,
    metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
)
best = ModelCheckpoint(
    "models", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True
)
trainer = pl.Trainer(
    logger=False,
    enable_progress_bar=False,
    accelerator="cpu",
    devices=1,
    max_epochs=4,
    callbacks=[best, resume],
)
trainer.fit(network, train_loader, val_loader)
results = trainer.test(dataloaders=test_loader, weights_only=False)
torch.save({"weights": network.state_dict(), "results": results}, "weights.pt")
