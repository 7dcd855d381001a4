"""A loader that saves where it is, as was proved before anything was drawn from it."""

from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from sagemaker_lightning.compat.torch_data import (
    copied,
    end_workers,
    is_of_nodes,
    lead_nodes,
    not_restarting,
    state_after_end,
    without_mark_of_end,
)
from sagemaker_lightning.data.deterministic import (
    counts_only,
    knows_its_end,
    leaves_its_rest,
    plan,
)
from sagemaker_lightning.data.loaders.resumable import NO_BATCH, Shared, are_equal, digest_of
from sagemaker_lightning.data.loaders.unplaced import UnplacedLoader
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.graph.kinds.base import refusing

PROVED_AFTER = 2
"""Number of batches after which a loader's own state is tried on a copy of it."""


class Stateful(UnplacedLoader):
    """A loader of any class with `state_dict` and `load_state_dict`."""

    def __init__(self, loader: Any, seed: tuple[Any, ...], mode: str) -> None:
        super().__init__(loader, seed, mode, own=True)

    def is_proved(self) -> bool:
        """Return whether a fresh loader that gets the loader's state continues as the loader does.

        Both are copies. They draw the next batches, and begin another iteration: the state may
        forget what was read ahead, or stay for iterations to come. Where the loader moves with its
        copies, as one whose position is in memory that processes share, these prove nothing: its
        state is relied on.
        """
        shared = Shared(self.loader)
        try:
            return self._continues_in_copies() or self._moves_with_copies()
        finally:
            shared.give_back()

    def _moves_with_copies(self) -> bool:
        """Return whether the loader has another state once something was drawn from a copy."""
        try:
            states = [digest(copied(self.loader).state_dict()) for _ in range(2)]
            with isolate_rng():  # the state may have the states of the process's generators
                next(iter(copied(self.loader)), NO_BATCH)
            states.append(digest(copied(self.loader).state_dict()))
        except Exception:  # it is the user's code, or a library's
            return False
        return states[0] == states[1] != states[2]

    def _continues_in_copies(self) -> bool:
        copies = [copied(self.loader), copied(self.loader)]
        if None in copies:
            return False
        original, resumed = (Stateful(loader, self.seed, self.mode) for loader in copies)
        try:
            original.prepare(0, None, must_prove=False)
            original.begin(0)
            for _ in range(PROVED_AFTER):
                next(original.iterator, NO_BATCH)
            if counts_only(original.loader):
                return False
            resumed.prepare(0, original.states(within=True), must_prove=False)
            resumed.go_to(PROVED_AFTER)
            return original.digest_of_rest() == resumed.digest_of_rest()
        except Exception:  # it is the user's code, or a library's
            return False

    def digest_of_rest(self) -> int:
        """Return a digest of the next batches and of the first one of another iteration."""
        drawn = [next(self.iterator, NO_BATCH) for _ in range(PROVED_AFTER)]
        self.begin(1)
        return digest_of([*drawn, next(self.iterator, NO_BATCH)])

    @property
    def keeps_ahead(self) -> bool:
        """Whether it counts a batch as drawn that Lightning has fetched ahead: it always does."""
        return True

    def states(self, within: bool) -> dict[str, Any]:
        """Return what `prepare` takes as `saved`."""
        end = state_after_end(self.loader) if self.over and not within else None
        return super().states(within) | {
            "own": values.encode(self.loader.state_dict()),
            "end": values.encode(end),
        }

    def go_to(self, done: int) -> None:
        """Begin the iteration after `done` batches.

        UserError if the loader has another number of data workers than its state was saved with.
        """
        if not (saved := self.saved):
            self.begin(0)
            return
        with refusing(runs_users_code=True):
            if self.workers != saved["workers"]:
                raise self.other_workers("saved its state", saved["workers"])
            own, end = values.decode(saved["own"]), values.decode(saved["end"])
            over = saved["over"]
            if begins_anew := end is not None and self._has_batches_after(own):
                own = end
            self.loader.load_state_dict(own)
        if saved["within"]:
            self._continue(done, over)
        elif is_of_nodes(self.loader):
            # Given the state of an end, it would begin two iterations where there was one.
            lead_nodes(self.loader, own, are_equal)
            self.begin(0)
        elif leaves_its_rest(self.loader):
            self._begin_after_rest()
        else:
            self._begin_next(over, begins_anew)

    def _continue(self, done: int, over: bool) -> None:
        """Continue the iteration that the loader's state is of, after `done` batches."""
        self.begun -= 1
        with not_restarting(self.loader):
            self._begin_loaded(done, ended=not done and over)
        if done and over and leaves_its_rest(self.loader):
            # Nobody asks for its end; it would begin the next iteration with this state.
            next(self.iterator, NO_BATCH)

    def _begin_after_rest(self) -> None:
        """Begin the next iteration of a loader that drops the rest of the one before.

        It may have a rest even if that one was over: more batches than its length says.
        """
        plan(self.loader, self.begun - 1, 0)
        left = iter(self.loader)
        next(left, None)  # the iteration begins with its first batch
        left.close()
        self._begin_loaded(0, ended=False)

    def _begin_next(self, over: bool, begins_anew: bool) -> None:
        """Begin the next iteration of a loader with the state of the one before.

        Args:
            over: Whether that one had come to its end.
            begins_anew: Whether the loader's state is already that of the next one.
        """
        if not over:  # it was left before its end, and the loader would continue it
            plan(self.loader, self.begun - 1, 0)
            iter(self.loader)
        after_end = over and not begins_anew and knows_its_end(self.loader)
        self._begin_loaded(0, over, after_end)

    def _has_batches_after(self, own: dict[str, Any]) -> bool:
        """Return whether the loader has more batches after the state of an end."""
        self.loader.load_state_dict(without_mark_of_end(own))
        plan(self.loader, self.begun - 1, 0)
        try:
            return next(iter(self.loader), NO_BATCH) is not NO_BATCH
        finally:
            end_workers(self.loader)

    def begin(self, turn: int, start: int = 0) -> None:
        """Begin an iteration at its first batch."""
        self._begin_turn(turn)
        plan(self.loader, self.begun - 1, 0)
        self.iterator = self._iterate_seeded()

    def _begin_loaded(self, start: int, ended: bool, after_end: bool = False) -> None:
        """Begin the first iteration of an epoch where the loader's state leads.

        Args:
            start: Number of batches before it.
            ended: Whether it is the state of an end.
            after_end: Whether the loader starts over by itself after it.
        """
        self._begin_turn(0)
        plan(self.loader, self.begun - 1 - after_end, start)
        self.iterator = self._iterate_seeded(start, ended)
