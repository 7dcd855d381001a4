"""Each of two ranks gets back its own state in a resumed run."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

from sagemaker_lightning.resume.callback import ExactResume


class Own(ranks.Regression):
    """A model that holds other values on each rank, saves some of them, and fails at a step."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.count = 0
        self.generator = None
        self.loaded = None

    def on_train_start(self):
        self.generator = np.random.default_rng(self.global_rank)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails:
            raise RuntimeError("as a job that is lost")
        self.count += 1 + self.global_rank
        return super().training_step(batch, batch_idx) * (
            1 + self.generator.random() + self.count / 10
        )

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = {"rank": np.int64(self.global_rank), "count": self.count}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["own"]


def train(folder: str, fails: int = -1) -> Own:
    """Train or resume, with checkpoints every two steps."""
    model = Own(fails)
    trainer = ranks.trainer([ExactResume(folder, seed=3, every_n_steps=2)], gradient_clip_val=1.0)
    trainer.fit(model, ranks.Numbered(44, batch_size=4))
    return model


def interrupted() -> tuple:
    """Return whether the weights are those of an uninterrupted run, and what was loaded."""
    alone = train("alone")
    with suppress(RuntimeError):
        train("run", fails=8)
    model = train("run")
    return torch.equal(model.weights, alone.weights), model.count == alone.count, model.loaded


@pytest.mark.slow
def test_each_rank_has_its_own(tmp_path: Path):
    ended = ranks.run(interrupted, folder=tmp_path)
    assert [ended_rank.value for ended_rank in ended] == [
        (True, True, {"rank": 0, "count": 8}),
        (True, True, {"rank": 1, "count": 16}),
    ], [ended_rank.error for ended_rank in ended]
