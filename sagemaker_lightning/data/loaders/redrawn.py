"""A loader that cannot begin at a batch: it starts over, and is drawn to the position."""

import contextlib
import itertools
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from lightning_fabric.utilities.data import sized_len
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from sagemaker_lightning.compat.torch_data import (
    copied,
    end_workers,
    is_of_nodes,
    kept_iterators,
    lead_nodes,
)
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.deterministic import plan, saves_between_epochs
from sagemaker_lightning.data.loaders import strange
from sagemaker_lightning.data.loaders.resumable import NO_BATCH, Shared, are_equal, digest_of
from sagemaker_lightning.data.loaders.unplaced import UnplacedLoader
from sagemaker_lightning.data.pool_draws import PoolDraws
from sagemaker_lightning.data.sample_seeding import has_state
from sagemaker_lightning.data.seeded_indices import number_of
from sagemaker_lightning.state import generators, object_graph
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import is_of_users_code

EACH_TIME = "other batches each time"
BY_WEIGHTS = "by weights that training may change"


class WeightReads(TorchFunctionMode):
    """Finds out whether code computes with weights to be trained, as a rollout of a policy does.

    What it draws again after some steps is something else.

    Args:
        weights: The weights, by id; None for all parameters that take gradients.
    """

    def __init__(self, weights: Collection[int] | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.found = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's; look at what it is given."""
        result = function(*args, **(kwargs or {}))
        # To ask for a device or a shape is not a computation.
        is_asked = getattr(function, "__name__", "") in ("__get__", "size", "dim", "numel")
        if not self.found and (not is_asked or isinstance(result, Tensor)):
            given = [*args, *(kwargs or {}).values()]
            given += [each for part in given if isinstance(part, (list, tuple)) for each in part]
            self.found = any(map(self._is_weight, given))
        return result

    def _is_weight(self, value: Any) -> bool:
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        return is_trained and (self.weights is None or id(value) in self.weights)


def loaders_within(loader: Any) -> list[DataLoader[Any]]:
    """Return a DataLoader, or those that a loader of another class holds.

    They are without those of classes that iterate in their own way, such as over an iterator that
    they keep.
    """
    if isinstance(loader, DataLoader):
        return [loader]
    held = object_graph.walk({"loader": loader}, (DataLoader, Dataset, nn.Module, Trainer))
    return [
        each
        for _, each in held
        if isinstance(each, DataLoader) and type(each).__iter__ is DataLoader.__iter__
    ]


class Redrawn(UnplacedLoader):
    """A stream, or a loader of a class of its own.

    What it or its dataset saves itself is used between epochs, where it is proved to lead there.
    """

    redraws = True

    def __init__(self, loader: Any, seed: tuple[Any, ...], mode: str) -> None:
        super().__init__(loader, seed, mode, saves_between_epochs(loader))
        self.data_loaders = loaders_within(loader)
        """The DataLoaders that draw for it, or itself if it is one."""
        self.has_own_workers = bool(self.workers)
        """Whether data workers draw all of it, and not a part that it puts together with others."""
        self.workers = self.workers or sum(
            getattr(each, "num_workers", 0) for each in self.data_loaders
        )
        self.workers_before = self.workers
        """The number of data workers of the run that is resumed."""
        self.proved = False
        self.differs = ""
        """Why it draws other batches each time, if it is known to: nothing is drawn to compare."""
        self.strange_because = ""
        """Why it is to be left to Lightning from the next epoch on; "" if it is not."""
        self.of_nodes = is_of_nodes(loader)
        """Whether its nodes may count the epochs, which its state has."""
        # What saves a state: a loader's is right between epochs only.
        self.has_source = has_state(self._source)
        # As it was before anything was drawn from it, if what its source saves has to be tried.
        self.fresh = copied(loader) if self.has_source and not self.of_nodes else None
        self.fresh_source = self._encoded_source()
        self.trusts_source: bool | None = None  # None while nothing was tried
        self.pools = PoolDraws()
        self.source: Any = None
        stays = any(getattr(each, "persistent_workers", False) for each in self.data_loaders)
        if stays and rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
            log.warning(
                f"persistent_workers: the workers of {self.name} start over with each epoch, so "
                "that an epoch can be resumed, and so do their counters; to keep both, "
                "use torchdata's StatefulDataLoader, and give the dataset a state_dict()"
            )

    @property
    def keeps_ahead(self) -> bool:
        """Whether a batch that Lightning has fetched ahead may not be drawn a second time.

        It may be drawn from what training changes, such as a replay buffer; data workers have a
        copy of that.
        """
        return not self.has_own_workers

    def epoch_begins(self, epoch: int) -> None:
        """Seed an iteration by somebody else as if the loader had not been used before."""
        generators.reseed(self._generators_to_seed(), number_of("epoch", *self.seed, epoch))

    def give_back(self, saved: Mapping[str, Any], data: str = "now") -> None:
        """Restore the state of the order, of the data, and of what saves a state."""
        self.workers_before = saved["workers"]
        self._restore_source(saved["source"])  # first, as in `_prove`
        super().give_back(saved, data)

    def prepare(self, epoch: int, saved: Mapping[str, Any] | None, must_prove: bool) -> None:
        """Prepare for an epoch, or restore the state that the loader had in it."""
        super().prepare(epoch, saved, must_prove)
        self.workers_before = saved["workers"] if saved else self.workers
        if saved and saved["differs"]:
            self._note_different(BY_WEIGHTS if saved["differs"] == BY_WEIGHTS else EACH_TIME)
        if saved and not saved["within"] and self.workers != self.workers_before:
            self._tell_other_workers()
        # What was restored is not asked for: some tell it only once they are iterated over.
        self.source = saved["source"] if saved else self._source_state()

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        return self._states(within, self.source if within else self._source_state())

    def _tell_other_workers(self) -> None:
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
            log.warning(
                f"{self.name} had {printable(str(self.workers_before))[:20]} data workers, and has "
                f"{self.workers} now: a resumed run has other batches than one left alone"
            )

    def _states(self, within: bool, source: Any) -> dict[str, Any]:
        begun = self.earlier if within else self.begun
        own = {"source": source, "begun": begun, "differs": self.differs}
        own["strange"] = self.strange_because
        return super().states(within) | own

    def go_to(self, done: int) -> None:
        """Draw the first `done` batches again, and throw them away.

        UserError if other data workers than before would draw others.
        """
        if done and self.workers != self.workers_before:
            raise self.other_workers("has drawn this epoch's batches", self.workers_before)
        if self.must_prove and not self.proved:
            self._prove(done)
        else:
            self.begin(0)
        self._skip(done)

    def _skip(self, done: int) -> None:
        """Draw `done` batches, and say how long it took."""
        began = time.monotonic()
        for _ in range(done):
            if next(self.iterator, self) is not self:
                continue
            if self.mode != "max_size_cycle":
                break
            self.begin(self.turn + 1)
            if next(self.iterator, self) is self:
                break
        if done and rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning sets it
            log.info(
                f"the training data cannot start at a batch ({self.name}): the {done} batches "
                f"before this one were drawn again, in {time.monotonic() - began:.1f} s"
            )

    def begin(self, turn: int, start: int = 0) -> None:
        """Begin an iteration at its first batch."""
        self._begin_turn(turn)
        for each in self.data_loaders:
            end_workers(each)
        plan(self.loader, self.begun - 1, 0)
        self.iterator = self._iterate_seeded()

    def _prove(self, done: int) -> None:
        """Draw the first batch twice, and set `why` if the two differ.

        Generators that drawing the first one has made are seeded for the second. Where batches have
        to be drawn again by data workers, nothing is compared.
        """
        self.proved = True
        if done and self.has_own_workers:
            self.begin(0)
            return
        order = self.order.encode()
        data = self.data.encode()
        threads = strange.users_threads(self.loader)
        pools = strange.pools(self.loader)
        is_one_stream = strange.holds_python_generator(self.loader)
        weights = WeightReads()
        # What a DataLoader's own dataset draws, the line of its fetcher names.
        is_loader = isinstance(self.loader, DataLoader)
        with nullcontext() if is_loader else self.pools.watching(), weights:
            self.begin(0)
            batch = next(self.iterator, NO_BATCH)
        has_threads = bool(strange.users_threads(self.loader) - threads)
        # A pool that the first draw has begun draws on, and may not find its data put back.
        has_threads = has_threads or not strange.pools(self.loader) <= pools
        if has_threads or self.pools.found or strange.draws_in_pool(self.loader):
            self._leave(strange.IN_THREAD)
            self._put_back(batch)
            return
        if self.of_nodes and strange.nodes_draw_ahead():
            self._put_back(batch)  # they continue while what they draw from is put back
            self._note_different()
            return
        if weights.found:
            self._put_back(batch)
            self._note_different(BY_WEIGHTS)
            return
        if (following := self._next_of_kept()) is not NO_BATCH:
            self._leave(strange.KEEPS)
            rest = itertools.chain([batch, following], self.iterator)
            self.iterator = itertools.islice(rest, sized_len(self.loader))
            return
        first_digest = digest_of(batch)
        shared = Shared(self.loader)  # as one draw leaves it, also what the data have
        # First: nodes that are led back may draw ahead, and have what they draw from move on.
        self._restore_source(self.source)
        self.order.return_to(order)
        self.data.return_to(data)
        self.begun -= 1  # the second draw counts as the same iteration
        self.begin(0)
        repeated = next(self.iterator, NO_BATCH)
        shared.give_back()
        self._put_back(repeated)
        if first_digest != digest_of(repeated):
            if is_one_stream:  # the second iteration has continued where the first one was
                self._put_back(batch)
            self._note_different()

    def _note_different(self, reason: str = EACH_TIME) -> None:
        """Have no run resume within an epoch: what is drawn again would be other batches."""
        self.proved = True
        self.differs = reason
        # Nobody knows whether it draws the same from an epoch's end: litdata's
        # ParallelStreamingDataset with a length does not.
        unsure = ", perhaps also in a resumed run" if reason == EACH_TIME else ""
        self.why = f"{self.name} draws {reason}{unsure}"

    def _leave(self, reason: str) -> None:
        """Stop controlling the loader: its draws at once, its iterations from the next one."""
        self.seeds = False
        self.strange_because = reason
        self.why = strange.why(self.name, reason)

    def _next_of_kept(self) -> Any:
        """Return the next batch of an iterator that the loader continues with if it is begun again.

        It is NO_BATCH if there is none: a loader may also keep one that it then makes again.
        """
        kept = kept_iterators(self.loader)
        if not kept:
            return NO_BATCH
        again = iter(self.loader)
        if not _are_same(kept, kept_iterators(self.loader)):
            return NO_BATCH
        following = next(again, NO_BATCH)  # the code of a generator has not run before
        return following if _are_same(kept, kept_iterators(self.loader)) else NO_BATCH

    def _put_back(self, batch: Any) -> None:
        """Have the iterator begin with a batch that was drawn from it."""
        if batch is not NO_BATCH:
            self.iterator = itertools.chain([batch], self.iterator)

    # What the loader or its dataset saves ---------------------------------------------------------

    @property
    def _source(self) -> Any:
        is_itself = self.own or self.of_nodes
        return self.loader if is_itself else getattr(self.loader, "dataset", None)

    def _encoded_source(self) -> Any:
        """Return the state that the source saves now; None if it cannot."""
        if self.has_source:
            with contextlib.suppress(Exception):  # it is the user's code, or a library's
                return values.encode(self._source.state_dict())
        return None

    def _restore_source(self, state: Any) -> None:
        """Give the source its saved state, or raise UserError if it does not take it."""
        if state is None:
            return
        present = None if self.of_nodes else self._encoded_source()
        # Data workers draw from copies of it, of which some take no state of the whole.
        if present is not None and values.digest(present) == values.digest(state):
            return
        own = values.decode(state)
        try:
            if self.of_nodes:
                lead_nodes(self.loader, own, are_equal)
                return
            self._source.load_state_dict(own)
        except Exception as error:
            if is_of_users_code(error):
                raise  # what that says is theirs to see
            if self.workers != self.workers_before:
                raise self.other_workers("saved its state", self.workers_before) from error
            raise UserError(
                f"{self.name} does not take the state that it has saved "
                f"({printable(f'{type(error).__name__}: {error}')[:200]}); continue with the "
                "options and the number of data workers that it had, or move the checkpoints away "
                "to start over"
            ) from error
        # litdata's loader asks its datasets for their lengths as if there were no workers, and
        # leaves them so.
        sized_len(self.loader)

    def _source_state(self) -> Any:
        """Return the state with which a new process draws what comes next.

        It is None if one that starts over draws it.
        """
        state = self._encoded_source()
        fresh = self.fresh_source
        if state is None or (fresh and values.digest(state) == values.digest(fresh)):
            return state
        if self.trusts_source is None:
            self.trusts_source = self.own or self.of_nodes or self._source_is_proved(state)
        return state if self.trusts_source else None

    def _source_is_proved(self, state: Any) -> bool:
        """Return whether a fresh loader, given a state, draws what this one will draw next.

        One that cannot be copied is trusted.
        """
        present = copied(self.loader)
        if present is None or self.fresh is None:
            return True
        saved = self._states(within=False, source=state)
        original, resumed = (
            type(self)(loader, self.seed, self.mode) for loader in (present, copied(self.fresh))
        )
        original.epoch = self.epoch
        original.begun = self.begun
        shared = Shared(self.loader)
        try:
            resumed.give_back(saved)
            resumed.prepare(self.epoch, saved, must_prove=False)
            digests = []
            for each in (original, resumed):
                each.begin(0)
                digests.append(digest_of(next(each.iterator, NO_BATCH)))
        except Exception:  # it is the user's code, or a library's
            return False
        finally:
            shared.give_back()
        return digests[0] == digests[1]


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return list(map(id, first)) == list(map(id, second))
