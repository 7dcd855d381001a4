"""Shards / decoding alone, WebDataset and litdata: images a processor second; starts; memory.

    python -m benchmarks.data_shards [--n 5] [--steps 10] [--images 4000] [--shard-bytes 100M]

All read the same JPEGs, decode, crop and flip them alike, in as many data workers as there are
CPUs. Ours compares checksums and seeds each sample, as with ExactResume. "Decoding alone" does the
same to bytes that are in memory, in the same number of workers: with batches, as a loader has to
hand them over, and without. Two loaders take turns of some steps, and what counts is the processor
time of a loader and its workers: with all cores busy, images/s are images a processor second, and
other work on the machine changes these less. WebDataset and litdata are measured where they are
installed.

Ours is read from S3, too: a local one, with a latency (--latency) and a bandwidth (--bandwidth).
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks import report, turns
from sagemaker_lightning import ShardBatches, ShardedDataset, make_deterministic
from sagemaker_lightning.shards import command, disk_cache

BATCH_SIZE = 32
PIXELS = 400  # height and width of an image in its file; ImageNet's have 469 x 387 on average
WORKERS = len(os.sched_getaffinity(0))
BUCKET = "bucket"


def write(folder: Path, images: int, shard_bytes: int) -> None:
    """Write JPEGs in ten classes, their shards, and the same in litdata's format."""
    draw = np.random.default_rng(0)
    for number in range(images):
        coarse = draw.integers(256, size=(PIXELS // 4, PIXELS // 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((PIXELS, PIXELS), Image.Resampling.BILINEAR)
        path = folder / "images" / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)
    command.make(folder / "images", folder / BUCKET / "train", shard_bytes, seed=0)
    if find_spec("litdata"):
        from litdata.streaming import Cache

        data = ShardedDataset(folder / BUCKET / "train")
        cache = Cache(str(folder / "litdata"), chunk_bytes=shard_bytes)
        for number in range(images):
            sample = data[number]
            cache[number] = {"jpg": sample["jpg"], "cls": int(sample["cls"])}
        cache.done()
        cache.merge()


TRANSFORM = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])


def decoded(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return an image, uint8 [3, 224, 224], and its class."""
    data = torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8)
    return TRANSFORM(decode_image(data, ImageReadMode.RGB)), int(sample["cls"])


class InMemory(Dataset):
    """Samples that are in memory.

    Args:
        samples: They.
        gives: Whether an item is the image, or only its class: then nothing is handed over.
    """

    def __init__(self, samples: list[dict], gives: bool) -> None:
        self.samples = samples
        self.gives = gives

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        image, label = decoded(self.samples[number])
        return (image, label) if self.gives else (0, label)


def ours(location: str, cache: str = "", streams: int = 1) -> DataLoader:
    """Return our loader, as ExactResume has it."""
    options = {"cache_dir": cache} if cache else {}
    data = ShardedDataset(location, decoded, **options)
    batches = ShardBatches(data, BATCH_SIZE, window=2048, drop_last=True, streams=streams)
    loader = DataLoader(data, batch_sampler=batches, num_workers=WORKERS)
    return make_deterministic(loader, seed=1)


def in_memory(location: str, gives: bool) -> DataLoader:
    """Return a loader of samples that are in memory."""
    data = ShardedDataset(location)
    samples = [data[number] for number in range(min(len(data), 2048))]
    return DataLoader(
        InMemory(samples, gives), BATCH_SIZE, shuffle=True, num_workers=WORKERS, drop_last=True
    )


def webdataset(location: str) -> Any:
    """Return a loader of WebDataset's, of the same shards."""
    import webdataset as wds

    urls = sorted(map(str, Path(location).glob("*.tar")))
    data = wds.WebDataset(urls, shardshuffle=len(urls), seed=1, empty_check=False)
    batches = data.shuffle(2048, seed=1).map(decoded).batched(BATCH_SIZE, partial=False)
    return wds.WebLoader(batches, batch_size=None, num_workers=WORKERS)


def litdata(location: str) -> Any:
    """Return a loader of litdata's, of the same images."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        str(Path(location).parents[1] / "litdata"), shuffle=True, transform=decoded
    )
    return StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=WORKERS, drop_last=True)


def train(make: Callable[[], Any], clock: turns.Clock) -> None:
    """Ask a loader for as many batches as the clock counts, through as many epochs as it takes."""
    torch.set_num_threads(1)
    loader = make()
    step = 0
    while step < clock.total_steps:
        for batch in loader:
            clock.tick(len(batch[1]))
            step += 1
            if step == clock.total_steps:
                return


def processor_seconds() -> float:
    """Return the processor time of this process and its data workers, also those that ended."""
    process = psutil.Process()
    own = process.cpu_times()
    times = [own, *(each.cpu_times() for each in process.children(recursive=True))]
    return own.children_user + own.children_system + sum(each.user + each.system for each in times)


def compare(
    name: str, what: str, first: Callable, second: Callable, n: int, steps: int
) -> report.Comparison:
    """Return n ratios of images a processor second, each the median of two processes' turns."""
    ratios = []
    for _ in range(n):
        rates = turns.pair(
            partial(train, first), partial(train, second), steps, "fork", processor_seconds
        )
        ratios.append(statistics.median(one / other for one, other in rates))
        one, other = (statistics.median(each) for each in zip(*rates, strict=True))
        print(f"{name}: {one:.1f} / {other:.1f} images, ratio {ratios[-1]:.3f}", flush=True)
    return report.Comparison(name, f"images a processor second, {what}", ratios)


# Starts, memory, requests -------------------------------------------------------------------------


PROBE = """
import os, sys, time
from benchmarks import data_shards
began = time.perf_counter()
loader = data_shards.ours(*sys.argv[1:3])
loader.begin_epoch(0, int(sys.argv[3]) if sys.argv[3] != "middle" else len(loader) // 2)
batches = iter(loader)
next(batches)
print(time.perf_counter() - began)
sys.stdout.flush()
os._exit(0)
"""


def seconds_to_first_batch(location: str, cache: str, batch: str) -> float:
    """Return the seconds, after the imports, to the first batch of a process that begins there."""
    arguments = [sys.executable, "-c", PROBE, location, cache, batch]
    output = subprocess.check_output(arguments, cwd=report.ROOT, env=report.variables(), text=True)
    return float(output)


def _fetched(location: str, cache: str) -> float:
    """Return the memory that fetching all shards adds at peak, in sizes of its bound."""
    data = ShardedDataset(location, cache_dir=cache)
    origin = data_source(location)
    origin.read(data.index.shards[0].name, 0, 1)  # the client is there
    store = disk_cache.DiskCache(Path(cache), 2**40, data.identity)

    def fetch() -> None:
        for number, shard in enumerate(data.index.shards):
            store.fetch(number, shard, origin, ())

    _, added = report.peak(fetch)
    return added / (disk_cache.CONNECTIONS * disk_cache.PIECE)


def data_source(location: str) -> Any:
    """Return the source of a location."""
    from sagemaker_lightning.shards.sources import source

    return source(location)


MEMORY = """
import sys
from benchmarks import data_shards
print(data_shards._fetched(*sys.argv[1:3]))
"""


def memory(location: str, cache: str) -> float:
    """Return what `_fetched` returns in a new process."""
    arguments = [sys.executable, "-c", MEMORY, location, cache]
    output = subprocess.check_output(arguments, cwd=report.ROOT, env=report.variables(), text=True)
    return float(output)


@contextmanager
def s3(folder: Path, latency: float, bandwidth: float):
    """Serve a folder from a process of its own; yield its endpoint. AWS_* is set meanwhile."""
    options = [f"--latency={latency}", f"--bandwidth={bandwidth}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.local_s3", str(folder), *options],
        cwd=report.ROOT,
        env=report.variables(),
        stdout=subprocess.PIPE,
        text=True,
    )
    endpoint = server.stdout.readline().strip()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    before = dict(os.environ)
    os.environ.update(keys, AWS_ENDPOINT_URL=endpoint)
    try:
        yield endpoint
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.terminate()
        server.wait()


