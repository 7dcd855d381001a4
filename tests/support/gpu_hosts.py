"""Stand-in folders of a host that has GPUs."""

from pathlib import Path

import pytest

from sagemaker_lightning.doctor.checks import Level, Machine

# The text of the driver's own file, of the closed and of the open kernel module.
CLOSED_KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version: gcc 7.3.1\n"
)
OPEN_KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  "
    "Release Build  (archlinux-builder)\n"
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def gpu_host(root: Path, driver: str, *models: str, text: str = CLOSED_KERNEL_MODULE) -> Path:
    """Write the files that show a container its host's GPUs."""
    write(root, {"proc/driver/nvidia/version": text.format(driver)})
    for number, model in enumerate(models):
        address = f"0000:00:{number:02x}.0"
        information = f"Model: \t\t {model}\nIRQ:   \t\t 11\nGPU UUID: \t GPU-0\n"
        write(
            root,
            {
                f"proc/driver/nvidia/gpus/{address}/information": information,
                f"dev/nvidia{number}": "",
            },
        )
        write(
            root,
            {
                f"sys/bus/pci/devices/{address}/{name}": f"{value}\n"
                for name, value in (("vendor", "0x10de"), ("class", "0x030200"))
            },
        )
    return root


def compatibility(environment: Path, version: str = "595.45.04") -> Path:
    """Write the stand-ins of conda-forge's cuda-compat into an environment."""
    write(environment, {f"cuda-compat/libcuda.so.{version}": ""})
    for name in ("libcuda.so.1", "libcuda.so"):
        (environment / "cuda-compat" / name).symlink_to(f"libcuda.so.{version}")
    return environment / "cuda-compat"


def found(machine: Machine, check) -> list[tuple[str, Level, str]]:
    return [(finding.subject, finding.level, finding.text) for finding in check(machine)]


def machine(root: Path, **variables: str) -> Machine:
    return Machine(root=root, variables=variables)


@pytest.fixture(name="torch_for_cuda")
def stand_in_torch(tmp_path):
    """A folder with a torch for CUDA 13.2 that cannot be imported."""
    write(
        tmp_path / "site/torch",
        {"__init__.py": "raise RuntimeError('imported')", "version.py": "cuda = '13.2'\n"},
    )
    return tmp_path / "site"
