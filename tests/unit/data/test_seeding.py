"""data/seeding.py: what a run draws by, and that it leaves the process as it was."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning.data.seeded_indices import number_of, seed_all, unseeded
from sagemaker_lightning.data.seeding import Seeding


@pytest.mark.parametrize("ends", ["on_exception", "teardown"])
def test_a_run_that_ends_or_fails_leaves_the_process_as_it_was(ends):
    undone = []
    seeding = Seeding(7)
    seeding.changed.callback(undone.append, "entropy")
    getattr(seeding, ends)(None, None, "validate")
    assert undone == ["entropy"]


def test_each_generator_of_the_process_is_seeded(monkeypatch):
    def drawn(*key: object) -> tuple[float, ...]:
        seed_all(*key)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert drawn("x", 1) == drawn("x", 1)
    assert not set(drawn("x", 1)) & set(drawn("x", 2))
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    seed_all("x", 1)
    assert not seeds
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert seed_all("x", 1) == number_of("x", 1) and seeds == [number_of("x", 1)]


def test_a_run_draws_what_earlier_versions_drew():
    """Else a run that continues with another version is another one."""
    assert number_of("sample", 7, "train", 0, 3) == 8349078409027794008
    seed_all("sample", 1)
    assert [unseeded.bits(size) for size in (12, 32)] == [2174, 1028623734]


PLACE = {"epoch": 1, "batch": 2, "loader": 0, "step": 3, "rank": 0}
HOOKS = {
    "on_fit_start": {"rank"},
    "on_train_start": {"rank"},
    "on_train_epoch_start": {"epoch", "rank"},
    "on_train_batch_start": {"epoch", "batch", "rank"},
    "on_train_epoch_end": {"epoch", "rank"},
    "on_validation_start": {"step", "rank"},
    "on_validation_batch_start": {"step", "loader", "batch", "rank"},
    "teardown": set(),
}
"""What the draws after a hook depend on, besides the seed."""


def drawn_after(hook: str, seed: int = 7, **place: int) -> float:
    """Return what is drawn after a hook of a training."""
    place = PLACE | place
    trainer = SimpleNamespace(
        current_epoch=place["epoch"],
        global_step=place["step"],
        global_rank=place["rank"],
        fit_loop=SimpleNamespace(
            _combined_loader=None, epoch_loop=SimpleNamespace(batch_idx=place["batch"])
        ),
    )
    arguments = {
        "on_train_batch_start": [None, 99],
        "on_validation_batch_start": [None, place["batch"], *[place["loader"]][: place["loader"]]],
        "teardown": ["fit"],
    }
    getattr(Seeding(seed), hook)(trainer, None, *arguments.get(hook, []))
    return torch.rand(1).item()


@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_drawn_after_a_hook_depends_on_the_place_alone(hook: str):
    drawn = drawn_after(hook)
    assert drawn == drawn_after(hook) != drawn_after(hook, seed=8)
    assert {
        name for name in PLACE if drawn_after(hook, **{name: PLACE[name] + 1}) != drawn
    } == HOOKS[hook]


def test_each_hook_draws_something_else():
    assert len(set(map(drawn_after, HOOKS))) == len(HOOKS)
    seed_all("x")
    expected = torch.rand(1)
    seed_all("x")
    Seeding(7).teardown(SimpleNamespace(), None, "test")
    assert torch.equal(torch.rand(1), expected)


class Model(pl.LightningModule):
    """Notes the samples that it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batch_size = 4
        self.samples = []

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0)[:, None]), self.batch_size, shuffle=True)

    def training_step(self, batch, batch_idx):
        self.samples += batch[0].flatten().tolist()
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


@pytest.mark.parametrize("searches", [True, False])
def test_a_search_before_training_changes_no_order(tmp_path, searches):
    model = Model()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "default_root_dir": tmp_path, "accelerator": "cpu"}
    trainer = pl.Trainer(callbacks=[Seeding(7)], max_epochs=1, **quiet)
    if searches:
        Tuner(trainer).scale_batch_size(model, max_trials=2, init_val=2, steps_per_trial=1)
    model.batch_size = 4
    model.samples.clear()
    trainer.fit(model)
    assert model.samples[:4] == [29, 21, 30, 36]
