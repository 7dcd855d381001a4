"""The "python version" of CIFAR-10, read as untrusted input.

It is described at https://www.cs.toronto.edu/~kriz/cifar.html. A data channel is input: it must not
run code. Therefore pickles are read by an unpickler that can build only plain containers and
descriptions of arrays, whatever their checksum.
"""

import io
import os
import pickle
import reprlib
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
# A real batch has 31 MB. A larger file is not a CIFAR-10 batch, and is not read into memory.
MAX_BYTES = 256 * 2**20


class _Dtype:
    """What a pickle says about a type of numbers."""

    name: object = ""

    def __init__(self, name: object, *_) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Ignore the order of a number's bytes: it has one only."""


class _Array:
    """What a pickle says about an array.

    Nothing of numpy is called with them: numpy believes what a pickle says about memory, pointers
    included.
    """

    shape: object = None
    dtype: object = None
    is_fortran: object = None
    content: object = None

    def __init__(self, *_) -> None:
        """Take what numpy's function of protocols 0 to 4 takes; the rest comes as the state."""

    def __setstate__(self, state: tuple) -> None:
        _, self.shape, self.dtype, self.is_fortran, content = state
        # Python 2's bytes
        self.content = content.encode("latin-1") if isinstance(content, str) else content

    def __str__(self) -> str:
        """Return its type and shape, in one short line whatever they are."""
        return f"{reprlib.repr(getattr(self.dtype, 'name', None))} {reprlib.repr(self.shape)}"

    def images(self) -> np.ndarray | None:
        """Return the array, uint8 [N, 3072]; None if it is another one."""
        content = self.content
        if (
            not isinstance(content, bytes | bytearray)
            or type(self.dtype) is not _Dtype
            or self.dtype.name != "u1"
            or self.shape != (len(content) // 3072, 3072)
            or len(content) % 3072
        ):
            return None
        array = np.frombuffer(content, dtype=np.uint8)
        return array.reshape(3072, -1).T if self.is_fortran else array.reshape(-1, 3072)


class _ArrayFromBuffer(_Array):
    """What a pickle of protocol 5 says about an array."""

    def __init__(self, content: object, dtype: object, shape: object, order: object) -> None:
        self.__setstate__((None, shape, dtype, order == "F", content))


# What a pickled array needs (numpy 1 and 2, protocols 0 to 5). Python 2 and protocols below 3 write
# bytes by `_codecs.encode`. `str.encode` does the same. No pickle can tamper with any of these: it
# cannot change what has a `__setstate__`, nor a C method.
_ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): str.encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _ArrayFromBuffer for core in ("core", "_core")},
}


class Missing(FileNotFoundError, UserError):
    """A file is not there: a mistake of the user.

    It is not a mistake if the folder is meant to have only some of the files.
    """


class _ArrayUnpickler(pickle.Unpickler):
    """Builds plain containers and descriptions of arrays only.

    It refuses anything else that a pickle names, before it is imported.
    """

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
    """Return the images and labels of one split.

    The images are uint8 [N, 3, 32, 32] (RGB), the labels int64 [N] (0 to 9).

    Args:
        folder: Has the five training batches and the test batch, or the folder or the archive in
            which the authors ship them.
        train: Whether to read the training images, not the test images.
        channel: What error messages call the folder.
        part: Whether some of the files are enough.

    Raises UserError, which names the file and what is wrong with it; its class is Missing if the
    file is not there.
    """
    names = TRAIN_FILES if train else TEST_FILES
    batches = {}
    all_images = None
    for name, content in _files(folder, names, channel):
        images, labels = _decode(content, f"{channel}: {name}")
        del content  # frees its memory before the next one is read
        if all_images is None:  # the authors' files all have the same length
            all_images = np.empty((len(names), *images.shape), dtype=np.uint8)
        # Copied to its place at once: memory is needed for one set of images, not for two.
        if images.shape == all_images.shape[1:]:
            target = all_images[names.index(name)]
            target[:] = images
            images = target
        batches[name] = images, labels
    missing = [name for name in names if name not in batches]
    if missing and not (part and batches):
        raise Missing(
            f"{channel}: {missing[0]} is missing; expected {', '.join(TRAIN_FILES + TEST_FILES)}"
        )
    found_batches = [batches[name] for name in names if name in batches]
    labels = np.concatenate([labels for _, labels in found_batches])
    if len(found_batches) == len(names) and all(
        images.base is all_images for images, _ in found_batches
    ):
        return all_images.reshape(-1, 3, 32, 32), labels
    return np.concatenate([images for images, _ in found_batches]), labels


def download(folder: Path) -> None:
    """Download the authors' archive into `folder`, unless it is there.

    It is checked against its MD5, and is there completely or not at all. UserError if it cannot be
    fetched.
    """
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(str(folder / ARCHIVE), CIFAR10.tgz_md5):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        try:
            download_url(CIFAR10.url, temporary, ARCHIVE, CIFAR10.tgz_md5)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"--data.download: {CIFAR10.url} could not be fetched ({error}); give the data as "
                "a channel instead"
            ) from None
        os.replace(Path(temporary, ARCHIVE), folder / ARCHIVE)


def _files(folder: Path, names: tuple[str, ...], channel: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the batch files.

    They are in the folder itself, in the authors' folder, or in the authors' archive.
    """
    for parent in (folder, folder / FOLDER):
        if paths := [parent / name for name in names if (parent / name).is_file()]:
            for path in paths:
                if path.stat().st_size > MAX_BYTES:
                    raise UserError(
                        f"{channel}: {path.name} has {path.stat().st_size} bytes, a batch has 31 "
                        "million"
                    )
                yield path.name, path.read_bytes()
            return
    if not (folder / ARCHIVE).is_file():
        file_names = (
            ", ".join(path.name + "/" * path.is_dir() for path in sorted(folder.iterdir())[:5])
            if folder.is_dir()
            else "no such folder"
        )
        raise Missing(
            f"{channel}: {folder} holds no CIFAR-10 (found: {file_names or 'nothing'}); "
            f"expected the file {ARCHIVE}, the folder {FOLDER} or the files in it"
        )
    try:
        with tarfile.open(folder / ARCHIVE) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isreg() and name in names and member.size <= MAX_BYTES:
                    yield name, archive.extractfile(member).read()
            while archive.fileobj.read(2**20):  # up to its end, where gzip has the checksum
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:  # OSError: gzip's checksum
        raise UserError(
            f"{channel}: {ARCHIVE} is damaged or incomplete ({error}); copy it again"
        ) from None


def _decode(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one batch's images and labels; UserError starts with `where`."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where} is not a CIFAR-10 batch: {reason}; copy it again") from None
    batch = batch if isinstance(batch, dict) else {}
    data = batch.get("data")
    labels = batch.get("labels")
    images = data.images() if isinstance(data, _Array) else None
    if images is None:
        description = str(data) if isinstance(data, _Array) else type(data).__name__
        raise UserError(f"{where}: 'data' is {description}, must be uint8 'u1' (N, 3072)")
    if not isinstance(labels, list) or len(labels) != len(images):
        description = (
            f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        )
        raise UserError(
            f"{where}: 'labels' must be a list of {len(images)} numbers, found {description}"
        )
    wrong = [label for label in labels if type(label) is not int or not 0 <= label <= 9]
    if wrong:
        raise UserError(f"{where}: label {reprlib.repr(wrong[0])} found, expected 0 to 9")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)