def requests(endpoint: str) -> int:
    """Return the number of requests that the local S3 has had."""
    with urlopen(f"{endpoint}/REQUESTS") as answer:
        return sum(eval(answer.read(), {}).values())  # noqa: S307  (our own server's)


def run(
    n: int, steps: int, images: int, shard_bytes: int, latency: float, bandwidth: float
) -> list[report.Comparison]:
    """Measure n pairs of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, images, shard_bytes)
        place = str(folder / BUCKET / "train")
        shards = ShardedDataset(place).index.shards
        mine = partial(ours, place)
        others = {
            "decoding alone": partial(in_memory, place, False),
            "decoding, with batches": partial(in_memory, place, True),
            "webdataset": partial(webdataset, place),
            "litdata": partial(litdata, place),
        }
        found = []
        for other, make in others.items():
            if other in ("webdataset", "litdata") and not find_spec(other):
                print(f"{other} is not installed: not measured")
                continue
            what = f"shards in a folder / {other}"
            found.append(compare(other, what, mine, make, n, steps))
        with s3(folder, latency, bandwidth) as endpoint:
            remote = f"s3://{BUCKET}/train"
            cached = partial(ours, remote, str(folder / "cache"))
            what = "shards on S3 / in a folder"
            found.append(compare("S3, cached", what, cached, mine, n, steps))
            found.append(starts("start, a folder", place, "", n))
            found.append(starts("start, S3", remote, str(folder / "starts"), n))
            peaks = []
            counts = []
            pieces = sum(-(-shard.bytes // disk_cache.PIECE) for shard in shards)
            for pair in range(n):
                before = requests(endpoint)
                peaks.append(memory(remote, str(folder / f"memory-{pair}")))
                counts.append((requests(endpoint) - before) / pieces)
            found.append(
                report.Comparison("memory", "memory added by fetching / its bound of 64 MiB", peaks)
            )
            found.append(
                report.Comparison(
                    "requests", "requests to fetch all shards / pieces of 8 MiB", counts
                )
            )
    return found


def starts(name: str, location: str, cache: str, n: int) -> report.Comparison:
    """Return n ratios of seconds: resumed in the middle of an epoch / begun."""
    ratios = []
    for pair in range(n):
        seconds = {}
        for batch in ("middle", "0") if pair % 2 else ("0", "middle"):
            folder = f"{cache}-{pair}-{batch}" if cache else ""
            seconds[batch] = seconds_to_first_batch(location, folder, batch)
        resumed, begun = seconds["middle"], seconds["0"]
        ratios.append(resumed / begun)
        print(f"{name}: {resumed:.2f} / {begun:.2f} s = {ratios[-1]:.3f}", flush=True)
    return report.Comparison(name, "seconds to the first batch, resumed / begun", ratios)


def main() -> None:
    """Run what the flags ask for."""
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    parser.add_argument("--images", type=report.positive, default=4000)
    parser.add_argument("--shard-bytes", type=command.size, default=command.size("100M"))
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of an answer of S3")
    parser.add_argument("--bandwidth", type=float, default=0, help="bytes/s of S3; 0: no limit")
    args = parser.parse_args()
    report.publish(
        run(args.n, args.steps, args.images, args.shard_bytes, args.latency, args.bandwidth)
    )


if __name__ == "__main__":
    main()
