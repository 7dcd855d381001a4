"""How samples are drawn, in the process of a loader or in a data worker: each with a seed of its own.

torch makes a fetcher for each iteration of a DataLoader, in the process that draws; what is done to that is done to
every way of going through a loader, of torch's class, of a library's or of a user's.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterDataPipe

from sagemaker_lightning.compat.random_generators import without_entropy
from sagemaker_lightning.compat.torch_data import fetcher_maker, has_map, make_fetchers_by
from sagemaker_lightning.data.seeded_indices import Found, Key, Keys, number_of, seed_all, unseeded
from sagemaker_lightning.data.worker_signals import end_with_the_loader, held_back
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.encoding import decoded, encoded
from sagemaker_lightning.state.object_graph import walk
from sagemaker_lightning.state.object_state import State


def has_state(one: Any) -> bool:
    """Return whether an object saves and loads its own state, and need be told nothing for it."""
    saves = getattr(one, "state_dict", None)
    loads = getattr(one, "load_state_dict", None)
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

    A loader that makes keys of its indices says it with these. Of one that goes through its samples in a way of its
    own, and knows where it is, each sample's seed is a function of `seed`, the iteration and what was drawn in it.
    """

    seed: tuple | None = None
    turn: int = 0
    """The number of the iteration that the next fetcher is made for."""
    first: tuple[int, ...] = ()
    """The samples that each worker has drawn before, where the loader does not say so itself."""
    said: Tensor | None = None
    """uint8 [1], shared with all workers: whether it was said that a dataset changes in them."""


class Drawn:
    """The samples of an iterable dataset, each drawn with a seed of its own.

    Only what belongs to the process is seeded: of a generator that a dataset holds, all workers have the same copy, and
    may rely on it that all draw the same order, of which each takes its part.
    """

    def __init__(self, samples: Iterator, seed: tuple, number: int, found: Found) -> None:
        self.samples = samples
        self.seed = seed
        self.number = number
        self.found = found

    def __iter__(self) -> "Drawn":
        return self

    def __next__(self) -> Any:
        seed_all("sample", *self.seed, self.number)
        self.number += 1
        return next(self.samples)


class DrawnWithState(Drawn):
    """The same of a dataset that saves where it is.

    A worker that has come to its end before the others is there again, though the dataset may say that it is at its
    beginning.
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
        """Return the state of the samples, the number of those drawn, and the states of generators."""
        self.found.more()
        held = {
            path: encoded(generators.state_of(one)) for path, one in self.found.generators.items()
        }
        return {
            "samples": self.samples.state_dict() if has_state(self.samples) else None,
            self.NUMBER: (*self.seed, self.number),
            "generators": held,
            "over": self.over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        if state["samples"] is not None:
            self.samples.load_state_dict(state["samples"])
        if state.get("over"):
            self.samples = iter(())
            self.over = True
        *seed, self.number = state[self.NUMBER]
        self.seed = tuple(seed)
        for path, one in generators.find(self.found.roots).items():
            if path in state["generators"]:
                generators.restore(one, decoded(state["generators"][path]))


class Fetchers:
    """Makes the fetchers of one loader in one process.

    Args:
        plan: What decides how samples are drawn.
        loader: The loader, or what is known of it in a worker: its dataset, collate function and worker_init_fn.
        worker: The number of the data worker; None in the loader's own process.
    """

    def __init__(self, plan: Plan, roots: dict[str, Any], worker: int | None = None) -> None:
        self.plan = plan
        self.worker = worker
        self.turn = plan.turn
        self.found = Found(roots)
        self.watch = Watch(roots, plan.said if worker == 0 else None)
        before = fetcher_maker()
        self.given = getattr(before, "__wrapped__", before)

    def install(self) -> Callable:
        """Make them in torch's place, and return what did before."""
        before = fetcher_maker()

        @functools.wraps(self.given)
        def create(kind: int, dataset: Any, *rest: Any) -> Any:
            return self.create(kind, dataset, *rest)

        make_fetchers_by(create)
        return before

    def create(self, kind: int, dataset: Any, *rest: Any) -> Any:
        """Return a fetcher for the next iteration."""
        turn = self.turn
        self.turn = self.turn + 1
        if self.plan.seed is None or isinstance(dataset, IterDataPipe):
            fetcher = self.given(kind, dataset, *rest)
        elif has_map(kind):
            fetcher = self.given(kind, dataset, *rest)
            fetcher.fetch = functools.partial(self._fetch, fetcher.fetch, (*self.plan.seed, turn))
        else:
            seed = (*self.plan.seed, turn)
            worker = self.worker or 0
            generators.reseed(self.found.generators, number_of("generators", *seed))
            seed_all("samples", *seed, worker)
            fetcher = self.given(kind, dataset, *rest)
            first = self.plan.first[worker] if self.plan.first else 0
            drawn = (
                DrawnWithState if has_state(fetcher.dataset_iter) or has_state(dataset) else Drawn
            )
            fetcher.dataset_iter = drawn(fetcher.dataset_iter, (*seed, worker), first, self.found)
        return fetcher

    def _fetch(self, given: Callable, seed: tuple, wanted: Any) -> Any:
        """Return a batch; drawn again where generators were made on the way, and nobody could seed them."""
        keys = wanted
        if not isinstance(wanted, (Keys, Key)):
            keys = (
                Keys(wanted, seed, wanted)
                if isinstance(wanted, list) and wanted
                else Key(wanted, seed, wanted)
            )
        batch = given(keys.begin(self.found))
        if self.found.more():
            batch = given(keys.begin(self.found))
        self.watch.look(self.found.batches)
        return batch


