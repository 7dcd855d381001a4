"""The doctor, and the entry point's choice of a library for an older driver.

Both look at stand-in folders of a host.
"""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from containers import ROOT

from sagemaker_lightning.doctor import __main__ as program
from sagemaker_lightning.doctor import checks, gpu_driver
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
Space = namedtuple("Space", "f_bavail f_blocks f_frsize")


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


@pytest.mark.parametrize("text", [CLOSED_KERNEL_MODULE, OPEN_KERNEL_MODULE])
def test_a_host_is_read(tmp_path, text):
    host = gpu_driver.Host.read(
        gpu_host(tmp_path, "535.183.01", "Tesla T4", "NVIDIA A10G", text=text)
    )
    assert host == gpu_driver.Host("535.183.01", ("Tesla T4", "NVIDIA A10G"))
    assert gpu_driver.Host.read(tmp_path / "nowhere") == gpu_driver.Host("", ())


def test_the_cuda_of_torch_is_read_without_importing_it():
    import torch

    assert gpu_driver.installed_cuda() == (torch.version.cuda or "")


def test_the_version_of_the_libraries_is_that_of_their_file(tmp_path):
    assert gpu_driver.library_version(tmp_path) == ""
    assert gpu_driver.library_version(compatibility(tmp_path)) == "595.45.04"


@pytest.mark.parametrize(
    ("driver", "model", "cuda", "library", "use", "says"),
    [
        ("535.183.01", "NVIDIA A10G", "13.2", "595.45.04", True, "libraries 595.45.04 are used"),
        (
            "550.54.15",
            "Tesla T4",
            "13.2",
            "595.45.04",
            True,
            "is older than CUDA 13.2 needs (R580)",
        ),
        ("570.86.15", "NVIDIA H100 80GB HBM3", "13.2", "595.45.04", True, "are used"),
        ("570.86.15", "NVIDIA B200", "13.2", "595.45.04", True, "are used"),
        ("580.65.06", "NVIDIA A10G", "13.2", "595.45.04", False, ""),
        ("610.10", "NVIDIA L40S", "13.2", "595.45.04", False, ""),
        ("535.183.01", "NVIDIA A10G", "12.8", "570.10", False, ""),
        (
            "470.57.02",
            "NVIDIA A10G",
            "13.2",
            "595.45.04",
            False,
            "no library helps below R535; use another instance",
        ),
        (
            "535.183.01",
            "Tesla V100-SXM2-16GB",
            "13.2",
            "595.45.04",
            False,
            "no code for Volta and older; use an",
        ),
        (
            "580.65.06",
            "Tesla V100-SXM2-16GB",
            "13.2",
            "595.45.04",
            False,
            "no code for Volta and older; use an",
        ),
        ("470.57.02", "Tesla K80", "13.2", "595.45.04", False, "GPU Tesla K80: CUDA 13.2"),
        ("535.183.01", "Tesla V100-SXM2-16GB", "12.8", "570.10", False, ""),
        (
            "535.183.01",
            "NVIDIA GeForce RTX 4090",
            "13.2",
            "595.45.04",
            False,
            "RTX 4090, which is none of the data",
        ),
        ("535.183.01", "NVIDIA A10G", "13.2", "", False, "install conda-forge's cuda-compat=13.2"),
        ("535.183.01", "NVIDIA A10G", "", "595.45.04", False, ""),  # torch's CPU build
        ("", "NVIDIA A10G", "13.2", "595.45.04", False, ""),  # no driver
    ],
)
def test_what_is_done_about_a_driver(driver, model, cuda, library, use, says):
    decision = gpu_driver.decide(gpu_driver.Host(driver, (model,)), cuda, library)
    assert decision.use == use and says in decision.line and bool(decision.line) == bool(says)


