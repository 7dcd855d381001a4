"""Each of two ranks gets back its own state in a resumed run."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import ranks
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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


class Centred(nn.Module):
    """Takes the mean of what its own rank has seen away; its state dict has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(2)

    def get_extra_state(self):
        return {"mean": self.mean}

    def set_extra_state(self, state):
        self.mean = state["mean"]

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


class Apart(pl.LightningModule):
    """Reads what its own rank has logged, seen and noted; the ranks share the optimizer's state."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.net = nn.Sequential(Centred(), nn.Linear(2, 1))
        self.fails = fails
        self.noted = []
        self.read = []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails:
            raise RuntimeError("as a job that is lost")
        own = float(self.trainer.callback_metrics.get("loss_epoch", 1))
        self.read.append(own)
        loss = (self.net(batch[0]) * own - 1 - len(self.noted)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self.noted.append(self.current_epoch)

    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


class ByHand(Apart):
    """Does its steps itself: then DDP leaves each rank its own buffer after the first step."""

    def __init__(self, fails: int) -> None:
        super().__init__(fails)
        self.automatic_optimization = False
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + batch[0].mean(0)
        loss = super().training_step([batch[0] + self.seen], batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.read.extend(self.seen.tolist())


def train_apart(kind: type[Apart], folder: str, fails: int = -1) -> Apart:
    """Train or resume, with other data loaders in each epoch."""
    resume = ExactResume(folder, seed=3, every_n_steps=2)
    trainer = ranks.trainer([resume], max_epochs=3, reload_dataloaders_every_n_epochs=1)
    samples = TensorDataset(torch.arange(48.0).view(24, 2) / 48)
    trainer.fit(model := kind(fails), DataLoader(samples, 3, shuffle=True))
    return model


def interrupted_apart(kind: type[Apart]) -> tuple:
    """Return how the state of a run that was interrupted three times differs from one left alone.

    That is on this rank. It was interrupted within an epoch, at its edge and in the next one.
    """
    alone = train_apart(kind, "alone")
    for fails in (5, 8, 11):
        with suppress(RuntimeError):
            train_apart(kind, "run", fails)
    run = train_apart(kind, "run")
    ends = [
        [*map(torch.Tensor.tolist, each.net.parameters()), each.net[0].mean.tolist(), each.noted]
        + each.read
        for each in (alone, run)
    ]
    return ends[0] == ends[1], run.noted


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Apart, ByHand])
def test_what_the_ranks_log_note_and_share_comes_back(tmp_path: Path, kind):
    ended = ranks.run(interrupted_apart, kind, folder=tmp_path)
    noted = [0, 1, 2], []
    assert [ended_rank.value for ended_rank in ended] == [(True, each) for each in noted], [
        ended_rank.error for ended_rank in ended
    ]
    lines = [line for each in ended for line in each.output.splitlines() if "warning:" in line]
    assert [line for line in lines if "warning: fails of model was " not in line] == []


class Contrastive(ranks.Regression):
    """Compares its samples with those of all ranks: each rank needs as many; fails at a step."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.everywhere = []

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails:
            raise RuntimeError("as a job that is lost")
        everywhere = self.all_gather(batch[1])
        self.everywhere.append(everywhere.flatten().tolist())
        return super().training_step(batch, batch_idx) * everywhere.std()

    def validation_step(self, batch, batch_idx):
        self.log("gathered", self.all_gather(batch[1]).std(), batch_size=1)


def train_contrastive(folder: str, fails: int = -1) -> tuple[Contrastive, torch.Tensor]:
    model = Contrastive(fails)
    trainer = ranks.trainer([ExactResume(folder, seed=3, every_n_steps=2)])
    numbers = torch.arange(19.0)
    data = TensorDataset(numbers[:, None].expand(19, 192) / 10, numbers)
    loaders = [DataLoader(data, 4, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(model, *loaders)
    return model, trainer.callback_metrics["gathered"]


def interrupted_contrastive() -> tuple:
    """Return the samples of the epochs, and whether the resumed run ends as the one left alone."""
    alone, gathered = train_contrastive("alone")
    with suppress(RuntimeError):
        train_contrastive("run", fails=5)
    model, gathered_too = train_contrastive("run")
    same = torch.equal(model.weights, alone.weights) and bool(gathered == gathered_too)
    sizes = [len(step) for step in alone.everywhere[:3]]
    return sizes, same, model.everywhere == alone.everywhere


@pytest.mark.slow
def test_ranks_whose_code_gathers_have_batches_of_one_size(tmp_path: Path):
    """19 samples are 10 for each rank, as Lightning's sampler has it."""
    ended = ranks.run(interrupted_contrastive, folder=tmp_path)
    assert [each.value for each in ended] == [([8, 8, 4], True, True)] * 2, ended[0].error
    lines = [line for line in ended[0].output.splitlines() if "take some samples twice" in line]
    assert len({*lines}) == 2 and all("all_gather" in line for line in lines)
    assert "take some samples twice" not in ended[1].output


class Walks(IterableDataset):
    """Draws by a generator of its rank's, and by one that all ranks have alike."""

    def __init__(self, rank: int) -> None:
        self.own = random.Random(rank)
        self.common = np.random.default_rng(5)
        self.drawn: list[tuple[float, float]] = []

    def __iter__(self):
        for _ in range(6):
            self.drawn.append((self.own.random(), self.common.random()))
            yield torch.full((192,), sum(self.drawn[-1])), torch.zeros(())


class Walking(Own):
    def train_dataloader(self):
        self.walks = Walks(self.global_rank)
        return DataLoader(self.walks, batch_size=2)


def walked(folder: str, fails: int = -1) -> Walking:
    model = Walking(fails)
    ranks.trainer([ExactResume(folder, seed=3, every_n_steps=2)], max_epochs=2).fit(model)
    return model


def interrupted_walks() -> tuple:
    """Return what a rank has drawn, and whether the resumed run ends as the one left alone."""
    alone = walked("alone")
    with suppress(RuntimeError):
        walked("run", fails=4)
    return alone.walks.drawn, torch.equal(walked("run").weights, alone.weights)


@pytest.mark.slow
def test_a_stream_draws_on_each_rank_as_its_generators_are_there(tmp_path: Path):
    """Those that the rank has seeded differ between ranks; those that all have alike do not."""
    ended = ranks.run(interrupted_walks, folder=tmp_path)
    (first, is_same), (second, _) = (each.value for each in ended)
    assert is_same, ended[0].error
    assert all(one[0] != other[0] for one, other in zip(first, second, strict=True))
    assert [one[1] for one in first] == [other[1] for other in second]
