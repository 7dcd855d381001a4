"""data/loaders/redrawn.py: loaders that start over and are drawn to the position."""

import functools
import itertools
import queue
import random
import re
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from threading import Thread
from types import SimpleNamespace

import pytest
import streams
import torch
from loader_epochs import (
    LOADERS,
    STATEFUL,
    TWO_WORKERS,
    Numbers,
    begin,
    made,
    of_unpacking_nodes,
    rest,
    stopped,
    train,
)
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
from torchdata import nodes

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.loaders import strange, unplaced
from sagemaker_lightning.data.loaders.strange import Strange
from sagemaker_lightning.state.graph import values


def test_a_stream_without_batches_gives_none():
    assert train(lambda: DataLoader(Numbers(0), 4)) == []


@pytest.mark.parametrize(
    "name",
    [
        "a buffer",
        "a stream that counts",
        "a dataset with a state",
        "a loader of its own",
        "lazy",
        "a generator",
        "the longest, and others again",
    ],
)
def test_to_look_whether_batches_can_be_drawn_again_changes_none(name):
    assert train(LOADERS[name], proves=True) == train(LOADERS[name], proves=False)


def endless():
    """Yield numbers."""
    yield from itertools.count()


class OfOneStream(IterableDataset):
    """Gives itself as its iterator, and goes through one generator."""

    def __init__(self) -> None:
        self.numbers = endless()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.numbers)


class KeepsStreams:
    """A loader of batches from a generator that it keeps, as DomainBed's."""

    def __init__(self) -> None:
        self.streams = [endless(), endless()]

    def __iter__(self):
        while True:
            yield [next(stream) for stream in self.streams]


@pytest.mark.parametrize("make", [lambda: DataLoader(OfOneStream(), 2), KeepsStreams])
def test_no_batch_of_a_stream_that_all_iterations_share_is_lost(make):
    assert train(make, limit=3, proves=True) == train(make, limit=3, proves=False)


def test_nodes_that_draw_ahead_when_they_get_a_state_lose_nothing_by_that():
    assert train(of_unpacking_nodes, proves=True) == train(of_unpacking_nodes, proves=False)


class Divided(IterableDataset):
    """Reads two shards, of which each of two data workers has one, as datasets of Hugging Face."""

    def __init__(self) -> None:
        self.given: dict | None = None

    def state_dict(self) -> dict:
        return {"read of each": [0, 0]}

    def load_state_dict(self, state: dict) -> None:
        self.given = state

    def __iter__(self):
        worker = get_worker_info()
        if self.given and worker and len(self.given["read of each"]) != 1:
            raise IndexError("this worker has one shard")
        yield from Numbers(8)


def test_data_workers_are_not_given_a_state_that_is_there():
    make = lambda: DataLoader(Divided(), 4, num_workers=2)  # noqa: E731
    assert train(make, proves=True) == train(make, proves=False)


def test_a_stream_of_one_batch():
    make = lambda: DataLoader(Numbers(4), 4)  # noqa: E731
    assert [place[:2] for place in train(make)] == [(epoch, 0) for epoch in range(3)]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_the_first_rank_tells_what_a_resumed_epoch_takes(capsys, monkeypatch, rank, lines):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    states = stopped(LOADERS["a buffer"], 2) | {"why": "a reason"}
    assert not capsys.readouterr().out
    combined, fetcher = begin(LOADERS["a buffer"])
    combined.begin(fetcher, 0, 2, states)
    output = capsys.readouterr().out
    drawn_again = (
        r"the training data cannot start at a batch \(streams\.Buffered\): the 3 batches before "
        r"this one were drawn again, in \d\.\d s\n"
    )
    differs = "a reason: the rest of this epoch differs from that of an uninterrupted run\n"
    assert len(re.findall(drawn_again, output)) == output.count(differs) == lines
    assert output.count("\n") == 2 * lines