def test_one_gpu_that_is_none_of_the_data_centre_is_enough():
    host = gpu_driver.Host("535.183.01", ("NVIDIA A10G", "NVIDIA GeForce RTX 4090"))
    assert not gpu_driver.decide(host, "13.2", "595.45.04").use


@pytest.fixture
def torch_for_cuda(tmp_path):
    """A folder with a torch for CUDA 13.2 that cannot be imported."""
    write(
        tmp_path / "site/torch",
        {"__init__.py": "raise RuntimeError('imported')", "version.py": "cuda = '13.2'\n"},
    )
    return tmp_path / "site"


def enter(
    tmp_path: Path, site: Path, *command: str, **variables: str
) -> subprocess.CompletedProcess:
    """Run a command through the entry point on the stand-in host, with the stand-in torch."""
    (tmp_path / "bin").mkdir(exist_ok=True)  # `python -I` takes no PYTHONPATH
    (tmp_path / "bin/python").write_text(
        f'#!/bin/bash\n[[ $1 != -I ]] || shift\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "bin/python").chmod(0o755)
    variables_given = {
        "CONDA_PREFIX": str(tmp_path / "environment"),
        "SAGEMAKER_LIGHTNING_ROOT": str(tmp_path / "host"),
    }
    variables_given |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(site)}
    return subprocess.run(
        [ROOT / "entrypoint.sh", *command],
        env=os.environ | variables_given | variables,
        capture_output=True,
        text=True,
    )


SHOW_LIBRARY_PATH = ("bash", "-c", "echo path=${LD_LIBRARY_PATH-unset}")


def test_the_entry_point_puts_the_libraries_on_the_path_for_an_older_driver(
    tmp_path, torch_for_cuda
):
    folder = compatibility(tmp_path / "environment")
    gpu_host(tmp_path / "host", "535.183.01", "NVIDIA A10G")
    completed = enter(tmp_path, torch_for_cuda, *SHOW_LIBRARY_PATH)
    assert completed.stdout == f"path={folder}\n"
    warning = "GPU driver 535.183.01 is older than CUDA 13.2 needs (R580)"
    assert completed.stderr == f"{warning}; NVIDIA's compatibility libraries 595.45.04 are used\n"
    completed = enter(tmp_path, torch_for_cuda, *SHOW_LIBRARY_PATH, LD_LIBRARY_PATH="/mine")
    assert completed.stdout == f"path={folder}:/mine\n"


@pytest.mark.parametrize(
    ("driver", "model", "says"),
    [
        ("580.65.06", "NVIDIA A10G", ""),
        ("470.57.02", "NVIDIA A10G", "below R535"),
        ("535.1", "NVIDIA GeForce RTX 4090", "none of the data centre"),
    ],
)
def test_the_entry_point_leaves_the_path_alone(tmp_path, torch_for_cuda, driver, model, says):
    compatibility(tmp_path / "environment")
    gpu_host(tmp_path / "host", driver, model)
    completed = enter(tmp_path, torch_for_cuda, *SHOW_LIBRARY_PATH)
    assert (
        completed.stdout == "path=unset\n"
        and completed.stderr.count("\n") == bool(says)
        and says in completed.stderr
    )


def found(machine: Machine, check) -> list[tuple[str, Level, str]]:
    return [(finding.subject, finding.level, finding.text) for finding in check(machine)]


def machine(root: Path, **variables: str) -> Machine:
    return Machine(root=root, variables=variables)


