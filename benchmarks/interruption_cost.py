"""What it costs that a job may be interrupted: `python -m benchmarks.interruptions cost`."""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from pytorch_lightning import Callback

from app.agreement import Agreement

STEPS = 40


class Stalls(Callback):
    """The seconds of each step, and of each checkpoint for which training waits."""

    def __init__(self, resume) -> None:
        self.steps, self.saves, self.began = [], [], None
        save = resume._save
        resume._save = lambda state, last: self._timed(save, state, last)

    def _timed(self, save, state, last) -> None:
        began = time.perf_counter()
        save(state, last)
        if not last:
            self.saves.append(time.perf_counter() - began)

    def on_train_batch_start(self, *_) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_) -> None:
        """Stop it."""
        self.steps.append(time.perf_counter() - self.began)


def main() -> None:
    """Print the ratios."""
    print(f"{os.cpu_count()} CPUs, torch {torch.__version__}; ResNet-18 on the digits, batches of 32")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        stalls = train(["--resume.every_n_steps=5"])
        size = max(path.stat().st_size for path in Path("output/data/checkpoints").glob("step-*")) / 1e6
    step, saves = median(stalls.steps), [seconds / median(stalls.steps) for seconds in stalls.saves]
    spread = f"[{min(saves):.2f}..{max(saves):.2f}], n={len(saves)}"
    print(
        f"a step takes {step:.3f} s; a checkpoint of {size:.0f} MB holds it up for {median(saves):.2f} steps {spread}"
    )
    two, four = agreement(2) / step, agreement(4) / step
    print(f"an agreement, once a second, takes {two:.5f} of a step with 2 ranks, {four:.5f} with 4")


def train(flags: list[str]) -> Stalls:
    """Train in this process, and return what was measured."""
    from app.cli import CLI
    from app.environment import Environment

    cli = CLI(
        Environment(), ["--trainer.max_epochs=-1", f"--trainer.max_steps={STEPS}", "--trainer.accelerator=cpu", *flags]
    )
    stalls = Stalls(cli.config_init.resume)
    cli.trainer.callbacks.append(stalls)
    cli.trainer.fit(cli.model, cli.datamodule)
    return stalls


def agreement(ranks: int) -> float:
    """Return the median seconds of an agreement between so many processes on this machine."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        started = [context.Process(target=_agree, args=(rank, ranks, folder, answers)) for rank in range(ranks)]
        for process in started:
            process.start()
        found = [answers.get() for _ in started]
        for process in started:
            process.join()
    return median(found)


def _agree(rank: int, ranks: int, folder: str, answers) -> None:
    class Trainer:
        world_size, is_global_zero = ranks, rank == 0

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    agreed, seconds = Agreement(Trainer), []
    for _ in range(200):
        torch.distributed.barrier()
        began = time.perf_counter()
        agreed.agree(0, due=False, now=True)
        seconds.append(time.perf_counter() - began)
    answers.put(median(seconds))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
