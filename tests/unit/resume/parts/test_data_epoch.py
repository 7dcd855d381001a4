"""When data are made, and from which draws and which state of the user's objects."""

import random
from pathlib import Path

import nightly
import pytest
import pytorch_lightning as pl
import torch
from short_fits import Noted, as_in_a_new_process, interrupted, trainer, weights
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset
from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.resume.parts.data_epoch import DataEpoch
from sagemaker_lightning.resume.parts.trainer_settings import TrainerSettings

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


@pytest.mark.parametrize(
    ("every", "made", "some", "begun", "epoch", "stay"),
    [
        (0, None, False, True, 5, True),
        (0, None, True, True, 5, True),
        (3, 3, False, True, 3, True),
        (3, 3, True, True, 5, True),
        (3, 2, False, True, 5, False),
        (3, 2, False, False, 2, True),
        (3, -float("inf"), False, False, 5, False),
        (3, None, False, False, 5, False),
    ],
)
def test_the_epoch_of_the_validation_data(every, made, some, begun, epoch, stay):
    """Those that are made before training begins are compared with those that there were."""
    trainer = in_epoch_5(reload_dataloaders_every_n_epochs=every)
    saved = {"validation_made": made, "validation_batches": {0: 7, 1: 3}}
    run = resumed(run_of(trainer), data_epoch=saved)
    run.part(TrainerSettings).at_start = {"limit_val_batches": 1.0} if begun else {}
    part = run.part(DataEpoch)
    assert part.epoch_of_validation_data(some) == epoch
    part.validation_data_made()
    seen = trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
    assert seen == ({0: 7, 1: 3} if stay else {0: 1})


def test_a_new_run_has_no_validation_data_of_before():
    part = run_of(trainer := in_epoch_5()).part(DataEpoch)
    assert part.epoch_of_validation_data(False) == 5
    part.validation_data_made()
    assert trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader == {0: 1}


def test_validation_data_are_made_for_the_comparison_if_there_were_some():
    assert not run_of(in_epoch_5())._had_validation_data()
    run = resumed(run_of(in_epoch_5()))
    for name, had in (
        ("length train.0", False),
        ("val.0", False),
        ("length val.0.dataset", True),
    ):
        run.resumed.digests.setdefault("data_identity", {})[name] = 1
        assert run._had_validation_data() is had


class Pool(pl.LightningDataModule):
    """Counts its loaders, and gives more samples of a shuffled pool with each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = list(range(16))
        self.labeled = self.pool[:4]
        self.calls = 0
        self.own = random.Random(4)

    def train_dataloader(self):
        self.calls += 1
        if self.calls > 1:
            random.shuffle(self.pool)
            self.own.shuffle(self.pool)
            self.labeled = self.labeled + self.pool[:4]
        samples = TensorDataset(torch.arange(32.0).view(16, 2))
        return DataLoader(Subset(samples, self.labeled), 2, shuffle=True)


class Learner(Noted):
    """Has the loaders of its data module alone."""

    train_dataloader = pl.LightningModule.train_dataloader
    val_dataloader = pl.LightningModule.val_dataloader


@pytest.mark.parametrize(
    "stops",
    nightly.all_but(
        [["batch 2:0"], ["end 1", "batch 2:1"]],
        [["batch 1:1"], ["end 1"], ["batch 2:0"], ["batch 2:3"], ["end 1", "batch 2:1"]],
    ),
    ids=lambda stops: ", then ".join(stops),
)
def test_data_that_depend_on_how_often_they_were_made_are_the_same(tmp_path, stops):
    """What the first ones have changed is not in a checkpoint: each run makes them."""

    def fitted(folder, **moments):
        as_in_a_new_process()
        torch.manual_seed(1)
        model, data = Learner(**moments), Pool()
        options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
        trainer(tmp_path / folder, **options).fit(model, datamodule=data)
        return weights(model), data.pool, data.labeled, data.calls

    alone = fitted("alone")
    for stop in stops:
        with interrupted():
            fitted("run", stop=stop)
    assert fitted("run") == alone


class Grown(torch.utils.data.Dataset):
    """Samples that training adds."""

    def __init__(self) -> None:
        self.samples = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return (self.samples[index],)


class Growing(pl.LightningDataModule):
    """Makes its loaders of two datasets, once training has added samples to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.given = TensorDataset(torch.rand(4, 2))
        self.grown = Grown()
        self.sizes = iter([2, 2])

    def train_dataloader(self):
        size = next(self.sizes, 2)
        datasets = [self.given, self.grown] if self.grown.samples else [self.given]
        return DataLoader(ConcatDataset(datasets), size, shuffle=True)


class Labels(Learner):
    """Adds samples at the end of each epoch."""

    def on_train_epoch_end(self):
        self.trainer.datamodule.grown.samples += [self.line.weight.detach().clone()[0]] * 2
        super().on_train_epoch_end()


