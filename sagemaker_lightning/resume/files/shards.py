"""The shards of a checkpoint: for each rank, a file with its parts of the sharded tensors.

The ranks write their shards first, and tell each other the checksums. The checkpoint's own file has
these, and comes last: it says which part of each tensor each shard has. The shards' names follow
from it, so that it names no file. With the same ranks, each reads its own shard alone; with others,
each reads what its parts overlap.
"""

import errno
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from sagemaker_lightning.compat import dtensors
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.data.gather import gather, own_group
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY
from sagemaker_lightning.resume.files.entries import CommonEntries, Shards, TensorForm

SHARDS_KEY: Final = "shards"
"""The entry of a checkpoint that describes its shards."""
TENSORS_KEY: Final = "tensors"
RANKS_KEY = "ranks"
PARTS_KEY = "parts"
MAY_LACK = f"{RANKS_KEY}/", f"{PARTS_KEY}/"
"""How the names begin of tensors that a rank may lack: it has other objects, or as at first."""
WEIGHTS = "state_dict/"
"""How the names of the model's weights begin, after what precedes them all."""
MARK = "sagemaker_lightning_shared_out"
"""The only key of a dict that stands for a tensor; its value is the tensor's name."""
NAME = re.compile(r"step-(?P<step>\d{9,})-(?P<number>\d+)-rank-\d+-of-\d+\.shard")
"""The name of a shard."""


def path_of(folder: Path, step: int, number: int, rank: int, ranks: int) -> Path:
    """Return the path of a rank's shard of a checkpoint.

    Args:
        folder: The folder of the checkpoints.
        step: The checkpoint's optimizer step.
        number: The number of the save.
        rank: The rank.
        ranks: Number of ranks.
    """
    return folder / f"step-{step:09d}-{number:d}-rank-{rank:04d}-of-{ranks:04d}.shard"


def paths_in(folder: Path, step: int) -> list[tuple[int, Path]]:
    """Return the numbers of the saves, and the paths, of all shards of a step in a folder."""
    found = ((NAME.fullmatch(path.name), path) for path in all_in(folder))
    return [
        (int(match["number"]), path)
        for match, path in found
        if match and int(match["step"]) == step
    ]


def all_in(folder: Path) -> list[Path]:
    """Return the paths of all shards in a folder."""
    found = [path for path in folder.glob("step-*.shard") if NAME.fullmatch(path.name)]
    return [path for path in found if path.is_file()]  # a folder is not ours, and stays


def remove(folder: Path, step: int, before: float = math.inf) -> None:
    """Remove the shards of a step whose saves have a lower number."""
    for number, path in paths_in(folder, step):
        if number < before:
            path.unlink(missing_ok=True)


def remove_orphans(folder: Path, steps: Sequence[int]) -> None:
    """Remove the shards of steps of which there is no checkpoint: it was not finished."""
    for path in all_in(folder):
        if (match := NAME.fullmatch(path.name)) and int(match["step"]) not in steps:
            path.unlink(missing_ok=True)


# Saving -------------------------------------------------------------------------------------------


class OwnForm(TypedDict):
    """What a rank says of a tensor that is shared out; files/entries.py has the words."""

    shape: list[int]
    dtype: str
    layout: list[list[str]]
    chunk: list[list[int]]
    """The offsets and the sizes of this rank's part."""


