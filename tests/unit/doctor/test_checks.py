"""What the doctor checks, on stand-in folders of a host."""

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_hosts import (
    compatibility,
    found,
    gpu_host,
    machine,
    write,
)

from sagemaker_lightning.doctor import checks, gpu_driver
from sagemaker_lightning.doctor.checks import Level, Machine

Space = namedtuple("Space", "f_bavail f_blocks f_frsize")


def test_gpus_that_work(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    gpu_host(tmp_path, "580.65.06", "NVIDIA A10G", "NVIDIA A10G")
    ((subject, level, text),) = found(machine(tmp_path), checks.gpus)
    assert (subject, level) == ("GPU", Level.FINE)
    assert text == "2 x NVIDIA A10G; driver 580.65.06; torch is built for CUDA 13.2"


def test_a_driver_without_a_gpu_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "")
    assert found(machine(gpu_host(tmp_path, "580.65.06")), checks.gpus) == [
        ("GPU", Level.WRONG, "none; driver 580.65.06; torch is not there, or for CPUs alone")
    ]


def test_an_older_driver_with_and_without_the_entry_point(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    gpu_host(tmp_path, "535.183.01", "NVIDIA A10G")
    folder = compatibility(tmp_path / "environment")
    environment = {"CONDA_PREFIX": str(folder.parent)}
    _, (subject, level, text) = found(machine(tmp_path, **environment), checks.gpus)
    assert (subject, level) == ("GPU driver", Level.WRONG)
    assert text.endswith("are not on LD_LIBRARY_PATH; start by the image's entry point")
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
    write(tmp_path, {"dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    text = "0 in /dev for 1 GPUs; start the container with --gpus all"
    assert ("GPU devices", Level.WRONG, text) in found(machine(tmp_path), checks.gpus)
    others = [("0x10de", "0x040300"), ("0x1013", "0x030000"), ("0x1002", "0x030000")]
    for number, (vendor, kind) in enumerate(others):
        device = f"sys/bus/pci/devices/0000:01:00.{number}"
        write(tmp_path, {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"})
    (tmp_path / "proc/driver/nvidia/version").unlink()
    ((_, level, text),) = found(machine(tmp_path), checks.gpus)
    assert level == Level.WRONG and text.startswith(
        "the host has 1, but no driver is in this container"
    )


@pytest.mark.parametrize(
    ("packages", "driver", "expected"),
    [
        (["nvidia-nccl-cu12", "numpy", None], "", [("NCCL", Level.FINE, "2.1 (nvidia-nccl-cu12)")]),
        (["nvidia_nccl_cu13"], "580", [("NCCL", Level.FINE, "2.1 (nvidia_nccl_cu13)")]),
        (
            ["a-nvidia-nccl-cu12"],
            "580",
            [
                (
                    "NCCL",
                    Level.NOTE,
                    "no package nvidia-nccl-cu*; several GPUs cannot train together",
                )
            ],
        ),
        ([], "", []),
    ],
)
def test_nccl(tmp_path, monkeypatch, packages, driver, expected):
    """The metadata of a broken package has no name."""
    if driver:
        gpu_host(tmp_path, "580.65.06", "NVIDIA A10G")
    found_packages = [SimpleNamespace(name=name, version="2.1") for name in packages]
    monkeypatch.setattr(checks, "distributions", lambda: found_packages)
    assert found(machine(tmp_path), checks.nccl) == expected


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
    write(tmp_path, {"sys/class/infiniband/rdmap0s6/device/vendor": "0x1d0f\n"})
    assert found(machine(tmp_path), checks.efa)[0][2].startswith("2 devices (rdmap0s6, ...), with")


LIBFABRICS = [
    "opt/amazon/efa/lib64",
    "opt/amazon/efa/lib",
    "opt/conda/envs/job/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
]


NCCL_PLUGINS = [
    "opt/amazon/ofi-nccl/lib64",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/aws-ofi-nccl/lib",
    "opt/conda/envs/job/lib",
]


@pytest.mark.parametrize(
    ("folder", "library", "other"),
    [(folder, "libfabric.so.1", "aws-ofi-nccl") for folder in LIBFABRICS]
    + [(folder, "libnccl-net-ofi.so", "libfabric") for folder in NCCL_PLUGINS],
)
def test_where_the_libraries_of_efa_may_be(tmp_path, folder, library, other):
    write(
        tmp_path,
        {
            "sys/class/infiniband/rdmap16s27/device/vendor": "0x1d0f\n",
            "dev/infiniband/uverbs0": "",
            f"{folder}/{library}": "",
        },
    )
    text = f"device rdmap16s27, but no {other} in this image: NCCL uses TCP"
    assert found(machine(tmp_path), checks.efa) == [("EFA", Level.NOTE, text)]


def test_the_interface_that_sagemaker_names(tmp_path):
    write(tmp_path, {"sys/class/net/eth0/mtu": "9001\n", "sys/class/net/eth0/operstate": "up\n"})
    for name, level, says in (
        ("eth0", Level.FINE, "eth0; found "),
        ("eth7", Level.NOTE, "SageMaker names eth7, which is not here; found "),
        (None, Level.FINE, ""),
    ):
        ((_, is_level, text),) = found(Machine(tmp_path, {}, name), checks.network)
        assert is_level == level and text == f"{says}eth0 (mtu 9001, up)"
    assert found(Machine(tmp_path / "none", {}), checks.network)[0][2] == "none"
    assert found(Machine(tmp_path / "none", {}, "eth0"), checks.network)[0][2] == (
        "SageMaker names eth0, which is not here; found none"
    )


def test_memory_and_its_limit(tmp_path):
    write(tmp_path, {"proc/meminfo": f"MemTotal:   {2**31} kB\nMemAvailable:   {2**30} kB\n"})
    assert found(machine(tmp_path), checks.memory) == [
        ("memory", Level.FINE, "1024.0 GiB of 2048.0 GiB available")
    ]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        write(tmp_path, {f"sys/fs/cgroup/{file}": f"{2**30}\n"})
        assert found(machine(tmp_path), checks.memory)[0][2].endswith(
            "; this container may use 1.0 GiB"
        )
        (tmp_path / "sys/fs/cgroup" / file).unlink()
    for limit in ("max", 2**41):
        write(tmp_path, {"sys/fs/cgroup/memory.max": f"{limit}\n"})
        assert found(machine(tmp_path), checks.memory)[0][2] == "1024.0 GiB of 2048.0 GiB available"


def test_little_shared_memory_and_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "opt/ml/output").mkdir(parents=True)
    write(
        tmp_path,
        {
            "proc/mounts": "/dev/sda /opt/ml/output ext4 ro,relatime 0 0\n/dev/sda / ext4 rw 0 0\n"
            "/dev/sda /opt/ml/output ext4\n/dev/sdb /opt/ml/input xfs rw\n"
        },
    )
    monkeypatch.setattr(os, "statvfs", lambda path: Space(2**22, 2**24, 4))
    assert found(machine(tmp_path), checks.memory)[1][:2] == ("shared memory", Level.NOTE)
    disk, mounts = found(machine(tmp_path), checks.disk)
    assert disk == (
        "disk /opt/ml/output",
        Level.NOTE,
        "0.0 GiB of 0.1 GiB free; checkpoints need more",
    )
    assert mounts[2] == "below /opt/ml: /opt/ml/output (ext4, ro), /opt/ml/input (xfs, rw)"
    for free, all_bytes, level in ((30, 28, Level.FINE), (29, 27, Level.NOTE)):
        monkeypatch.setattr(os, "statvfs", lambda path: Space(2**free, 2**all_bytes, 1))  # noqa: B023
        assert found(machine(tmp_path), checks.memory)[1][1] == level
        assert found(machine(tmp_path), checks.disk)[0][1] == level
    monkeypatch.setattr(os, "statvfs", lambda path: Space(2**30, 2**31, 2**12))
    assert found(machine(tmp_path), checks.memory)[1][1:] == (
        Level.FINE,
        "8192.0 GiB in /dev/shm",
    )
    assert found(machine(tmp_path), checks.disk)[0][1:] == (
        Level.FINE,
        "4096.0 GiB of 8192.0 GiB free",
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert found(machine(tmp_path), checks.disk)[0][1] == Level.WRONG


def test_the_folders_that_a_job_writes(tmp_path):
    for name in ("ml/model", "ml/output", "ml/checkpoints", "tmp", "opt/ml/model"):
        (tmp_path / name).mkdir(parents=True)
    *folders, mounts = found(machine(tmp_path, SAGEMAKER_BASE_DIR="/ml"), checks.disk)
    assert [subject for subject, _, _ in folders] == [
        "disk /ml/model",
        "disk /ml/output",
        "disk /ml/checkpoints",
        "disk /tmp",
    ]
    assert mounts == ("mounts", Level.FINE, "below /ml: none")


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
    for seconds_behind, expected in ((86400, Level.FINE), (86401, Level.WRONG)):
        now = installed_at - seconds_behind
        assert found(Machine(tmp_path, {}, None, now), checks.clock)[0][1] == expected


def test_the_time_is_the_clocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.time, "time", lambda: 4e9)
    assert found(machine(tmp_path), checks.clock) == [
        ("clock", Level.FINE, "2096-10-02 07:06:40 UTC")
    ]
    assert found(Machine(tmp_path, {}, now=0.0), checks.clock)[0][2].startswith(
        "1970-01-01 00:00:00 UTC, "
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


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ValueError("Input/output error")]
)
def test_a_check_that_fails_is_a_finding(tmp_path, monkeypatch, error):
    def broken(machine):
        raise error
        yield

    monkeypatch.setattr(checks, "CHECKS", (broken, checks.clock))
    first_finding, second_finding = checks.findings(machine(tmp_path))
    assert (
        first_finding.level == Level.NOTE
        and first_finding.subject == "broken"
        and "Input/output error" in first_finding.text
        and second_finding.subject == "clock"
    )
