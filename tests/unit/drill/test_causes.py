"""drill/causes.py: which cause of a difference is named."""

import io
import itertools
import logging
import random
import re
import threading
from decimal import Decimal
from types import CellType, SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.loops.fit_loop import _FitLoop
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from sagemaker_lightning.drill import causes as search
from sagemaker_lightning.resume.check import explanation
from sagemaker_lightning.resume.check.explanation import DifferenceKind, likely_causes

HERE = "test_causes"
DRAWS = random.Random(3)
DRAWN = itertools.count()


@pytest.fixture(autouse=True)
def searching(monkeypatch):
    monkeypatch.setattr(explanation, "_searches", [])
    search.register()


class Fake:
    """An object with some attributes."""

    def __init__(self, **values) -> None:
        vars(self).update(values)


def trainer_of(model=None, loader=None, callbacks=(), **values) -> Fake:
    """Return what the search for causes asks of a trainer."""
    return Fake(
        **{
            "lightning_module": model or LightningModule(),
            "datamodule": None,
            "train_dataloader": loader,
            "val_dataloaders": None,
            "callbacks": list(callbacks),
            "fit_loop": _FitLoop(None),
            "optimizers": [],
            "loggers": [],
            "lr_scheduler_configs": [],
            "strategy": Fake(root_device=torch.device("cpu")),
        }
        | values
    )


def causes(kind: DifferenceKind, *arguments, **values) -> str:
    return likely_causes(trainer_of(*arguments, **values), (kind,), [])


def data_causes(loader=None, **values) -> str:
    return causes(DifferenceKind.BATCH, None, loader, **values)


class Masks:
    """Collates by what it keeps."""

    def __call__(self, samples):
        return samples


class Ordered(SimpleNamespace):
    """Has the length of its sampler, if that has one."""

    def __len__(self) -> int:
        return len(self.sampler)


class Endless(Sampler):
    """A sampler of the user's, without a length."""

    def __init__(self) -> None:
        pass

    def __iter__(self):
        return itertools.count()


class Following(RandomSampler):
    """A sampler that training changes."""


class Points(Dataset):
    """Points, and something that they hold."""

    def __init__(self, held=None) -> None:
        self.held = held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(index)


class Classwide(Points):
    """Points with a generator that all of them share."""

    draws = np.random.default_rng(1)


class RandomPoints(Points):
    """Has a name as of a generator, and draws nothing."""


class Rng:
    """Draws, of a library of its own."""


class RandomOrder(Sampler):
    """A sampler whose name says that it draws."""

    def __init__(self) -> None:
        pass

    def __iter__(self):
        return iter(range(4))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Own:
    """A loader of a user's own."""

    def __init__(self, held=None) -> None:
        self.held = held

    def __iter__(self):
        return iter(range(4))


class Around(Own):
    """A loader of a dataset, which has no data workers."""

    dataset = Points()


class Saving(Own):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def collate(samples):
    return DRAWS.random()


def exactly(loader: DataLoader, sampler: Sampler | None = None) -> DataLoader:
    """Return a loader whose order something of ours makes, by a sampler."""
    loader.batch_plan = Ordered(sampler=sampler)
    return loader


GENERATOR = "a generator of random numbers in "
NO_CAUSE = "something in the data that no seed decides: time, another library's generator, files"


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (None, NO_CAUSE),
        (exactly(DataLoader(Points())), NO_CAUSE),
        (exactly(DataLoader(RandomPoints())), NO_CAUSE),
        (exactly(DataLoader(Points(), sampler=RandomOrder())), NO_CAUSE),
        (
            exactly(DataLoader(Points([[np.random.default_rng(1)]]))),
            f"{GENERATOR}{HERE}.Points.held",
        ),
        (exactly(DataLoader(Points(Rng()))), f"{GENERATOR}{HERE}.Points.held"),
        (exactly(DataLoader(Points(), collate_fn=collate)), f"{GENERATOR}{HERE}.DRAWS"),
        (exactly(DataLoader(Points(), worker_init_fn=collate)), f"{GENERATOR}{HERE}.DRAWS"),
        (exactly(DataLoader(Points(), sampler=Rng())), f"{GENERATOR}sampler"),
        (
            DataLoader(Stream()),
            f"{HERE}.Stream, an IterableDataset, which has to draw the same samples again",
        ),
        (
            DataLoader(Points()),
            "loader 0, a torch.utils.data.dataloader.DataLoader, which has to give the same "
            "batches again",
        ),
        (
            [exactly(DataLoader(Points())), Own()],
            f"loader 1, a {HERE}.Own, which has to give the same batches again",
        ),
        (
            Own(np.random.default_rng(1)),
            f"{GENERATOR}{HERE}.Own.held, or loader 0, a {HERE}.Own, which has to give the same "
            "batches again",
        ),
        (Saving(), f"loader 0, a {HERE}.Saving, what its state_dict says"),
        (Around(), f"loader 0, a {HERE}.Around, which has to give the same batches again"),
        (exactly(DataLoader(Classwide())), f"{GENERATOR}{HERE}.Classwide.draws"),
        (
            exactly(DataLoader(Points(), num_workers=2)),
            f"what {HERE}.Points keeps in its 2 data worker(s)",
        ),
        (
            exactly(DataLoader(torch.zeros(2), num_workers=2, collate_fn=Masks())),
            f"what {HERE}.Masks keeps in its 2 data worker(s)",
        ),
        (
            exactly(DataLoader(Points()), Following(Points())),
            f"what training changes in {HERE}.Following",
        ),
        (
            exactly(DataLoader(Points()), Endless()),
            f"what training changes in {HERE}.Endless",
        ),
        (
            exactly(DataLoader(torch.utils.data.TensorDataset(torch.zeros(2)), num_workers=2)),
            NO_CAUSE,
        ),
    ],
)
def test_what_in_a_loader_may_give_other_batches(loader, says):
    found = data_causes(loader)
    assert found.startswith(says) if says is NO_CAUSE else found == says


