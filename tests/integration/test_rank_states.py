"""Each of two ranks gets back its own state in a resumed run."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

from sagemaker_lightning.resume.callback import ExactResume


class Walk:
    """A state of one's own, another on each rank."""

    def __init__(self) -> None:
        self.at = 0.0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Own(ranks.Regression):
    """A model that holds other values on each rank, saves some of them, and fails at a step."""

    def __init__(self, fails: int, walk: Walk | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.walk = walk or Walk()
        self.count = 0
        self.generator = None
        self.loaded = None

    def on_train_start(self):
        self.generator = np.random.default_rng(self.global_rank)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails:
            raise RuntimeError("as a job that is lost")
        self.count += 1 + self.global_rank
        self.walk.at += 0.01 * (1 + self.global_rank)
        return super().training_step(batch, batch_idx) * (
            1 + self.generator.random() + self.count / 10 + self.walk.at
        )

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = {"rank": np.int64(self.global_rank), "count": self.count}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["own"]


def train(folder: str, fails: int = -1) -> Own:
    """Train or resume, with checkpoints every two steps."""
    walk = Walk()
    resume = ExactResume(folder, seed=3, every_n_steps=2, parts={"walk": walk})
    model = Own(fails, walk)
    trainer = ranks.trainer([resume], gradient_clip_val=1.0)
    trainer.fit(model, ranks.Numbered(44, batch_size=4))
    return model


def interrupted() -> tuple:
    """Return whether the weights are those of an uninterrupted run, and what was loaded."""
    alone = train("alone")
    with suppress(RuntimeError):
        train("run", fails=8)
    model = train("run")
    same = model.count == alone.count and model.walk.at == alone.walk.at
    return torch.equal(model.weights, alone.weights), same, model.loaded


@pytest.mark.slow
def test_each_rank_has_its_own(tmp_path: Path):
    ended = ranks.run(interrupted, folder=tmp_path)
    assert [ended_rank.value for ended_rank in ended] == [
        (True, True, {"rank": 0, "count": 8}),
        (True, True, {"rank": 1, "count": 16}),
    ], [ended_rank.error for ended_rank in ended]