class Watch:
    """Says, once, what a dataset changes of itself in a data worker, where no checkpoint sees it."""

    def __init__(self, roots: dict[str, Any], said: Tensor | None) -> None:
        self.roots = roots
        self.said = said
        self.state = State(lambda: roots)

    def look(self, batches: int) -> None:
        """Look, after the first batches and few of the later ones; the first may make what then stays."""
        if self.said is None or self.said[0] or (batches > 4 and batches % 64):
            return
        if batches == 1:
            self.state.mark()
        elif changed := sorted(self.state.changed()):
            self.said[0] = 1
            owners = dict(walk(self.roots, code=False))
            names = [f"{type(owners[path]).__qualname__}.{name}" for path, name in changed]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(
                f"{', '.join(names[:3])}{more} changes in the data workers, where no checkpoint sees it: a run that "
                "goes on has it as at a worker's start; if samples depend on it, give num_workers=0",
                flush=True,
            )


@contextmanager
def drawing(loader: DataLoader, plan: Plan) -> Iterator[None]:
    """Have an iterator of the loader, and its workers, which are made meanwhile, draw so."""
    given = loader.worker_init_fn
    in_order = getattr(loader, "in_order", True)
    roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    before = None
    vars(loader)["in_order"] = True  # else the clock would decide which batch comes next
    if loader.num_workers:
        vars(loader)["worker_init_fn"] = functools.partial(
            start_worker, given, loader.collate_fn, plan
        )
    else:
        before = Fetchers(plan, roots).install()
    try:
        with held_back(loader):
            yield
    finally:
        vars(loader).update(worker_init_fn=given, in_order=in_order)
        if before:
            make_fetchers_by(before)


def start_worker(
    also: Callable[[int], None] | None, collate: Callable, plan: Plan, worker: int
) -> None:
    """Begin a data worker."""
    end_with_the_loader()
    unseeded.begin(torch.initial_seed())
    without_entropy(unseeded.bits)
    if also:
        also(worker)
    roots = {
        "dataset": torch.utils.data.get_worker_info().dataset,
        "collate_fn": collate,
        "init": also,
    }
    Fetchers(plan, roots, worker).install()
