"""data/loaders/strange.py: loaders that are left as Lightning has them."""

import itertools
import threading
from types import SimpleNamespace

import pytest
from loader_epochs import (
    EPOCHS,
    begin,
    rest,
    train,
)
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from sagemaker_lightning.data.loaders import strange
from sagemaker_lightning.data.seeding import Seeding


class KeepingWorkers(DataLoader):
    """Goes on with one iterator over all epochs, as timm's MultiEpochsDataLoader."""

    def __init__(self, **options) -> None:
        super().__init__(range(8), 2, **options)
        vars(self)["batch_sampler"] = itertools.cycle(list(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        yield from itertools.islice(self.iterator, 4)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=["no workers", "workers"],
)
@pytest.mark.parametrize("stage", ["training", "validation"])
def test_a_loader_that_keeps_an_iterator_is_left_as_it_is(options, stage):
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]] * EPOCHS
    if stage == "validation":
        trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=4)
        seeding = Seeding(7)
        loader = seeding._exact(trainer, KeepingWorkers(**options), RunningStage.VALIDATING)
        combined = CombinedLoader([loader], "sequential")
        seeding.together(trainer, combined, "val")
        drawn = [batch.tolist() for _ in range(EPOCHS) for batch, _, _ in combined]
    else:
        combined, fetcher = begin(lambda: KeepingWorkers(**options))
        drawn = []
        for epoch in range(EPOCHS):
            combined.begin(fetcher, epoch, 0, proves=True)
            drawn += [batch.tolist() for batch, _, _ in rest(fetcher)]
        assert combined.why == (
            "test_strange.KeepingWorkers keeps an iterator from one epoch to the next, so it "
            "draws as with Lightning alone, and a resumed run may have other batches than "
            "one left alone"
        )
    combined.reset()
    assert drawn == expected


class KeepingLater(KeepingWorkers):
    """Makes that iterator when it is first iterated over, as timm 1.0.31's."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.iterator = None

    def __iter__(self):
        if self.iterator is None:
            self.iterator = DataLoader.__iter__(self)
        for _ in range(len(self)):
            yield next(self.iterator)


class Wrapping:
    """Wraps a loader, as timm's PrefetchLoader."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        yield from self.loader


class BeginningAnew(Wrapping):
    """Keeps an iterator, and makes another one for each iteration."""

    def __iter__(self):
        self.iterator = iter(self.loader)
        yield from self.iterator


@pytest.mark.parametrize("make", [KeepingLater, lambda: Wrapping(KeepingLater())])
def test_an_iterator_that_is_kept_once_it_is_made_is_left_as_it_is(make):
    combined, fetcher = begin(make)
    drawn = []
    for epoch in range(EPOCHS):
        combined.begin(fetcher, epoch, 0, proves=True)
        drawn += [batch.tolist() for batch, _, _ in rest(fetcher)]
    assert drawn == [[0, 1], [2, 3], [4, 5], [6, 7]] * EPOCHS
    assert "keeps an iterator from one epoch to the next, so it draws as" in combined.why
    combined.reset()


def test_an_iterator_that_is_made_for_each_iteration_is_not_kept():
    make = lambda: BeginningAnew(DataLoader(range(8), 2))  # noqa: E731
    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0, proves=True)
    assert not combined.why
    assert train(make, [(0, 2), (1, 1)]) == train(make)


class Own:
    """A loader of a class of the user's."""

    def __iter__(self):
        return iter(range(4))


def wait(event: threading.Event) -> None:
    event.wait(10)


def test_threads_of_the_users_draw_for_no_loader_of_a_library():
    ends = threading.Event()
    thread = threading.Thread(target=wait, args=(ends,))
    thread.start()
    try:
        assert strange.users_threads(DataLoader(range(4))) == set()
        assert thread in strange.users_threads(Own())
    finally:
        ends.set()
        thread.join()
