"""How samples are drawn, in a loader's process or a data worker: seeded.

torch makes a fetcher for each iteration of a DataLoader, in the process that draws the samples. So
changing the fetchers changes every way of iterating over a loader, whether its class is torch's, a
library's or a user's.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterDataPipe

from sagemaker_lightning.compat.random_generators import replace_entropy
from sagemaker_lightning.compat.torch_data import (
    fetcher_function,
    is_map_style,
    replace_fetcher_function,
)
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.pool_draws import PoolDraws
from sagemaker_lightning.data.seeded_indices import (
    Draws,
    SeededIndex,
    SeededIndices,
    UserGenerators,
    number_of,
    seed_all,
    unseeded,
)
from sagemaker_lightning.process import allocator
from sagemaker_lightning.process.child_signals import end_with_the_loader
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.graph.nodes import GENERATOR
from sagemaker_lightning.state.graph.state import GraphState


def has_state(owner: Any) -> bool:
    """Return whether an object saves and loads its own state by itself.

    It does if it has `state_dict` and `load_state_dict`, and `state_dict` needs no argument.
    """
    saves = getattr(owner, "state_dict", None)
    loads = getattr(owner, "load_state_dict", None)
    if not callable(saves) or not callable(loads):
        return False
    try:
        inspect.signature(saves).bind()
    except (TypeError, ValueError):
        return False
    return True


@dataclass
class Plan:
    """What decides how a loader's samples are drawn.

    A loader that turns its indices into keys passes this on in them. For a loader that iterates
    over its samples in its own way, and knows how far it is, each sample's seed is a function of
    `seed`, of the iteration and of the number of samples drawn in it.
    """

    seed: tuple[Any, ...] | None = None
    turn: int = 0
    """Number of the iteration that the next fetcher is made for."""
    first: tuple[tuple[int, int], ...] = ()
    """For each worker, which worker's samples it continues with, and how many of these were drawn
    before; () if the loader knows it itself."""
    samples_draw: bool | None = None
    """Whether samples draw random numbers in the loader's process; None before the first batch."""
    is_followed_by_seed: bool = False
    """Whether the generators are seeded, in the loader's process, before anything draws after a
    batch."""
    warned: Tensor | None = None
    """uint8 [2], shared by all workers: 1 once a line has said that a dataset changes there, and
    that it draws in a pool of threads; None if nothing is said."""

    def begin(self, turn: int, first: tuple[tuple[int, int], ...] = ()) -> None:
        """Plan the next iteration.

        Args:
            turn: Its number.
            first: The value of the attribute.
        """
        self.turn = turn
        self.first = first

    def next_turn(self) -> None:
        """Note that the fetchers of an iteration are made."""
        self.turn += 1


END = object()


