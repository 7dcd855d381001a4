"""All-pairs similarity: rows/s of app/similarity.py / rows/s of others; peak memory.

    python -m benchmarks.similarity [--n 5] [--rows 20000] [--columns 256] [--top_k 10] [--peaks]

Each round compares a block of rows with all rows, one contender after another, in one process, on
all threads: ours; torch's matrix product alone, in blocks of the same size, which keeps nothing;
numpy with argpartition; scikit-learn's NearestNeighbors; faiss-cpu's IndexFlatIP, if it is
installed. --peaks measures only ours, at 10,000 to 200,000 rows, each in a process of its own.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks import report
from sagemaker_lightning.process import allocator
from sagemaker_lightning.rows.table import Table

from app.similarity import DTYPES, Compared, Similarity

CPU = torch.device("cpu")
BLOCK_ROWS = 1024  # rows that are compared with all rows in a turn


def unit(rows: int, columns: int) -> np.ndarray:
    """Return random rows of length 1, float32."""
    random_rows = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return random_rows / np.linalg.norm(random_rows, axis=1, keepdims=True)


def contenders(
    table: np.ndarray, k: int, folder: Path, device: torch.device = CPU, precision: str = "float32"
) -> dict[str, Callable[[], object]]:
    """Return a function for each contender, by name, which compares a block of rows.

    Work that is done once for all blocks is done already.
    """
    allocator.keep_freed_memory()  # as app/split.py does; the others have it, too
    np.save(folder / "rows.npy", table)
    settings = Similarity(top_k=k, memory=4, precision=precision)
    compared = Compared(settings, Table.read(folder, "rows"), device)
    all_rows = torch.from_numpy(table).to(device, DTYPES[precision])
    block = min(BLOCK_ROWS, len(table))

    def product() -> None:
        for first in range(0, len(table), compared.width):
            all_rows[:block] @ all_rows[first : first + compared.width].T

    def numpy() -> object:
        scores = table[:block] @ table.T
        best = np.argpartition(-scores, k, axis=1)[:, : k + 1]
        return np.take_along_axis(scores, best, axis=1)

    def in_blocks() -> None:
        for first in range(0, block, compared.size):
            compared(range(first, min(first + compared.size, block)))

    functions = {"ours": in_blocks, "matrix product alone": product}
    try:
        import faiss
    except ImportError:
        faiss = None
    if device.type == "cuda":
        if hasattr(faiss, "StandardGpuResources"):
            index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), table.shape[1])
            index.add(table)
            functions["faiss-gpu, IndexFlatIP"] = lambda: index.search(table[:block], k + 1)
        return functions
    from sklearn.neighbors import NearestNeighbors

    model = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(table)
    functions |= {
        "numpy, argpartition": numpy,
        "scikit-learn": lambda: model.kneighbors(table[:block]),
    }
    if faiss:
        faiss.omp_set_num_threads(torch.get_num_threads())
        index = faiss.IndexFlatIP(table.shape[1])
        index.add(table)
        functions["faiss-cpu, IndexFlatIP"] = lambda: index.search(table[:block], k + 1)
    return functions


def timed(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds, in turns, for so many rounds.

    One round before them does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, function in work.items():
            began = time.perf_counter()
            function()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def run(n: int, rows: int, columns: int, top_k: int) -> list[report.Comparison]:
    """Compare in n rounds, after one that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = timed(contenders(unit(rows, columns), top_k, Path(folder)), n)
    for name, times in seconds.items():
        print(f"{name}: {min(BLOCK_ROWS, rows) / statistics.median(times):.0f} rows/s", flush=True)
    quantities = f"rows/s against {rows} rows of {columns}, top {top_k}: ours / "
    ours = seconds.pop("ours")
    return [
        report.Comparison(
            "similarity",
            quantities + name,
            [
                their_seconds / our_seconds
                for their_seconds, our_seconds in zip(times, ours, strict=True)
            ],
        )
        for name, times in seconds.items()
    ]


def peaks(columns: int, top_k: int) -> None:
    """Print the peak memory of ours."""
    print("\n| rows | the rows alone, MB | peak added, MB |\n| --- | --- | --- |")
    for rows in (10_000, 50_000, 100_000, 200_000):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            added = pool.apply(_peak, (rows, columns, top_k))
        print(f"| {rows} | {rows * columns * 4 / 1e6:.0f} | {added / 1e6:.0f} |", flush=True)


def _peak(rows: int, columns: int, top_k: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "rows.npy"), unit(rows, columns))

        def blocks() -> None:
            compared = Compared(
                Similarity(top_k=top_k), Table.read(Path(folder), "rows"), torch.device("cpu")
            )
            for first in range(0, 4 * compared.size, compared.size):
                compared(range(first, first + compared.size))

        return report.peak(blocks)[1]


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=5)
    parser.add_argument("--rows", type=report.positive, default=20_000)
    parser.add_argument("--columns", type=report.positive, default=256)
    parser.add_argument("--top_k", type=report.positive, default=10)
    parser.add_argument("--peaks", action=argparse.BooleanOptionalAction, default=False)
    args = vars(parser.parse_args())
    peaks(args["columns"], args["top_k"]) if args.pop("peaks") else report.publish(run(**args))