def test_nothing_is_said_of_an_epoch_that_begins(capsys):
    states = stopped(LOADERS["a buffer"], 0) | {"why": "a reason", "ahead": values.encode([])}
    combined, fetcher = begin(LOADERS["a buffer"])
    combined.begin(fetcher, 0, 0, states)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("options, rank, begin_anew", [({}, 0, 1), ({}, 1, 0), (STATEFUL, 0, 0)])
def test_workers_that_stay_are_said_to_begin_anew(capsys, monkeypatch, options, rank, begin_anew):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    begin(made("resumable", **TWO_WORKERS, **options, persistent=True))
    begin(streams.Steady)
    warning = "persistent_workers: the workers of streams.Resumable start over with each epoch"
    output = capsys.readouterr().out
    assert output.count(warning) == output.count("\n") == begin_anew


class Wrapping:
    """Draws from a DataLoader that it holds, as timm's PrefetchLoader."""

    def __init__(self, **options) -> None:
        self.loader = DataLoader(Noisy(), 4, shuffle=True, **options)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            yield batch + 1


class Noisy(Dataset):
    """Twenty samples, with noise."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        return index + torch.rand(1)


STAY = {"num_workers": 2, "persistent_workers": True}


def test_data_workers_that_a_wrapped_loader_keeps_draw_the_same_after_a_resume():
    make = functools.partial(Wrapping, **STAY)
    assert train(make, [(0, 2), (1, 0), (1, 3)]) == train(make)


def test_other_data_workers_of_a_wrapped_loader_are_refused_within_an_epoch():
    states = stopped(functools.partial(Wrapping, **STAY), 3)
    combined, fetcher = begin(Wrapping)
    with pytest.raises(UserError, match="with 2 data workers, now there are 0"):
        combined.begin(fetcher, 0, 3, states)


def test_a_state_that_a_librarys_loader_does_not_take_is_named():
    """ParallelMapper has another state without workers."""

    def made_with(workers: int) -> nodes.Loader:
        sampler = nodes.SamplerWrapper(RandomSampler(range(8)))
        return nodes.Loader(nodes.ParallelMapper(sampler, float, workers, method="thread"))

    combined, fetcher = begin(lambda: made_with(2))
    combined.begin(fetcher, 0, 0)
    rest(fetcher)
    states = combined.states(fetcher, False)
    combined.reset()
    resumed, other = begin(lambda: made_with(0))
    with pytest.raises(UserError, match="does not take the state that it has saved .KeyError"):
        resumed.give_back(states)
        resumed.begin(other, 1, 0, states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.soak), 2]
)
@pytest.mark.parametrize(
    "mode",
    [
        "all",
        *(
            pytest.param(mode, marks=pytest.mark.soak)
            for mode in ("weights", "batches", "parallel")
        ),
    ],
)
def test_litdata_of_several_datasets(tmp_path, monkeypatch, workers, mode):
    """Here its state is right between epochs only, so an epoch is drawn again."""
    monkeypatch.chdir(tmp_path)
    streams.Mixed().prepare_data()
    make = lambda: streams.Mixed(workers, mode).train_dataloader()  # noqa: E731
    alone = train(make)
    last_batch = max(batch for epoch, batch, _ in alone if epoch == 1)
    assert len({batch for _, _, batch in alone}) == len(alone)
    assert train(make, [(0, 4), (1, 0), (1, last_batch), (2, 0)]) == alone


def test_what_a_run_has_changed_in_a_stream_is_changed_after_a_resume():
    """What was drawn before is drawn again from the stream as it was."""
    make = lambda: DataLoader(streams.Buffered(), 8)  # noqa: E731

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    next(fetcher)
    combined.flattened[0].dataset.level = 5.0
    next(fetcher)
    states = combined.states(fetcher, True)
    resumed, other = begin(make)
    resumed.begin(other, 0, 2, states)
    assert resumed.flattened[0].dataset.level == 5.0
    assert str(rest(other)) == str(rest(fetcher))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_batch_is_drawn_twice_once(workers, capsys):
    """Not where workers have to draw an epoch's first batches again, which takes long enough."""

    class Watched(streams.Steady):
        num_workers = workers

        def __iter__(self):
            print("iterated")  # a variable is given back after a trial
            return super().__iter__()

    def iterations():
        return capsys.readouterr().out.count("iterated")

    combined, fetcher = begin(Watched)
    combined.begin(fetcher, 0, 0, proves=True)
    assert iterations() == 2
    states = combined.states(fetcher, True)
    rest(fetcher)
    combined.begin(fetcher, 1, 0, proves=True)
    assert iterations() == 1
    combined, fetcher = begin(Watched)
    combined.begin(fetcher, 0, 1, states, proves=True)
    assert iterations() == (1 if workers else 2)


