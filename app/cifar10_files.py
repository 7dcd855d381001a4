"""The "python version" of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html), read as untrusted input.

A data channel is input: it must not run code. Pickles are therefore read through an unpickler that can build
arrays and plain containers only, whatever their checksum.
"""

import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sagemaker_lightning import UserError

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST_FILES = ("test_batch",)
# A real batch has 31 MB. More than this is no CIFAR-10 batch, and is not read into memory.
MAX_BYTES = 256 * 2**20

# What a pickled array needs (numpy 1 and 2, protocols 0 to 5). `_codecs.encode` is how Python 2 and
# protocols below 3 spell bytes; `str.encode` does the same and, being a C method, cannot be
# tampered with by a pickle.
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): str.encode,
    **{
        (f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0]
        for core in ("core", "_core")
    },
    **{
        (f"numpy.{core}.numeric", "_frombuffer"): np.empty(1).__reduce_ex__(5)[0]
        for core in ("core", "_core")
    },
}


class Missing(FileNotFoundError, UserError):
    """A file is not there: a user's mistake, unless the folder is to hold a part of the files only."""


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; anything else a pickle names is refused before it is imported."""

    def find_class(self, module: str, name: str):
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no batch of images needs"
            ) from None


def read(
    folder: Path, train: bool, channel: str, part: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [N, 3, 32, 32] (RGB), and labels, int64 [N] (0 to 9), of one split.

    `folder` holds the five training batches and the test batch, or the folder or archive that the authors ship
    them in; `part` of them is enough if that is said. `channel` is what error messages call it. UserError, of class
    Missing if it is not there, names the file and what is wrong with it.
    """
    names = TRAIN_FILES if train else TEST_FILES
    batches = {}
    whole = None
    for name, content in _files(folder, names, channel):
        images, labels = _decode(content, f"{channel}: {name}")
        del content  # before the next is read
        if whole is None:  # all are as long as the first, unless they are not the authors'
            whole = np.empty((len(names), *images.shape), dtype=np.uint8)
        # In its place at once: memory for one set of images, not for two.
        if images.shape == whole.shape[1:]:
            place = whole[names.index(name)]
            place[:] = images
            images = place
        batches[name] = images, labels
    missing = [name for name in names if name not in batches]
    if missing and not (part and batches):
        raise Missing(
            f"{channel}: {missing[0]} is missing; needed are {', '.join(TRAIN_FILES + TEST_FILES)}"
        )
    parts = [batches[name] for name in names if name in batches]
    labels = np.concatenate([labels for _, labels in parts])
    if len(parts) == len(names) and all(images.base is whole for images, _ in parts):
        return whole.reshape(-1, 3, 32, 32), labels
    return np.concatenate([images for images, _ in parts]), labels


def download(folder: Path) -> None:
    """Fetch the authors' archive into `folder` unless it is there, checked against its MD5, complete or not at all."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(str(folder / ARCHIVE), CIFAR10.tgz_md5):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as aside:
        try:
            download_url(CIFAR10.url, aside, ARCHIVE, CIFAR10.tgz_md5)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"--data.download: {CIFAR10.url} could not be fetched ({error}); give the data as "
                "a channel instead"
            ) from None
        os.replace(Path(aside, ARCHIVE), folder / ARCHIVE)


def _files(folder: Path, names: tuple[str, ...], channel: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the batch files: loose, in the authors' folder, or in their archive."""
    for place in (folder, folder / FOLDER):
        if found := [place / name for name in names if (place / name).is_file()]:
            for path in found:
                if path.stat().st_size > MAX_BYTES:
                    raise UserError(
                        f"{channel}: {path.name} has {path.stat().st_size} bytes, a batch has 31 "
                        "million"
                    )
                yield path.name, path.read_bytes()
            return
    if not (folder / ARCHIVE).is_file():
        found = (
            ", ".join(sorted(path.name for path in folder.iterdir())[:5])
            if folder.is_dir()
            else "no such folder"
        )
        raise Missing(
            f"{channel}: {folder} holds no CIFAR-10 (found: {found or 'nothing'}); allowed are "
            f"{ARCHIVE}, the folder {FOLDER} or the files in it"
        )
    try:
        with tarfile.open(folder / ARCHIVE) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isreg() and name in names and member.size <= MAX_BYTES:
                    yield name, archive.extractfile(member).read()
            while archive.fileobj.read(2**20):  # to its end, where gzip keeps the checksum
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:  # OSError: gzip's checksum
        raise UserError(
            f"{channel}: {ARCHIVE} is damaged or incomplete ({error}); copy it again"
        ) from None


def _decode(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one batch's images and labels, or raise UserError that starts with `where`."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where} is not a CIFAR-10 batch: {reason}; copy it again") from None
    batch = {str(key): value for key, value in batch.items()} if isinstance(batch, dict) else {}
    data = batch.get("data")
    labels = batch.get("labels")
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != 3072
    ):
        found = (
            f"{data.dtype} {list(data.shape)}"
            if isinstance(data, np.ndarray)
            else type(data).__name__
        )
        raise UserError(f"{where}: 'data' is {found}, must be uint8 [N, 3072]")
    if not isinstance(labels, list) or len(labels) != len(data):
        found = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise UserError(f"{where}: 'labels' must be a list of {len(data)} numbers, found {found}")
    wrong = [label for label in labels if type(label) is not int or not 0 <= label <= 9]
    if wrong:
        raise UserError(f"{where}: label {wrong[0]!r} found, allowed are 0 to 9")
    return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)
