"""What a sharded model's training and checkpoints cost, against FSDP2 alone and Lightning's own.

    python -m benchmarks.sharded [--n 3] [--sizes 10 30 100] [--steps 6]

A transformer of so many million parameters (examples/language_model.py) is trained by two ranks on
this machine, over gloo, as data-parallel FSDP2. Each ratio is of two trainings, one right after the
other:

- a step: the bare loop's seconds of the same model on as many samples / ours, by the clock and of
  processor time
- a checkpoint's stall, from the end of a step that is saved to the beginning of the next one, less
  the median of that time at other steps; and the whole of a save, until it is on the disk: ours /
  Lightning's (ModelParallelStrategy, save_distributed_checkpoint)
- a load, from fit() to the first batch, by two ranks and by four: ours / Lightning's
- the bytes that training adds to a rank's memory at its peak, with one, two and four ranks: ours /
  the bare loop's
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import report
from benchmarks.checkpoint_cost import EVERY, SAVES, Gaps
from examples.language_model import LanguageModel, Transformer
from sagemaker_lightning import ExactResume

SHAPES = {1: (128, 4), 10: (384, 6), 30: (640, 6), 100: (1024, 8), 300: (1536, 10)}
"""Width and layers for so many million parameters."""
LENGTH = 32
BATCH_SIZE = 4
WARM_UP = 3  # steps that are not measured
RESHARDED = 4  # ranks that load what two have saved


class Starts(pl.Callback):
    """Notes when steps begin."""

    def __init__(self, clock: str = "perf_counter") -> None:
        self.clock = clock
        self.times: list[float] = []

    def on_train_batch_start(self, *_: object) -> None:
        """Note that a step begins."""
        self.times.append(getattr(time, self.clock)())


class GapsUntilWritten(Gaps):
    """Measures the seconds between two steps, with the writing of a checkpoint."""

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Note the time, once nothing is written in the background."""
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        super().on_train_batch_start(*arguments)


# What is measured ---------------------------------------------------------------------------------


def language_model(size: int) -> LanguageModel:
    """Return the model of a size, in millions of parameters."""
    width, layers = SHAPES[size]
    return LanguageModel(length=LENGTH, width=width, layers=layers, batch_size=BATCH_SIZE)


def fit(size: int, steps: int, *callbacks: pl.Callback, checkpoint: Path | None = None) -> None:
    """Train by Lightning, until so many steps are done."""
    ranks = distributed.get_world_size()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1),
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning's own format needs weights_only=False; ours is read in another way.
    trainer.fit(language_model(size), ckpt_path=checkpoint, weights_only=False)


def saver(folder: Path, is_ours: bool, every: int = EVERY) -> pl.Callback:
    """Return what saves checkpoints."""
    if is_ours:
        return ExactResume(folder / "ours", seed=1, every_n_steps=every, every_n_minutes=0)
    return ModelCheckpoint(folder / "lightning", every_n_train_steps=every, save_top_k=-1)


def step(
    size: int,
    steps: int,
    folder: Path,
    is_ours: bool,
    clock: str = "perf_counter",
) -> float:
    """Return the median seconds of a step, in which no checkpoint is saved."""
    if is_ours:
        starts = Starts(clock)
        fit(size, steps + WARM_UP, starts, saver(folder, True, every=10**6))
        times = starts.times
    else:
        times = [getattr(time, clock)() for _ in bare_steps(size, steps + WARM_UP)]
    times = times[WARM_UP - 1 :]
    return median(after - before for before, after in zip(times, times[1:], strict=False))


