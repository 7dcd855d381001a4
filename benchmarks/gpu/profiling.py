"""The parts of a step and of a validation: kernels, and the time without any kernel."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.step import Setting
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.train import APPLICATION

WARMUP_BATCHES = 10  # batches before the ones that are looked at
SHOWN_KERNELS = 12  # kernels in the table


class Profiler(Callback):
    """Profiles some batches of the training, or of the validation, after some others."""

    def __init__(self, stage: str, count: int, warmup: int) -> None:
        self.count = count
        self.warmup = warmup
        self.batches = 0
        setattr(self, f"on_{'train' if stage == 'step' else 'validation'}_batch_end", self.tick)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.profiler = torch.profiler.profile(activities=activities)

    def tick(self, *_: object) -> None:
        """Count a batch."""
        self.batches += 1
        if self.batches == self.warmup:
            self._finish()
            self.profiler.start()
        elif self.batches == self.warmup + self.count:
            self._finish()
            self.profiler.stop()

    def _finish(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def profile(stage: str, setting: Setting, count: int, accelerator: str) -> dict[str, Any]:
    """Return the kernels of `count` batches of a "step" or of a "validation".

    On a CPU, it returns the operations.
    """
    warmup = min(WARMUP_BATCHES, count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        environment = SageMakerEnvironment(
            model_dir=path / "model", output_data_dir=path, checkpoint_dir=path / "checkpoints"
        )
        batches = warmup + count + 1
        flags = [
            *setting.flags,
            f"--data.batch_size={setting.batch_size}",
            f"--trainer.accelerator={accelerator}",
        ]
        flags += [
            f"--data.images={50_000 + batches * setting.batch_size}",
            "--trainer.max_epochs=1",
        ]
        flags += [
            f"--data.val_split={batches * setting.batch_size}",
            "--trainer.num_sanity_val_steps=0",
        ]
        flags += [
            f"--trainer.limit_train_batches={batches if stage == 'step' else 2}",
            "--trainer.devices=1",
        ]
        flags += [f"--trainer.limit_val_batches={0 if stage == 'step' else batches}"]
        cli = CommandLine(environment, flags, APPLICATION)
        profiler = Profiler(stage, count, warmup)
        cli.trainer.callbacks.append(profiler)
        cli.trainer.fit(cli.model, cli.datamodule)
    return summary(profiler.profiler, torch.cuda.is_available()) | {"batches": count}


def summary(profiler: torch.profiler.profile, on_gpu: bool) -> dict[str, Any]:
    """Return the profiled time, the share of it without a kernel, and the longest kernels."""
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    # An annotation is not a kernel: it lasts from its first kernel to its last one.
    events = [
        event
        for event in profiler.events()
        if event.device_type == device_type and not event.is_user_annotation
    ]
    if not events:
        raise RuntimeError("the profiler saw no kernel: this machine does not let it (CUPTI)")
    # In microseconds.
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy = 0.0
    gaps = []
    reached = spans[0][0]
    for start, end in spans:
        if start > reached:
            gaps.append(start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    microseconds = reached - spans[0][0]
    totals: dict[str, list[float]] = {}
    for event in events:
        kernel_microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        entry = totals.setdefault(event.name, [0, 0.0])
        entry[0] = entry[0] + 1
        entry[1] = entry[1] + kernel_microseconds
    longest = sorted(totals.items(), key=lambda total: -total[1][1])[:SHOWN_KERNELS]
    return {
        "milliseconds": microseconds / 1e3,
        "idle": 1 - busy / microseconds,
        "kernels": len(events),
        "gaps": len(gaps),
        "longest_gap": max(gaps, default=0.0) / 1e3,
        "top": [
            {"name": name[:100], "calls": calls, "milliseconds": kernel_microseconds / 1e3}
            for name, (calls, kernel_microseconds) in longest
        ],
    }


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of kernels."""
    lines = []
    for record in records:
        lines += [
            "",
            f"{record['setting']}:",
            "",
            "| kernel | calls | ms a batch | share |",
            "| --- | --- | --- | --- |",
        ]
        for row in record["top"]:
            each = row["milliseconds"] / record["batches"]
            share = row["milliseconds"] / record["milliseconds"]
            name = row["name"].replace("|", "\\|")
            lines.append(f"| `{name}` | {row['calls']} | {each:.3f} | {share:.1%} |")
    return "\n".join(lines).strip()
