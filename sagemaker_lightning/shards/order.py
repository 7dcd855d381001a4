"""ShardBatches: shards are shuffled, then the samples of a window: a function of (seed, epoch).

An epoch's order is made so:

1. The shards are shuffled, and their samples, in the order that they have in a shard, are one line.
2. The line is cut into `streams` pieces of equal length; a stream's samples are in few shards.
3. Each stream is cut into windows of `window` samples, and the samples of a window are shuffled.
4. Batch b of the epoch is the next batch of stream b modulo `streams`. Rank r of n trains on the
   batches r, r + n, r + 2n ... So with as many streams as ranks, each rank reads a piece of the
   line, and no other.

With shards that each host has for itself (ShardedByS3Key), there is a line for each host, cut into
pieces for its ranks. The epoch then ends with the shortest stream.
"""

import functools
from collections.abc import Iterator, Mapping

import numpy as np
from torch import distributed

from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.data.batch_order import PlacedOrder, PlacedSampler
from sagemaker_lightning.data.partition import BatchDivision
from sagemaker_lightning.data.seeded_indices import number_of
from sagemaker_lightning.shards import index as indexes
from sagemaker_lightning.shards.dataset import ShardedDataset


class ShardBatches(PlacedSampler):
    """Batches of a `ShardedDataset`, in an order that needs a few shards at a time.

    Give it to a DataLoader as `batch_sampler`, for validation as well (`shuffle=False`): a loader
    without it reads from all shards at once. It has no state. With ExactResume or
    `make_deterministic`, the seed and the epoch are theirs; else call `set_epoch`. Several ranks
    need one of the two: it gives each rank its part of a batch.

    Args:
        dataset: The dataset.
        batch_size: Samples of a batch.
        window: Number of samples that are shuffled together. The windows of all streams and the
            ones after them are what a cache needs room for.
        shuffle: Whether shards and windows are shuffled.
        drop_last: Whether the samples that do not make a whole batch for each stream are left out.
        seed: Decides the order, with the epoch.
        streams: Number of pieces; by default, the number of ranks when this is made. A run that may
            resume with another number of ranks needs one that stays, such as the largest of them.

    Raises UserError if a stream would have no sample.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        batch_size: int,
        *,
        window: int = 16384,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        streams: int | None = None,
    ) -> None:
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if dataset.owned and streams not in (None, ranks):
            raise UserError(
                f"ShardBatches: found streams={streams}, expected {ranks}, the number of ranks, as "
                "each host has shards of its own; leave streams out"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.window = window
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.streams = streams or ranks
        self.epoch = 0
        lines: dict[tuple[int, ...], list[int]] = {}
        owned = dataset.owned or ((),) * self.streams
        for stream, shards in enumerate(owned):
            lines.setdefault(shards, []).append(stream)
        self.lines = tuple((shards, tuple(streams)) for shards, streams in lines.items())
        """The shards of each line, () for all, and the streams that it is cut into."""
        first = dataset.index.first
        self.divisions = tuple(
            BatchDivision(
                int(sum(first[shard + 1] - first[shard] for shard in shards) or first[-1]),
                batch_size,
                len(streams),
                drop_last,
            )
            for shards, streams in self.lines
        )
        """How each line is cut into batches of its streams."""
        if not len(self):
            raise UserError(
                f"{dataset.location}: found {len(dataset)} samples for {self.streams} streams and "
                f"a batch size of {batch_size}; expected at least one batch for each stream"
            )

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration draw the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.streams * min(division.batches for division in self.divisions)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.placed(number_of("order", self.seed, self.epoch))
        for batch in range(len(self)):
            order.reach(batch)
            yield order[batch]

    def placed(self, number: int) -> "ShardOrder":
        """Return the order of an epoch, which a number from 0 to 2**63 - 1 decides."""
        return ShardOrder(self, number)

    @property
    def marks(self) -> dict[str, int]:
        """Numbers that tell the order, and the shards, from others, by name."""
        return {
            indexes.NAME: self.dataset.identity,
            "shards of hosts": number_of(self.dataset.owned),
            "streams": self.streams,
            "batch_size": self.batch_size,
            "window": self.window,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def check_same(self, marks: Mapping[str, int], within: bool) -> None:
        """Raise UserError if a run that is resumed had other shards or another order."""
        now = self.marks
        names = [name for name in now if name in marks and marks[name] != now[name]]
        if indexes.NAME in names:
            raise UserError(
                f"{self.dataset.location}: found other shards than the interrupted run had (its "
                f"{indexes.NAME} was another one); give those, or a new folder for checkpoints"
            )
        if names and within:
            name = names[0]
            found = "others" if " " in name else f"{name}={now[name]}"
            before = "" if " " in name else f"={printable(str(marks[name]))[:20]}"
            raise UserError(
                f"ShardBatches: found {found}, expected {name}{before}, as the run had that is "
                "resumed within an epoch; its order is another one; give the same (streams are as "
                "many as ranks by default)"
            )


class ShardOrder(PlacedOrder):
    """The order of one epoch; only what is asked for is drawn.

    Args:
        batches: What it is the order of.
        number: Decides it.
    """

    def __init__(self, batches: ShardBatches, number: int) -> None:
        self.batches = batches
        self.number = number
        self.first = batches.dataset.index.first
        self.streams: dict[int, Stream] = {}
        for line, ((shards, streams), division) in enumerate(
            zip(batches.lines, batches.divisions, strict=True)
        ):
            numbers = np.array(shards or range(len(self.first) - 1))
            if batches.shuffle:
                numbers = numbers[self.permutation(len(numbers), "shards", line)]
            ends = np.cumsum(self.first[numbers + 1] - self.first[numbers])
            begin = 0
            last = division.batches - 1
            for place, stream in enumerate(streams):
                length = last * division.batch_size + len(division.part(last, place))
                piece = range(begin, begin + length)
                self.streams[stream] = Stream(self, stream, numbers, ends, piece, last)
                begin += length

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> list[int]:  # type: ignore[override]  # nobody slices it
        """Return the samples of a batch."""
        if not 0 <= batch < len(self):
            raise IndexError(batch)
        number, stream = divmod(batch, self.batches.streams)
        return self.streams[stream].batch(number)

    def reach(self, batch: int) -> None:
        """Have the shards of a batch's window, and of the next one, fetched."""
        number, stream = divmod(batch, self.batches.streams)
        self.streams[stream].reach(number)
        wanted = [each.wanted for each in self.streams.values() if each.wanted]
        self.batches.dataset.prefetch(shard for shards in wanted for shard in shards)

    def permutation(self, length: int, *key: object) -> np.ndarray:
        """Return int64 [length], the numbers below `length` in an order."""
        # Not numpy's newer generators: those may draw something else in another version.
        seed = number_of(self.number, *key)
        return np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).permutation(length)