def test_gpus_that_work(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    gpu_host(tmp_path, "580.65.06", "NVIDIA A10G", "NVIDIA A10G")
    ((subject, level, text),) = found(machine(tmp_path), checks.gpus)
    assert (subject, level) == ("GPU", Level.FINE)
    assert text == "2 x NVIDIA A10G; driver 580.65.06; torch is built for CUDA 13.2"


def test_an_older_driver_with_and_without_the_entry_point(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    gpu_host(tmp_path, "535.183.01", "NVIDIA A10G")
    folder = compatibility(tmp_path / "environment")
    environment = {"CONDA_PREFIX": str(folder.parent)}
    assert found(machine(tmp_path, **environment), checks.gpus)[1][:2] == (
        "GPU driver",
        Level.WRONG,
    )
    _, (subject, level, text) = found(
        machine(tmp_path, **environment, LD_LIBRARY_PATH=f"{folder}:/x"), checks.gpus
    )
    assert (subject, level) == ("GPU driver", Level.NOTE) and text.endswith(
        "libraries 595.45.04 are used"
    )
    assert found(machine(tmp_path), checks.gpus)[1][1] == Level.WRONG  # no libraries


def test_gpus_that_the_container_was_not_given(tmp_path):
    gpu_host(tmp_path, "580.65.06", "NVIDIA A10G")
    (tmp_path / "dev/nvidia0").unlink()
    assert ("GPU devices", Level.WRONG) in [
        finding[:2] for finding in found(machine(tmp_path), checks.gpus)
    ]
    (tmp_path / "proc/driver/nvidia/version").unlink()
    ((_, level, text),) = found(machine(tmp_path), checks.gpus)
    assert level == Level.WRONG and text.startswith(
        "the host has 1, but no driver is in this container"
    )


def test_efa(tmp_path):
    assert found(machine(tmp_path), checks.efa) == [("EFA", Level.FINE, "no device")]
    write(tmp_path, {"sys/class/infiniband/mlx5_0/device/vendor": "0x15b3\n"})
    assert found(machine(tmp_path), checks.efa) == [("EFA", Level.FINE, "no device")]
    write(tmp_path, {"sys/class/infiniband/rdmap16s27/device/vendor": "0x1d0f\n"})
    ((_, level, text),) = found(machine(tmp_path), checks.efa)
    assert level == Level.NOTE and text == "device rdmap16s27, but no /dev/infiniband/uverbs* here"
    write(tmp_path, {"dev/infiniband/uverbs0": ""})
    ((_, level, text),) = found(machine(tmp_path), checks.efa)
    assert (
        level == Level.NOTE
        and "no libfabric and no aws-ofi-nccl in this image: NCCL uses TCP" in text
    )
    write(
        tmp_path,
        {
            "opt/amazon/efa/lib64/libfabric.so.1": "",
            "opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so": "",
        },
    )
    assert found(machine(tmp_path), checks.efa) == [
        ("EFA", Level.FINE, "device rdmap16s27, with libfabric and aws-ofi-nccl")
    ]


def test_the_interface_that_sagemaker_names(tmp_path):
    write(tmp_path, {"sys/class/net/eth0/mtu": "9001\n", "sys/class/net/eth0/operstate": "up\n"})
    for name, level in (("eth0", Level.FINE), ("eth7", Level.NOTE), (None, Level.FINE)):
        ((_, is_level, text),) = found(Machine(tmp_path, {}, name), checks.network)
        assert is_level == level and "eth0 (mtu 9001, up)" in text


def test_memory_and_its_limit(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal:   8388608 kB\nMemAvailable:   4194304 kB\n"})
    assert found(machine(tmp_path), checks.memory) == [
        ("memory", Level.FINE, "4.0 GiB of 8.0 GiB available")
    ]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        write(tmp_path, {f"sys/fs/cgroup/{file}": f"{2**30}\n"})
        assert found(machine(tmp_path), checks.memory)[0][2].endswith(
            "; this container may use 1.0 GiB"
        )
        (tmp_path / "sys/fs/cgroup" / file).unlink()
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert found(machine(tmp_path), checks.memory)[0][2] == "4.0 GiB of 8.0 GiB available"


def test_little_shared_memory_and_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "opt/ml/output").mkdir(parents=True)
    write(
        tmp_path,
        {"proc/mounts": "/dev/sda /opt/ml/output ext4 ro,relatime 0 0\n/dev/sda / ext4 rw 0 0\n"},
    )
    monkeypatch.setattr(os, "statvfs", lambda path: Space(2**24, 2**26, 1))
    assert found(machine(tmp_path), checks.memory)[1][:2] == ("shared memory", Level.NOTE)
    disk, mounts = found(machine(tmp_path), checks.disk)
    assert disk == (
        "disk /opt/ml/output",
        Level.NOTE,
        "0.0 GiB of 0.1 GiB free; checkpoints need more",
    )
    assert mounts[2] == "below /opt/ml: /opt/ml/output (ext4, ro)"
    monkeypatch.setattr(os, "statvfs", lambda path: Space(2**40, 2**41, 1))
    assert {
        level
        for check in (checks.memory, checks.disk)
        for _, level, _ in found(machine(tmp_path), check)
    } == {Level.FINE}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert found(machine(tmp_path), checks.disk)[0][1] == Level.WRONG


def test_a_clock_that_is_behind(tmp_path):
    installed_at = Path(checks.__file__).stat().st_mtime
    assert found(Machine(tmp_path, {}, None, installed_at + 60), checks.clock)[0][1] == Level.FINE
    ((_, level, text),) = found(
        Machine(tmp_path, {}, None, installed_at - 10 * 86400), checks.clock
    )
    assert (
        level == Level.WRONG
        and "10 days before this image was made; correct the host's clock" in text
    )


def test_the_summary_of_a_job_is_the_gpus_and_what_is_not_fine(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    gpu_host(tmp_path, "535.183.01", "NVIDIA GeForce RTX 4090")
    lines = list(checks.summary(machine(tmp_path)))
    assert lines[0].startswith("GPU: 1 x NVIDIA GeForce RTX 4090; driver 535.183.01")
    assert lines[1].startswith(
        "GPU driver: WRONG: GPU driver 535.183.01 is older than CUDA 13.2 needs (R580); no lib"
    )
    assert len(lines) == 2


def test_a_check_that_fails_is_a_finding(tmp_path, monkeypatch):
    def broken(machine):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(checks, "CHECKS", (broken, checks.clock))
    first_finding, second_finding = checks.findings(machine(tmp_path))
    assert (
        first_finding.level == Level.NOTE
        and "Input/output error" in first_finding.text
        and second_finding.subject == "clock"
    )


def run_doctor(root: Path, site: Path, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sagemaker_lightning.doctor"]
    environment = (
        os.environ
        | {"SAGEMAKER_LIGHTNING_ROOT": str(root), "PYTHONPATH": f"{site}:{ROOT}"}
        | variables
    )
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)


def test_the_program_on_a_machine_without_a_gpu(tmp_path, torch_for_cuda):
    write(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"})
    completed = run_doctor(tmp_path, torch_for_cuda)
    assert completed.returncode == 0 and completed.stderr == "", completed
    assert completed.stdout.splitlines()[0] == "ok    GPU: none; torch is built for CUDA 13.2"
    assert completed.stdout.splitlines()[-1] == "nothing is wrong"


def test_the_program_asks_torch_and_survives_it(tmp_path, torch_for_cuda):
    """The stand-in torch ends with an error when it is imported."""
    gpu_host(tmp_path, "580.65.06", "NVIDIA A10G")
    completed = run_doctor(tmp_path, torch_for_cuda)
    assert completed.returncode == 1
    assert "WRONG torch: cannot compute on the GPU (RuntimeError: imported)" in completed.stdout
    assert completed.stdout.splitlines()[-1] == "1 wrong"


def test_the_program_on_a_contradictory_job(tmp_path, torch_for_cuda):
    completed = run_doctor(tmp_path, torch_for_cuda, SM_HOSTS="algo-1")
    assert completed.returncode == 1 and completed.stdout.startswith("WRONG job: SM_HOSTS")


def test_torch_is_not_asked_without_a_driver(tmp_path):
    assert list(program.ask_torch(machine(tmp_path))) == []
