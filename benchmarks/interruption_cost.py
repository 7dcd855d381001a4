"""The cost of being interruptible: `python -m benchmarks.interruptions cost`."""

import contextlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pytorch_lightning import Callback

from benchmarks.report import ROOT, variables
from sagemaker_lightning.resume.agreement import Agreement
from sagemaker_lightning.resume.callback import ExactResume

STEPS = 40
INTERVAL_SECONDS = 60 * inspect.signature(ExactResume).parameters["every_n_minutes"].default


class Stalls(Callback):
    """Measures steps, records, checkpoints and processor time.

    They are the seconds of each step, of its records, of each checkpoint for which training waits,
    and of the processors that a checkpoint takes.
    """

    def __init__(self, resume, waits: bool) -> None:
        self.steps = []
        self.saves = []
        self.work = []
        self.resume = resume
        self.waits = waits
        self.notes = [0.0]
        for hook in ("on_train_batch_start", "on_before_backward", "on_train_batch_end"):
            setattr(resume, hook, partial(self._noted, getattr(resume, hook)))

    def on_train_start(self, *_) -> None:
        """Time each checkpoint from now on."""
        self.save = self.resume.run.save
        self.resume.run.save = self._timed

    def _timed(self, state, last) -> None:
        began = _now()
        work = time.process_time()
        self.save(state, last)
        if self.waits:
            self.resume.run.writer.wait()
        self.saves.append(_now() - began)
        self.work.append(time.process_time() - work)

    def _noted(self, hook, *args) -> None:
        # The clock of this process: nobody waits for what it asks of a GPU.
        began = time.perf_counter()
        hook(*args)
        self.notes[-1] += time.perf_counter() - began

    def on_train_batch_start(self, *_) -> None:
        """Start the clock."""
        self.notes.append(0.0)
        self.began = _now()

    def on_train_batch_end(self, *_) -> None:
        """Stop the clock."""
        self.steps.append(_now() - self.began)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the ratios."""
    print(
        f"{os.cpu_count()} CPUs, torch {torch.__version__}; ResNet-18 on the digits, batches of 32"
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        background = train("background", waits=False)
        waiting = train("waiting", waits=True)
        size = max(path.stat().st_size for path in Path("waiting").glob("step-*")) / 1e6
        fresh, resumed = (
            median(start(flags) for _ in range(3)) for flags in (["--resume.dirpath=none"], [])
        )
    step = median(background.steps)
    print(f"a step takes {step:.3f} s; a checkpoint has {size:.0f} MB; training waits for it")
    for manner, stalls in (("written in the background", background), ("written at once", waiting)):
        # Training waits for the last one in any case.
        ratios = [seconds / step for seconds in stalls.saves[:-1]]
        print(
            f"  {manner}: {median(ratios):.2f} steps [{min(ratios):.2f}..{max(ratios):.2f}], "
            f"n={len(ratios)}"
        )
    # The training loses the writer's processor time, spread over all processors.
    cost = median(background.saves[:-1]) + median(waiting.work) / os.cpu_count()
    print(
        f"  at the default interval, {INTERVAL_SECONDS:.0f} s, all in all: "
        f"{cost / INTERVAL_SECONDS:.4f} of the training's time"
    )
    note_seconds = median(background.notes[2:])
    print(
        f"what is noted of a step takes {note_seconds * 1e6:.0f} us, "
        f"{note_seconds / step:.6f} of it"
    )
    with_two_ranks = agreement(2) / step
    with_four_ranks = agreement(4) / step
    print(
        f"an agreement, once a second, takes {with_two_ranks:.5f} of a step with 2 ranks, "
        f"{with_four_ranks:.5f} with 4"
    )
    print(
        f"process start to the end of one step: resumed / fresh {resumed / fresh:.3f} "
        f"({fresh:.1f} s), n=3"
    )


def train(folder: str, waits: bool, accelerator: str = "cpu", steps: int = STEPS) -> Stalls:
    """Train in this process, with a checkpoint every few steps, and return the measurements."""
    from sagemaker_lightning.cli.lightning_cli import CommandLine
    from sagemaker_lightning.contract.environment import SageMakerEnvironment

    from app.train import APPLICATION

    flags = [
        "--trainer.max_epochs=-1",
        f"--trainer.max_steps={steps}",
        f"--trainer.accelerator={accelerator}",
    ]
    flags += [f"--resume.dirpath={folder}", "--resume.every_n_steps=5", "--checkpoint.monitor=null"]
    cli = CommandLine(SageMakerEnvironment(), flags, APPLICATION)
    stalls = Stalls(cli.resume, waits)
    cli.trainer.callbacks.append(stalls)
    cli.trainer.fit(cli.model, cli.datamodule)
    return stalls


def start(flags: list[str]) -> float:
    """Return the seconds of a job that takes one step.

    Without flags, the job resumes and takes one step after its checkpoint; else it takes its first.
    """
    resumes = not flags
    flags = flags or ["--resume.dirpath=waiting", "--checkpoint.monitor=null"]
    flags = [
        *flags,
        "--trainer.max_epochs=-1",
        f"--trainer.max_steps={STEPS + 1 if resumes else 1}",
    ]
    command = [
        sys.executable,
        str(ROOT / "app/train.py"),
        *flags,
        "--trainer.accelerator=cpu",
        "--resume.keep=9",
    ]
    began = time.perf_counter()
    subprocess.run(command, env=variables(), check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    for path in (
        *Path("none").glob("*"),
        *Path("waiting").glob(f"step-{STEPS + 1:09d}*"),
        *Path("waiting").glob("last*"),
    ):
        path.unlink()
    return seconds


def agreement(ranks: int) -> float:
    """Return the median seconds of an agreement between so many processes on this machine."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(target=_agree, args=(rank, ranks, folder, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        seconds = [results.get() for _ in processes]
        for process in processes:
            process.join()
    return median(seconds)


def _agree(rank: int, ranks: int, folder: str, results) -> None:
    class Trainer:
        world_size = ranks
        is_global_zero = rank == 0

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    agreed = Agreement(Trainer)
    seconds = []
    for _ in range(200):
        torch.distributed.barrier()
        began = time.perf_counter()
        agreed.agree(0, due=False, now=True)
        seconds.append(time.perf_counter() - began)
    results.put(median(seconds))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