def processor(size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return the median seconds of processor time of a step, which other programs do not change."""
    return step(size, steps, folder, is_ours, "process_time")


def bare_steps(size: int, steps: int) -> Iterator[None]:
    """Train by FSDP2 alone; yield before each step."""
    model = language_model(size)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    options = {name: model.hparams[name] for name in ("length", "width", "layers")}
    with torch.device("meta"):
        model.network = Transformer(len(model.text.characters), **options)
    for part in (*model.network.blocks, model.network):
        fully_shard(part, mesh=mesh)
    model.network.to_empty(device="cpu")
    for module in model.network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = model.configure_optimizers()
    loader = DataLoader(model.text, BATCH_SIZE, sampler=DistributedSampler(model.text))
    for _, batch in zip(range(steps), loader, strict=False):
        yield
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def stall(size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return the median seconds for which a checkpoint holds training up."""
    gaps = Gaps()
    fit(size, SAVES * EVERY + 1, gaps, saver(folder, is_ours))
    return gaps.stall()


def save(size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return the median seconds until a checkpoint is on the disk."""
    gaps = GapsUntilWritten()
    fit(size, SAVES * EVERY + 1, gaps, saver(folder, is_ours))
    return gaps.stall()


def load(size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return the seconds from fit() to the first batch of a training that continues."""
    starts = Starts()
    checkpoint = None
    if not is_ours:
        (checkpoint,) = (folder / "lightning").glob(f"*step={SAVES * EVERY}.ckpt")
    callbacks = [saver(folder, True, every=10**6)] if is_ours else []
    began = time.perf_counter()
    fit(size, SAVES * EVERY + 3, starts, *callbacks, checkpoint=checkpoint)
    # The checkpoint has brought the times of the training that it is of.
    return next(at for at in starts.times if at > began) - began


def memory(size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return the bytes that training adds to this rank's memory at its peak."""

    def train() -> None:
        if is_ours:
            fit(size, WARM_UP, saver(folder, True, every=10**6))
        else:
            list(bare_steps(size, WARM_UP))

    return report.peak(train)[1]


MEASURES = {each.__name__: each for each in (step, processor, stall, save, load, memory)}


# Processes ----------------------------------------------------------------------------------------


def be_rank(name: str, size: int, steps: int, folder: Path, kind: str) -> None:
    """Measure in this rank; rank 0 prints the greatest value of all ranks."""
    distributed.init_process_group("gloo")
    if name != "memory":
        list(bare_steps(1, 1))  # what is imported at the first step
    value = torch.tensor(MEASURES[name](size, steps, folder, kind == "ours"))
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    if distributed.get_rank() == 0:
        print(json.dumps({"value": value.item()}), flush=True)
    distributed.destroy_process_group()
    # FSDP2 keeps its group all the same, with gloo's threads. One that frees a tensor of Python's
    # while Python ends aborts the process: "terminate called without an active exception".
    os._exit(0)


def measure(name: str, ranks: int, size: int, steps: int, folder: Path, is_ours: bool) -> float:
    """Return what ranks on this machine measure."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "-m", "benchmarks.sharded", "rank", name),
        *map(str, (size, steps, folder, "ours" if is_ours else "other")),
    ]
    done = subprocess.run(
        command, env=report.variables(OMP_NUM_THREADS="1"), text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])["value"]


def run(n: int, sizes: list[int], steps: int, only: list[str]) -> list[report.Comparison]:
    """Measure all sizes; print each pair."""
    ratios: dict[str, list[float]] = {}
    for size in sizes:
        for _ in range(n):
            with tempfile.TemporaryDirectory(prefix="sharded-") as folder:
                for name, ranks in (
                    ("step", 2),
                    ("processor", 2),
                    ("stall", 2),
                    ("save", 2),
                    ("load", 2),
                    ("load", RESHARDED),
                    *(("memory", ranks) for ranks in (1, 2, 4)),
                ):
                    if name not in only:
                        continue
                    place = Path(folder, f"{name}-{ranks}")
                    if name == "load":
                        shutil.copytree(Path(folder, "save-2"), place)
                    pair = [
                        measure(name, ranks, size, steps, place, is_ours)
                        for is_ours in (True, False)
                    ]
                    ratio = (
                        pair[1] / pair[0] if name in ("step", "processor") else pair[0] / pair[1]
                    )
                    label = f"{name}, {size} M, {ranks} ranks"
                    ratios.setdefault(label, []).append(ratio)
                    print(f"{label}: {pair[0]:.4g} / {pair[1]:.4g}: {ratio:.3f}", flush=True)
    what = {
        "step": "seconds, the bare loop / ours",
        "processor": "a step's seconds of processor time, the bare loop / ours",
        "memory": "bytes at the peak, ours / the bare loop",
    }
    return [
        report.Comparison(label, what.get(label.split(",")[0], "seconds, ours / Lightning"), values)
        for label, values in ratios.items()
    ]


def arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = report.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SHAPES, default=[10, 30, 100])
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="save comes before load"
    )
    parser.add_argument("--steps", type=report.positive, default=6)
    parser.set_defaults(n=3)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        name, size, steps, folder, kind = sys.argv[2:]
        be_rank(name, int(size), int(steps), Path(folder), kind)
    else:
        args = arguments()
        report.publish(run(args.n, args.sizes, args.steps, args.only))
