"""Common parts of the benchmarks: ratios of interleaved pairs, and a table.

The table names the machine.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADER = "| benchmark | ratio: median [range] | n | what / what |\n| --- | --- | --- | --- |"

KEEPS_MEMORY = dict(
    re.findall(r"(MALLOC_\w+)=(\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
)
"""The variables by which the image has malloc keep memory (mallopt(3)): bytes, as text."""
# Times faster than one instance, in the article that this project began with.
ARTICLE = {2: 1.8, 4: 3.7, 8: 7.3}


@dataclass(frozen=True)
class Comparison:
    """The ratios ours / other of one benchmark, one for each pair."""

    name: str
    what: str
    """Quantity, ours / other: in words."""
    ratios: Sequence[float]

    def row(self) -> str:
        """Return the row of the table."""
        low = min(self.ratios)
        middle = statistics.median(self.ratios)
        high = max(self.ratios)
        return (
            f"| {self.name} | {middle:.3f} [{low:.3f}..{high:.3f}] | "
            f"{len(self.ratios)} | {self.what} |"
        )


def parser(manual: str) -> argparse.ArgumentParser:
    """Return a parser with the flag of all benchmarks; `manual` is the caller's docstring."""
    argument_parser = argparse.ArgumentParser(
        description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument(
        "--n", type=positive, help="pairs that are measured (default: %(default)s)"
    )
    return argument_parser


def positive(text: str) -> int:
    """Return the flag's value, a whole number above 0."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def publish(comparisons: Sequence[Comparison]) -> None:
    """Print the machine, the versions and a Markdown table."""
    rows = "\n".join(comparison.row() for comparison in comparisons)
    print(f"\n{machine()}\n\n{HEADER}\n{rows}")


def improvements(seconds: Mapping[int, float]) -> str:
    """Return the original article's table: instances, time, and the gain over one instance."""
    rows = [
        (
            f"| {count} | {time:.2f} s | {seconds[1] / time:.2f}x | "
            f"{f'{ARTICLE[count]}x' if count in ARTICLE else ''} |"
        )
        for count, time in sorted(seconds.items())
    ]
    return "\n".join(
        ["| instances | time | improvement | the article's |", "| --- | --- | --- | --- |", *rows]
    )


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a process that can import `app` and `benchmarks` anywhere."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path} | more


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return `work`'s result, and the bytes by which it raises this process's peak memory."""
    # Reset the peak to the memory in use now: proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    kibibytes_before = _kibibytes("VmRSS")
    result = work()
    return result, (_kibibytes("VmHWM") - kibibytes_before) * 1024


def machine() -> str:
    """Return hardware, versions and commit.

    The load is that of the last minute; it shows how busy the machine was.
    """
    import pytorch_lightning  # here, as what only starts jobs elsewhere does without all three
    import torch
    import torchvision

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    cpu = (
        f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads"
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = (
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}"
    )
    return (
        f"hardware: {cpu}; GPU: {gpu}; load: {os.getloadavg()[0]:.1f}\n"
        f"versions: {versions}, pytorch-lightning {pytorch_lightning.__version__}\n"
        f"commit: {commit()}"
    )


def _kibibytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def commit() -> str:
    """Return the commit, with -dirty if files differ from it; "unknown" outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
