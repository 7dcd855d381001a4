"""The checkpoint that a run resumes from."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sagemaker_lightning.compat.model_parallel import data_rank, data_ranks
from sagemaker_lightning.resume.files.checkpoint_file import BEFORE_HOOKS, ENTRIES_KEY
from sagemaker_lightning.resume.files.entries import Entries, RankOverrides
from sagemaker_lightning.resume.files.shards import PARTS_KEY, RANKS_KEY, ShardReader
from sagemaker_lightning.resume.parts.part import Part, Place
from sagemaker_lightning.resume.resume_point import ResumePoint


class Resumption:
    """The checkpoint that a run resumes from, and how far the run is with it.

    Args:
        file_name: The name of its file.
        checkpoint: What the file has; it is changed in place.
        rank: This rank.
        world_size: Number of ranks.
        mesh: The sizes of the mesh of a sharded model's ranks; empty if it is not sharded.
    """

    def __init__(
        self,
        file_name: str,
        checkpoint: dict[str, Any],
        rank: int,
        world_size: int,
        mesh: Sequence[int] = (),
    ) -> None:
        self.file_name = file_name
        self.entries: Entries = checkpoint.pop(ENTRIES_KEY)
        """This package's entries."""
        self.step = self.entries["step"]
        self.saved_at = ResumePoint(self.entries["resume_point"])
        self.point: ResumePoint | None = self.saved_at
        """The same; None once training continues."""
        self.world_size = self.entries["world_size"]
        self.mesh = self.entries.get("mesh", [])
        self.same_ranks = (self.world_size, self.mesh) == (world_size, list(mesh))
        """Whether as many ranks have saved it, which shared out the model as these do."""
        # With another number of ranks than before, each is as rank 0 was.
        self.rank_state = self.entries["ranks"][rank if self.same_ranks else 0]
        own: RankOverrides = self.rank_state["rank_overrides"]
        has_own = self.same_ranks and bool(own["entries"])
        self.checkpoint: dict[str, Any] = checkpoint | (own["entries"] if has_own else {})
        """What Lightning loads; empty once training continues."""
        self.exact_values = own["exact_values"] if has_own else self.entries["exact_values"]
        """Those of its values that are not plain, as records of values by path."""
        self.epoch_is_open = self.saved_at is not ResumePoint.EPOCH
        """Whether it was saved within an epoch that has not ended yet."""
        self.digests: dict[str, dict[str, int]] = {}
        """The digests of what was saved, by a part's key and name."""

    def of(self, part: Part | type[Part]) -> Any:
        """Return what it has of a part; of a part of Lightning's, all that Lightning loads."""
        if part.place is Place.LIGHTNING:
            return self.checkpoint
        saved = self.rank_state if part.place is Place.RANK else self.entries["parts"]
        return saved[part.key]

    def resolve(self, reader: ShardReader) -> None:
        """Read the tensors that are shared out."""
        self.checkpoint = reader.resolve(self.checkpoint)
        self.entries["parts"] = reader.resolve(self.entries["parts"], PARTS_KEY)
        self.rank_state = reader.resolve(self.rank_state, RANKS_KEY)

    def saved(self, part: Part) -> Any:
        """Return what was saved of a part; of Lightning's, before any hook has replaced it."""
        found = self.of(part)
        return {**found, **found[BEFORE_HOOKS]} if part.place is Place.LIGHTNING else found

    def of_all_ranks(self, key: str) -> list[Any]:
        """Return what each rank has saved of a part."""
        return [state[key] for state in self.entries["ranks"]]

    def of_data_ranks(self, part: Part) -> tuple[list[Any], list[Any]]:
        """Return what the ranks from which this one takes over have saved of a part, and all ranks.

        Ranks that share tensors have trained on the same samples: one of them counts. With as many
        ranks as before, this rank's own is all there is.
        """
        if self.same_ranks:
            return [self.of(part)], [self.of(part)]
        everyone = self.of_all_ranks(part.key)[:: math.prod(self.mesh[1:])]
        return everyone[data_rank(part.trainer) :: data_ranks(part.trainer)], everyone

    def forget_digests(self, part: type[Part], is_outdated: Callable[[str], bool]) -> None:
        """Compare some values of a part no more.

        Args:
            part: The part.
            is_outdated: Returns whether a value is not compared, given its name.
        """
        digests = self.digests.get(part.key, {})
        for name in list(filter(is_outdated, digests)):
            del digests[name]

    def training_continues(self) -> None:
        """Note that the first epoch has begun or is resumed: later ones are as usual."""
        self.point = None

    def epoch_ended(self) -> None:
        """Note that the epoch in which the checkpoint was saved has ended."""
        self.epoch_is_open = False

    def forget_checkpoint(self) -> None:
        """Free what Lightning has loaded."""
        self.checkpoint = {}


def sharded_text(mesh: Sequence[int]) -> str:
    """Return how ranks share a model out, for a message; "" if they do not."""
    return f", with a model sharded as {'x'.join(map(str, mesh))}" if mesh else ""