class Rows(Dataset):
    """Rows of numbers in lists."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int):
        return (torch.tensor(self.rows[number]),)


class Aggregating(pl.LightningDataModule):
    """Makes its loaders of the datasets and of the rows that training has added to its lists."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets = [TensorDataset(torch.rand(4, 2))]
        self.rows = [[number, 1.0] for number in range(8)]
        self.longest = 4

    def train_dataloader(self):
        taken = [row for row in self.rows if row[0] < self.longest]
        return DataLoader(ConcatDataset([*self.datasets, Rows(taken)]), 2, shuffle=True)


class Replacing(Aggregating):
    """Makes its loader of the newest dataset alone."""

    def train_dataloader(self):
        return DataLoader(self.datasets[0], 1, shuffle=True)


class Aggregates(Learner):
    """Adds a dataset at the end of each epoch, or replaces it, and has more rows taken."""

    def on_train_epoch_end(self):
        data = self.trainer.datamodule
        if isinstance(data, Replacing):
            data.datasets.clear()
        data.datasets.append(TensorDataset(self.line.weight.detach() * torch.rand(4, 2)))
        data.longest += 1
        super().on_train_epoch_end()


class Folding(pl.LightningDataModule):
    """Has a fold of its data for the validation, another one in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = TensorDataset(torch.arange(24.0).view(12, 2) / 24)
        self.fold = 0

    def of(self, *folds: int) -> DataLoader:
        rows = [number for number in range(12) if number % 3 in folds]
        return DataLoader(Subset(self.samples, rows), 2)

    def train_dataloader(self):
        return self.of(*({0, 1, 2} - {self.fold}))

    def val_dataloader(self):
        return self.of(self.fold)


class Folds(Learner):
    """Takes the next fold at the end of each epoch."""

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.events.append(f"validates {batch[0].sum().item()}")

    def on_train_epoch_end(self):
        self.trainer.datamodule.fold = (self.trainer.datamodule.fold + 1) % 3
        super().on_train_epoch_end()


def fold_on(folder: Path, stop: str = "") -> list:
    """Validate on data that follow what training has changed, after a check before training."""
    as_in_a_new_process()
    torch.manual_seed(1)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    trainer(folder, **options).fit(model := Folds(stop), datamodule=Folding())
    return model.events


class Narrowing(torch.utils.data.Sampler):
    """Draws batches of the samples with the greatest losses, of fewer from epoch to epoch."""

    def __init__(self) -> None:
        self.losses = torch.ones(16)
        self.kept = 14
        self.rng = random.Random(3)

    def __len__(self) -> int:
        return self.kept // 2

    def __iter__(self):
        order = self.losses.argsort(descending=True)[: self.kept].tolist()
        self.rng.shuffle(order)
        return iter([order[start : start + 2] for start in range(0, self.kept, 2)])


class Narrows(Learner):
    """Tells the sampler the losses, and how many samples to keep."""

    @property
    def sampler(self) -> Narrowing:
        return self.trainer.train_dataloader.batch_sampler

    def training_step(self, batch, batch_idx):
        loss = super().training_step([batch[0]], batch_idx)
        self.sampler.losses[batch[1]] *= 0.5 + 0.1 * loss.item()
        return loss

    def on_train_epoch_end(self):
        self.sampler.kept -= 2
        super().on_train_epoch_end()


def grow_on(folder: Path, stop: str = "") -> list:
    """Train on data to which training adds some, and return what happened."""
    as_in_a_new_process()
    torch.manual_seed(1)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    trainer(folder, **options).fit(model := Labels(stop), datamodule=Growing())
    return model.events


def aggregate_on(folder: Path, stop: str = "", data: type = Aggregating) -> list:
    """Train on data that are what a data module has got while training."""
    as_in_a_new_process()
    torch.manual_seed(1)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    trainer(folder, **options).fit(model := Aggregates(stop), datamodule=data())
    return model.events


def replace_on(folder: Path, stop: str = "") -> list:
    """Train on data that training replaces in the data module."""
    return aggregate_on(folder, stop, Replacing)


def narrow_on(folder: Path, stop: str = "") -> list:
    """Train on loaders that are given to `fit`, of which training changes the sampler."""
    as_in_a_new_process()
    torch.manual_seed(1)
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    samples = TensorDataset(torch.rand(16, 2), torch.arange(16))
    loader = DataLoader(samples, batch_sampler=Narrowing())
    trainer(folder, **options).fit(model := Narrows(stop), loader)
    return model.events


SUBSET = Subset(TensorDataset(torch.rand(16, 2)), list(range(16)))


class Prunes(Noted):
    """Takes samples from a variable's subset, which each epoch's loader reads."""

    def train_dataloader(self):
        return DataLoader(SUBSET, 2, shuffle=True)

    def on_train_epoch_end(self):
        SUBSET.indices = SUBSET.indices[2:]
        super().on_train_epoch_end()


def prune_on(folder: Path, stop: str = "") -> list:
    """Train on a library's dataset in a variable of this module."""
    as_in_a_new_process()
    torch.manual_seed(1)
    globals()["SUBSET"] = Subset(TensorDataset(torch.rand(16, 2)), list(range(16)))
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    trainer(folder, **options).fit(model := Prunes(stop))
    return model.events


