# /// script
# dependencies = ["pytorch-forecasting==1.8.0"]
# ///
"""A temporal fusion transformer, as in pytorch-forecasting's tutorial on demand."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import (
    GroupNormalizer,
    QuantileLoss,
    TemporalFusionTransformer,
    TimeSeriesDataSet,
)

from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=5)

draws = np.random.default_rng(0)
time = np.tile(np.arange(60), 8)
data = pd.DataFrame({"time_idx": time, "shop": np.repeat([f"shop {n}" for n in range(8)], 60)})
data["month"] = (data.time_idx % 12).astype(str)
data["volume"] = (
    10 + np.sin(time / 6) + np.repeat(draws.random(8), 60) + 0.1 * draws.standard_normal(len(data))
)

training = TimeSeriesDataSet(
    data[data.time_idx < 54],
    time_idx="time_idx",
    target="volume",
    group_ids=["shop"],
    max_encoder_length=12,
    max_prediction_length=6,
    static_categoricals=["shop"],
    time_varying_known_categoricals=["month"],
    time_varying_known_reals=["time_idx"],
    time_varying_unknown_reals=["volume"],
    target_normalizer=GroupNormalizer(groups=["shop"], transformation="softplus"),
    add_relative_time_idx=True,
    add_target_scales=True,
    add_encoder_length=True,
)
validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
train_loader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
val_loader = validation.to_dataloader(train=False, batch_size=16, num_workers=0)

trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=15,
    callbacks=[LearningRateMonitor(), EarlyStopping("val_loss", patience=10), resume],
    logger=CSVLogger("curves"),
    enable_progress_bar=False,
)
model = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.03,
    hidden_size=8,
    attention_head_size=2,
    dropout=0.1,
    hidden_continuous_size=4,
    loss=QuantileLoss(),
    log_interval=0,
    reduce_on_plateau_patience=1,
    optimizer="adam",
)
trainer.fit(model, train_dataloaders=train_loader, val_dataloaders=val_loader)
best = TemporalFusionTransformer.load_from_checkpoint(
    trainer.checkpoint_callback.best_model_path, weights_only=False
)
predictions = best.predict(val_loader, trainer_kwargs={"accelerator": "cpu", "logger": False})
torch.save(
    {"last": model.state_dict(), "best": best.state_dict(), "predictions": predictions},
    "weights.pt",
)
