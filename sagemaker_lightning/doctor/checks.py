"""Looks at what a container has for training: GPUs, network, memory, disk, mounts, clock.

Every check reads files below a root folder, / except in tests, and returns findings. Nothing is
changed, and torch is not imported here.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import distributions
from pathlib import Path

from sagemaker_lightning.doctor import gpu_driver

GIB = 2**30
LEAST_SHARED_MEMORY_BYTES = GIB // 4
LEAST_DISK_BYTES = GIB
# S3 refuses a request whose time differs by 15 minutes. Here a clock that is behind the date of
# our own files by a day is wrong.
MAX_CLOCK_LAG_SECONDS = 86400
EFA_LIBRARIES = ("opt/amazon/efa/lib*", "opt/conda/envs/*/lib", "usr/lib/*-linux-gnu", "usr/lib*")
EFA_PLUGINS = (
    *("opt/amazon/ofi-nccl/lib*", "opt/amazon/ofi-nccl/lib/*", "opt/aws-ofi-nccl/lib"),
    "opt/conda/envs/*/lib",
)
AMAZON, NVIDIA = "0x1d0f", "0x10de"  # PCI vendors


class Level(Enum):
    """How much a finding matters."""

    FINE = "ok"
    NOTE = "note"  # training works, perhaps slowly
    WRONG = "WRONG"  # training with it fails


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    subject: str
    text: str
    level: Level = Level.FINE

    def __str__(self) -> str:
        return f"{self.level.value:5} {self.subject}: {self.text}"


@dataclass(frozen=True)
class Machine:
    """Where the checks look."""

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    interface: str | None = None
    """The network interface that SageMaker names; None if it names none."""
    now: float | None = None
    """The time in seconds since 1970; None for the clock's."""

    @property
    def compatibility(self) -> Path:
        """The folder of NVIDIA's forward-compatibility libraries."""
        return Path(self.variables.get("CONDA_PREFIX", "/nowhere"), "cuda-compat")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Look for GPUs, the driver, and whether it is new enough for torch."""
    host = gpu_driver.Host.read(machine.root)
    cuda = gpu_driver.installed_cuda()
    built = f"torch is built for CUDA {cuda}" if cuda else "torch is not there, or for CPUs alone"
    on_bus = len(list(_pci_displays(machine.root)))
    if not host.driver:
        if on_bus:
            text = (
                f"the host has {on_bus}, but no driver is in this container; start it with --gpus "
                "all, on a host with NVIDIA's container toolkit"
            )
            yield Finding("GPU", text, Level.WRONG)
        else:
            yield Finding("GPU", f"none; {built}")
        return
    names = ", ".join(
        f"{host.models.count(model)} x {model}" for model in dict.fromkeys(host.models)
    )
    decision = gpu_driver.decide(host, cuda, gpu_driver.library_version(machine.compatibility))
    helped = decision.use and gpu_driver.in_use(machine.compatibility, machine.variables)
    text = f"{names or 'none'}; driver {host.driver}; {built}"
    yield Finding("GPU", text, Level.FINE if host.models else Level.WRONG)
    if decision.use and not helped:
        text = f"{decision.line}, but are not on LD_LIBRARY_PATH; start by the image's entry point"
        yield Finding("GPU driver", text, Level.WRONG)
    elif decision.line:
        yield Finding("GPU driver", decision.line, Level.NOTE if helped else Level.WRONG)
    devices = len(list((machine.root / "dev").glob("nvidia[0-9]*")))
    if devices < len(host.models):
        text = f"{devices} in /dev for {len(host.models)} GPUs; start the container with --gpus all"
        yield Finding("GPU devices", text, Level.WRONG)


def nccl(machine: Machine) -> Iterator[Finding]:
    """Look for NCCL, which carries the gradients between GPUs."""
    versions = [
        f"{package.version} ({package.name})"
        for package in distributions()
        if re.fullmatch(r"nvidia[-_]nccl[-_]cu\d+", package.name or "")
    ]
    if versions:
        yield Finding("NCCL", ", ".join(versions))
    elif gpu_driver.Host.read(machine.root).driver:
        text = "no package nvidia-nccl-cu*; several GPUs cannot train together"
        yield Finding("NCCL", text, Level.NOTE)


def efa(machine: Machine) -> Iterator[Finding]:
    """Look for EFA devices, and for the libraries by which NCCL uses them."""
    devices = sorted(
        path.parent.parent.name
        for path in (machine.root / "sys/class/infiniband").glob("*/device/vendor")
        if _text(path) == AMAZON
    )
    if not devices:
        yield Finding("EFA", "no device")
        return
    name = f"{len(devices)} devices ({devices[0]}, ...)" if devices[1:] else f"device {devices[0]}"
    missing = []
    if not _library(machine.root, EFA_LIBRARIES, "libfabric.so*"):
        missing.append("libfabric")
    if not _library(machine.root, EFA_PLUGINS, "libnccl-net*.so*"):
        missing.append("aws-ofi-nccl")
    if not list((machine.root / "dev/infiniband").glob("uverbs*")):
        yield Finding("EFA", f"{name}, but no /dev/infiniband/uverbs* here", Level.NOTE)
    elif missing:
        text = f"{name}, but no {' and no '.join(missing)} in this image: NCCL uses TCP"
        yield Finding("EFA", text, Level.NOTE)
    else:
        yield Finding("EFA", f"{name}, with libfabric and aws-ofi-nccl")


def network(machine: Machine) -> Iterator[Finding]:
    """Look for the interface between the hosts."""
    folder = machine.root / "sys/class/net"
    names = sorted(path.name for path in folder.glob("*"))
    described = ", ".join(
        f"{name} (mtu {_text(folder / name / 'mtu')}, {_text(folder / name / 'operstate')})"
        for name in names
    )
    wanted = machine.interface
    if wanted and wanted not in names:
        text = f"SageMaker names {wanted}, which is not here; found {described or 'none'}"
        yield Finding("network interface", text, Level.NOTE)
    elif wanted:
        yield Finding("network interface", f"{wanted}; found {described}")
    else:
        yield Finding("network interface", described or "none")


def memory(machine: Machine) -> Iterator[Finding]:
    """Look at memory, the container's limit, and shared memory."""
    numbers = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB", _text(machine.root / "proc/meminfo")))
    total = int(numbers.get("MemTotal", 0)) * 1024
    available = int(numbers.get("MemAvailable", 0)) * 1024
    limit = _text(machine.root / "sys/fs/cgroup/memory.max") or _text(
        machine.root / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    text = f"{_gib(available)} of {_gib(total)} available"
    if limit.isdecimal() and int(limit) < total:
        text += f"; this container may use {_gib(int(limit))}"
    yield Finding("memory", text)
    shared = machine.root / "dev/shm"
    if not shared.is_dir():
        return
    size = _space(shared)[1]
    if size < LEAST_SHARED_MEMORY_BYTES:
        text = (
            f"{_gib(size)} in /dev/shm; data workers need more, or end by a bus error; start the "
            "container with --shm-size=8g"
        )
        yield Finding("shared memory", text, Level.NOTE)
    else:
        yield Finding("shared memory", f"{_gib(size)} in /dev/shm")


def disk(machine: Machine) -> Iterator[Finding]:
    """Look at the folders that a job writes, and at what is mounted there."""
    base = Path(machine.variables.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    for folder in (base / "model", base / "output", base / "checkpoints", Path("/tmp")):
        path = machine.root / str(folder).lstrip("/")
        if not path.is_dir():
            continue
        free, size = _space(path)
        if not os.access(path, os.W_OK):
            text = f"user {os.geteuid()} cannot write there; mount it writable"
            yield Finding(f"disk {folder}", text, Level.WRONG)
        elif free < LEAST_DISK_BYTES:
            text = f"{_gib(free)} of {_gib(size)} free; checkpoints need more"
            yield Finding(f"disk {folder}", text, Level.NOTE)
        else:
            yield Finding(f"disk {folder}", f"{_gib(free)} of {_gib(size)} free")
    mounts = [
        f"{fields[1]} ({fields[2]}, {fields[3].partition(',')[0]})"
        for line in _text(machine.root / "proc/mounts").splitlines()
        if len(fields := line.split()) > 3 and Path(fields[1]).is_relative_to(base)
    ]
    yield Finding("mounts", f"below {base}: {', '.join(mounts) or 'none'}")


def clock(machine: Machine) -> Iterator[Finding]:
    """Compare the clock with the date of our own files: requests to AWS are signed with a time."""
    now = time.time() if machine.now is None else machine.now
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    behind = Path(__file__).stat().st_mtime - now
    if behind > MAX_CLOCK_LAG_SECONDS:
        text += f", {behind / 86400:.0f} days before this image was made; correct the host's clock"
        yield Finding("clock", text, Level.WRONG)
    else:
        yield Finding("clock", text)


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...]
CHECKS = (gpus, nccl, efa, network, memory, disk, clock)


def findings(machine: Machine) -> Iterator[Finding]:
    """Yield what all checks find; a check that fails is a finding."""
    for check in CHECKS:
        try:
            yield from check(machine)
        except (OSError, ValueError) as error:
            yield Finding(check.__name__, f"cannot be looked at ({error})", Level.NOTE)


def summary(machine: Machine) -> Iterator[str]:
    """Yield the lines for a job's start: the GPUs, and what is not fine."""
    for finding in findings(machine):
        if finding.level is not Level.FINE or finding.subject == "GPU":
            mark = "" if finding.level is Level.FINE else f"{finding.level.value}: "
            yield f"{finding.subject}: {mark}{finding.text}"


def _pci_displays(root: Path) -> Iterator[Path]:
    """Yield the PCI devices that are GPUs of NVIDIA."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith("0x03"):
            yield device


def _library(root: Path, folders: tuple[str, ...], name: str) -> bool:
    """Return whether a library is in one of the folders."""
    return any(True for folder in folders for _ in root.glob(f"{folder}/{name}"))


def _space(path: Path) -> tuple[int, int]:
    """Return the free bytes and all bytes of the file system of `path`."""
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _text(file: Path) -> str:
    """Return the text of a file without its last newline; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
