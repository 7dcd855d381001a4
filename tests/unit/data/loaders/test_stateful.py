"""data/loaders/stateful.py: loaders that save where they are, and how that is proved."""

from multiprocessing import active_children

import pytest
import streams
import torch
from loader_epochs import (
    LOADERS,
    STATEFUL,
    TWO_WORKERS,
    Numbers,
    OfStreaming,
    begin,
    made,
    rest,
    stopped,
    train,
)
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import IterableDataset

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import make_resumable, plan
from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.state.graph import values


def test_an_epoch_that_ends_with_a_streams_last_batch_leaves_the_next_one_its_end():
    """The next epoch's first iteration is empty, and the loaders begin it again."""
    make = made("counted+resumable", "max_size_cycle", **STATEFUL)
    assert train(make, [(2, 0)]) == train(make)


def test_another_number_of_workers_cannot_continue_with_the_state_of_the_first():
    states = stopped(LOADERS["a state"], 2)
    combined, fetcher = begin(made("resumable", **STATEFUL, workers=1))
    says = (
        "streams.Resumable saved its state with 0 data workers, now there are 1; continue "
        "with num_workers=0"
    )
    with pytest.raises(UserError, match=says):
        combined.begin(fetcher, 0, 2, states)


def test_a_hook_between_epochs_sees_the_same_after_a_resume():
    """A loader that saves its state draws by the number of its iteration."""
    make = lambda: streams.StatefulDataLoader(Numbers(8), 4)  # noqa: E731

    def seen(combined: CombinedLoader) -> str:
        combined.epoch_begins(1)
        return str(list(combined.flattened[0]))

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    rest(fetcher)
    states = combined.states(fetcher, False)
    resumed, _ = begin(make)
    resumed.give_back(states)
    assert seen(resumed) == seen(combined) != seen(begin(make)[0])


class Unseeded(IterableDataset):
    """It draws an order as it begins, before its first sample."""

    def __iter__(self):
        return iter(torch.rand(8).tolist())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("dataset", [Unseeded(), Numbers(8)], ids=["at once", "one by one"])
def test_a_loader_with_a_state_draws_by_the_number_of_its_iteration(dataset):
    def loader():
        torch.rand(1)
        return make_resumable(streams.StatefulDataLoader(dataset, 4), 7)[0]

    first = loader()
    iterations = [str(list(first)) for _ in range(3)]
    assert len(set(iterations)) == 3
    second = loader()
    plan(second, 1, 0)
    assert [str(list(second)) for _ in range(2)] == iterations[1:]


def test_each_sample_of_a_loader_with_a_state_has_a_seed_of_its_own():
    def noise(batch_size: int) -> list[float]:
        loader, reason = make_resumable(
            streams.StatefulDataLoader(streams.Remembered(), batch_size), 7
        )
        assert reason
        return torch.cat([inputs for inputs, _ in loader]).tolist()

    assert noise(4) == noise(5)


def test_batches_leave_the_generators_of_a_loader_with_a_state_alone():
    """Its dataset saves them, and draws on from them."""

    def noise(batch_size: int) -> list[float]:
        combined, fetcher = begin(
            lambda: streams.StatefulDataLoader(streams.Resumable(), batch_size)
        )
        combined.begin(fetcher, 0, 0)
        return torch.cat([inputs for (inputs, _), _, _ in rest(fetcher)]).tolist()

    assert noise(4) == noise(5)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_has_ended_before_the_others_does_not_begin_anew(persistent):
    """At its end its dataset says that it is at its beginning; the epoch continues with the other
    worker.
    """
    make = made("uneven", **STATEFUL, **TWO_WORKERS, persistent=persistent)
    alone = train(make)
    assert train(make, [(0, 7), (1, 9)]) == alone
    assert [epoch for epoch, _, _ in alone] == [0] * 11 + [1] * 11 + [2] * 11


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_litdata(tmp_path, monkeypatch, workers):
    """litdata's loader saves its position, and counts its epochs.

    What samples draw in its workers is not part of its state.
    """
    monkeypatch.chdir(tmp_path)
    streams.Streamed().prepare_data()
    make = lambda: streams.Streamed(workers).train_dataloader()  # noqa: E731
    for limit in (0, 7):
        alone = train(make, limit=limit)
        assert len(alone) == 3 * (limit or 10) and len({batch for _, _, batch in alone}) == len(
            alone
        )
        assert train(make, [(0, 3), (1, 0), (1, 2), (2, 0)], limit) == alone


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_state_in_memory_that_copies_share_is_relied_on(workers):
    """A copy of the loader moves its position; tried or not, its epochs differ."""
    make = lambda: OfStreaming(workers)  # noqa: E731
    alone = train(make)
    assert len(alone) == 3 * 12 and len({batch for _, _, batch in alone}) == len(alone)
    assert train(make, [(0, 3), (0, 8), (1, 0), (1, 5), (2, 0)]) == alone
    assert train(make, [(0, 3), (1, 0), (1, 5), (2, 0)], limit=7) == train(make, limit=7)


