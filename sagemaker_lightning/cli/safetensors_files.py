"""A sharded model's whole weights in files of a bounded size, so that no host holds all of them.

The files are named as transformers names them: `model-00001-of-00003.safetensors`, ..., and
`model.safetensors.index.json`, which says in which file each weight is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from sagemaker_lightning.compat import dtensors
from sagemaker_lightning.contract.atomic_files import atomic_writes, json_text, remove_leftovers

INDEX = "model.safetensors.index.json"
PATTERN = "model-*-of-*.safetensors"
FILE_BYTES = 2**30
"""The most bytes of weights in a file, unless a weight alone has more."""


def size(weights: Mapping[str, Tensor]) -> int:
    """Return the bytes of whole weights."""
    return sum(weight.nbytes for weight in weights.values())


def parts(weights: Mapping[str, Tensor], file_bytes: int) -> list[list[str]]:
    """Return the names of the weights in each file."""
    files: list[list[str]] = []
    room = 0
    for name, weight in weights.items():
        if not files or weight.nbytes > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= weight.nbytes
    return files


def write(folder: Path, weights: Mapping[str, Tensor], writes: bool, file_bytes: int) -> None:
    """Write weights, one file after another; all ranks call it.

    A rank that writes has the whole weights of one file at a time in its host's memory, up to three
    times, as the library makes bytes of them. The files get their names when all are written, the
    index last.

    Args:
        folder: The folder to write to.
        weights: A state dict of tensors, of which each rank may have a part.
        writes: Whether this rank writes.
        file_bytes: The most bytes of weights in a file.

    Raises:
        OSError: A file cannot be written; then those of an earlier program are still there.
    """
    files = parts(weights, file_bytes)
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    index = {
        "metadata": {"total_size": size(weights)},
        "weight_map": {key: name for name, keys in zip(names, files, strict=True) for key in keys},
    }
    if not writes:
        for keys in files:
            dtensors.whole({key: weights[key] for key in keys}, keeps=False)
        return
    for pattern in (PATTERN, INDEX):
        remove_leftovers(folder, pattern)
    with atomic_writes([folder / name for name in (*names, INDEX)]) as (*opened, index_file):
        for keys, file in zip(files, opened, strict=True):
            file.write(_content({key: weights[key] for key in keys}))
        index_file.write(json_text(index, indent=2).encode() + b"\n")
    remove(folder, but=names)


def _content(weights: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file; whole weights live no longer than this call."""
    whole = dtensors.whole(weights, keeps=True)
    # The library refuses tensors that share memory, as buffers may.
    own = {
        key: weight.detach().to("cpu", copy=weight is weights[key]) for key, weight in whole.items()
    }
    del whole
    return save(own, metadata={"format": "pt"})


def remove(folder: Path, but: Sequence[str] = ()) -> None:
    """Remove the files that an earlier program has written to a folder.

    Args:
        folder: The folder.
        but: The names of the files that stay, and so does the index if there are any.
    """
    for path in folder.glob(PATTERN):
        if path.name not in but:
            path.unlink()
    if not but:
        (folder / INDEX).unlink(missing_ok=True)
