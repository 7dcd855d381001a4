"""The doctor, and the entry point's choice of a library for an older driver.

Both look at stand-in folders of a host.
"""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ("cuda: Optional[str] = None", ""),
        ("cuda_of_others = '1.2'", ""),
    ],
)
def test_the_cuda_of_torch_is_in_its_file_of_versions(tmp_path, monkeypatch, line, cuda):
    write(tmp_path, {"version.py": f"__version__ = '2.9'\n{line}\nhip = None\n"})
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpu_driver, "find_spec", lambda name: spec)
    assert gpu_driver.installed_cuda() == cuda


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)])
def test_without_torch_there_is_no_cuda(monkeypatch, spec):
    """A folder of the name torch, which is no package, has no origin."""
    monkeypatch.setattr(gpu_driver, "find_spec", lambda name: spec)
    assert gpu_driver.installed_cuda() == ""


def test_the_version_of_the_libraries_is_that_of_their_file(tmp_path):
    assert gpu_driver.library_version(tmp_path) == ""
    assert gpu_driver.library_version(compatibility(tmp_path)) == "595.45.04"
    write(tmp_path, {"cuda-compat/libcuda.so.99.1": "", "cuda-compat/libcuda.so.595.9": ""})
    assert gpu_driver.library_version(tmp_path / "cuda-compat") == "595.45.04"


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
            "RTX 4090, which is not a data",
        ),
        ("535.183.01", "NVIDIA A10G", "13.2", "", False, "install conda-forge's cuda-compat=13.2"),
        ("580", "NVIDIA A10G", "13.2", "595.45.04", False, ""),
        ("579.9", "NVIDIA A10G", "13.2", "595.45.04", True, "are used"),
        ("535", "NVIDIA A10G", "13.2", "595.45.04", True, "are used"),
        ("534.9", "NVIDIA A10G", "13.2", "595.45.04", False, "no library helps below R535"),
        ("525", "NVIDIA A10G", "12.8", "570.10", False, ""),
        ("524.9", "NVIDIA A10G", "12.8", "570.10", True, "older than CUDA 12.8 needs (R525)"),
        ("450", "NVIDIA A10G", "12.8", "570.10", True, "are used"),
        ("449.9", "NVIDIA A10G", "12.8", "570.10", False, "no library helps below R450"),
        ("470.57.02", "NVIDIA A10G", "11.8", "520.10", False, ""),  # a CUDA that we do not know
        ("570.86.15", "NVIDIA A10G", "13.2", "570.86.15", False, "are not in this environment"),
        ("570.86.15", "NVIDIA A10G", "13.2", "570.9.99", False, "are not in this environment"),
        ("570.86.15", "NVIDIA A10G", "13.2", "570.100", True, "libraries 570.100 are used"),
        ("535.183.01", "NVIDIA A10G", "", "595.45.04", False, ""),  # torch's CPU build
        ("", "NVIDIA A10G", "13.2", "595.45.04", False, ""),  # no driver
    ],
)
def test_what_is_done_about_a_driver(driver, model, cuda, library, use, says):
    decision = gpu_driver.decide(gpu_driver.Host(driver, (model,)), cuda, library)
    assert decision.use == use and says in decision.line and bool(decision.line) == bool(says)


GPUS = {
    "helped": (
        "Tesla T4, NVIDIA T4G, NVIDIA A2, NVIDIA A10, NVIDIA A10G, NVIDIA A10M, NVIDIA A16, "
        "NVIDIA A30, NVIDIA A40, NVIDIA A100-SXM4-80GB, NVIDIA A800-SXM4-80GB, NVIDIA L4, "
        "NVIDIA L20, NVIDIA L40, NVIDIA L40S, NVIDIA H20, NVIDIA H100 80GB HBM3, NVIDIA H200, "
        "NVIDIA H800, NVIDIA B100, NVIDIA B200, NVIDIA B300 SXM6 AC, NVIDIA GH200 480GB, "
        "NVIDIA GB200, NVIDIA GB300"
    ),
    "not a data centre": "NVIDIA RTX A4000, NVIDIA GeForce GTX 1080, NVIDIA T400",
    "dropped": (
        "Tesla K80, Tesla M60, Tesla P4, Tesla P40, Tesla P100-PCIE-16GB, Tesla V100-SXM2-32GB, "
        "Tesla V100S-PCIE-32GB, NVIDIA TITAN V"
    ),
}