class Stream:
    """A piece of a line of shards.

    Args:
        order: The epoch's order.
        number: The stream's number.
        shards: int64 [shards], the numbers of the line's shards, in their order.
        ends: int64 [shards], where each of them ends in the line.
        piece: The places of the piece in the line.
        last: Number of its last batch, which takes what is left.
    """

    def __init__(
        self,
        order: ShardOrder,
        number: int,
        shards: np.ndarray,
        ends: np.ndarray,
        piece: range,
        last: int,
    ) -> None:
        self.order = order
        self.number = number
        self.shards = shards
        self.ends = ends
        self.begin = piece.start
        self.length = len(piece)
        self.last = last
        self.wanted: list[int] = []
        """The shards that are needed now and next; [] if none of its batches was asked for."""
        self._window = functools.lru_cache(maxsize=2)(self._drawn_window)

    def batch(self, number: int) -> list[int]:
        """Return the samples of a batch of this stream."""
        size = self.order.batches.batch_size
        window = self.order.batches.window
        places = range(number * size, self.length if number == self.last else number * size + size)
        drawn = [self._window(place // window)[place % window] for place in places]
        at = self.begin + np.array(drawn)
        shard = np.searchsorted(self.ends, at, side="right")
        numbers = self.shards[shard]
        # A shard ends at `ends` in the line, and at the first sample of the next one by number.
        samples: list[int] = (self.order.first[numbers + 1] - (self.ends[shard] - at)).tolist()
        return samples

    def reach(self, number: int) -> None:
        """Note which shards a batch's window needs, and the next one."""
        batches = self.order.batches
        begin = number * batches.batch_size // batches.window * batches.window
        end = min(begin + 2 * batches.window, self.length)
        ends = [self.begin + begin, self.begin + max(begin, end - 1)]
        first, last = np.searchsorted(self.ends, ends, side="right").tolist()
        self.wanted = self.shards[first : last + 1].tolist()

    def _drawn_window(self, number: int) -> np.ndarray:
        """Return int64 [samples], the places in this stream of the samples of a window."""
        batches = self.order.batches
        begin = number * batches.window
        length = min(batches.window, self.length - begin)
        if not batches.shuffle:
            return begin + np.arange(length)
        return begin + self.order.permutation(length, "window", self.number, number)
