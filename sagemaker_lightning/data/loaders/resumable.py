"""What every kind of loader has: its position, and the state that a checkpoint holds."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from sagemaker_lightning.compat.torch_data import has_iterator
from sagemaker_lightning.data.deterministic import data_of, keeps_workers, order_of, plan
from sagemaker_lightning.data.seeded_indices import seed_all
from sagemaker_lightning.state import batch_digest, generators, object_graph
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.nodes import GENERATOR
from sagemaker_lightning.state.graph.state import GraphState
from sagemaker_lightning.state.graph.text import Record
from sagemaker_lightning.state.module_variables import held_variables, mentioned_variables

NO_BATCH = "no batch"


def digest_of(batch: Any) -> int:
    """Return a number that tells a batch from another one."""
    return batch_digest.combine(map(int, batch_digest.leaf_digests(batch)))


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two states of a loader, or of one of its nodes, are the same."""
    return values.digest(values.encode(first)) == values.digest(values.encode(second))


def name_of(loader: Any) -> str:
    """Return the name of a loader's class; for torch's and torchdata's, of the dataset's class."""
    is_own = type(loader).__module__.partition(".")[0] not in ("torch", "torchdata")
    kind = type(loader if is_own else getattr(loader, "dataset", loader))
    return f"{kind.__module__}.{kind.__qualname__}"


class Shared:
    """What a loader shares with its copies, as it is now: what functions keep.

    It is in their variables and defaults, and may be generators.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        reached = [*object_graph.walk({"loader": loader})]
        code = {path: each for path, each in reached if type(each) is FunctionType}
        roots = code | held_variables(mentioned_variables(code))
        self.state = GraphState(lambda: roots, is_kept=True)
        self.before = self.state.encode()
        self.generators = [
            (each, GENERATOR.content(each)) for each in generators.find(roots).values()
        ]

    def give_back(self) -> None:
        """Undo what a trial has changed."""
        self.state.return_to(self.before)
        for generator, state in self.generators:
            GENERATOR.fill(generator, None, [], state)


class ResumableLoader(ABC):
    """One loader of an epoch; it may begin again before the longest loader has ended.

    Args:
        loader: The loader.
        seed: Decides what it draws.
        mode: How Lightning combines the loaders; "" if there is only one.
        own: Whether the loader itself saves what decides its order.
    """

    redraws = False
    """Whether it gets to a position by drawing what is before it."""

    def __init__(self, loader: Any, seed: tuple[Any, ...], mode: str, own: bool = False) -> None:
        self.loader = loader
        self.seed = seed
        self.mode = mode
        self.own = own
        self.name = name_of(loader)
        self.workers = getattr(loader, "num_workers", 0)
        self.why = ""
        """Why no run can be resumed within the epoch; "" if one can."""
        skip = (Dataset,) if isinstance(loader, DataLoader) else ()
        self.order = GraphState(partial(order_of, loader, own), skip, is_kept=True)
        self.data = GraphState(partial(data_of, loader, own), is_kept=True)
        self.order_at_start = self.order.encode()
        # The data's state when the iteration began, or when the workers started that still run.
        self.kept = self.data.encode()
        self.data_now: Record | None = None
        self.saved: Mapping[str, Any] | None = None
        self.must_prove = False
        self.epoch = 0
        self.turn = -1
        self.begun = 0  # number of iterations begun, in this run and in the runs that it resumes
        self.earlier = 0  # those begun before this epoch
        self.over = False
        self.iterator: Iterator[Any] = iter(())

    @abstractmethod
    def go_to(self, done: int) -> None:
        """Begin the iteration after `done` batches."""

    @abstractmethod
    def begin(self, turn: int, start: int = 0) -> None:
        """Begin an iteration after `start` batches.

        Args:
            turn: Number of the iteration within the epoch.
            start: Number of batches that are left out.
        """

    @property
    def keeps_ahead(self) -> bool:
        """Whether a checkpoint has to hold the batch that Lightning has fetched ahead."""
        return False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.begin(self.turn + 1)
        return self.iterator

    def stop(self) -> None:
        """Drop the iterator, and what it holds."""
        self.iterator = iter(())

    def epoch_begins(self, epoch: int) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Seed an iteration by somebody else as if the loader had not been used before."""

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore the state of the order and of the data.

        `data` names the state of the data: "now" is the state when the checkpoint was taken, "data"
        is the state when the iteration began.
        """
        self.order.return_to(saved["order"])
        self.data.return_to(saved[data])
        # For a hook that iterates over the loader before the next epoch does.
        plan(self.loader, saved["begun"], 0)

    def prepare(self, epoch: int, saved: Mapping[str, Any] | None, must_prove: bool) -> None:
        """Prepare for an epoch, or restore the state that the loader had in it.

        Args:
            epoch: The epoch.
            saved: What `states` returned; None if there is no checkpoint.
            must_prove: Whether to find out if the loader draws the same batches a second time.
        """
        self.epoch = epoch
        self.turn = -1
        self.saved = saved
        self.must_prove = must_prove
        if saved:
            self.begun = operator.index(saved["begun"])
            if isinstance(saved["draw"], bool) and hasattr(self.loader, "planned"):
                self.loader.planned.samples_draw = saved["draw"]
        if saved and saved["within"]:
            self.give_back(saved, "data")
            self.data_now = saved["now"]
        elif saved and not self.redraws and keeps_workers(self.loader):
            # The workers hold copies of the data as it was when they started.
            self.data_now = self.data.encode()
            self.data.return_to(saved["data"])
        if self.data_now is not None and self.workers and not self.redraws:
            self.data.return_shared(self.data_now)  # of this, workers have no copies
        self.order_at_start = self.order.encode()
        self.earlier = self.begun
        if self.redraws or not self._workers_stay:
            self.kept = self.data.encode()

    def settle(self) -> None:
        """Restore the data as it was when the checkpoint was taken.

        It is called once the workers have copies of the data as it was when the iteration began, or
        once the batches before this one have been drawn again.
        """
        if self.data_now is not None:
            # A generator that has drawn those batches is where it was: no record has it.
            self.data.return_to(self.data_now, keeps_unsaved=True)
            self.data_now = None

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        return {
            "order": self.order_at_start if within else self.order.encode(),
            "data": self.kept if within or self._workers_stay else self.data.encode(),
            "own": None,
            "now": self.data.encode(),
            "source": None,
            "given": 0,
            "begun": self.begun,
            "over": self.over,
            "draw": getattr(getattr(self.loader, "planned", None), "samples_draw", None),
            "within": within,
            "workers": self.workers,
            "strange": "",
        }

    @property
    def _workers_stay(self) -> bool:
        return keeps_workers(self.loader) and has_iterator(self.loader)

    def _begin_turn(self, turn: int) -> None:
        """Count an iteration that begins; drop the one before it."""
        self.turn = turn
        self.over = False
        self.iterator = iter(())
        self.begun += 1

    def _seed(self, purpose: str, epoch: int, turn: int) -> None:
        number = seed_all(purpose, *self.seed, epoch, turn)
        if isinstance(generator := getattr(self.loader, "generator", None), torch.Generator):
            generator.manual_seed(number)
