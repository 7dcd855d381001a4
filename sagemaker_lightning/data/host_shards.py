"""Nodes with parts of the data (ShardedByS3Key): what all ranks agree on.

`agree` and `share` are collectives: all ranks call them. If one rank finds a mistake, all ranks
raise it: a rank that ends alone leaves the others waiting for it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from torch import distributed

from sagemaker_lightning.contract.environment import host_and_rank
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.gather import gather
from sagemaker_lightning.data.partition import BatchDivision

Content = TypeVar("Content")
"""What ranks read from files."""


@dataclass(frozen=True)
class Shard:
    """The part of the data that one node has."""

    host: str
    """Name of the node's host."""
    ranks: int
    """Number of the job's ranks on this node."""
    train: int
    """Number of images for training."""
    val: int
    """Number of images for validation."""


def agree(read: Callable[[], tuple[int, int]], node: int) -> list[Shard]:
    """Return what each node has, in the order of the nodes' ranks.

    Args:
        read: Returns the numbers of images for training and for validation on this node.
        node: The rank of this node.

    Raises UserError, on every rank, if `read` raises UserError or OSError on one of them, or if a
    rank would have no image.
    """
    answers = gather((node, _current_host(), *_read_or_problem(read)))
    needed = "; with ShardedByS3Key, each host needs training files of its own"
    _raise_first_problem(
        (host, f"{problem}{needed if missing else ''}") for _, host, _, problem, missing in answers
    )
    shards = []
    for _, answers_of_node in groupby(answers, key=lambda answer: answer[0]):
        (_, host, sizes, _, _), *other_ranks = answers_of_node
        assert sizes is not None  # no rank has a problem
        shards.append(Shard(host, 1 + len(other_ranks), *sizes))
    for shard in shards:
        for flag, kind, size in (
            ("data_dir", "training", shard.train),
            ("val_split", "validation", shard.val),
        ):
            if size < shard.ranks:
                raise UserError(
                    f"--data.{flag}: found {size} {kind} images on {shard.host}, which has "
                    f"{shard.ranks} ranks; expected one for each or more: use more files, fewer "
                    "hosts, or the channel as FullyReplicated"
                )
    return shards


def share(read: Callable[[], Content]) -> Content:
    """Return what `read` returns; if files are missing here, another rank's result.

    The files are missing if `read` raises FileNotFoundError. The other rank is the first one that
    has them. Raises UserError, on every rank, if no rank has the files, or if `read` raises
    UserError or another OSError on one of them.
    """
    arrays, problem, missing = _read_or_problem(read)
    answers = gather((_current_host(), problem, missing))
    owners = [rank for rank, (_, problem, _) in enumerate(answers) if not problem]
    _raise_first_problem(
        (host, problem) for host, problem, missing in answers if not missing or not owners
    )
    if len(owners) < len(answers):
        to_send = [arrays]
        distributed.broadcast_object_list(to_send, src=owners[0])
        arrays = arrays or to_send[0]
    assert arrays is not None  # this rank has them, or has got them
    return arrays


def ranks(shards: Sequence[Shard], split: str, rank: int, seed: int) -> dict[str, object]:
    """Return the arguments about nodes' parts of a split for a rank's loader.

    Each node has its own order and augmentation, so that equal positions on two nodes are not
    treated alike. The result is {} if there are no shards.

    Args:
        shards: What each node has.
        split: "train" or "val".
        rank: Global rank.
        seed: Decides the order and the augmentation, with the node.
    """
    for node, shard in enumerate(shards):
        if rank < shard.ranks:
            sizes = [(getattr(each, split), each.ranks) for each in shards]
            return {
                "rank": rank,
                "world_size": shard.ranks,
                "shards": sizes,
                "seed": f"{seed}, node {node}",
            }
        rank -= shard.ranks
    return {}  # no shards: all nodes have the same data


def line(shards: Sequence[Shard], batch_size: int, drop_last: bool) -> str:
    """Return a line for the log: images of each host, and how many go unused."""
    left_out = {}
    steps = {}
    for split, whole_only in (("train", drop_last), ("val", False)):
        divisions = [
            BatchDivision(getattr(shard, split), batch_size, shard.ranks, whole_only)
            for shard in shards
        ]
        steps[split] = min(division.batches for division in divisions)
        sizes = [
            (division.size, division.positions(steps[split] - 1).stop) for division in divisions
        ]
        left_out[split] = (
            f"{sum(size - used for size, used in sizes)} of {sum(size for size, _ in sizes)}"
        )
    have = ", ".join(f"{shard.host} {shard.train} + {shard.val}" for shard in shards)
    return (
        f"shards, training + validation images: {have}; an epoch of {steps['train']} steps, the "
        f"fewest that one has, leaves out {left_out['train']} training images and "
        f"{left_out['val']} validation images"
    )


def _read_or_problem(read: Callable[[], Content]) -> tuple[Content | None, str, bool]:
    """Return (what `read` returns, the problem, whether a file is missing).

    The problem is "" if there is none.
    """
    try:
        return read(), "", False
    except (UserError, OSError) as error:
        return None, str(error), isinstance(error, FileNotFoundError)


def _raise_first_problem(problems: Iterable[tuple[str, str]]) -> None:
    """Raise UserError for the first of the problems that is not "".

    `problems` are (host, problem), in the same order on every rank.
    """
    for host, problem in problems:
        if problem:
            raise UserError(f"{problem} (on {host})")


def _current_host() -> str:
    return host_and_rank().partition(",")[0]
