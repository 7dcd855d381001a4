"""The machine that is measured: its parts, and whether they are sufficient."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning
import torch
import torchvision

GIB = 2**30
# GiB that must be free: for checkpoints of 134 MB, data, and batches of 1,024.
LEAST_DISK_GIB = 8
LEAST_MEMORY_GIB = 8
LEAST_GPU_MEMORY_GIB = 8


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide what is measured."""

    gpu: str
    """Name of the GPU, "" where torch finds none."""
    gpu_memory: float
    """GiB; 0 without a GPU."""
    gpu_free: float
    """GiB that are free."""
    driver: str
    """That of the GPU, as nvidia-smi has it; "" where that finds none."""
    trouble: str
    """What torch says where it finds no GPU."""
    cpu: str
    cores: int
    memory: float
    """GiB, all."""
    free: float
    """GiB of it that are free."""
    disk: float
    """GiB that are free where temporary files go."""

    @classmethod
    def read(cls, folder: Path) -> "Machine":
        """Look at this machine.

        Afterwards this process cannot be forked for work on the GPU.
        """
        gpu = ""
        gpu_memory = 0.0
        gpu_free = 0.0
        trouble = ""
        try:
            torch.cuda.init()
            gpu = torch.cuda.get_device_name()
            gpu_free, gpu_memory = (value / GIB for value in torch.cuda.mem_get_info())
        except (RuntimeError, AssertionError) as error:
            trouble = str(error).splitlines()[0]
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        cpu = next(
            (line.partition(": ")[2] for line in lines if line.startswith("model name")),
            platform.machine(),
        )
        memory = psutil.virtual_memory()
        disk = shutil.disk_usage(folder).free / GIB
        cores = os.cpu_count() or 1
        total = memory.total / GIB
        free = memory.available / GIB
        return cls(gpu, gpu_memory, gpu_free, _driver(), trouble, cpu, cores, total, free, disk)

    def obstacle(self, miniature: bool = False) -> str:
        """Return in one line why nothing can be measured here; "" if it can."""
        if not miniature and not self.gpu:
            if self.driver:
                return (
                    f"GPU: torch {torch.__version__}, built for CUDA {torch.version.cuda}, "
                    f"cannot use the one that is here ({self.trouble}); "
                    f"found is driver {self.driver}, needed one for that CUDA: "
                    "of the R580 series or later for CUDA 13, R525 for CUDA 12"
                )
            return (
                "GPU: none is found here; run it where there is one, "
                "or rehearse it on a CPU with --miniature"
            )
        share = 0.1 if miniature else 1
        for resource, free, needed in (
            ("GPU memory", self.gpu_free, 0 if miniature else LEAST_GPU_MEMORY_GIB),
            ("memory", self.free, share * LEAST_MEMORY_GIB),
            ("disk for temporary files", self.disk, share * LEAST_DISK_GIB),
        ):
            if free < needed:
                return (
                    f"{resource}: found {free:.1f} GiB free, expected {needed:g}; "
                    "end what else takes it"
                )
        return ""

    @property
    def about(self) -> dict[str, Any]:
        """Return the machine's entry in a file of results; a host is the machine of the GPU."""
        host = {"cpu": self.cpu, "cores": self.cores, "memory": round(self.memory)}
        return {
            "gpu": self.gpu,
            "gpu_memory": round(self.gpu_memory),
            "driver": self.driver,
            "hosts": [host],
        }


def versions() -> dict[str, Any]:
    """Return the versions that decide what is measured."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "pytorch-lightning": pytorch_lightning.__version__,
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if completed.returncode else completed.stdout.strip()