def test_what_is_not_the_same_when_drawn_again_is_reported():
    class Timed(IterableDataset):
        ticks = iter(range(1000))

        def __iter__(self):
            yield from (float(next(self.ticks)) for _ in range(12))

    def why(make) -> str:
        combined, fetcher = begin(make)
        combined.begin(fetcher, 0, 0, proves=True)
        return combined.why

    class Own(DataLoader):
        pass

    each_time = "draws other batches each time, perhaps also in a resumed run"
    assert why(lambda: streams.Unsteady()) == f"streams.Unsteady {each_time}"
    assert why(lambda: DataLoader(Timed(), 4)).endswith(f"Timed {each_time}")
    assert why(lambda: Own(Timed(), 4)).endswith(f"Own {each_time}")
    assert why(lambda: [streams.Steady(), streams.Unsteady()]) == f"streams.Unsteady {each_time}"
    for repeatable in (
        streams.Steady,
        made("buffered"),
        made("points"),
        made("resumable", **STATEFUL),
    ):
        assert why(repeatable) == ""


class Rollouts(IterableDataset):
    """Its iterations change what the checkpoint has as the model's, such as an environment."""

    drawn = 0

    def __iter__(self):
        for _ in range(4):
            Rollouts.drawn += 1
            yield float(Rollouts.drawn)


@pytest.mark.parametrize("wrap", [lambda data: DataLoader(data, None), lambda data: data])
def test_who_draws_others_each_time_is_asked_once(wrap):
    """A resumed run would else draw one batch more than the run that was left alone."""

    def make():
        return wrap(Rollouts())

    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0, proves=True)
    rest(fetcher)
    states = combined.states(fetcher, False)
    combined, fetcher = begin(make)
    combined.give_back(states)
    Rollouts.drawn = before = 100
    combined.begin(fetcher, 1, 0, states, proves=True)
    rest(fetcher)
    assert Rollouts.drawn == before + 4
    assert "draws other batches each time" in combined.why


class Forever(IterableDataset):
    """Keeps a generator, which no record holds, from one epoch to the next."""

    kept = None

    def __iter__(self):
        if self.kept is None:
            self.kept = iter(index for _ in range(9) for index in torch.randperm(6).tolist())
        for _ in range(8):
            yield next(self.kept)


def test_a_generator_that_has_drawn_the_batches_before_continues_in_the_first_epoch():
    """No record holds it. In later epochs it starts over, and a line names it."""
    alone = train(lambda: DataLoader(Forever(), 2))
    assert train(lambda: DataLoader(Forever(), 2), [(0, 1)]) == alone
    assert train(lambda: DataLoader(Forever(), 2), [(0, 3)]) == alone
    assert len(train(lambda: DataLoader(Forever(), 2), [(1, 2)])) == len(alone)


class Policy(IterableDataset):
    """What an agent has seen, which acts by the weights that are trained."""

    def __init__(self, is_trained: bool = True) -> None:
        self.agent = torch.nn.Linear(2, 2).requires_grad_(is_trained)
        self.acted = 0

    def __iter__(self):
        seen = torch.zeros(2)
        for _ in range(4):
            self.acted += 1
            with torch.no_grad():
                seen = self.agent(seen)
            yield seen


