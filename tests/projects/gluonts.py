# /// script
# dependencies = ["gluonts[torch]==0.17.0"]
# ///
"""DeepAR of gluonts': a stream of windows, drawn at random.

It ends with the best model of its own checkpoints.
"""

import numpy as np
import pandas as pd
import torch
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator

from sagemaker_lightning import ExactResume

resume = ExactResume("checkpoints", seed=42, every_n_steps=5)
draws = np.random.default_rng(0)
days = pd.date_range("2020-01-01", periods=150, freq="D")
data = PandasDataset(
    {
        f"series {n}": pd.Series(
            5 + np.sin(np.arange(150) / (5 + n)) + 0.1 * draws.random(150), days
        )
        for n in range(6)
    }
)
estimator = DeepAREstimator(
    freq="D",
    prediction_length=7,
    context_length=14,
    num_layers=1,
    hidden_size=8,
    batch_size=8,
    num_batches_per_epoch=10,
    trainer_kwargs={
        "max_epochs": 4,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "callbacks": [resume],
    },
)
predictor = estimator.train(data)
torch.save(predictor.prediction_net.state_dict(), "weights.pt")