class SharedOut:
    """The tensors of a checkpoint that are shared out, as they are found in what is saved."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        """This rank's parts, on the CPU, by name."""
        self.forms: dict[str, OwnForm] = {}
        """What the tensors are, by name."""
        self.chunks: dict[tuple[Any, ...], dtensors.Chunk] = {}
        """This rank's part by how a tensor is shared out; optimizers' states are as the weights."""

    def take(self, value: Any, *path: str) -> Any:
        """Return dicts and lists within each other with marks in the place of the tensors.

        Args:
            value: They are copied.
            path: Begins the names of the tensors in it.
        """
        return dtensors.mapped(value, self._take, path)

    def _take(self, path: tuple[Any, ...], tensor: DTensor) -> dict[str, str]:
        name = "/".join(map(str, path))
        while name in self.parts:
            name += "'"
        if dtensors.has_partial_sums(tensor):
            raise UserError(
                f"a checkpoint of this run could not be read again: {name} is a DTensor of partial "
                "sums; keep there what redistribute() makes of it"
            )
        how = tensor.device_mesh, tensor.placements, tensor.shape
        if how not in self.chunks:
            self.chunks[how] = dtensors.chunk_of(tensor)
        offsets, sizes = self.chunks[how]
        self.parts[name] = dtensors.local_part(tensor).to("cpu", copy=True)
        self.forms[name] = {
            "shape": list(tensor.shape),
            "dtype": _dtype_text(tensor),
            "layout": _layout(tensor),
            "chunk": [list(offsets), list(sizes)],
        }
        return {MARK: name}

    def described(self, gather: Callable[[Any], list[Any]]) -> Shards:
        """Return what a checkpoint says of all ranks' parts; all ranks call it.

        Args:
            gather: Returns the values of all ranks, by rank.
        """
        of_ranks: list[dict[str, OwnForm]] = gather(self.forms)
        first: dict[str, OwnForm] = {}
        for rank, forms in enumerate(of_ranks):
            common = {name for name in first if not name.startswith(MAY_LACK)}
            others = set() if rank == 0 else common - forms.keys()
            for name, form in forms.items():
                is_common = rank == 0 or name in first or name.startswith(MAY_LACK)
                if not is_common or _what(first.setdefault(name, form)) != _what(form):
                    others.add(name)
            if others:
                raise UserError(
                    f"a checkpoint of this run could not be read again: {min(others)} is a DTensor "
                    f"on rank 0 or rank {rank} only, or another one; keep the same tensors on all "
                    "ranks"
                )
        return {
            TENSORS_KEY: {
                name: {
                    "shape": form["shape"],
                    "dtype": form["dtype"],
                    "layout": form["layout"],
                    "chunks": [
                        forms[name]["chunk"] if name in forms else None for forms in of_ranks
                    ],
                }
                for name, form in first.items()
            }
        }


def _what(form: OwnForm) -> tuple[list[int], str]:
    return form["shape"], form["dtype"]


def _dtype_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout(tensor: DTensor) -> list[list[str]]:
    """Return how a tensor is shared out over each dimension of its mesh, by the dimension's name.

    It is empty if that has no words that can be read again.
    """
    names = tensor.device_mesh.mesh_dim_names or ()
    words = list(map(dtensors.word_of, tensor.placements))
    return [list(pair) for pair in zip(names, words, strict=True)] if names and all(words) else []


class ShardWriter:
    """Writes a rank's shards, and learns, in the background, what the others have written.

    Args:
        host: The name of this host.
        group: The ranks' group; None for a new one, as training continues, with collectives of its
            own, while they write.
    """

    def __init__(self, host: str, group: distributed.ProcessGroup | None = None) -> None:
        self.host = host
        self.group = group or own_group()
        self.rank = distributed.get_rank()
        self.ranks = distributed.get_world_size()

    def write(self, folder: Path, step: int, number: int, parts: Mapping[str, Tensor]) -> list[str]:
        """Write this rank's shard; return the checksums of all ranks' shards; all ranks call it.

        Args:
            folder: The folder of the checkpoints.
            step: The checkpoint's optimizer step.
            number: The number of the save.
            parts: This rank's parts of the tensors, by name.

        Raises:
            OSError: A rank could not write its shard.
        """
        path = path_of(folder, step, number, self.rank, self.ranks)
        content = {ENTRIES_KEY: {"rank": self.rank}, TENSORS_KEY: parts}
        checksum, problem = "", ""
        try:
            checksum = checkpoint_file.write(path, content, step, number).hex()
        except Exception as error:  # the others wait for an answer
            problem = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            problem = f"on {self.host}: {problem}"
        answers = gather((checksum, problem), self.group)
        if problem := next((problem for _, problem in answers if problem), ""):
            path.unlink(missing_ok=True)
            raise OSError(errno.EIO, problem)
        return [checksum for checksum, _ in answers]


# Reading ------------------------------------------------------------------------------------------


def problem(checkpoint: Path, mesh: Sequence[int], ranks: int, own_ranks: Sequence[int]) -> str:
    """Return which shard of an intact checkpoint is missing or damaged; "" if none that is needed.

    Args:
        checkpoint: The checkpoint's own file.
        mesh: The sizes of the mesh of this run's ranks.
        ranks: Number of ranks of this run.
        own_ranks: The ranks of this host, which with the same mesh read their own shards alone.
    """
    entries = checkpoint_file.read(checkpoint, mmap=True)[ENTRIES_KEY]
    if SHARDS_KEY not in entries:
        return ""
    try:
        if {type(entries[name]) for name in ("step", "number", "world_size")} != {int}:
            raise TypeError
        is_same = (entries["mesh"], entries["world_size"]) == (list(mesh), ranks)
        needed = own_ranks if is_same else range(entries["world_size"])
        checksums = [bytes.fromhex(each) for each in entries[SHARDS_KEY]["checksums"]]
        step, number = entries["step"], entries["number"]
        if (step, number) != tuple(checkpoint_file.read_footer(checkpoint))[:2]:
            raise ValueError  # names of files are made of them
        for rank in needed:
            path = path_of(checkpoint.parent, step, number, rank, entries["world_size"])
            if problem := _file_problem(path, step, number, checksums[rank]):
                return f"needs its shard {path.name}, which {problem}"
    except (KeyError, IndexError, TypeError, ValueError):
        return "is forged: what it says of its shards is not what this program writes"
    return ""


