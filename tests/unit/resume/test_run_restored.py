"""Short trainings of this process that are interrupted: what a resumed run has from before."""

import copy
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
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
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning import ExactResume
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.state.graph import values

ENTRIES = checkpoint_file.ENTRIES_KEY


def newest(folder: Path) -> Path:
    """Return the newest checkpoint."""
    return max(folder.glob("step-*.ckpt"))


def resume_of(trainer: pl.Trainer) -> ExactResume:
    return next(each for each in trainer.callbacks if isinstance(each, ExactResume))


# Limits and models --------------------------------------------------------------------------------


class Longer(pl.Callback):
    """Adds an epoch to the training, once."""

    def __init__(self) -> None:
        self.added = 0

    def on_train_epoch_start(self, trainer, pl_module):
        if not self.added:
            self.added = 1
            trainer.fit_loop.max_epochs += 1


@pytest.mark.parametrize(("epochs", "trained"), [(2, 3), (5, 5)])
def test_epochs_that_a_callback_has_added_are_trained(tmp_path, epochs, trained):
    """Unless the limit is another one now."""
    for stop in ("batch 1:1", "batch 1:2"):
        with interrupted():
            trainer(tmp_path, Longer()).fit(Noted(stop))
    trainer(tmp_path, Longer(), max_epochs=epochs).fit(model := Noted())
    assert [event for event in model.events if event.startswith("end")] == [
        f"end {number}" for number in range(trained)
    ]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_models_of_each_step_are_written_once(tmp_path):
    """Lightning would give them other names when it writes them again.

    A file of another run in their folder stays as it is.
    """

    def models(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, monitor="loss", save_top_k=-1, every_n_train_steps=1)

    every = {}
    for fails in ("", "batch 1:2"):
        folder = tmp_path / (fails or "alone")
        (folder / "models").mkdir(parents=True)
        others = folder / "models/epoch=0-step=4.ckpt"
        others.write_text("of another run")
        if fails:
            with interrupted():
                training = trainer(folder, models(folder / "models"), enable_checkpointing=True)
                training.fit(Noted(fails=fails))
        written = models(folder / "models")
        trainer(folder, written, enable_checkpointing=True).fit(Noted())
        every[fails] = sorted(path.name for path in (folder / "models").iterdir())
        assert others.read_text() == "of another run"
    assert every[""] == every["batch 1:2"] and len(every[""]) == 8 + 1
    as_in_a_new_process()
    done = models(folder / "models")
    trainer(folder, done, enable_checkpointing=True).fit(Noted())
    assert done.current_score == written.current_score is not None


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("lose", "problem"),
    [(Path.unlink, "is missing"), (flip, "is damaged: its checksum does not match")],
)
def test_a_checkpoint_whose_best_model_is_missing_or_damaged_is_skipped(
    tmp_path, capfd, lose, problem
):
    """An earlier one does not tell of it: the run makes it again."""

    def train(**options) -> Noted:
        best = BestModel(tmp_path / "models", monitor="loss_epoch", filename="best-{epoch}")
        training = trainer(tmp_path, best, enable_checkpointing=True, every_n_steps=2, keep=9)
        training.fit(model := Noted(**options))
        return model

    with interrupted():
        train(stop="batch 1:1")
    assert saved(tmp_path).keys() == {2, 4, 6}
    file = tmp_path / "models/best-epoch=0.ckpt"
    lose(file)
    capfd.readouterr()
    model = train()
    out = capfd.readouterr().out
    assert f"refers to {file.name}, the best model, which {problem}; it is skipped" in out
    assert "resuming from step 2" in out and model.global_step == 8
    assert len(list((tmp_path / "models").iterdir())) == 1


def test_each_interruption_is_reported_to_the_end(tmp_path):
    for stop in ("batch 0:1", "batch 1:1"):
        with interrupted():
            trainer(tmp_path).fit(Noted(stop))
    training = trainer(tmp_path)
    training.fit(Noted())
    assert len(resume_of(training).resumes) == 2


# The code -----------------------------------------------------------------------------------------


class Smooth(Noted):
    """Has numbers in its code."""

    def __init__(self, factor: float, stop: str = "") -> None:
        super().__init__(stop)
        self.factor = factor
        self.parts = torch.tensor([factor])


@pytest.mark.parametrize("allowed", [False, True])
def test_other_numbers_of_the_code_are_reported(tmp_path, capfd, allowed):
    """Unless other settings are allowed."""
    with interrupted():
        trainer(tmp_path).fit(Smooth(0.5, "batch 0:1"))
    capfd.readouterr()
    trainer(tmp_path, other_settings=allowed).fit(Smooth(0.75))
    says = (
        "warning: factor of model was 0.5, is 0.75: this run continues from its checkpoint, and "
        "may end with other weights than a run that begins with these settings"
    )
    assert (says in capfd.readouterr().out) is not allowed


