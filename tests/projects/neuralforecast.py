# /// script
# dependencies = ["neuralforecast==3.3.0"]
# ///
"""Two of neuralforecast's models.

It makes a Trainer for each from the arguments that the model got.
"""

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS

from sagemaker_lightning import ExactResume

draws = np.random.default_rng(0)
series = [
    pd.DataFrame(
        {
            "unique_id": f"series {n}",
            "ds": pd.date_range("2020-01-01", periods=120, freq="D"),
            "y": np.sin(np.arange(120) / (5 + n)) + 0.1 * draws.standard_normal(120),
        }
    )
    for n in range(8)
]
data = pd.concat(series, ignore_index=True)
common = {
    "h": 7,
    "input_size": 21,
    "batch_size": 4,
    "val_check_steps": 10,
    "random_seed": 1,
    "accelerator": "cpu",
    "enable_progress_bar": False,
}
models = [
    NHITS(
        max_steps=60,
        mlp_units=3 * [[16, 16]],
        early_stop_patience_steps=5,
        callbacks=[ExactResume("checkpoints/nhits", seed=42, every_n_steps=5)],
        **common,
    ),
    LSTM(
        max_steps=40,
        encoder_hidden_size=8,
        encoder_dropout=0.2,
        encoder_n_layers=2,
        decoder_hidden_size=8,
        callbacks=[ExactResume("checkpoints/lstm", seed=43, every_n_steps=5)],
        **common,
    ),
]
forecast = NeuralForecast(models=models, freq="D")
forecast.fit(data, val_size=14)
predicted = forecast.predict()
torch.save(
    {
        "models": [model.state_dict() for model in forecast.models],
        "predicted": predicted[["NHITS", "LSTM"]].to_numpy().tolist(),
    },
    "weights.pt",
)