@pytest.mark.parametrize(
    ("kind", "model"), [(kind, model) for kind in GPUS for model in GPUS[kind].split(", ")]
)
def test_which_gpus_a_library_helps(kind, model):
    decision = gpu_driver.decide(gpu_driver.Host("535.183.01", (model,)), "13.2", "595.45.04")
    assert decision.use == (kind == "helped")
    assert ("no code for Volta and older" in decision.line) == (kind == "dropped")


def test_a_gpu_that_is_not_shown_is_named_as_unknown():
    decision = gpu_driver.decide(gpu_driver.Host("535.183.01", ()), "13.2", "595.45.04")
    assert not decision.use and "no library helps for an unknown GPU" in decision.line


def test_one_gpu_of_another_kind_than_a_data_centres_is_enough():
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
        ("535.1", "NVIDIA GeForce RTX 4090", "not a data centre"),
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


@pytest.mark.parametrize(
    ("driver", "used", "says"),
    [
        ("580.65.06", False, ""),
        ("470.57.02", False, "no library helps below R535"),
        ("535.183.01", True, "libraries 595.45.04 are used"),
    ],
)
def test_the_choice_prints_the_folder_and_why(tmp_path, monkeypatch, capsys, driver, used, says):
    """As above, in this process."""
    folder = compatibility(tmp_path / "environment")
    gpu_host(tmp_path / "host", driver, "NVIDIA A10G")
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    monkeypatch.setattr(sys, "argv", ["gpu_driver.py", str(folder)])
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_ROOT", str(tmp_path / "host"))
    gpu_driver.main()
    output, errors = capsys.readouterr()
    assert output == (f"{folder}\n" if used else "")
    assert says in errors and errors.count("\n") == bool(says)


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
    assert completed.stdout.endswith("\n1 wrong\n")


def test_the_program_knows_the_interface_that_sagemaker_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_ROOT", str(tmp_path))
    monkeypatch.setenv("SM_NETWORK_INTERFACE_NAME", "eth9")
    assert program.main() == 0
    assert "note  network interface: SageMaker names eth9, " in capsys.readouterr().out


def test_torch_is_not_asked_without_a_driver(tmp_path):
    assert list(program.ask_torch(machine(tmp_path))) == []


TORCH_THAT_COMPUTES = """
__version__ = "2.9"


def zeros(count, device):
    assert device == "cuda"


class cuda:
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda number: f"GPU {number}")
"""


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch) -> Machine:
    """A machine with a driver, and a torch for CUDA."""
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "13.2")
    return machine(gpu_host(tmp_path, "580.65.06", "NVIDIA A10G"))


def test_torch_that_computes_names_all_gpus(tmp_path, monkeypatch, gpu_machine):
    write(tmp_path / "site", {"torch.py": TORCH_THAT_COMPUTES})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert found(gpu_machine, program.ask_torch) == [
        ("torch", Level.FINE, "torch 2.9 computes on GPU 0, GPU 1")
    ]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("Error: an earlier one\nRuntimeError: no luck\nand a hint\n", "RuntimeError: no luck"),
        ("first\nlast\n", "last"),
        ("", "exit status -11"),
        (f"Error: {'x' * 400}", f"Error: {'x' * 293}"),
    ],
)
def test_why_torch_does_not_compute(monkeypatch, gpu_machine, errors, reason):
    done = subprocess.CompletedProcess([], -11, "", errors)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert found(gpu_machine, program.ask_torch) == [
        ("torch", Level.WRONG, f"cannot compute on the GPU ({reason})")
    ]


def test_torch_that_takes_too_long_is_wrong(monkeypatch, gpu_machine):
    def run(line, timeout, **_):
        raise subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert found(gpu_machine, program.ask_torch) == [
        ("torch", Level.WRONG, "torch did not compute on the GPU within 120 s")
    ]


def test_torch_for_the_cpu_is_not_asked(monkeypatch, gpu_machine):
    monkeypatch.setattr(gpu_driver, "installed_cuda", lambda: "")
    assert found(gpu_machine, program.ask_torch) == []


def test_a_mistake_in_the_flags_is_one_line():
    command = [sys.executable, "-m", "sagemaker_lightning.doctor", "--wrong"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    line = "error: unrecognized arguments: --wrong; --help lists all flags\n"
    assert (ended.returncode, ended.stderr) == (2, line)
