"""resume/moments.py in short trainings of this process: nothing is left out or done twice."""

import contextlib
import itertools
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.utilities import CombinedLoader
from short_fits import (
    Noted,
    alone_and_resumed,
    as_in_a_new_process,
    interrupted,
    saved,
    trainer,
    training,
    weights,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.loaders.several import EndingLoaders
from sagemaker_lightning.resume import moments


def whole(folder: Path, **options) -> dict:
    """Return options of a training with two validations in an epoch, one before, and a log."""
    logger = CSVLogger(folder / "logs", version=0)
    return options | {
        "val_check_interval": 2,
        "num_sanity_val_steps": 1,
        "logger": logger,
        "log_every_n_steps": 1,
    }


def rows(folder: Path) -> str:
    """Return what was logged."""
    return (folder / "logs/lightning_logs/version_0/metrics.csv").read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> SimpleNamespace:
    """A training without an interruption: its folder and its model."""
    folder = tmp_path_factory.mktemp("alone")
    trainer(folder, **whole(folder, profiler=SimpleProfiler())).fit(model := Noted())
    return SimpleNamespace(folder=folder, model=model)


@pytest.mark.parametrize(
    ("moment", "step", "kind", "says"),
    [
        ("stop batch 0:0", 1, "batch", "the state is as it was saved, and the next batch is the"),
        ("stop validation 0:1", 2, "validation", "the state is as it was saved, and the next "),
        ("stop batch 0:3", 4, "validation", "the state is as it was saved"),
        ("stop end 0", 4, "epoch", "the state is as it was saved; the interrupted run recorded no"),
        ("fails batch 1:2", 4, "epoch", "the next 2 steps are those of the interrupted run, bit"),
    ],
)
def test_a_resumed_training_does_the_rest(tmp_path, capfd, alone, moment, step, kind, says):
    """The rest of the batches, the validations, the schedule, the hooks and the log."""
    how, _, event = moment.partition(" ")
    with interrupted():
        trainer(tmp_path, **whole(tmp_path)).fit(Noted(**{how: event}))
    assert saved(tmp_path)[step] == kind
    capfd.readouterr()
    resumed = trainer(tmp_path, **whole(tmp_path))
    resumed.fit(model := Noted())
    assert model.events == alone.model.events
    assert weights(model) == weights(alone.model)
    assert resumed.callback_metrics == alone.model.trainer.callback_metrics
    assert rows(tmp_path) == rows(alone.folder)
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"resuming from step {step}: {tmp_path / f'step-{step:09}.ckpt'}"
    assert second.startswith(f"resumed at step {step}: {says}")


def test_each_epoch_ends_with_a_checkpoint(alone):
    assert saved(alone.folder) == {4: "epoch", 8: "epoch"}


def test_lightnings_profiler_sees_the_loader(alone):
    fetches = alone.model.trainer.profiler.recorded_durations["[EpochLoop].train_dataloader_next"]
    assert len(fetches) >= 8


@pytest.mark.parametrize(
    ("epochs", "says"), [(2, "step 8 was the last one"), (1, "step 8 is beyond max_epochs=1, and ")]
)
def test_a_training_that_is_done_only_ends(tmp_path, capfd, alone, epochs, says):
    """With the hooks that begin and end it: a callback may need both."""
    shutil.copytree(alone.folder, tmp_path, dirs_exist_ok=True)
    done = trainer(tmp_path, **whole(tmp_path, max_epochs=epochs))
    done.fit(model := Noted())
    assert model.events == alone.model.events and weights(model) == weights(alone.model)
    assert done.max_epochs == epochs and rows(tmp_path) == rows(alone.folder)
    assert f"nothing is left to train: {says}" in capfd.readouterr().out
    assert saved(tmp_path) == {4: "epoch", 8: "epoch"}


@pytest.mark.parametrize("nothing", ["max_epochs", "limit_train_batches"])
def test_without_anything_to_train_no_hook_runs(tmp_path, nothing):
    trainer(tmp_path, **{nothing: 0}).fit(model := Noted())
    assert model.events == []


def test_hooks_at_the_start_see_what_was_restored(tmp_path):
    class Starting(Noted):
        def on_train_start(self):
            seen.append(len(self.events))

    seen = []
    with interrupted():
        trainer(tmp_path).fit(first := Starting("batch 1:1"))
    trainer(tmp_path).fit(Starting())
    assert seen[0] == 0 and 0 < seen[1] <= len(first.events)


def test_a_schedule_that_an_average_has_replaced_is_not_compared(tmp_path, capfd):
    for _ in range(2):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
        trainer(tmp_path, averaging).fit(Noted())
        as_in_a_new_process()
    out = capfd.readouterr().out
    assert "nothing is left to train" in out and "differ" not in out


class FineTunedRate(LearningRateFinder):
    """Searches a rate at the start of some epochs, as the example in Lightning's documentation."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("validates", [0, 1.0])
def test_a_search_between_epochs_finds_what_it_would_have_found(tmp_path, validates):
    """It continues from Lightning's counts, and asks whether a validation has ended."""

    class Searched(Noted):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            self.note(f"rate {self.lr}")

    def train(folder: Path, **moments) -> list[str]:
        search = FineTunedRate(num_training_steps=3, max_lr=0.2, early_stop_threshold=None)
        options = {"max_epochs": 3, "limit_val_batches": validates, "default_root_dir": tmp_path}
        trainer(folder, search, **options).fit(model := Searched(**moments))
        return model.events

    alone = train(tmp_path / "alone")
    with interrupted():
        train(tmp_path / "run", fails="batch 2:1")
    assert train(tmp_path / "run") == alone


class FineTunedSize(BatchSizeFinder):
    """Searches a batch size as the third epoch begins."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.scale_batch_size(trainer, pl_module)


@pytest.mark.parametrize("stop", ["batch 1:1", "end 1"])
def test_a_search_between_epochs_of_a_resumed_run_takes_nothing_back(tmp_path, stop):
    """It makes data of its own, where a resumed run has those of an earlier epoch."""

    class Searched(Noted):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(8, 2)), self.batch_size)

    def train(folder: Path, *stops: str) -> list[str]:
        search = FineTunedSize(steps_per_trial=1, init_val=2, max_trials=1)
        options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
        options |= {"default_root_dir": tmp_path}
        trainer(folder, search, **options).fit(model := Searched(*stops))
        return model.events

    alone = train(tmp_path / "alone")
    with interrupted():
        train(tmp_path / "run", stop)
    assert train(tmp_path / "run") == alone


def test_a_higher_limit_trains_on(tmp_path, capfd, alone):
    shutil.copytree(alone.folder, tmp_path, dirs_exist_ok=True)
    longer = trainer(tmp_path, **whole(tmp_path, max_epochs=3))
    longer.fit(model := Noted())
    before = len(alone.model.events) - 1
    assert model.events[:before] == alone.model.events[:before]
    batches = [event for event in model.events[before:] if event.startswith("batch")]
    assert batches == [f"batch 2:{number}" for number in range(4)]
    assert "nothing is left" not in capfd.readouterr().out


def test_an_epoch_that_ends_early_ends_once(tmp_path):
    """After the validation that was interrupted; a longer training continues within the epoch."""
    events = []
    for stop in ("", "validation 0:0"):
        folder = tmp_path / (stop or "alone")
        options = {"val_check_interval": 2, "keep": 9}
        if stop:
            with interrupted():
                trainer(folder, **options).fit(Noted(stop, ends="batch 0:1"))
            assert saved(folder) == {2: "validation"}
        trainer(folder, **options).fit(model := Noted(ends="batch 0:1"))
        events.append(model.events)
        assert saved(folder) == {2: "batch"}
    assert events[0] == events[1] and events[0][-2:] == ["end 0", "all"]


class Stream(IterableDataset):
    """A library's stream: it knows how far it was, and starts over whenever it is iterated."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self) -> None:
        self.at = self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for self.at in range(start + 1, 5):
            yield [torch.ones(2)]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Streaming(Noted):
    def val_dataloader(self):
        return DataLoader(Stream())


def test_a_stream_that_was_read_to_its_end_begins_anew(tmp_path, capfd):
    alone, again = alone_and_resumed(training(Streaming), tmp_path, "batch 1:1")
    assert again.validated == alone.validated == 8
    assert "differ" not in capfd.readouterr().out


class Following(Sampler):
    """Draws rarely what the model has been trained on."""

    def __init__(self) -> None:
        self.weights = torch.ones(8)

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        for _ in range(8):
            yield int(self.weights.argmax())


class Telling(Noted):
    """Tells the sampler what it has trained on.

    Args:
        workers: Number of data workers.
    """

    def __init__(self, stop: str = "", workers: int = 0) -> None:
        super().__init__(stop)
        self.workers = workers
        self.seen = []

    def train_dataloader(self):
        self.order = Following()
        data = TensorDataset(torch.arange(8.0)[:, None].expand(8, 2))
        return DataLoader(data, 1, sampler=self.order, num_workers=self.workers)

    def training_step(self, batch, batch_idx):
        self.seen.append(int(batch[0][0, 0]))
        self.order.weights[self.seen[-1]] *= 0.1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("moment", ["batch 0:1", "batch 0:4", "end 0", "batch 1:2"])
def test_a_sampler_that_follows_the_training_continues(tmp_path, moment):
    """It is asked for a batch once the one before it was trained on, as with Lightning alone."""
    alone, again = alone_and_resumed(training(Telling), tmp_path, moment)
    assert again.seen == alone.seen
    assert alone.seen[:8] == list(range(8))


@pytest.mark.slow
def test_a_sampler_that_workers_ask_ahead_cannot_follow_after_a_resume(tmp_path, capfd):
    trainer(tmp_path).fit(Telling(workers=1))
    says = "Following changes while an epoch is trained, and data workers get its indices ahead: a"
    assert capfd.readouterr().out.count(says) == 1


class Pairing(Noted):
    """Draws unlabelled samples beside its batches, from an iterator that it keeps."""

    def __init__(self, stop: str = "") -> None:
        super().__init__(stop)
        self.unlabelled = DataLoader(TensorDataset(torch.rand(5, 2)), 2, shuffle=True)
        self.drawn = None
        self.seen = []

    def training_step(self, batch, batch_idx):
        try:
            (more,) = next(self.drawn or iter(()))
        except StopIteration:
            self.drawn = iter(self.unlabelled)
            (more,) = next(self.drawn)
        self.seen.append(more.tolist())
        return super().training_step([torch.cat([batch[0], more])[:2]], batch_idx)


@pytest.mark.parametrize("moment", ["batch 0:1", "batch 0:2", "end 0", "batch 1:2"])
def test_an_iterator_that_the_model_keeps_continues(tmp_path, moment):
    alone, again = alone_and_resumed(training(Pairing), tmp_path, moment)
    assert again.seen == alone.seen and len(alone.seen) == 8
    assert weights(again) == weights(alone)


class Turned(Sampler):
    """Begins where its attribute says."""

    first = 0

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        return iter([(self.first + index) % 8 for index in range(8)])


class Saved(Turned):
    """Saves itself where it begins."""

    def state_dict(self) -> dict:
        return {"first": self.first}

    def load_state_dict(self, state: dict) -> None:
        self.first = state["first"]


class Faded(Dataset):
    """Points that training lets fade."""

    level = 1.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return self.level * torch.tensor([index / 8, torch.rand(()).item()])


class Changing(Noted):
    """Changes its data and their order, and makes something that no checkpoint holds."""

    order_class = Turned

    def train_dataloader(self):
        self.order = self.order_class()
        self.points = Faded()
        return DataLoader(self.points, 2, sampler=self.order)

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.lock = threading.Lock()
        self.order.first = 3 * self.order.first + 1

    def training_step(self, batch, batch_idx):
        with self.lock:
            self.note(f"points {batch.tolist()}")
            return super().training_step([batch], batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.order.first += 2
        self.points.level *= 0.9


class ChangingSaved(Changing):
    order_class = Saved


class Stored(Dataset):
    """Samples in a table, which no checkpoint holds."""

    def __init__(self, values: torch.Tensor) -> None:
        self.rows = pyarrow.table({"x": values.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return torch.tensor([self.rows["x"][index].as_py(), 1.0])


class Redrawn(Noted):
    """Draws its data in each epoch; they depend on what training has changed."""

    level = 1.0

    def train_dataloader(self):
        return DataLoader(Stored(self.level * torch.rand(8)), 2, shuffle=True)

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.note(f"points {batch[0].tolist()}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.level *= 0.9


def reloading(epochs: int) -> dict:
    return {"reload_dataloaders_every_n_epochs": epochs}


DATA = [(Changing, {}), (ChangingSaved, {}), (Redrawn, reloading(1)), (Redrawn, reloading(2))]


@pytest.fixture(scope="module", params=DATA)
def changed(request, tmp_path_factory) -> SimpleNamespace:
    """A model that was trained without an interruption, its class and the trainer's options."""
    kind, options = request.param
    trainer(tmp_path_factory.mktemp("alone"), **options).fit(model := kind())
    return SimpleNamespace(model=model, kind=kind, options=options)


@pytest.mark.parametrize("stop", ["batch 1:1", "end 0"])
def test_data_are_as_training_had_changed_them(tmp_path, capfd, changed, stop):
    """And objects that no checkpoint holds are made again."""
    with interrupted():
        trainer(tmp_path, **changed.options).fit(changed.kind(stop))
    trainer(tmp_path, **changed.options).fit(model := changed.kind())
    assert model.events == changed.model.events and weights(model) == weights(changed.model)
    assert "warning" not in capfd.readouterr().out


def test_data_that_are_made_anew_are_others(tmp_path):
    trainer(tmp_path, **reloading(1)).fit(model := Redrawn())
    points = [event for event in model.events if event.startswith("points")]
    assert len(points) == len(set(points)) == 4


class Deriving(Noted):
    """Derives numbers from its weights in a hook, and others when its data are made.

    Args:
        number: What the data have.
    """

    def __init__(self, number: float, stop: str = "") -> None:
        super().__init__(stop)
        self.number = number

    def on_fit_start(self):
        self.anchor = self.line.weight.detach().clone()

    def train_dataloader(self):
        self.mean = torch.tensor(self.number)
        return super().train_dataloader()

    def val_dataloader(self):
        self.spread = torch.tensor(self.number)
        return super().val_dataloader()


@pytest.mark.parametrize("checks", [0, 1])
def test_what_is_made_with_the_data_is_made_again(tmp_path, checks):
    """But what a hook has computed is as it was, also with a check before training."""
    options = {"num_sanity_val_steps": checks}
    with interrupted():
        trainer(tmp_path, **options).fit(first := Deriving(1.0, "batch 0:1"))
    trainer(tmp_path, **options).fit(model := Deriving(2.0))
    assert torch.equal(model.anchor, first.anchor)
    assert model.mean == model.spread == 2.0


def test_validation_data_are_made_when_they_are_needed(tmp_path):
    class Making(Noted):
        def val_dataloader(self):
            self.note("data")
            return super().val_dataloader()

    with interrupted():
        trainer(tmp_path, check_val_every_n_epoch=2).fit(first := Making("batch 0:1"))
    trainer(tmp_path, check_val_every_n_epoch=2).fit(model := Making())
    assert first.events.count("data") == 0 and model.events.count("data") == 1


class Searching(Noted):
    """Has the size of its batches from a search, whose events it notes apart."""

    batch_size = 1

    def __init__(self, stop: str) -> None:
        super().__init__(stop)
        self.searches = []

    def note(self, event: str) -> None:
        if any(isinstance(each, BatchSizeFinder) for each in self.trainer.callbacks):
            super().note(event)
        else:
            self.searches.append(event.partition(" ")[0])

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(8, 2)), self.batch_size, shuffle=True)

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].repeat(2 // self.batch_size, 1)], batch_idx)


def test_a_training_after_a_search_is_resumed_with_its_result(tmp_path, capfd):
    """The data are those that were made after the search; the search itself saves nothing."""
    models = []
    for stop in ("", "batch 1:1"):
        folder = tmp_path / (stop or "alone")
        for text in filter(None, (stop, "resume")):
            search = BatchSizeFinder(init_val=2, max_trials=1, steps_per_trial=1)
            training = trainer(folder, search, val_check_interval=2)
            with interrupted() if text == stop else contextlib.nullcontext():
                training.fit(model := Searching(text))
        models.append(model)
    assert models[0].events == models[1].events and models[1].batch_size == 2
    assert models[0].searches == ["start", "epoch", "batch", "loss", "end", "all"]
    assert saved(tmp_path / "alone") == {4: "epoch", 8: "epoch"}
    assert "warning" not in capfd.readouterr().out


class Unrepeatable(Noted):
    """Has data that nobody can draw a second time."""

    def train_dataloader(self):
        return Once()

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)


class Once:
    """Four batches, others each time."""

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        return iter([torch.full((2, 2), next(TIMES) / 99) for _ in range(4)])


TIMES = itertools.count()


@pytest.mark.parametrize("saves", [True, False])
def test_data_are_drawn_twice_only_if_checkpoints_are_saved(tmp_path, capfd, saves):
    trainer(tmp_path, saves=saves, max_epochs=1).fit(Unrepeatable())
    says = "Once draws other batches each time, perhaps also in a resumed run: checkpoints are"
    assert (says in capfd.readouterr().out) is saves


# Without a training -------------------------------------------------------------------------------


class Calls:
    """Notes each call of any function."""

    def __init__(self) -> None:
        self.noted = []

    def __getattr__(self, name):
        return lambda *arguments: self.noted.append((name, *arguments))


class Left(EndingLoaders):
    """Loaders of which nothing is there but that they are left."""

    def __init__(self) -> None:
        self.noted = []

    def leave(self, following) -> None:
        self.noted.append(("leave", following))


def installed(**options) -> pl.Trainer:
    """Return a trainer whose loops are ours, and call a run that notes it."""
    settings = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    made = pl.Trainer(**settings | options, accelerator="cpu", devices=1)
    run = Calls()
    run.seeding = run
    run.data_needed = lambda *_: contextlib.nullcontext()
    run.is_training = True
    moments.install(made, run)
    return made


def loops_of(made: pl.Trainer) -> list:
    return [
        made.fit_loop,
        made.fit_loop.epoch_loop,
        made.fit_loop.epoch_loop.val_loop,
    ]


def test_a_trainer_gets_its_own_loops_back(alone, monkeypatch):
    """Meanwhile, no rank waits before each batch for what others know of a signal."""
    told = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: told.append("signal"))
    made = installed()
    tells = made.fit_loop.epoch_loop._broadcast_sigterm_tensor
    tells()
    assert told == []
    moments.remove(made)
    made.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert told == ["signal"]
    for each in (made, alone.model.trainer):
        for loop, lightnings in zip(
            loops_of(each), loops_of(pl.Trainer(logger=False)), strict=True
        ):
            assert type(loop) is type(lightnings)
            assert vars(loop).keys() == vars(lightnings).keys()


def test_new_loaders_are_prepared_and_the_old_ones_left(tmp_path):
    made = installed()
    for loop, kind in ((made.fit_loop, "train"), (made.fit_loop.epoch_loop.val_loop, "val")):
        first, second = Left(), Left()
        loop.of.noted.clear()
        for loaders in (None, first, first, second, None):
            loop._combined_loader = loaders
        assert loop.loaders is None
        assert first.noted == [("leave", second)] and second.noted == [("leave", None)]
        assert loop.of.noted == [
            ("together", made, loaders, kind) for loaders in (first, first, second)
        ]


@pytest.mark.parametrize(
    ("interval", "options", "says"),
    [
        (
            5,
            {},
            "--trainer.val_check_interval: found 5, expected 1 to 4, the batches of an epoch; "
            "or give --trainer.check_val_every_n_epoch=null, which counts batches across epochs",
        ),
        (4, {}, ""),
        (1.0, {}, ""),
        (5, {"limit_val_batches": 0}, ""),
        (5, {"check_val_every_n_epoch": None}, ""),
    ],
)
def test_a_validation_that_never_comes_is_one_line(monkeypatch, interval, options, says):
    """Another error of the data stays what it is."""

    def fails(loop):
        raise ValueError("a mistake in the data")

    monkeypatch.setattr(_FitLoop, "setup_data", fails)
    made = installed(val_check_interval=interval, **options)
    made.fit_loop.max_batches = 4
    with pytest.raises(UserError if says else ValueError) as raised:
        made.fit_loop.setup_data()
    assert str(raised.value) == (says or "a mistake in the data")


def test_the_batch_that_comes_next_is_as_a_step_would_get_it():
    """Unless there is none, or the steps draw the batches themselves."""
    made = installed()
    model = Noted()
    model.on_before_batch_transfer = lambda batch, dataloader_idx: batch + 1
    made.strategy.connect(model)
    made.fit_loop._data_fetcher = fetcher = _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader(DataLoader([3.0])))
    iter(fetcher)
    assert moments.next_batch(made).tolist() == [4.0]
    assert made.training
    with pytest.raises(StopIteration):
        moments.next_batch(made)
    made.fit_loop._data_fetcher = _DataLoaderIterDataFetcher()
    made.fit_loop._data_fetcher.setup(CombinedLoader(DataLoader([3.0])))
    iter(made.fit_loop._data_fetcher)
    with pytest.raises(StopIteration):
        moments.next_batch(made)


class Transferring(pl.LightningDataModule):
    """Data whose own hook moves a batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        """Return the batch."""
        return batch

    def train_dataloader(self) -> DataLoader:
        """Return a loader of four batches."""
        return DataLoader(TensorDataset(torch.rand(8, 2)), 2)

    val_dataloader = train_dataloader


class Moving(Noted):
    """A model with a hook of its own before a batch is moved."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        """Return the batch."""
        return batch


def with_hook_on_the_object() -> Noted:
    """Return a model one of whose hooks is set on the object."""
    model = Noted()
    model.on_after_batch_transfer = lambda batch, dataloader_idx: batch
    return model


@pytest.mark.parametrize(
    ("make", "data", "seeded"),
    [
        (Noted, None, False),
        (Moving, None, True),
        (with_hook_on_the_object, None, True),
        (Noted, Transferring, True),
    ],
)
def test_what_is_drawn_between_a_batch_and_its_step_is_seeded_if_the_user_moves_it(
    tmp_path, make, data, seeded
):
    seen = []

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            seen.append(trainer.fit_loop.loaders.seeds_batches)

    trainer(tmp_path, Looking(), max_epochs=1).fit(make(), datamodule=data() if data else None)
    assert seen == [seeded] * 4