class SeededSamples:
    """The samples of an iterable dataset, each drawn with a seed of its own.

    Only the process's generators are seeded. All workers have the same copy of a generator that a
    dataset holds. They may rely on all of them drawing the same order from it, and each takes its
    part of that order.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        seed: tuple[Any, ...],
        number: int,
        user_generators: UserGenerators,
    ) -> None:
        self.samples: Any = samples  # it may have a state
        self.seed = seed
        self.number = number
        self.user_generators = user_generators

    def __next__(self) -> Any:
        seed_all("sample", *self.seed, self.number)
        self.number += 1
        return next(self.samples)


class SeededSamplesWithState(SeededSamples):
    """The samples of an iterable dataset that saves how far it is.

    If a worker had reached its end before the others, it is at its end again after a resume, even
    if the dataset's own state says that it is at its beginning.
    """

    NUMBER = "samples_drawn"
    over = False

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.over = True
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the samples' state, how many were drawn, and the generators' states."""
        self.user_generators.more()
        generator_states = {
            path: GENERATOR.content(generator)
            for path, generator in self.user_generators.generators.items()
        }
        return {
            "samples": self.samples.state_dict() if has_state(self.samples) else None,
            self.NUMBER: (*self.seed, self.number),
            "generators": generator_states,
            "over": self.over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state["samples"] is not None:
            self.samples.load_state_dict(state["samples"])
        if state.get("over"):
            self._go_to_end()
        *seed, self.number = state[self.NUMBER]
        self.seed = tuple(seed)
        for path, generator in generators.find(self.user_generators.roots).items():
            if path in state["generators"]:
                GENERATOR.fill(generator, None, [], state["generators"][path])

    def _go_to_end(self) -> None:
        """Have no more samples, as an iteration that was at its end.

        A dataset that gives the rest of an iteration, once it is loaded, has to give that of this
        one; it has none. Another one would begin the next iteration.
        """
        dataset: Any = self.user_generators.roots.get("dataset")
        if has_state(dataset):
            state = copy.deepcopy(dataset.state_dict())
            if next(self.samples, END) is not END:
                dataset.load_state_dict(state)
        self.samples = iter(())
        self.over = True


class Fetchers:
    """Makes the fetchers of one loader in one process.

    Args:
        plan: What decides how samples are drawn.
        roots: The objects that may hold generators, by name: dataset, collate function, and in a
            worker its worker_init_fn.
        worker: Number of the data worker; None in the loader's own process.
    """

    def __init__(self, plan: Plan, roots: dict[str, Any], worker: int | None = None) -> None:
        self.plan = plan
        self.worker = worker
        self.turn = self.first_turn = plan.turn
        self.user_generators = UserGenerators(roots)
        self.watch = Watch(roots, plan.warned if worker == 0 else None)
        self.draws = Draws()
        self.name = type(roots.get("dataset")).__qualname__
        maker = fetcher_function()
        self.make_fetcher = getattr(maker, "__wrapped__", maker)

    def install(self) -> Callable[..., Any]:
        """Replace torch's maker of fetchers, and return the one that was there."""
        maker_before = fetcher_function()

        @functools.wraps(self.make_fetcher)
        def create(kind: int, dataset: Any, *rest: Any) -> Any:
            return self.create(kind, dataset, *rest)

        replace_fetcher_function(create)
        return maker_before

    def create(self, kind: int, dataset: Any, *rest: Any) -> Any:
        """Return a fetcher for the next iteration, whose samples are seeded."""
        with self._watching_pools():
            fetcher = self._create(kind, dataset, *rest)
        fetcher.fetch = functools.partial(self._fetch_first, fetcher, fetcher.fetch)
        return fetcher

    def _fetch_first(self, fetcher: Any, fetch: Callable[..., Any], indices: Any) -> Any:
        """Return the first batch of a fetcher, which fetches the others as `fetch` does."""
        fetcher.fetch = fetch
        with self._watching_pools():
            return fetch(indices)

    @contextmanager
    def _watching_pools(self) -> Iterator[None]:
        """Print, once, if what is drawn in this context is drawn in a pool of threads."""
        warned = self.plan.warned
        if warned is None or warned[1]:
            yield
            return
        draws = PoolDraws()
        with draws.watching():
            yield
        if draws.found:
            warned[1] = 1
            log.warning(
                f"{self.name} draws random numbers in a pool of threads, in no fixed order: this "
                "run is not exact, interrupted or not; draw before the pool gets a task, or from "
                "a generator of the task's own"
            )

    def _create(self, kind: int, dataset: Any, *rest: Any) -> Any:
        turn = self.turn
        self.turn = self.turn + 1
        if self.plan.seed is None or isinstance(dataset, IterDataPipe):
            fetcher = self.make_fetcher(kind, dataset, *rest)
        elif is_map_style(kind):
            fetcher = self.make_fetcher(kind, dataset, *rest)
            fetcher.fetch = functools.partial(
                self._fetch_seeded, fetcher.fetch, (*self.plan.seed, turn)
            )
        else:
            seed = (*self.plan.seed, turn)
            worker = self.worker or 0
            self.user_generators.find()
            generators.reseed(self.user_generators.generators, number_of("generators", *seed))
            seed_all("samples", *seed, worker)
            fetcher = self.make_fetcher(kind, dataset, *rest)
            first = 0
            # A worker that stays has the plan of the iteration for which it was started.
            if self.plan.first and turn == self.first_turn:
                worker, first = self.plan.first[worker]
            drawn_class = (
                SeededSamplesWithState
                if has_state(fetcher.dataset_iter) or has_state(dataset)
                else SeededSamples
            )
            fetcher.dataset_iter = drawn_class(
                fetcher.dataset_iter, (*seed, worker), first, self.user_generators
            )
        return fetcher

    def _fetch_seeded(self, fetch: Callable[..., Any], seed: tuple[Any, ...], indices: Any) -> Any:
        """Return a batch, drawn with its seeds.

        If drawing it has made new generators, which could not be seeded before, it is drawn again.
        """
        if not self.user_generators.batches:
            # Not before: a resumed run may still restore generators once it has the iterator.
            self.user_generators.find()
        try:
            batch = self._drawn(fetch, seed, indices)
        except StopIteration:
            log.warning(
                f"{self.name}, or what it calls for an item, raised StopIteration: torch takes "
                "this for the end of the epoch's data, and no more of it is used; catch it where "
                "next() is called, or give next() a default"
            )
            raise
        self.watch.look(self.user_generators.batches)
        return batch

    def _drawn(self, fetch: Callable[..., Any], seed: tuple[Any, ...], indices: Any) -> Any:
        if isinstance(indices, SeededIndices):
            return self._fetch_keys(fetch, indices)
        keys = indices
        if not isinstance(indices, SeededIndex):
            keys = (
                SeededIndices(indices, seed, indices)
                if isinstance(indices, list) and indices
                else SeededIndex(indices, seed, indices)
            )
        batch = fetch(keys.begin(self.user_generators))
        if self.user_generators.more():
            batch = fetch(keys.begin(self.user_generators))
        return batch

    def _fetch_keys(self, fetch: Callable[..., Any], keys: SeededIndices) -> Any:
        """Return a batch whose samples have seeds of their own, if they need any.

        A seed for each sample takes longer than to make a small sample. While samples depend on
        none, there is at most one for each batch, which is drawn again with all seeds if a sample
        did. The first batch has all seeds: so it is drawn once if samples draw, as they mostly do
        in each batch or never.
        """
        draws = self.draws
        if self.plan.samples_draw is False and not self.user_generators.generators:
            if self.worker is None and not self.plan.is_followed_by_seed:
                keys.seed_as_after_last()
            if self.worker is None or draws.states is None:  # in a worker, nobody else draws
                draws.begin()
            try:
                with draws:
                    batch = fetch(keys.copy())
            except Exception:
                if not draws.look():
                    raise
            if not draws.look() and not self.user_generators.more():
                return batch
            self.plan.samples_draw = True
        if self.plan.samples_draw is None:
            draws.states = None
            with draws:
                batch = fetch(keys.begin(self.user_generators, draws))
            self.plan.samples_draw = draws.look()
        else:
            batch = fetch(keys.begin(self.user_generators))
        if self.user_generators.more():
            batch = fetch(keys.begin(self.user_generators))
        return batch


class Watch:
    """Prints, once, which attributes a dataset changes of itself in a data worker.

    No checkpoint contains them.
    """

    def __init__(self, roots: dict[str, Any], warned: Tensor | None) -> None:
        self.roots = roots
        self.warned = warned
        self.state = GraphState(lambda: roots)

    def look(self, batches: int) -> None:
        """Look whether the objects have changed, and print which attributes if so.

        It is done after the first batches, after the 64th and whenever their number has doubled: it
        reads all that the dataset holds. The first batch may create what then stays: the state
        after it is the one compared with.
        """
        is_due = batches <= 4 or (batches % 64 == 0 and (batches // 64).bit_count() == 1)
        if not is_due or self.warned is None or self.warned[0]:
            return
        if batches == 1:
            self.state.mark()
        elif names := self.state.names_changed():
            self.warned[0] = 1
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            log.warning(
                f"{', '.join(names[:3])}{more} changes in the data workers, where no checkpoint "
                "saves it: a resumed run has its value at a worker's start; if samples depend on "
                "it, set num_workers=0"
            )


@contextmanager
def drawing(loader: DataLoader[Any], plan: Plan) -> Iterator[None]:
    """Have an iterator made in this context, and its workers, draw as `plan` says."""
    worker_init_fn = loader.worker_init_fn
    in_order = loader.in_order
    roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    maker_before = None
    vars(loader)["in_order"] = True  # else the order of batches depends on the workers' speed
    if loader.num_workers:
        vars(loader)["worker_init_fn"] = functools.partial(
            start_worker, worker_init_fn, loader.collate_fn, plan
        )
    else:
        maker_before = Fetchers(plan, roots).install()
    try:
        yield
    finally:
        vars(loader).update(worker_init_fn=worker_init_fn, in_order=in_order)
        if maker_before:
            replace_fetcher_function(maker_before)


def start_worker(
    worker_init_fn: Callable[[int], None] | None,
    collate_fn: Callable[..., Any],
    plan: Plan,
    worker: int,
) -> None:
    """Prepare a data worker: its signals, its memory, its seeds and its fetchers."""
    end_with_the_loader()
    allocator.keep_freed_memory(allocator.WORKER_THRESHOLD_BYTES)
    unseeded.begin(torch.initial_seed())
    replace_entropy(unseeded.bits)
    if worker_init_fn:
        worker_init_fn(worker)
    info = torch.utils.data.get_worker_info()
    assert info is not None  # this is a data worker
    roots = {
        "dataset": info.dataset,
        "collate_fn": collate_fn,
        "init": worker_init_fn,
    }
    Fetchers(plan, roots, worker).install()