@pytest.mark.parametrize("wrap", [lambda data: DataLoader(data, None), lambda data: data])
def test_what_is_drawn_by_trained_weights_is_not_drawn_again(wrap):
    """Within an epoch, a resumed run has other weights than at its beginning."""
    policy = Policy()
    combined, fetcher = begin(lambda: wrap(policy))
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why.endswith("Policy draws by weights that training may change")
    assert len(rest(fetcher)) == 4 == policy.acted
    states = combined.states(fetcher, False)
    combined, fetcher = begin(lambda: wrap(Policy()))
    combined.give_back(states)
    combined.begin(fetcher, 1, 0, states, proves=True)
    assert combined.why.endswith("Policy draws by weights that training may change")
    combined, fetcher = begin(lambda: wrap(Policy(is_trained=False)))
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why == ""


class InThread:
    """A loader that draws ahead, in a thread."""

    def __iter__(self):
        batches = queue.Queue(1)
        thread = Thread(target=lambda: [batches.put(number) for number in range(4)], daemon=True)
        thread.start()
        for _ in range(4):
            yield batches.get()


class Reading(DataLoader):
    """A loader whose data are read by threads of a library."""

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
            yield from super().__iter__()


def test_a_loader_that_reads_by_a_librarys_threads_is_not_reported():
    combined, fetcher = begin(lambda: Reading(Numbers(8), 4))
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why == ""


def test_a_loader_that_draws_in_a_thread_is_reported():
    combined, fetcher = begin(InThread)
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why.startswith("test_redrawn.InThread draws in a thread of its own, so ")
    assert [batch for batch, _, _ in rest(fetcher)] == [0, 1, 2, 3]


class InPool:
    """A loader that prepares its batches in a pool of threads, by numbers that these draw."""

    def __init__(self, pool=ThreadPoolExecutor) -> None:
        self.pool = pool(1)
        self.rng = random.Random(1)

    def __iter__(self):
        prepared = [self.pool.submit(self.rng.random) for _ in range(4)]
        yield from (each.result() for each in prepared)


class OfThreadPool(ThreadPool):
    """A pool of multiprocessing's, asked as those of concurrent.futures are."""

    def submit(self, function):
        asked = self.apply_async(function)
        return SimpleNamespace(result=asked.get)


class Shuffled(InPool):
    """One that draws nothing in its pool: the order is drawn as its loader is iterated over."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = None
        self.loader = DataLoader(range(8), 4, shuffle=True, generator=torch.Generator())

    def __iter__(self):
        yield from (self.pool.submit(batch.add, 1).result() for batch in self.loader)


class InLocalPool(InPool):
    """One that makes its pool for each iteration."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            yield from pool.map(lambda _: self.rng.random(), range(4))


@pytest.mark.parametrize("make", [InPool, lambda: InPool(OfThreadPool), InLocalPool])
def test_a_loader_that_draws_in_a_pool_of_threads_is_reported_and_left_alone(make):
    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0, proves=True)
    assert re.match(r"test_redrawn\.In\w*Pool draws in a thread of its own, so ", combined.why)
    assert len(list(rest(fetcher))) == 4


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("make", [InThread, InPool])
def test_a_loader_that_was_left_alone_still_is_after_an_epochs_end(make, epochs):
    combined, fetcher = begin(make)
    for epoch in range(epochs):
        combined.begin(fetcher, epoch, 0, proves=True)
        rest(fetcher)
    states = combined.states(fetcher, False)
    combined, fetcher = begin(make)
    combined.give_back(states)
    combined.begin(fetcher, epochs, 0, states, proves=True)
    assert type(combined.resumables[0]) is Strange
    assert len(list(rest(fetcher))) == 4


def test_a_loader_is_left_alone_for_a_reason_that_there_is():
    combined, fetcher = begin(InThread)
    states = combined.states(fetcher, False)
    states["loaders"][0]["strange"] = "says something else"
    with pytest.raises(UserError, match="a checkpoint holds"):
        combined.give_back(states)


