"""Data of which each node has a part of its own (SageMaker's ShardedByS3Key): what all ranks have to agree on.

`agree` and `share` are collectives, which all ranks call. What one of them finds wrong is raised by all of them alike:
a rank that ends alone leaves the others waiting for it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import distributed

from sagemaker_lightning.contract.environment import place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.partition import Division


@dataclass(frozen=True)
class Shard:
    """What one node has."""

    host: str
    """Its name."""
    ranks: int
    """How many ranks of the job are there."""
    train: int
    """Images for training."""
    val: int
    """Images for validation."""


def agree(read: Callable[[], tuple[int, int]], node: int) -> list[Shard]:
    """Return what each node has, in the order of their ranks.

    `read` returns the numbers of images, training and validation, of this node, whose rank is `node`. UserError, on
    every rank, if `read` raises UserError or OSError on one of them, or if a rank would have no image.
    """
    told = _gather((node, _host(), *_tried(read)))
    needed = "; with ShardedByS3Key, each host needs training files of its own"
    _raise_first(
        (host, f"{problem}{needed if missing else ''}") for _, host, _, problem, missing in told
    )
    found = []
    for _, same in groupby(told, key=lambda one: one[0]):
        (_, host, sizes, _, _), *others = same
        found.append(Shard(host, 1 + len(others), *sizes))
    for shard in found:
        for flag, kind, size in (
            ("data_dir", "training", shard.train),
            ("val_split", "validation", shard.val),
        ):
            if size < shard.ranks:
                raise UserError(
                    f"--data.{flag}: found {size} {kind} images on {shard.host}, which has {shard.ranks} ranks; "
                    "allowed is one for each or more: use more files, fewer hosts, or the channel as FullyReplicated"
                )
    return found


def share(read: Callable[[], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return what `read` returns, where it raises FileNotFoundError that of the first rank where it does not.

    UserError, on every rank, if nobody has it, or if `read` raises another UserError or OSError on one of them.
    """
    found, problem, missing = _tried(read)
    told = _gather((_host(), problem, missing))
    owners = [rank for rank, (_, problem, _) in enumerate(told) if not problem]
    _raise_first((host, problem) for host, problem, missing in told if not missing or not owners)
    if len(owners) < len(told):
        sent = [found]
        distributed.broadcast_object_list(sent, src=owners[0])
        found = found or sent[0]
    return found


def ranks(shards: Sequence[Shard], split: str, rank: int, seed: int) -> dict[str, object]:
    """Return what global rank `rank` has to tell its loader of the nodes' parts of `split` ("train" or "val").

    Each node has an order and an augmentation of its own, so that equal positions on two nodes are not treated alike.
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
    return {}  # no shards: all nodes have the same


def line(shards: Sequence[Shard], batch_size: int, drop_last: bool) -> str:
    """Return a line for the log: what each host has, and how much of it an epoch leaves out."""
    left_out = {}
    steps = {}
    for split, whole_only in (("train", drop_last), ("val", False)):
        divisions = [
            Division(getattr(shard, split), batch_size, shard.ranks, whole_only) for shard in shards
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
        f"shards, training + validation images: {have}; an epoch of {steps['train']} steps, the fewest that one has, "
        f"leaves out {left_out['train']} training images and {left_out['val']} validation images"
    )


def _tried(read: Callable) -> tuple[object, str, bool]:
    """Return what `read` returns, what it has against that, "" if nothing, and whether that is a missing file."""
    try:
        return read(), "", False
    except (UserError, OSError) as error:
        return None, str(error), isinstance(error, FileNotFoundError)


def _raise_first(problems: Iterable[tuple[str, str]]) -> None:
    """Raise the first of the problems (host, what it is), the same on every rank, unless all are ""."""
    for host, problem in problems:
        if problem:
            raise UserError(f"{problem} (on {host})")


def _gather(told: tuple) -> list[tuple]:
    """Return what each rank of the job tells."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, told)
    return everyone


def _host() -> str:
    return place().partition(",")[0]
