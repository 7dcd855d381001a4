"""The entry point's choice of a library for an older driver, on stand-in folders of a host."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from containers import ROOT
from gpu_hosts import (
    CLOSED_KERNEL_MODULE,
    OPEN_KERNEL_MODULE,
    compatibility,
    gpu_host,
    stand_in_torch,  # noqa: F401  the fixture torch_for_cuda
    write,
)

from sagemaker_lightning.doctor import gpu_driver


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
    """A folder of the name torch, which is not a package, has no origin."""
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
