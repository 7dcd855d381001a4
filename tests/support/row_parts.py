"""Parts of a table, as the hosts of a job leave them."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from sagemaker_lightning.rows import merge, parts

ROW_COUNT = 30
HOST_COUNT = 3


def write_parts(folder: Path, sharded: bool = False) -> dict[str, np.ndarray]:
    """Write the parts of three hosts, each into its own folder.

    Return what merging them has to give.
    """
    numbers = np.arange(ROW_COUNT)
    arrays = {
        "neighbours": (numbers[:, None] + [1, 2]) % ROW_COUNT,
        "scores": numbers.astype(np.float32) / 7,
    }
    arrays["counts"] = np.ones(ROW_COUNT, np.int64)
    hosts = [f"algo-{host + 1}" for host in range(HOST_COUNT)]
    rows_per_host = ROW_COUNT // HOST_COUNT
    if sharded:
        arrays["neighbours"] = (
            numbers[:, None] // rows_per_host * rows_per_host
            + (numbers[:, None] + [1, 2]) % rows_per_host
        )
    for host, name in enumerate(hosts):
        rows = range(rows_per_host * host, rows_per_host * (host + 1))
        block = {key: array[rows.start : rows.stop] for key, array in arrays.items()}
        about = {
            "source": "s" if not sharded else name,
            "settings": {"k": 2, "numbers": ["neighbours"]},
            "host": name,
        }
        about |= {
            "total": None if sharded else ROW_COUNT,
            "hosts": hosts,
            "files": {"a.npy": 20, "b.npy": 10},
        }
        if sharded:
            block["neighbours"] = block["neighbours"] - rows.start
            rows = range(rows_per_host)
            about["files"] = {f"{name}.npy": rows_per_host}
        parts.write(folder / name, rows, [(rows, block)], about)
    return arrays


def archived(folder: Path, archive: Path) -> Path:
    """Return the parts in one model.tar.gz, as SageMaker makes it."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.name, recursive=False)
    return archive


def refused(models: list, output: Path) -> str:
    """Run a merge that has to fail, and return its line."""
    paths_before = sorted(output.rglob("*")) if output.exists() else None
    with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at it
        merge.merge([str(model) for model in models], output)
    assert (sorted(output.rglob("*")) if output.exists() else None) == paths_before
    return str(error.value)


def edited(folder: Path, **changes) -> Path:
    """Change the first part's manifest, and return the folder of all parts."""
    (path,) = (folder / "algo-1").glob("manifest-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def arrays_of(folder: Path) -> dict:
    """Return the part of the first manifest that describes the arrays."""
    (path,) = (folder / "algo-1").glob("manifest-*.json")
    return json.loads(path.read_text())["arrays"]


def loaded(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a merge."""
    return {path.stem: np.load(path) for path in folder.glob("*.npy")}


def same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Return whether two sets of arrays have the same names, kinds and numbers."""
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == array.dtype and np.array_equal(actual[name], array)
        for name, array in expected.items()
    )


ABOUT = {"host": "a", "total": 10, "source": "s", "settings": {}, "hosts": ["a"], "files": {}}
