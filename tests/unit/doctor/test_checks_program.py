"""The doctor as a program, and its question to torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from containers import ROOT
from gpu_hosts import (
    found,
    gpu_host,
    machine,
    stand_in_torch,  # noqa: F401  the fixture torch_for_cuda
    write,
)

from sagemaker_lightning.doctor import __main__ as program
from sagemaker_lightning.doctor import gpu_driver
from sagemaker_lightning.doctor.checks import Level, Machine


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