def test_a_model_that_was_trained_before_keeps_the_numbers_of_its_code(tmp_path, capfd):
    """The program may have changed them since."""
    model = Smooth(0.5, "batch 0:1")
    with interrupted():
        trainer(tmp_path).fit(model)
    numbers = checkpoint_file.read(newest(tmp_path))[ENTRIES]["run"]["numbers"]
    model.stop = ""
    model.factor = 0.25
    model.parts = torch.tensor([0.25])
    model.events.clear()
    capfd.readouterr()
    trainer(tmp_path).fit(model)
    assert "differ" not in (out := capfd.readouterr().out) and "warning" not in out
    assert checkpoint_file.read(newest(tmp_path))[ENTRIES]["run"]["numbers"] == numbers
    assert numbers["factor of model"] == "0.5"


# Other ranks and settings -------------------------------------------------------------------------


class Loading(Noted):
    """Has something of its own in its checkpoints, and another learning rate."""

    def __init__(self, stop: str = "", rate: float = 0.1) -> None:
        super().__init__(stop)
        self.rate = rate
        self.loaded = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = np.int64(1)

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["own"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)


@pytest.mark.parametrize(("ranks", "loaded"), [(1, 5), (2, np.int64(1))])
def test_each_rank_has_its_own_entries_unless_there_were_more_ranks(tmp_path, capfd, ranks, loaded):
    with interrupted():
        trainer(tmp_path).fit(Loading("end 0"))
    path = newest(tmp_path)
    checkpoint = checkpoint_file.read(path)
    entries = checkpoint[ENTRIES]
    overrides = {
        "entries": {"own": 5},
        "exact_values": dict.fromkeys(("lightnings", "users"), values.encode({})),
    }
    entries["ranks"][0] |= {"rank_overrides": overrides}
    entries["ranks"] *= ranks
    entries["world_size"] = ranks
    checkpoint_file.write(path, checkpoint, 4, entries["number"])
    capfd.readouterr()
    trainer(tmp_path).fit(model := Loading())
    assert model.loaded == loaded and type(model.loaded) is type(loaded)
    first, *others = capfd.readouterr().out.splitlines()
    says = (
        "; 2 ranks saved it, now there are 1: no sample is left out or taken twice, but the run is "
        "no longer bit-identical to one without an interruption"
    )
    resuming = f"resuming from step 4: {path}"
    assert first == (f"warning: {resuming}{says}" if ranks == 2 else resuming)
    assert any("resumed at step" in line for line in others) is (ranks == 1)
    assert model.global_step == 8


def test_another_learning_rate_is_used_if_it_is_allowed(tmp_path):
    with interrupted():
        trainer(tmp_path).fit(Loading("batch 0:1"))
    trainer(tmp_path, other_settings=True).fit(model := Loading(rate=0.3))
    rates = [event.rpartition(" ")[2] for event in model.events if event.startswith("loss")]
    assert rates == ["0.1", "0.1", *["0.3"] * 6]


