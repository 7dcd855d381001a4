# /// script
# dependencies = ["darts==0.48.1"]
# ///
"""N-BEATS and a transformer of darts', with its own checkpoints.

The second is loaded from its best one.
"""

import numpy as np
import pandas as pd
import torch
from darts import TimeSeries
from darts.models import NBEATSModel, TransformerModel

from sagemaker_lightning import ExactResume

draws = np.random.default_rng(0)
days = pd.date_range("2020-01-01", periods=200, freq="D")
values = np.sin(np.arange(200) / 7) + 0.1 * draws.standard_normal(200)
series = TimeSeries.from_times_and_values(days, values.astype(np.float32))
train, val = series[:160], series[136:]


def trainer_arguments(name, seed):
    resume = ExactResume(f"checkpoints/{name}", seed=seed, every_n_steps=5)
    return {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [resume]}


nbeats = NBEATSModel(
    input_chunk_length=14,
    output_chunk_length=7,
    num_stacks=2,
    num_blocks=1,
    layer_widths=16,
    n_epochs=3,
    batch_size=16,
    dropout=0.1,
    random_state=1,
    pl_trainer_kwargs=trainer_arguments("nbeats", 42),
)
nbeats.fit(train)
transformer = TransformerModel(
    input_chunk_length=14,
    output_chunk_length=7,
    d_model=8,
    nhead=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dim_feedforward=16,
    n_epochs=3,
    batch_size=16,
    random_state=1,
    model_name="transformer",
    work_dir="darts_logs",
    save_checkpoints=True,
    force_reset=True,
    pl_trainer_kwargs=trainer_arguments("transformer", 43),
)
transformer.fit(train, val_series=val)
best = TransformerModel.load_from_checkpoint(
    "transformer", work_dir="darts_logs", best=True, trusted=True
)
predicted = best.predict(n=7, series=train).values().tolist()
torch.save(
    {
        "nbeats": nbeats.model.state_dict(),
        "transformer": transformer.model.state_dict(),
        "best": best.model.state_dict(),
        "predicted": predicted,
    },
    "weights.pt",
)