@pytest.mark.parametrize(
    "hook", ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"]
)
@pytest.mark.parametrize("base", [LightningModule, LightningDataModule])
def test_a_hook_that_changes_a_batch_is_named(hook, base):
    owner = type("Mine", (base,), {hook: lambda self, batch, index: batch, "__module__": HERE})()
    role = "lightning_module" if base is LightningModule else "datamodule"
    assert data_causes(**{role: owner}) == f"what {HERE}.Mine.{hook} draws"
    assert data_causes(**{role: base()}).startswith(NO_CAUSE)


def test_which_kind_of_difference_decides_where_the_cause_is_looked_for():
    """A batch that differs has another loss, and so has another learning rate."""
    trainer = trainer_of()
    length, batch, rate, loss = DifferenceKind
    found = {
        kinds: likely_causes(trainer, kinds, []).partition(" ")[0]
        for kinds in ((length,), (batch,), (batch, rate, loss), (rate,), (rate, loss), (loss,))
    }
    assert list(found.values()) == ["something"] * 3 + ["what"] * 2 + ["state"]
    assert likely_causes(trainer, (rate,), []) == (
        "what sets the learning rate, which is another value"
    )


def test_what_has_changed_comes_first_and_three_causes_are_enough():
    loader = exactly(DataLoader(Points(Rng()), num_workers=1, collate_fn=collate))
    kinds = (DifferenceKind.BATCH,)
    found = likely_causes(trainer_of(None, loader), kinds, ["a"])
    assert found == f"a, or {GENERATOR}{HERE}.Points.held, or {GENERATOR}{HERE}.DRAWS"
    assert likely_causes(trainer_of(None, loader), kinds, [*"abcd"]) == "a, or b, or c"


class SetsRates(LightningModule):
    @property
    def rates(self):
        return [group["lr"] for group in self.trainer.optimizers[0].param_groups]

    def warm_up(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0


class Warmup(Callback):
    def on_train_batch_start(self, trainer, *_):
        trainer.optimizers[0].param_groups[0]["lr"] = 1.0

    def on_train_end(self, *_):
        pass


def test_who_sets_a_learning_rate_is_named():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer = trainer_of(
        SetsRates(), callbacks=[Warmup(), pl.callbacks.StochasticWeightAveraging(0.1)]
    )
    others = [
        f"what {name} sets, which is another value"
        for name in (f"{HERE}.SetsRates.warm_up", f"{HERE}.Warmup.on_train_batch_start")
    ]
    kinds = (DifferenceKind.RATE,)
    assert likely_causes(trainer, kinds, []) == ", or ".join(others)
    trainer.lr_scheduler_configs = [Fake(scheduler=steps)] * 2
    schedule = "StepLR, whose arguments or state are others"
    assert likely_causes(trainer, kinds, []) == ", or ".join([schedule, *others])


class Holding(LightningModule):
    """Holds something."""

    def __init__(self, held) -> None:
        super().__init__()
        self.held = held


def wrapper():
    """Return a file that no record has."""
    return io.TextIOWrapper(io.BytesIO())


class Engine:
    """A user's object."""

    def __init__(self, held) -> None:
        self.inner = held


NO_STATE = "state that no checkpoint holds, or a kernel that is not deterministic"


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (itertools.cycle({1}), f"as in {HERE}.Holding.held (a itertools.cycle)"),
        ([itertools.cycle({1})], f"as in {HERE}.Holding.held (a itertools.cycle)"),
        (
            Engine(wrapper()),
            f"as in {HERE}.Engine.inner (a _io.TextIOWrapper)",
        ),
        (Engine(3), ""),
        (logging.getLogger("x"), ""),
        (threading.Lock(), ""),
        (re.compile("x"), ""),
        (Decimal(3), ""),
        (random.Random(3), ""),
        (nn.Linear(1, 1), ""),
        (SimpleNamespace(state_dict=lambda: {}, load_state_dict=print), ""),
        ({}, ""),
        (CellType([3]), ""),  # what a function has closed over
        (collate, ""),
        (len, ""),
        (lambda: DRAWN, ""),  # much of what code reads is not a state of a run
        (Engine, ""),
    ],
)
def test_state_that_no_checkpoint_holds_is_named(held, says):
    found = causes(DifferenceKind.LOSS, Holding(held))
    assert found == (f"state that no checkpoint holds, {says}" if says else NO_STATE)


def test_three_places_of_such_state_are_enough():
    found = causes(DifferenceKind.LOSS, Holding([Engine(wrapper()) for _ in range(4)]))
    assert found.count("_io.TextIOWrapper") == 3


def test_a_kernel_may_be_another_one(monkeypatch):
    compiled = "a compiled kernel that is another one in another process"
    model = Holding(type("OptimizedModule", (nn.Module,), {})())
    assert causes(DifferenceKind.LOSS, model) == compiled
    model = LightningModule()
    model._compiler_ctx = {"compiler": "dynamo"}
    assert causes(DifferenceKind.LOSS, model).startswith(compiled)
    on_gpu = {"strategy": Fake(root_device=torch.device("cuda", 0))}
    says = "a kernel that is not deterministic (--trainer.deterministic=true)"
    assert causes(DifferenceKind.LOSS, **on_gpu) == says
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert causes(DifferenceKind.LOSS, **on_gpu) == NO_STATE
