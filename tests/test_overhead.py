"""compat/overhead.py and imports: a process leaves out what most jobs do not need."""

import os
import re
import subprocess
import sys
import zipfile
import zipimport

import fsspec
import pytest
import torch
from conftest import ROOT
from lightning_fabric.utilities import cloud_io
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric

from sagemaker_lightning.compat import overhead

FAULTS = """
import resource, sys, torch
from sagemaker_lightning.process import allocator
if sys.argv[1:]:
    allocator.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(10_000_000)
before = faults()
for _ in range(40):
    torch.ones(10_000_000)
print(faults() - before)
"""


@pytest.mark.slow
def test_memory_that_was_freed_is_not_cleared_again():
    faults_when_given_back, faults_when_kept = (
        int(
            subprocess.check_output([sys.executable, "-c", FAULTS, *arguments], cwd=ROOT, text=True)
        )
        for arguments in ([], ["keep"])
    )
    assert faults_when_given_back > 40 * 5000 and faults_when_kept < faults_when_given_back / 3


GIVEN_BACK = """
import torch
import re
from pathlib import Path
from sagemaker_lightning.process import allocator
allocator.keep_freed_memory()
def resident():  # without the files' pages, which the kernel takes back when it likes
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = resident()
some = [torch.ones(10_000_000) for _ in range(4)]
del some[:3]  # in the middle of the heap
kept = resident()
allocator.return_freed_memory()
print(kept - before, resident() - before)
"""


@pytest.mark.slow
def test_memory_that_was_needed_once_is_given_back():
    bytes_kept, bytes_left = map(
        int,
        subprocess.check_output([sys.executable, "-c", GIVEN_BACK], cwd=ROOT, text=True).split(),
    )
    assert bytes_kept > 150e6 and 40e6 < bytes_left < 60e6


IMPORTED = """
import gc, sys
from sagemaker_lightning.process.lightning_import import import_lightning
import_lightning()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert "scipy.signal" not in sys.modules
import scipy.signal
print(scipy.signal.windows.hamming(3)[1])
"""
# What other threads may do meanwhile: scipy.signal and boto3 were once hidden from them.
MEANWHILE = """
import sys, threading
from sagemaker_lightning.compat import overhead
overhead.skip_scipy_signal()
done = []
def import_others():
    import boto3, botocore.exceptions, scipy.signal.windows
    done.append(scipy.signal.windows.hamming(3)[1])
thread = threading.Thread(target=import_others)
thread.start()
import torchmetrics
thread.join()
assert type(torchmetrics.__loader__) is overhead._WithoutSignal
print(*done)
"""
LEFT_AS_IT_IS = """
import os, sys
os.environ["SAGEMAKER_LIGHTNING_TRIM"] = "0"
from sagemaker_lightning.compat import overhead
overhead.skip_scipy_signal()
import torchmetrics
assert "scipy.signal" in sys.modules
from lightning_fabric.utilities import cloud_io
before = cloud_io._is_object_storage
overhead.trim_lightning()
print(float(cloud_io._is_object_storage is before))
"""
PROGRAMS = {"left out": IMPORTED, "other threads": MEANWHILE, "switched off": LEFT_AS_IT_IS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=() if name == "left out" else pytest.mark.soak)
        for name, program in PROGRAMS.items()
    ],
)
def test_lightning_comes_without_what_it_imports_in_vain(program):
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert float(completed.stdout) == 1 and not completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("train.py", marks=pytest.mark.soak), "train_multi_node.py"]
)
def test_a_program_imports_that_way(name, tmp_path):
    """A stray import of Lightning before that would cost a third of the start."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "app" / name), "--help"]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", completed.stderr, re.MULTILINE))
    assert completed.returncode == 0 and "pytorch_lightning" in imported
    assert not imported & {
        "scipy.signal",
        "scipy.stats",
        "s3fs",
        "boto3",
        "botocore",
        "sklearn",
        "matplotlib",
    }


# In one process -----------------------------------------------------------------------------------

IMPORTS = """
if found:
    import scipy.signal
    needed = False
if found:
    import json
kept = [found]
import string
"""


def test_only_the_statement_that_imports_scipy_signal_is_left_out(tmp_path, monkeypatch):
    for name in ("torchmetrics", "torchmetrics.audio", "others"):
        path = tmp_path.joinpath(*name.split("."), "__init__.py")
        path.parent.mkdir(parents=True)
        path.write_text(IMPORTS)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    finder = overhead._WithoutSignal
    for name in ("torchmetrics", "torchmetrics.audio"):
        spec = finder.find_spec(name, [str(tmp_path / "torchmetrics")] if "." in name else None)
        assert spec.origin == str(tmp_path.joinpath(*name.split("."), "__init__.py"))
        variables = {"found": True}
        exec(spec.loader.get_code(name), variables)
        assert variables.keys() >= {"json", "kept", "string"} and "scipy" not in variables
    for name in ("others", "torchmetrics.text"):
        assert finder.find_spec(name) is None


def test_torchmetrics_in_an_archive_or_missing_is_left_to_python(tmp_path, monkeypatch):
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("torchmetrics/__init__.py", IMPORTS)
    monkeypatch.setattr(sys, "path", [str(archive)])
    loader = overhead._WithoutSignal.find_spec("torchmetrics").loader
    assert isinstance(loader, zipimport.zipimporter)
    monkeypatch.setattr(sys, "path", [])
    assert overhead._WithoutSignal.find_spec("torchmetrics") is None


@pytest.fixture
def untrimmed(monkeypatch):
    """Give back Lightning's own functions, and these at the end what they were."""
    asked = []
    monkeypatch.setattr(cloud_io, "_is_object_storage", lambda fs: asked.append(fs) or True)
    monkeypatch.setattr(
        _ResultMetric, "to", getattr(_ResultMetric.to, "__wrapped__", _ResultMetric.to)
    )
    return asked


def test_lightnings_functions_are_changed_once_and_not_if_switched_off(untrimmed, monkeypatch):
    def functions() -> tuple:
        return cloud_io._is_object_storage, _ResultMetric.to

    before = functions()
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_TRIM", "0")
    overhead.trim_lightning()
    assert functions() == before
    monkeypatch.delenv("SAGEMAKER_LIGHTNING_TRIM")
    overhead.trim_lightning()
    changed = functions()
    overhead.trim_lightning()
    assert functions() == changed and not {*changed} & {*before}


def test_lightning_is_asked_for_other_file_systems_than_the_machines_own(untrimmed):
    overhead.trim_lightning()
    assert not cloud_io._is_object_storage(fsspec.filesystem("file")) and not untrimmed
    memory = fsspec.filesystem("memory")
    assert cloud_io._is_object_storage(memory) and untrimmed == [memory]


def test_a_logged_value_is_moved_to_another_device_only(untrimmed):
    overhead.trim_lightning()
    metric = _ResultMetric(
        _Metadata("training_step", "loss", on_step=True, on_epoch=False), is_tensor=True
    )
    value = metric.value
    assert metric.to(torch.device("cpu")) is metric and metric.value is value
    assert metric.to(torch.device("meta")).value.device.type == "meta"