class Counted(Sampler):
    """Draws another order in each pass; what it counts is its own."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.passes)))

    def __len__(self) -> int:
        return 8


class Keeps(Noted):
    """Makes its sampler with the first loader, and keeps it for those of the next epochs."""

    sampler = None

    def train_dataloader(self):
        self.sampler = self.sampler or Counted()
        return DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), 2, sampler=self.sampler)


def keep_on(folder: Path, stop: str = "") -> list:
    """Train on loaders of each epoch's own with one sampler."""
    as_in_a_new_process()
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    trainer(folder, **options).fit(model := Keeps(stop))
    return model.events


def test_a_sampler_that_is_kept_for_the_next_epochs_loader_continues(tmp_path, capfd):
    alone = keep_on(tmp_path / "alone")
    for stop in ("end 0", "batch 1:1", "end 2"):
        with interrupted():
            keep_on(tmp_path / "run", stop)
    assert keep_on(tmp_path / "run") == alone and "warning" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "stop", nightly.all_but(["batch 2:1"], ["end 1", "epoch 2", "batch 2:1", "batch 3:1"])
)
@pytest.mark.parametrize("train", [grow_on, aggregate_on, replace_on, fold_on, narrow_on, prune_on])
def test_data_made_anew_of_what_training_has_changed_are_the_same(tmp_path, capfd, train, stop):
    """What training gives an object that is there from the start is not a part of new loaders."""
    alone = train(tmp_path / "alone")
    with interrupted():
        train(tmp_path / "run", stop)
    assert train(tmp_path / "run") == alone
    assert train(tmp_path / "run") == alone  # it was over: no epoch follows, and no new data
    assert "warning" not in capfd.readouterr().out


class Counting(pl.LightningDataModule):
    """Counts epochs, and saves the count itself; its samples, or the data it makes, have it."""

    def __init__(self, counts_in: str, reads_in: str) -> None:
        super().__init__()
        self.counts_in = counts_in
        self.reads_in = reads_in
        self.epochs_seen = 0
        self.was_loaded = False

    def train_dataloader(self):
        if self.counts_in == "train_dataloader":
            self.epochs_seen += 1
        values = torch.arange(16.0).view(8, 2) / 16
        if self.reads_in == "samples":
            return DataLoader(Shifted(values, self), 2)
        return DataLoader(TensorDataset(values + self.epochs_seen), 2, shuffle=True)

    def val_dataloader(self):
        return []

    def state_dict(self):
        return {"epochs_seen": self.epochs_seen}

    def load_state_dict(self, state_dict):
        self.epochs_seen = state_dict["epochs_seen"]
        self.was_loaded = True


class Shifted(TensorDataset):
    """Adds what a data module has counted to its samples."""

    def __init__(self, values: torch.Tensor, data: Counting) -> None:
        super().__init__(values)
        self.data = data

    def __getitem__(self, index):
        return (self.tensors[0][index] + self.data.epochs_seen,)


class OfCounting(Noted):
    """Trains on the data of a `Counting`."""

    train_dataloader = val_dataloader = None

    def on_train_epoch_start(self):
        data = self.trainer.datamodule
        data.epochs_seen += data.counts_in == "on_train_epoch_start"
        super().on_train_epoch_start()


def count_on(folder, counts_in: str, reads_in: str, every: int, stop: str = "") -> tuple:
    as_in_a_new_process()
    data = Counting(counts_in, reads_in)
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": every}
    trainer(folder, **options).fit(model := OfCounting(stop), datamodule=data)
    return model.events, data.epochs_seen


@pytest.mark.parametrize(
    "stop", nightly.all_but(["batch 2:2"], ["batch 0:1", "batch 1:0", "end 1", "batch 2:2"])
)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("reads_in", ["samples", "train_dataloader"])
@pytest.mark.parametrize("counts_in", ["train_dataloader", "on_train_epoch_start"])
def test_data_are_made_before_the_data_modules_own_state_is_there(
    tmp_path, capfd, counts_in, reads_in, every, stop
):
    """Its load_state_dict sets the count that the interrupted run had later."""
    alone = count_on(tmp_path / "alone", counts_in, reads_in, every)
    with interrupted():
        count_on(tmp_path / "run", counts_in, reads_in, every, stop)
    assert count_on(tmp_path / "run", counts_in, reads_in, every) == alone
    assert "warning" not in capfd.readouterr().out


class Opening(Counting):
    """Opens, in load_state_dict, what cannot be saved."""

    def __init__(self) -> None:
        super().__init__("on_train_epoch_start", "samples")
        self.handle = None

    def open(self) -> None:
        self.handle = Path(__file__).open()  # noqa: SIM115

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.open()


def test_what_no_checkpoint_can_hold_stays_as_the_data_module_has_loaded_it(tmp_path):
    def fit(stop: str = "") -> Opening:
        as_in_a_new_process()
        data = Opening()
        model = OfCounting(stop)
        if stop:
            model.on_train_batch_start = lambda *_: data.open()
        trainer(tmp_path).fit(model, datamodule=data)
        return data

    with interrupted():
        fit("batch 1:1")
    data = fit()
    assert data.handle.read(3) == '"""' and data.epochs_seen == 2 and not data.was_loaded
