"""Saves and loads a state that ranks share, without a Trainer: shards, and a manifest that is last.

No pickle: the files are read as checkpoints are (checkpoint_file.py), and the manifest names none.
"""

import time
from pathlib import Path
from typing import Any

from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.gather import gather
from sagemaker_lightning.resume.files import checkpoint_file, shards
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY
from sagemaker_lightning.resume.files.entries import CommonEntries

STATE_KEY = "state"


def save(folder: Path, state: Any, step: int) -> Path:
    """Write a state; return the path of its manifest; all ranks call it.

    Args:
        folder: All ranks write to it: a folder of a shared file system, or of one host.
        state: Dicts and lists within each other, with numbers, texts and tensors; DTensors are
            written by the ranks that have their parts, everything else is rank 0's.
        step: Part of the files' names, such as the optimizer steps done.

    Raises:
        OSError: A rank could not write its shard; the message names its host.
    """
    shared = shards.SharedOut()
    marked = shared.take(state)
    number = gather(time.time_ns())[0]
    description = shared.described(gather)
    writer = shards.ShardWriter(SageMakerEnvironment.read().current_host, distributed.group.WORLD)
    checksums = writer.write(folder, step, number, shared.parts)
    path = folder / f"step-{step:09d}.ckpt"
    if distributed.get_rank() == 0:
        entries: CommonEntries = {
            "step": step,
            "number": number,
            "world_size": distributed.get_world_size(),
            "mesh": [],
            "shards": {**description, "checksums": checksums},
        }
        content = {STATE_KEY: marked, ENTRIES_KEY: entries}
        checkpoint_file.write(path, content, step, number)
    distributed.barrier()
    return path


def load(path: Path, like: Any = None, mesh: DeviceMesh | None = None) -> Any:
    """Return a state, shared out as this program's ranks share it; any number of ranks may.

    Args:
        path: The manifest, which `save` returned.
        like: A state of the same form, such as the model's present one. Where it has a DTensor of
            the same shape, the tensor is shared out as that; where it has another tensor, it is
            whole.
        mesh: The mesh of this program's ranks, for tensors that `like` has not, which are shared
            out over it as they were; None to get all those as a whole, and without ranks.

    Raises:
        UserError: The manifest or a shard is missing or damaged.
    """
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    found = "is missing" if not path.is_file() else checkpoint_file.examine(path)
    problem = (
        found
        if isinstance(found, str)
        else shards.problem(path, mesh=[-1], ranks=ranks, own_ranks=[])
    )
    if problem:
        raise UserError(f"{path} {problem}; expected a manifest with all its shards, as saved")
    content = checkpoint_file.read(path)

    def liked(keys: tuple[Any, ...]) -> Tensor | None:
        value = like
        for key in keys[1:]:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value if isinstance(value, Tensor) else None

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    reader = shards.ShardReader(path.parent, content[ENTRIES_KEY], rank, mesh, liked)
    return reader.resolve({STATE_KEY: content[STATE_KEY]})[STATE_KEY]