class Warm(Noted):
    """Has another learning rate from the start of training on."""

    def on_train_start(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05


def test_rates_are_those_of_the_interrupted_run(tmp_path):
    """What a hook at the start sets is what its schedule has lowered since."""
    alone, model = alone_and_resumed(training(Warm), tmp_path, "batch 1:1")
    assert model.events == alone.events and "0.025" in str(model.events)


def test_a_seed_that_was_drawn_is_kept(tmp_path):
    with interrupted():
        trainer(tmp_path, seed=None).fit(Noted("end 0"))
    path = newest(tmp_path)
    checkpoint = checkpoint_file.read(path)
    checkpoint[ENTRIES]["seed"] = 99
    checkpoint_file.write(path, checkpoint, 4, checkpoint[ENTRIES]["number"])
    trainer(tmp_path, seed=None).fit(Noted())
    assert checkpoint_file.read(newest(tmp_path))[ENTRIES]["seed"] == 99


def test_other_settings_are_refused(tmp_path):
    with interrupted():
        trainer(tmp_path).fit(Noted("batch 1:1"))
    with pytest.raises(UserError, match="another run: --trainer.gradient_clip_val was None, is 1"):
        trainer(tmp_path, gradient_clip_val=1.0).fit(Noted())


# Parts of the model -------------------------------------------------------------------------------


class Growing(Noted):
    """Gets a layer at the start of training, or none."""

    def __init__(self, stop: str = "", grows: bool = True) -> None:
        super().__init__(stop)
        self.grows = grows

    def on_fit_start(self):
        if self.grows:
            self.extra = nn.Linear(1, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_layer_that_a_hook_makes_is_restored(tmp_path):
    alone, model = alone_and_resumed(training(Growing), tmp_path, "batch 1:1")
    assert weights(model) == weights(alone)


def test_a_layer_that_is_not_made_again_is_refused(tmp_path):
    with interrupted():
        trainer(tmp_path).fit(Growing("batch 0:1"))
    with pytest.raises(UserError) as raised:
        trainer(tmp_path).fit(Growing(grows=False))
    assert str(raised.value) == (
        f"ExactResume(dirpath={tmp_path}): step 2 is of another run: its model has extra.bias, "
        "this one does not; give another folder, or move the checkpoints away to start over"
    )


class Counting(Noted):
    """Has buffers that grow with each batch, one of them in no state dict."""

    def __init__(self, stop: str = "") -> None:
        super().__init__(stop)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def training_step(self, batch, batch_idx):
        self.seen = torch.cat([self.seen, batch[0].sum().reshape(1)])
        self.count += 1
        return super().training_step(batch, batch_idx)


class CountingLate(Counting):
    """A hook at the start of training makes the buffer that grows."""

    def on_train_start(self):
        self.seen = torch.zeros(0)
        super().on_train_start()


@pytest.mark.parametrize("model_class", [Counting, CountingLate])
def test_buffers_that_have_grown_are_restored(tmp_path, model_class):
    alone, model = alone_and_resumed(training(model_class), tmp_path, "batch 1:1")
    assert torch.equal(model.seen, alone.seen) and model.count == alone.count == 8


@pytest.mark.parametrize("every", [0, 1])
def test_a_pruned_model_is_pruned_again(tmp_path, every):
    """Also if a hook at the start of training uses the pruned layer, and if data are made again."""

    def pruned(folder: Path, stop: str = "") -> tuple:
        pruning = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
        fits = trainer(folder, pruning, reload_dataloaders_every_n_epochs=every)
        fits.fit(model := Noted(stop))
        as_in_a_new_process()
        return weights(model), model.events

    alone = pruned(tmp_path / "alone")
    with interrupted():
        pruned(tmp_path, "batch 1:1")
    assert pruned(tmp_path) == alone


class Remembering(torch.optim.SGD):
    """Keeps the weights that it began with, known by their parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.first = {id(each): each.detach().clone() for each in self.param_groups[0]["params"]}


class MadeWithItsOptimizer(Noted):
    """Makes things of its first weights when it makes its optimizer, and trains with them."""

    def configure_optimizers(self):
        optimizer = Remembering(list(self.line.parameters()))
        self.anchor = [self.line.weight.detach().clone()]
        self.norm = float(self.line.weight.norm())
        self.register_buffer("mean", self.line.weight.detach().mean())
        self.teacher = copy.deepcopy(self.line).requires_grad_(False)
        rate = self.line.weight.detach().abs().mean()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch * rate / 99)
        return [optimizer], [schedule]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for mine, own in zip(self.teacher.parameters(), self.line.parameters(), strict=True):
                mine.lerp_(own, 0.1)
        first = self.optimizers().optimizer.first
        pulls = [self.anchor[0], self.teacher.weight, first[id(self.line.weight)], self.mean]
        return loss + self.norm * sum((self.line.weight - each).square().sum() for each in pulls)


class PrunedAtItsStart(Noted):
    def on_fit_start(self):
        prune.random_unstructured(self.line, "weight", amount=1)


class TaughtByItsStart(Noted):
    """Learns what it has said of its data before training."""

    def train_dataloader(self):
        inputs = torch.rand(8, 2)
        said = self.line(inputs).detach()
        return DataLoader(TensorDataset(inputs, said), 2, shuffle=True)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self.line(batch[0]) - batch[1]).square().sum()


@pytest.mark.parametrize("model_class", [MadeWithItsOptimizer, PrunedAtItsStart, TaughtByItsStart])
def test_what_is_made_of_the_first_weights_is_made_of_them_again(tmp_path, capfd, model_class):
    train = training(model_class)
    alone, model = alone_and_resumed(train, tmp_path, "batch 0:1", "batch 1:2")
    assert weights(model) == weights(alone) and model.events == alone.events
    assert "warning" not in capfd.readouterr().out


class Normalized(Noted):
    def __init__(self, stop: str = "") -> None:
        super().__init__(stop)
        self.norm = nn.BatchNorm1d(2)

    def training_step(self, batch, batch_idx):
        return super().training_step([self.norm(batch[0])], batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("stop", "steps"),
    [("batch 2:3", {}), ("batch 3:0", {}), ("batch 3:3", {}), ("batch 3:2", {1: 2})],
)
def test_the_epoch_that_an_average_adds_ends_as_if_it_was_not_interrupted(tmp_path, stop, steps):
    """It computes no gradients, and its step uses those of the epoch before.

    A schedule of batches in a step refuses to begin with more than one.
    """

    def train(folder: Path, **moments) -> Noted:
        as_in_a_new_process()
        average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        schedule = [GradientAccumulationScheduler(steps)] if steps else []
        fitted = trainer(folder, average, *schedule, max_epochs=3)
        fitted.fit(model := Normalized(**moments))
        return model

    alone = train(tmp_path / "alone")
    assert alone.events[-2:] == ["end 3", "all"]
    with interrupted():
        train(tmp_path / "run", stop=stop)
    for _ in range(2):  # the second one has nothing left to train
        model = train(tmp_path / "run")
        assert (weights(model), model.events) == (weights(alone), alone.events)


class Drifting(torch.utils.data.Dataset):
    """Counts how often each sample is read, and changes it at random each third time."""

    def __init__(self, size: int) -> None:
        self.points = torch.rand(size, 2)
        self.reads = [0] * size

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index):
        self.reads[index] += 1
        if self.reads[index] % 3 == 0:
            self.points[index] += torch.rand(2)
        return [self.points[index].clone()]


@pytest.mark.parametrize("stop", ["batch 1:2", "batch 2:1", "validation 2:1", "batch 3:0"])
def test_validation_data_that_change_as_they_are_read_come_back(tmp_path, stop):
    """Whether samples draw is found out by reading a batch once more, which is done once."""

    def train(folder: Path, **moments) -> tuple[list[int], torch.Tensor]:
        as_in_a_new_process()
        torch.manual_seed(1)
        drawn, validated = Drifting(8), Drifting(6)
        loaders = DataLoader(drawn, 2, shuffle=True), DataLoader(validated, 2)
        trainer(folder, max_epochs=5).fit(Noted(**moments), *loaders)
        return drawn.reads + validated.reads, validated.points.tolist()

    alone, resumed = alone_and_resumed(train, tmp_path, stop)
    assert resumed == alone


class Shuffled(torch.utils.data.Sampler):
    """An order by a generator of its own."""

    def __init__(self):
        self.draw = random.Random(1)

    def __iter__(self):
        return iter(self.draw.sample(range(8), 8))

    def __len__(self):
        return 8


@pytest.mark.parametrize("order", [{"shuffle": True}, {"sampler": None}], ids=str)
def test_a_training_that_is_done_leaves_its_loader_as_at_its_end(tmp_path: Path, order):
    """A hook at the end, or what follows the training, may draw from it."""

    class Walking(Noted):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.rand(8, 2)), 2, **order)

        def on_train_end(self):
            self.walked = [batch.tolist() for (batch,) in self.trainer.train_dataloader]

    def program() -> tuple[list, float]:
        if "sampler" in order:
            order["sampler"] = Shuffled()
        fits = trainer(tmp_path)
        fits.fit(model := Walking())
        as_in_a_new_process()
        return model.walked, "sampler" in order and order["sampler"].draw.random()

    assert program() == program()


class Warming(pl.Callback):
    """Sets the rate of each step before it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


def test_a_rate_that_a_hook_sets_before_a_step_is_no_difference(tmp_path, capfd):
    def train(folder: Path, stop: str = "") -> Noted:
        fits = trainer(folder, Warming())
        fits.fit(model := Noted(stop))
        return model

    alone, model = alone_and_resumed(train, tmp_path, "batch 0:1")
    out = capfd.readouterr().out
    assert weights(model) == weights(alone) and "the next batch is the expected one" in out


class Recounting(Noted):
    """Keeps a count outside of what a checkpoint has, and moves a sum as it loads."""

    def __init__(self, stop: str = "") -> None:
        super().__init__(stop)
        self.first = self.before = self.total = 0

    def on_fit_start(self):
        self.steps = itertools.chain([self.first], itertools.count(self.first + 1))
        next(self.steps)
        print("begins with", self.first)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loading"] = self.total

    def on_load_checkpoint(self, checkpoint):
        self.first = self.before = checkpoint["loading"]
        self.total = 0

    def training_step(self, batch, batch_idx):
        self.total += 1
        return (
            super().training_step(batch, batch_idx) * (self.total + self.before) * next(self.steps)
        )


def test_hooks_that_begin_training_have_the_numbers_that_were_loaded(tmp_path, capsys):
    """Afterwards, a number that training had not changed is as the program has made it."""
    alone, model = alone_and_resumed(training(Recounting), tmp_path, "batch 1:1")
    lines = capsys.readouterr().out.splitlines()
    begun = [line for line in lines if line.startswith("begins with")]
    assert begun == ["begins with 0", "begins with 0", "begins with 6"]
    assert (model.total, model.before, model.first) == (alone.total, 0, 0) == (8, 0, 0)
    assert weights(model) == weights(alone)