def test_a_loader_that_draws_nothing_in_its_pool_of_threads_is_not_reported():
    combined, fetcher = begin(Shuffled)
    combined.begin(fetcher, 0, 0, proves=True)
    assert combined.why == "" and len(list(rest(fetcher))) == 2


@pytest.mark.slow
def test_another_number_of_workers_cannot_draw_the_batches_again():
    """They share a stream's shards: other batches would be left out."""
    states = stopped(made("sharded", **TWO_WORKERS), 2)
    combined, fetcher = begin(made("sharded", workers=1))
    says = (
        "streams.Sharded has drawn this epoch's batches with 2 data workers, now there "
        "are 1; continue with num_workers=2"
    )
    with pytest.raises(UserError, match=says):
        combined.begin(fetcher, 0, 2, states)
    combined.reset()


@pytest.mark.parametrize("workers", [0, 1])
def test_another_number_of_workers_between_epochs_is_reported(capsys, workers):
    combined, fetcher = begin(made("sharded"))
    combined.begin(fetcher, 0, 0)
    rest(fetcher)
    states = combined.states(fetcher, within=False)
    resumed, fetcher = begin(made("sharded", workers=workers))
    resumed.give_back(states)
    resumed.begin(fetcher, 1, 0, states)
    resumed.reset()
    line = (
        "streams.Sharded had 0 data workers, and has 1 now: a resumed run has other batches than "
        "one left alone\n"
    )
    assert capsys.readouterr().out.count(line) == workers


class Tally:
    """What a dataset counts while it draws."""

    def __init__(self) -> None:
        self.count = 0


TALLY = Tally()


class Tallying(IterableDataset):
    """It has what its code reads as a variable, too."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def __iter__(self):
        for _ in range(4):
            TALLY.count += 1
            yield TALLY.count


def test_a_first_batch_that_is_drawn_twice_leaves_a_variable_as_one_draw_does(monkeypatch):
    monkeypatch.setattr(TALLY, "count", 0)
    seen = train(lambda: DataLoader(Tallying(TALLY), batch_size=None), proves=True)
    assert [batch for _, _, batch in seen[:4]] == ["1", "2", "3", "4"]
    assert TALLY.count == len(seen)


class AtOnce:
    """A loader whose thread draws as soon as it is iterated over, by a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self):
        batches = queue.Queue(1)
        draws = Thread(
            target=lambda: [batches.put(self.rng.random()) for _ in range(4)], daemon=True
        )
        draws.start()
        return (batches.get() for _ in range(4))


def test_a_generator_from_which_a_thread_draws_is_not_seeded_meanwhile(monkeypatch):
    def drawn() -> list[float]:
        combined, fetcher = begin(AtOnce)
        combined.begin(fetcher, 0, 0, proves=True)
        assert "draws in a thread of its own" in combined.why
        return [batch for batch, _, _ in rest(fetcher)]

    during = []
    reseed = unplaced.generators.reseed
    before = strange.users_threads(AtOnce())  # those that other tests have left

    def watched(seeded, number):
        during.append(bool(strange.users_threads(AtOnce()) - before))
        reseed(seeded, number)

    monkeypatch.setattr(unplaced.generators, "reseed", watched)
    first = drawn()
    assert during == [False] and drawn() == first


class BeginsPool(IterableDataset):
    """Makes what it draws with as it is first iterated over, as streaming's datasets do."""

    def __iter__(self):
        if not hasattr(self, "pool"):
            self.pool = ThreadPoolExecutor(1)
        yield from self.pool.map(self.sample, range(4))

    def sample(self, number: int) -> int:
        assert self.pool
        return number


def test_data_whose_pool_the_first_draw_begins_are_not_put_back():
    dataset = BeginsPool()
    combined, fetcher = begin(lambda: DataLoader(dataset, 1))
    combined.begin(fetcher, 0, 0, proves=True)
    assert "draws in a thread of its own" in combined.why
    assert [int(batch) for batch, _, _ in rest(fetcher)] == [0, 1, 2, 3]
    dataset.pool.shutdown()