def _file_problem(path: Path, step: int, number: int, checksum: bytes) -> str:
    """Return what is wrong with a shard; "" if nothing is."""
    if not path.exists():
        return "is missing"
    footer = checkpoint_file.read_footer(path)
    if not isinstance(footer, str) and footer != (step, number, checksum):
        return "is another one than was saved with it"
    found = checkpoint_file.examine(path)
    return found if isinstance(found, str) else ""


def _how(form: TensorForm) -> str:
    """Return how ranks shared a tensor out, as a key."""
    return repr((form["shape"], form["layout"], form["chunks"]))


def _placing(tensor: Tensor) -> Any:
    """Return how this run shares a tensor out, which may be not at all."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


class ShardReader:
    """Reads the tensors of a checkpoint that are shared out, as this run shares them out.

    Args:
        folder: The folder of the checkpoints.
        entries: This package's entries of the checkpoint.
        rank: This rank.
        mesh: The mesh of this run's ranks; None if it shares nothing out.
        like: Returns the tensor of this run as which one is shared out, given the keys that lead to
            it in the checkpoint; None if there is none.
    """

    def __init__(
        self,
        folder: Path,
        entries: CommonEntries,
        rank: int,
        mesh: DeviceMesh | None,
        like: Callable[[tuple[Any, ...]], Tensor | None],
    ) -> None:
        self.folder = folder
        self.entries = entries
        self.forms: Mapping[str, TensorForm] = (
            entries[SHARDS_KEY].get(TENSORS_KEY, {}) if SHARDS_KEY in entries else {}
        )
        self.rank = rank
        self.mesh = mesh
        self.like = like
        self.files: dict[int, Mapping[str, Tensor]] = {}
        self.taken: set[str] = set()
        """The tensors that were read: a name is one tensor's."""

    def resolve(self, value: Any, *path: Any) -> Any:
        """Return dicts and lists within each other with the tensors in the place of their marks.

        Whole tensors of which this run has parts are shared out, too.

        Args:
            value: They are changed in place where they can be.
            path: The keys that lead to it in the checkpoint.
        """
        if isinstance(value, dict):
            if value.keys() == {MARK}:
                return self.tensor(value[MARK], self.like(path))
            for key, each in value.items():
                value[key] = self.resolve(each, *path, key)
            return value
        if isinstance(value, list):
            value[:] = [self.resolve(each, *path, n) for n, each in enumerate(value)]
            return value
        if type(value) is tuple:
            return tuple(self.resolve(each, *path, n) for n, each in enumerate(value))
        is_of_all = isinstance(value, Tensor) and path[0] != RANKS_KEY
        return dtensors.placed_like(value, self.like(path)) if is_of_all else value

    @torch.no_grad()
    def tensor(self, name: str, like: Tensor | None) -> Tensor:
        """Return a tensor, shared out as another one of the same shape.

        Without one, it is shared out as the weights now are that were shared out as it was, or of
        these the one whose name ends its own; without such weights, as it was. If the other one is
        whole, or there is none and no mesh, so is it.

        Raises:
            UserError: It was shared out in a way that this run's mesh does not allow, or it may be
                of several weights that are shared out differently now.
        """
        if name in self.taken:  # a few bytes would make all of it once more
            raise ValueError(name)
        self.taken.add(name)
        form = self.forms[name]
        shape = torch.Size(form["shape"])
        dtype = getattr(torch, form["dtype"])
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise TypeError(name)
        if like is not None and like.shape != shape:
            like = None
        if like is None:
            like = self._weight_like(name, form)
        if not isinstance(like, DTensor) and (self.mesh is None or like is not None):
            made = target = torch.empty(shape, dtype=dtype)
            offsets, sizes = (0,) * len(shape), tuple(shape)
        else:
            if like is None:
                mesh, placements = self._layout(name, form["layout"])
            else:
                mesh, placements = like.device_mesh, like.placements
            made = dtensors.empty(shape, dtype, mesh, placements)
            target = dtensors.local_part(made)
            offsets, sizes = dtensors.chunk_of(made)
        self._fill(name, target, offsets, sizes)
        return made

    def _weight_like(self, name: str, form: TensorForm) -> Tensor | None:
        """Return a weight of this run that was shared out as a tensor was; None if there is none.

        Raises:
            UserError: There are several, which are shared out differently now.
        """
        weights = self._weights_by_form.get(_how(form), {})
        own = name.rstrip("'\")]}")
        named = [weights[each] for each in weights if own.endswith(each)]
        candidates = named or list(weights.values())
        if len(set(map(_placing, candidates))) > 1:
            raise UserError(
                f"a checkpoint holds {printable(name)[:200]}, a DTensor that may be of any of the "
                f"weights {', '.join(sorted(weights))[:300]}, which this run shares out in other "
                "ways; keep it in a dict by the weight's name, or give as many ranks as before, "
                "and the same sizes of the mesh"
            )
        return candidates[0] if candidates else None

    @cached_property
    def _weights_by_form(self) -> dict[str, dict[str, Tensor]]:
        """This run's weights, by how those of the checkpoint were shared out, and name."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, form in self.forms.items():
            _, is_weight, weight_name = name.partition(WEIGHTS)
            weight = self.like((WEIGHTS[:-1], weight_name)) if is_weight else None
            if weight is not None and list(weight.shape) == form["shape"]:
                found.setdefault(_how(form), {})[weight_name] = weight
        return found

    def _layout(self, name: str, layout: Sequence[Any]) -> tuple[DeviceMesh, Sequence[Placement]]:
        """Return the mesh, and the placements on it, of a layout as `_layout` describes it."""
        placements = [dtensors.placement_of(word) for _, word in layout]
        names = tuple(dimension for dimension, _ in layout)
        own_names = self.mesh.mesh_dim_names if self.mesh is not None else None
        if self.mesh is None or not names or not set(names) <= set(own_names or ()):
            raise UserError(
                f"a checkpoint holds {name}, which was shared out in a way that this run cannot "
                "make again; give as many ranks as before, share it out over the strategy's "
                "device_mesh, or move the checkpoints away to start over"
            )
        return self.mesh[names], placements

    def _fill(
        self, name: str, target: Tensor, offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Copy the saved parts of a tensor that overlap one into it.

        Raises:
            ValueError: They are not all of it.
        """
        if not target.numel():
            return
        chunks = {
            rank: (tuple(chunk[0]), tuple(chunk[1]))
            for rank, chunk in enumerate(self.forms[name]["chunks"])
            if chunk is not None
        }
        own = (tuple(offsets), tuple(sizes))
        if chunks.get(self.rank) == own:
            ranks = {own: self.rank}
        else:
            ranks = {chunk: rank for rank, chunk in reversed(chunks.items())}
        overlaps = []
        for (at, size), rank in ranks.items():
            low = [max(a, b) for a, b in zip(at, offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(at, size, offsets, sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = self._part(rank, name)
                if tuple(part.shape) != size or part.dtype != target.dtype:
                    raise ValueError(name)
                extent = [b - a for a, b in zip(low, high, strict=True)]
                overlaps.append((part, at, low, extent))
        if sum(math.prod(extent) for *_, extent in overlaps) != target.numel():
            if len(chunks) < len(self.forms[name]["chunks"]):
                raise UserError(
                    f"a checkpoint holds {printable(name)[:200]}, a DTensor of which some ranks "
                    "had no part; give as many ranks as before, and the same sizes of the mesh"
                )
            raise ValueError(name)
        filled = torch.zeros(tuple(sizes) if len(overlaps) > 1 else (), dtype=torch.bool)
        for part, at, low, extent in overlaps:
            to = [a - b for a, b in zip(low, offsets, strict=True)]
            of = [a - b for a, b in zip(low, at, strict=True)]
            target[dtensors.within(to, extent)] = part[dtensors.within(of, extent)]
            filled[dtensors.within(to, extent) if filled.dim() else ()] = True
        if not filled.all():
            raise ValueError(name)

    def _part(self, rank: int, name: str) -> Tensor:
        """Return a rank's part of a tensor; it is read from the file when it is used."""
        if rank not in self.files:
            entries = self.entries
            path = path_of(
                self.folder, entries["step"], entries["number"], rank, entries["world_size"]
            )
            self.files[rank] = checkpoint_file.read(path, mmap=True)[TENSORS_KEY]
        part = self.files[rank][name]
        if type(part) is not Tensor:
            raise TypeError(name)
        return part
