"""Data that follow the training, and cannot be drawn again: such a run resumes at epochs' ends."""

import pytest
import torch
from short_fits import Noted, alone_and_resumed, trainer, training, weights
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Hardest(Sampler):
    """Draws by the losses of the steps before, as they are at each draw, and by its last one."""

    def __init__(self) -> None:
        self.losses = [0.0] * 4

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        last = 0
        for _ in range(4):
            last = max(range(4), key=[each - last % 2 for each in self.losses].__getitem__)
            yield last


class HardestFirst(Hardest):
    """Draws by the losses as the epoch begins."""

    def __iter__(self):
        yield from sorted(range(4), key=self.losses.__getitem__)


class Mining(Noted):
    def __init__(self, class_: type[Hardest] = Hardest, **moments: str) -> None:
        super().__init__(**moments)
        self.sampler = class_()

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, sampler=self.sampler)

    def training_step(self, batch, batch_idx):
        self.sampler.losses[batch_idx] += 1.0
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("class_", "times"), [(Hardest, 1), (HardestFirst, 0)])
def test_a_sampler_that_follows_the_losses_within_an_epoch_is_said_once(
    tmp_path, capfd, class_, times
):
    trainer(tmp_path).fit(Mining(class_))
    said = (
        "warning: Hardest draws by losses, which training changes within an epoch: checkpoints "
        "are saved only at the end of an epoch"
    )
    assert capfd.readouterr().out.count(said) == times


@pytest.mark.parametrize("class_", [Hardest, HardestFirst])
def test_a_run_that_such_a_sampler_draws_for_is_exact(tmp_path, class_):
    train = training(lambda **moments: Mining(class_, **moments))
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2")
    assert weights(resumed) == weights(alone)
    assert resumed.sampler.losses == alone.sampler.losses


class MadeOfWeights(Noted):
    """Makes data of its weights."""

    def train_dataloader(self):
        rows = torch.arange(8.0).reshape(4, 2) / 10
        with torch.no_grad():
            made = self.line(rows)
        self.note(f"made {float(made.sum()):.6f}")
        return DataLoader(TensorDataset(rows + made))


def test_data_made_of_the_weights_are_said_and_exact(tmp_path, capfd):
    train = training(MadeOfWeights, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2")
    assert weights(resumed) == weights(alone)
    said = "warning: train_dataloader() uses the current weights to make each epoch's data"
    assert capfd.readouterr().out.count(said) == 3  # of the three starts


def test_data_made_of_the_first_weights_alone_are_drawn_again_within_an_epoch(tmp_path, capfd):
    train = training(MadeOfWeights)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2")
    assert weights(resumed) == weights(alone)
    assert "computes with weights" not in capfd.readouterr().out