def test_a_state_with_the_processs_generators_is_tried_on_copies():
    class Drawing(streams.Forgetful):
        def state_dict(self):
            return super().state_dict() | {"generator": torch.get_rng_state().tolist()}

    combined, fetcher = begin(Drawing)
    combined.begin(fetcher, 0, 0)
    assert type(combined.resumables[0]) is Redrawn


@pytest.mark.parametrize("stateful", [False, True])
def test_workers_stay_where_a_checkpoint_can_hold_what_is_in_them(stateful):
    children_before = set(active_children())
    combined, fetcher = begin(made("resumable", workers=1, persistent=True, stateful=stateful))
    workers = []
    for epoch in (0, 1):
        combined.begin(fetcher, epoch, 0)
        next(fetcher)
        workers.append({child.pid for child in set(active_children()) - children_before})
    combined.reset()
    assert len(workers[1]) == 1 and (workers[0] == workers[1]) == stateful


def test_a_batch_ahead_that_no_checkpoint_can_hold_is_reported():
    class Thing:
        pass

    def make():
        return streams.StatefulDataLoader(
            streams.Resumable(), 4, collate_fn=lambda samples: Thing()
        )

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    assert combined.why.endswith("Thing, which cannot be saved") and combined.why.startswith(
        "a batch holds a test_stateful."
    )
    assert values.decode(combined.states(fetcher, True)["ahead"]) == []


DRAWN = [0]


def counted(rows, kept=[0]):  # noqa: B006 (what a default keeps is meant)
    DRAWN[0] += 1
    kept[0] += 1
    return DRAWN[0], kept[0]


def test_a_trial_on_copies_leaves_no_marks_in_what_functions_keep():
    class Mapped(streams.Keeping):
        def __iter__(self):
            return map(counted, super().__iter__())

    epochs = train(Mapped)
    assert len(epochs) == DRAWN[0] == counted.__defaults__[0][0] == 30


def test_states_are_taken_only_when_they_are_asked_for(capsys):
    class Telling(streams.Keeping):
        def state_dict(self):
            print("taken")  # a variable is given back after a trial
            return super().state_dict()

    train(Telling)
    assert capsys.readouterr().out.count("taken") == 1  # asked once: can a checkpoint hold it?
    train(Telling, [(0, 2)])
    assert capsys.readouterr().out.count("taken") == 2


def test_a_state_that_no_checkpoint_can_hold_is_not_needed():
    class Odd(streams.Keeping):
        def state_dict(self):
            return super().state_dict() | {"odd": self}

    assert train(Odd, [(0, 2), (1, 1)]) == train(Odd)


class Passes(IterableDataset):
    """Samples in an order of each pass; workers have different numbers of them.

    Args:
        begins_anew: When it goes back to its beginning: "asked" for another pass, at its "end", or
            once it has given the "rest" of the pass whose state it got.
    """

    def __init__(self, begins_anew: str) -> None:
        self.begins_anew = begins_anew
        self.at = self.passes = self.first = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        size = 8 + 8 * worker
        if self.begins_anew == "rest":
            self.at, self.first = self.first, 0
        elif self.begins_anew == "asked" and self.at == size:
            self.at = 0
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.passes))
        while self.at < size:
            self.at += 1
            yield 100 * worker + order[self.at - 1]
        if self.begins_anew != "rest":
            self.passes += 1
        if self.begins_anew == "end":
            self.at = 0

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at = self.first = state["at"]
        self.passes = state["passes"]


@pytest.mark.parametrize("begins_anew", ["asked", "end", "rest"])
def test_workers_that_stay_begin_each_pass_whenever_their_dataset_does(begins_anew):
    def make():
        return streams.StatefulDataLoader(
            Passes(begins_anew), 2, num_workers=2, persistent_workers=True
        )

    assert train(make, [(0, 3), (1, 0), (1, 4), (2, 0)]) == train(make)


def test_an_epoch_that_has_only_its_end_left_leaves_the_next_one_whole():
    """Lightning asks for no batch after the last one, as in a validation that was stopped."""

    def second_epoch(stops: bool) -> list[str]:
        combined, fetcher = begin(OfStreaming)
        combined.begin(fetcher, 0, 0)
        done = len(rest(fetcher))
        if stops:
            states = combined.states(fetcher, True)
            combined, fetcher = begin(OfStreaming)
            combined.begin(fetcher, 0, done, states)
        combined.begin(fetcher, 1, 0)
        return [str(batch) for batch in rest(fetcher)]

    assert second_epoch(stops=True) == second_epoch(stops=False)
    assert len(second_epoch(stops=True)) == 12


class Longer(OfStreaming):
    """It has more batches than its length says, as Streaming's of parts of an epoch."""

    def __len__(self) -> int:
        return 10


def test_batches_beyond_a_loaders_length_are_not_those_of_the_next_epoch():
    alone = train(Longer)
    assert len(alone) == 30 and train(Longer, [(1, 0), (2, 0)]) == alone
